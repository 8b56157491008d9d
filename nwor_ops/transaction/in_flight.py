"""Windows that are judged when later ones have begun: those of a pipeline stage that samples nothing, or of an engine
with several batches in flight.

    manager = InFlightManager(windows=2, max_num_tokens=..., ...)      # mode "cow", register and allocate as ever

    manager.begin(window); ... manager.write(...)
    first = manager.defer()              # the step is over here, its sampling is not
    manager.begin(window); ... second = manager.defer()
    manager.settle(first, num_rejected)  # in any order

The undo log has rows for so many windows. Which of them a window takes is data, as everything is that compiled and
captured code sees: the log rows of its drafts begin further on. What an earlier window logged stays as it is until that
section is taken again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.transaction.manager import DraftCommitManager
from nwor_ops.transaction.undo_log import UndoLog
from nwor_ops.transaction.window import Window, numbers_on


@dataclass(frozen=True, eq=False)
class Deferred:
    """A window whose step is over, and whose drafts are not judged yet.

    Attributes:
        section: of the log.
        num_requests: padded ones included.
    """

    section: int
    num_requests: int


class InFlightManager(DraftCommitManager):
    """A manager in mode ``"cow"`` of which several windows may wait for their verdict.

    Args:
        windows: most that are begun and not judged. The log has this many times the rows.
        limits: as for :class:`DraftCommitManager`; ``max_draft_tokens`` is of one window.

    The tokens of windows in flight must have slots of their own, a slot may be given away only behind
    :meth:`settle` or :meth:`undo`. Commits are not made at once: :meth:`commit` raises.
    """

    _closing = "defer() or cancel()"
    _in_place_of_a_copy = "make another InFlightManager, register the layers' own caches and allocate() it"

    def __init__(self, *, windows: int, **limits: Any) -> None:
        self._windows = validation.integer("InFlightManager: windows", windows, 1)
        super().__init__(**limits)
        if self.mode != "cow":
            raise ValueError(f"InFlightManager: mode must be cow, got {self.mode!r}: shadow pages serve one window")
        self._waiting: dict[int, Deferred] = {}  # by section
        self._settling: set[int] = set()  # sections of those that are judged, counted, and not all undone yet
        self._cancelling: set[int] = set()  # sections of those whose cancel_deferred has begun
        self._section = 0  # of the open window

    @property
    def in_flight(self) -> int:
        """Windows that wait for their verdict."""
        return len(self._waiting)

    @property
    def launches_per_window(self) -> int:
        return super().launches_per_window + 6  # two copies, three that move log rows on, one that clears them

    def allocate(self) -> None:
        super().allocate()
        self._row_slots = torch.full(
            (len(self.groups), self.max_draft_tokens), -1, dtype=torch.int64, device=self.device
        )
        self._starts = [torch.zeros_like(self.buffers.draft_start_loc) for _ in range(self._windows)]
        self._ids = [torch.zeros_like(self.buffers.window_id) for _ in range(self._windows)]

    # ------------------------------------------------------------ the transaction

    def _plan(self, window: Window, slot_mappings: list[Tensor]) -> None:
        number = next((section for section in range(self._windows) if section not in self._waiting), None)
        if number is None:
            raise RuntimeError(
                f"begin: at most {self._windows} windows may wait for their verdict; call settle(), cancel_deferred() "
                "or forget() for one of them first"
            )
        self._section, buffers, rows = number, self.buffers, self._rows(number)
        ops.plan_window(
            window.query_start_loc, window.cu_num_draft_tokens, slot_mappings, buffers.log_rows, self._row_slots,
            buffers.row_requests[rows], buffers.row_positions[rows], buffers.counters, self._starts[number], None,
            window.num_bonus_tokens, window.leading_zero,
        )  # fmt: skip
        buffers.row_slots[:, rows].copy_(self._row_slots)
        self._ids[number].copy_(buffers.window_id)
        if rows.start:
            buffers.log_rows.add_((buffers.log_rows >= 0).to(torch.int32), alpha=rows.start)

    def defer(self) -> Deferred:
        """Close the window and leave its drafts where they are; they wait for :meth:`settle`.

        Raises:
            RuntimeError: no window is open, or its :meth:`cancel` has begun.
        """
        window = self._window_to_commit("defer")
        self._leave()
        deferred = self._waiting[self._section] = Deferred(self._section, window.num_requests)
        return deferred

    def settle(self, deferred: Deferred, num_rejected: Tensor) -> None:
        """Keep the accepted drafts of a window in flight, and undo the rest.

        Args:
            deferred: what :meth:`defer` returned.
            num_rejected: int32 ``[>= Q]``.

        If this raises, the window waits on. Where its drafts were judged already the verdict stands: another call
        finishes it, and its argument is not asked.

        Raises:
            RuntimeError: it was settled, cancelled or forgotten before, or its :meth:`cancel_deferred` has begun and
                failed.
            ValueError, TypeError: as :func:`nwor_ops.reject_rows_from_rejected`.
        """
        self._require_waiting("settle", deferred)
        section, buffers, rejected = deferred.section, self.buffers, self.buffers.row_rejected
        if section in self._cancelling:  # what it has undone is not to be kept
            raise RuntimeError(
                "settle: the window must not be one whose cancel_deferred() has begun; call that again, or forget()"
            )
        if section not in self._settling:
            self._judged = False
            try:
                self._judge(
                    ops.reject_rows_from_rejected, num_rejected, self._starts[section][: deferred.num_requests + 1],
                    rejected[self._rows(section)], buffers.num_accepted, buffers.counters,
                )  # fmt: skip
            finally:
                if self._judged:
                    self._settling.add(section)
        self._restore(section, rejected)
        self._remove(section)

    def undo(self, deferred: Deferred, requests: Iterable[int]) -> None:
        """Put back what the drafts of some requests overwrote, at once and whatever the verdict will be: their slots
        are about to be given away. They are counted by the verdict.

        Args:
            deferred: what :meth:`defer` returned.
            requests: places in that window's batch.

        Raises:
            RuntimeError: it was settled, cancelled or forgotten before.
            ValueError, TypeError: a place that is none of that batch's; nothing is undone.
        """
        self._require_waiting("undo", deferred)
        last = deferred.num_requests - 1
        places = [validation.integer("undo: requests", request, 0, last) for request in requests]
        buffers, rows = self.buffers, self._rows(deferred.section)
        ended = numbers_on(self.device, places)
        gone = torch.zeros_like(buffers.row_rejected)
        torch.any(buffers.row_requests[rows].unsqueeze(1) == ended, 1, out=gone[rows])
        self._restore(deferred.section, gone)
        buffers.row_slots.masked_fill_(gone, -1)  # what the slots hold from now on is another's

    def cancel(self) -> None:
        """Undo every draft of the open window, and close it. Its drafts count as rejected. No other window changes.

        If this raises, the window is still open, for another cancel or an abandon.
        """
        self._open_window("cancel")
        self._ending = "cancel"
        self._undo_all(self._section)
        self._leave()

    def cancel_deferred(self, deferred: Deferred) -> None:
        """As :meth:`cancel`, of a window in flight. If this raises, it waits on, for another or a :meth:`forget`."""
        self._require_waiting("cancel_deferred", deferred)
        self._cancelling.add(deferred.section)
        self._undo_all(deferred.section)
        self._remove(deferred.section)

    def abandon(self) -> None:
        """Close the open window without undoing anything, now or later."""
        self._open_window("abandon")
        self._leave()
        self._abandoned += 1

    def forget(self, deferred: Deferred) -> None:
        """As :meth:`abandon`, of a window in flight."""
        self._require_waiting("forget", deferred)
        self._take_back_verdict(deferred.section)
        self._remove(deferred.section)
        self._abandoned += 1

    def commit(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> None:
        """Raises RuntimeError: see :meth:`defer`."""
        raise RuntimeError("commit: windows of an InFlightManager are deferred and then settled")

    def commit_rejected(self, num_rejected: Tensor) -> None:
        """Raises RuntimeError: see :meth:`defer`."""
        raise RuntimeError("commit_rejected: windows of an InFlightManager are deferred and then settled")

    # ------------------------------------------------------------ inside

    def _rows(self, section: int) -> slice:
        return slice(section * self.max_draft_tokens, (section + 1) * self.max_draft_tokens)

    def _leave(self) -> None:
        """Close the open window as it is."""
        # A graph that is replayed in a step without drafts must log nothing: it would over rows that wait.
        self.buffers.log_rows.fill_(-1)
        self._end()

    def _remove(self, section: int) -> None:
        """The window waits no more."""
        del self._waiting[section]
        self._settling.discard(section)
        self._cancelling.discard(section)

    def _undo_all(self, section: int) -> None:
        buffers, rows = self.buffers, self._rows(section)
        gone = torch.zeros_like(buffers.row_rejected)
        gone[rows] = True
        self._restore(section, gone)
        # Counted behind what may fail, and is then done again.
        self._take_back_verdict(section)
        buffers.counters[ops.COUNTERS.index("rejected")].add_((buffers.row_requests[rows] >= 0).sum())
        self._cancelled += 1

    def _take_back_verdict(self, section: int) -> None:
        """Of a window whose settlement has failed."""
        if section in self._settling:
            self._uncount(self._rows(section))
            self._settling.remove(section)

    def _restore(self, section: int, rejected: Tensor) -> None:
        """Rows of other windows are left alone, whatever the flags say: they carry another number."""
        assert isinstance(self.recovery, UndoLog)
        for launch in self.recovery.launches:
            caches, table = launch.planes.arguments()
            ops.restore_slots(
                caches, launch.log, launch.row_slots, rejected, launch.page_offsets, self._ids[section],
                launch.row_windows, None, table,
            )  # fmt: skip

    def _require_waiting(self, method: str, deferred: Deferred) -> None:
        validation.instance(f"{method}: deferred", deferred, Deferred, "what defer() returned")
        if self._waiting.get(deferred.section) is not deferred:
            raise RuntimeError(f"{method}: that window does not wait for its verdict")
