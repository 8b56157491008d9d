"""Metrics: carry the counters to ``/metrics`` and ``nwor_ops.stats()``."""

from nwor_ops.vllm.metrics.exporter import totals, wrap_loggers_module
from nwor_ops.vllm.metrics.relay import wrap_scheduler_module
from nwor_ops.vllm.metrics.transport import choose_directory
from nwor_ops.vllm.metrics.worker import start, start_counting, stop

__all__ = [
    "choose_directory",
    "start",
    "start_counting",
    "stop",
    "totals",
    "wrap_loggers_module",
    "wrap_scheduler_module",
]
