"""Report of an engine's draft graphs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DraftGraphReport:
    """Counts and costs of one engine's draft graphs so far.

    Attributes:
        captured: request counts that have a graph, by pass (``"first_pass"``, ``"decode"``).
        captured_by_drafts: the same, by number of drafts. It has several entries if that number is dynamic.
        capture_seconds: time that capturing took, in seconds.
        capture_bytes: GPU memory that capturing took from the allocator, in bytes. The driver keeps further memory per
            graph.
        replays: number of passes that ran from graphs, by pass.
        eager: number of passes that ran vLLM's own code, by reason. Warm-up and profiling are included.

    Example:
        >>> report = DraftGraphReport(captured={"decode": [1, 2, 4]}, replays={"decode": 10})
        >>> report.as_dict()["replays"]
        {'decode': 10}
    """

    captured: dict[str, list[int]] = field(default_factory=dict)
    captured_by_drafts: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    replays: dict[str, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
