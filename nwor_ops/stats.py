"""What a manager has done so far. Counted on the device, read only when asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
        overflowed: windows left unplanned because they had more drafts than the log has rows.
        cancelled: windows cancelled: every draft undone.
        abandoned: windows closed without an undo: the drafts' rows stayed, as without this library.
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
