"""The parts of a session that ``nwor_ops.vllm.metrics.worker.SessionPublisher`` uses, without an engine."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch

from nwor_ops import COUNTERS, Stats
from nwor_ops.vllm.step_listener import StepListener


class CountedSession:
    def __init__(self, device: str = "cpu") -> None:
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.vanilla_steps: Counter[str] = Counter()
        self.host_seconds = 0.0
        self.listeners: list[StepListener] = []
        self.begun = 0
        self.manager = SimpleNamespace(
            stats=lambda counters: Stats.read(counters, cancelled=0, abandoned=0),
        )

    def subscribe(self, listener: StepListener) -> None:
        self.listeners.append(listener)

    def unsubscribe(self, listener: StepListener) -> None:
        self.listeners.remove(listener)

    def step(self, *counted: int) -> None:
        """Run one step with these counts, in the order of ``COUNTERS``. Does not synchronize with the device."""
        self.begun += 1
        for place, count in enumerate(counted):
            self.counters[place].add_(count)
        assert self.listeners
        for listener in self.listeners:
            listener.ended()
