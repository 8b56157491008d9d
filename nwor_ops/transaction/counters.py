"""What a manager, or the engines of a process, have done so far. Counted on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from nwor_ops.ops import COUNTERS


@dataclass(frozen=True)
class Stats:
    """Totals since the manager was made.

    Attributes:
        windows: windows begun.
        drafted: draft tokens that got a log row.
        accepted: drafts committed.
        rejected: drafts undone, those of cancelled windows included.
        overflowed: windows left unplanned because the log has too few rows or their numbers do not agree; none of their
            drafts counts as drafted.
        cancelled: windows cancelled: every draft undone.
        abandoned: windows closed without an undo: the drafts' rows stayed, as without this library.

    Between windows, drafted = accepted + rejected + the drafts of abandoned windows, however often a commit failed and
    was tried again before.
    """

    windows: int
    drafted: int
    accepted: int
    rejected: int
    overflowed: int
    cancelled: int
    abandoned: int

    @classmethod
    def read(cls, counters: Tensor, cancelled: int, abandoned: int) -> Stats:
        """Reads the device counters: waits for the device."""
        return cls(**dict(zip(COUNTERS, counters.tolist(), strict=True)), cancelled=cancelled, abandoned=abandoned)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class StagingStats:
    """Totals of a staging buffer. Counted on the device.

    Attributes:
        windows: windows committed or rejected.
        staged: rows staged, each counted once, in however many layers: unique tokens.
        stage_operations: rows staged, counted in every layer: layers x tokens.
        committed: rows written into the caches.
        rejected: rows staged that were not.
        incomplete: windows rejected as a whole because a layer lacked an accepted row, or a slot was outside.
    """

    windows: int
    staged: int
    stage_operations: int
    committed: int
    rejected: int
    incomplete: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class InterceptorStats:
    """Totals of an interceptor.

    Attributes:
        staging: of its buffer.
        direct_windows: windows written straight into the caches, for whatever reason.
        fallbacks: those of them that were to be staged and could not be.
    """

    staging: StagingStats
    direct_windows: int
    fallbacks: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EngineStats:
    """Totals over the engines that vLLM runs for a process. ``/metrics`` has the same numbers.

    Attributes:
        engines: engines with the transaction, counted here.
        windows, drafted, accepted, rejected, cancelled, abandoned: as in :class:`Stats`. Between steps,
            drafted = accepted + rejected + the drafts of abandoned windows.
        vanilla_steps: steps with drafts that ran without the transaction, by reason.
        comparisons: how often accepted and proposed drafts were compared with the scheduler's count.
        disagreements: how often the scheduler had counted something else.
        draft_graph_replays: passes of a draft model (its first pass, its decode loop) that were one graph launch.
        draft_eager_passes: such passes of an engine with draft graphs that ran vLLM's own code; dummy runs left out.
        one_state_steps: steps whose drafts were verified with one recurrent state per request; warm-up included.
        one_state_refused_requests: requests that such a step left out (their outputs are zeros), because the count of
            their accepted tokens cannot be: once for each step and KV-cache group. Anything but 0 is a fault.
    """

    engines: int
    windows: int
    drafted: int
    accepted: int
    rejected: int
    cancelled: int
    abandoned: int
    comparisons: int
    disagreements: int
    draft_graph_replays: int = 0
    draft_eager_passes: int = 0
    one_state_steps: int = 0
    one_state_refused_requests: int = 0
    vanilla_steps: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_sources: list[Callable[[], EngineStats]] = []


def add_source(source: Callable[[], EngineStats]) -> None:
    """Let :func:`stats` add what ``source()`` returns. Safe to call again."""
    if source not in _sources:
        _sources.append(source)


def stats() -> EngineStats:
    """What the engines of this process have done so far: for vLLM's ``LLM`` beside its ``get_metrics()``.

    An engine core in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) is asked: the numbers are exact, and
    the call waits for the device. One in a process of its own publishes twice a second: the numbers are what
    it has published last, also after it has ended, and at rest they are complete after a second. Engines of
    another process tree or host are not seen, nor, with ``emit_metrics`` off, those of another process.
    Comparisons and disagreements are always the published ones.

    Returns:
        Totals; zeros where no engine with the plugin was started.
    """
    counts: Counter[str] = Counter()
    vanilla_steps: Counter[str] = Counter()
    for source in _sources:
        found = source().as_dict()
        vanilla_steps.update(found.pop("vanilla_steps"))
        counts.update(found)
    names = (entry.name for entry in fields(EngineStats) if entry.name != "vanilla_steps")
    return EngineStats(**{name: counts[name] for name in names}, vanilla_steps=dict(vanilla_steps))
