"""Totals of a manager, of a staging buffer, and of the engines in a process. They are counted on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Stats:
    """Totals of a manager since it was created.

    Attributes:
        windows: windows begun.
        drafted: draft tokens that got a log row.
        accepted: draft tokens committed.
        rejected: draft tokens undone, including those of cancelled windows.
        overflowed: windows that were not planned, because the log has too few rows or the window's counts disagree.
            Their drafts do not count as drafted.
        cancelled: windows cancelled, with every draft undone.
        abandoned: windows closed without an undo. Their rows stay, as they would without this library.

    Between windows, drafted = accepted + rejected + the drafts of abandoned windows. This also holds after a commit
    that failed and was repeated.

    Example:
        >>> stats = Stats(windows=2, drafted=4, accepted=3, rejected=1, overflowed=0, cancelled=0, abandoned=0)
        >>> stats.accepted / stats.drafted
        0.75
    """

    windows: int
    drafted: int
    accepted: int
    rejected: int
    overflowed: int
    cancelled: int
    abandoned: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class StagingStats:
    """Totals of a staging buffer, counted on the device.

    Attributes:
        windows: windows committed or rejected.
        staged: distinct rows staged: a row counts once, in however many layers it was staged.
        stage_operations: pairs of layer and row staged.
        committed: rows written into the caches.
        rejected: staged rows that were not written.
        incomplete: windows rejected as a whole, because a layer lacked an accepted row or a slot was out of range.

    Example:
        >>> StagingStats(windows=1, staged=2, stage_operations=4, committed=1, rejected=1, incomplete=0).committed
        1
    """

    windows: int
    staged: int
    stage_operations: int
    committed: int
    rejected: int
    incomplete: int


@dataclass(frozen=True)
class EngineStats:
    """Totals of the vLLM engines of a process. ``/metrics`` has the same numbers.

    Attributes:
        engines: engines that are counted here.
        windows, drafted, accepted, rejected, cancelled, abandoned: as in :class:`Stats`. Between steps, ``drafted`` is
            the sum of ``accepted``, ``rejected`` and the drafts of abandoned windows.
        vanilla_steps: steps with drafts that ran without the transaction, by reason.
        errors: errors of this package after which an engine went on, by reason. Any value above 0 is a fault.
        draft_graph_replays: passes of a draft model that were one graph launch. A pass is its first pass or its decode
            loop.
        draft_eager_reasons: passes that ran vLLM's own code in an engine with draft graphs, by reason. Dummy runs are
            not counted.
        recurrent_steps: steps with windows and one recurrent state per request.
        recurrent_skipped_requests: requests that such a step skipped, because their accepted count was invalid. Their
            outputs are zeros. Each request counts once per step and KV-cache group. Any value above 0 is a fault.
        draft_vocabulary_tokens: tokens that the target sampled, with a draft vocabulary.
        draft_vocabulary_missed: those of them that were not in the set, so that they could not be drafted.

    Example:
        >>> import nwor_ops
        >>> nwor_ops.stats().engines  # in a process without an engine
        0
    """

    engines: int = 0
    windows: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    cancelled: int = 0
    abandoned: int = 0
    draft_graph_replays: int = 0
    recurrent_steps: int = 0
    recurrent_skipped_requests: int = 0
    draft_vocabulary_tokens: int = 0
    draft_vocabulary_missed: int = 0
    vanilla_steps: dict[str, int] = field(default_factory=dict)
    draft_eager_reasons: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)


_source: Callable[[], EngineStats] = EngineStats


def set_source(source: Callable[[], EngineStats] | None) -> None:
    """Let :func:`stats` return the totals of ``source()``, or zeros again if it is None."""
    global _source
    _source = source or EngineStats


def stats() -> EngineStats:
    """Return the totals of the engines of this process, in addition to ``get_metrics()`` of the vLLM class ``LLM``.

    An engine core in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) is read directly. Its numbers are exact, and
    the call synchronizes with the device.

    An engine core in another process sends its numbers with the outputs of its steps, at most twice a second. The
    numbers of the last steps arrive with the next request. They stay after that process has ended.

    Returns:
        The totals. They are zeros if no engine with the plugin was started.

    Example:
        >>> nwor_ops.stats().engines
        0
    """
    return _source()
