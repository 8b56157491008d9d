"""Metrics: carry the counters from the worker to ``/metrics`` and ``nwor_ops.stats()``.

``publisher`` is the worker's part, ``relay`` that of the engine core and of the front end, ``names`` has all metrics.
"""
