"""Run the command ``nwor-ops`` by ``python -m nwor_ops``."""

from nwor_ops_cli import main

if __name__ == "__main__":
    main()
