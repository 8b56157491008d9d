"""The parts of a session that ``nwor_ops.vllm.metrics.worker.SessionPublisher`` uses, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nwor_ops import COUNTERS, Stats


class CountedSession:
    def __init__(self, device: str = "cpu") -> None:
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.vanilla_steps: Counter[str] = Counter()
        self.listeners: list[Callable[[], None]] = []
        self.returned: list[Callable[[Any], None]] = []
        self.begun = 0
        self.manager = SimpleNamespace(
            buffers=SimpleNamespace(counters=self.counters),
            stats=lambda counters: Stats.read(counters, cancelled=0, abandoned=0),
        )

    def subscribe(self, ended: Callable[[], None] | None = None, returned: Callable[[Any], None] | None = None) -> None:
        self.listeners += [ended] if ended else []
        self.returned += [returned] if returned else []

    def unsubscribe(self, ended: Callable[[], None]) -> None:
        self.listeners.remove(ended)

    def step(self, *counted: int) -> None:
        """Run one step with these counts, in the order of ``COUNTERS``. Does not synchronize with the device."""
        self.begun += 1
        for place, count in enumerate(counted):
            self.counters[place].add_(count)
        assert self.listeners
        for ended in self.listeners:
            ended()
