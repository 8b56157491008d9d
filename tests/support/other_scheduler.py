"""A scheduler that is not vLLM's."""

from __future__ import annotations

from vllm.v1.core.sched.interface import SchedulerInterface


class OtherScheduler(SchedulerInterface):
    """Refused before anything is asked of it."""
