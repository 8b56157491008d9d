"""The commands of ``nwor-ops``. Their options are in ``nwor_ops_cli``."""
