"""Metrics: carry the counters to ``/metrics`` and ``nwor_ops.stats()``."""

from nwor_ops.vllm.metrics.exporter import patch_loggers_module, totals
from nwor_ops.vllm.metrics.relay import patch_scheduler_module
from nwor_ops.vllm.metrics.transport import choose_directory
from nwor_ops.vllm.metrics.worker import start, start_counting, stop

__all__ = [
    "choose_directory",
    "patch_loggers_module",
    "patch_scheduler_module",
    "start",
    "start_counting",
    "stop",
    "totals",
]
