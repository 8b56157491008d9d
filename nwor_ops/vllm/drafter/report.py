"""What the draft graphs of an engine have done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DraftGraphReport:
    """What one engine's draft graphs have done so far.

    Attributes:
        captured: request counts that have a graph, by pass (``"first_pass"``, ``"decode"``).
        captured_by_drafts: the same, by the number of drafts that they are for: several, where it is dynamic.
        capture_seconds: how long capturing took.
        capture_bytes: GPU memory that it took from the allocator; the driver keeps something for each graph besides.
        replays: passes that ran from graphs, by pass.
        eager: passes that ran vLLM's own code instead, by reason. Warm-up and profiling included.
    """

    captured: dict[str, list[int]] = field(default_factory=dict)
    captured_by_drafts: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    replays: dict[str, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
