"""Checks at run time: every byte of the cache (``audit``), and the scheduler's counts (``emit_metrics``)."""
