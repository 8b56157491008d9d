"""Metrics: carry the counters from the worker to ``/metrics`` and ``nwor_ops.stats()``.

``publisher`` is the worker's part, ``relay`` that of the engine core and of the front end, ``names`` has all metrics.
"""

from nwor_ops.vllm.metrics.publisher import forget, patch_runner_class, publish, start
from nwor_ops.vllm.metrics.relay import patch_output_module, patch_scheduler_module, totals

__all__ = [
    "forget",
    "patch_output_module",
    "patch_runner_class",
    "patch_scheduler_module",
    "publish",
    "start",
    "totals",
]
