"""A scheduler class that does not derive from vLLM's."""

from __future__ import annotations

from vllm.v1.core.sched.interface import SchedulerInterface


class OtherScheduler(SchedulerInterface):
    """The engine is refused before any method is called."""
