"""Deferred windows: the outcome of a window arrives after later windows have begun.

A pipeline rank that samples nothing needs this, and so does an engine with several batches in progress.

    manager = InFlightManager(windows=2, max_num_tokens=..., ...)      # mode "cow"; register layers, then allocate

    manager.begin(window); ... manager.write(...)
    first = manager.defer()              # the forward is over, its sampling is not
    manager.begin(window); ... second = manager.defer()
    manager.settle(first, num_rejected)  # in any order

The undo log has one section of rows per window. The section of a window is data: the log row numbers of its drafts are
shifted, so compiled and captured code does not change. The logged bytes of a window stay until its section is used
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.transaction.manager import DraftCommitManager
from nwor_ops.transaction.state import State
from nwor_ops.transaction.undo_log import UndoLog
from nwor_ops.transaction.window import Window, numbers_on


@dataclass(frozen=True, eq=False)
class Deferred:
    """A window whose forward is over and whose outcome is not known yet.

    Attributes:
        section: section of the undo log.
        num_requests: number of requests, including padded ones.
    """

    section: int
    num_requests: int


class InFlightManager(DraftCommitManager):
    """A manager in mode ``"cow"`` with several deferred windows.

    Args:
        windows: largest number of windows that are begun and not settled. The log has this many times the rows.
        limits: as for :class:`DraftCommitManager`. ``max_draft_tokens`` is the limit of one window.

    The tokens of deferred windows must have distinct slots. Reassign a slot only after :meth:`settle` or :meth:`undo`.
    There is no immediate commit: :meth:`commit` raises.

    Example:
        >>> import torch
        >>> cache = torch.zeros(4, 2, 1, 8)
        >>> manager = nwor_ops.InFlightManager(
        ...     windows=2, max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="cpu"
        ... )
        >>> manager.register_layer("layers.0", nwor_ops.LayerCache.packed(cache))
        >>> manager.allocate()
        >>> query_start_loc = torch.tensor([0, 2], dtype=torch.int32)
        >>> cu_num_draft_tokens = torch.tensor([1], dtype=torch.int32)
        >>> slots = torch.tensor([4, 5])
        >>> manager.begin(nwor_ops.Window(query_start_loc, cu_num_draft_tokens, {"default": slots}))
        >>> manager.write("layers.0", torch.ones(2, 1, 4), torch.ones(2, 1, 4), slots)
        >>> deferred = manager.defer()
        >>> manager.in_flight
        1
        >>> manager.settle(deferred, torch.tensor([1], dtype=torch.int32))  # the draft was rejected
        >>> cache.view(8, 8)[4:6, 0].tolist()
        [1.0, 0.0]
    """

    _binds = False  # each window has its own section of the log
    _closing = "defer() or cancel()"
    _in_place_of_a_copy = "make another InFlightManager, register the layers' own caches and allocate() it"

    def __init__(self, *, windows: int, **limits: Any) -> None:
        self._windows = validation.integer("InFlightManager: windows", windows, 1)
        super().__init__(**limits)
        if self.mode != "cow":
            raise ValueError(
                f"InFlightManager: mode must be cow, got {self.mode!r}; shadow pages serve one window at a time"
            )
        self._deferred: dict[int, Deferred] = {}  # by section
        self._counting: Deferred | None = None  # window for which only the device knows whether its outcome is counted
        self._settling: set[Deferred] = set()  # windows whose outcome is counted, and whose undo is not finished
        self._cancelling: set[Deferred] = set()  # windows whose cancel_deferred() has begun
        self._section = 0  # section of the open window

    @property
    def in_flight(self) -> int:
        """Number of deferred windows."""
        return len(self._deferred)

    @property
    def launches_per_window(self) -> int:
        return super().launches_per_window + 6  # two copies, three to shift log rows, one to clear them

    def allocate(self) -> None:
        super().allocate()
        self._row_slots = torch.full(
            (len(self.groups), self.max_draft_tokens), -1, dtype=torch.int64, device=self.device
        )
        self._starts = [torch.zeros_like(self.buffers.draft_start_loc) for _ in range(self._windows)]
        self._ids = [torch.zeros_like(self.buffers.window_id) for _ in range(self._windows)]

    # ------------------------------------------------------------ the transaction

    def begin(self, window: Window) -> None:
        if self._state is State.CLOSED:
            self._find_out()  # before the open window's drafts are subtracted
        super().begin(window)

    def _plan(self, window: Window, slot_mappings: list[Tensor]) -> None:
        number = next((section for section in range(self._windows) if section not in self._deferred), None)
        if number is None:
            raise RuntimeError(
                f"begin: all {self._windows} windows of the undo log are deferred; call settle(), cancel_deferred() or "
                "forget() for one of them first"
            )
        self._section, buffers, rows = number, self.buffers, self._rows(number)
        ops.plan_window(
            query_start_loc=window.query_start_loc,
            cu_num_draft_tokens=window.cu_num_draft_tokens,
            slot_mappings=slot_mappings,
            log_rows=buffers.log_rows,
            row_slots=self._row_slots,
            row_requests=buffers.row_requests[rows],
            row_positions=buffers.row_positions[rows],
            counters=buffers.counters,
            draft_start_loc=self._starts[number],
            num_bonus_tokens=window.num_bonus_tokens,
            leading_zero=window.leading_zero,
        )
        buffers.row_slots[:, rows].copy_(self._row_slots)
        self._ids[number].copy_(buffers.window_id)
        if rows.start:
            buffers.log_rows.add_((buffers.log_rows >= 0).to(torch.int32), alpha=rows.start)

    def defer(self) -> Deferred:
        """Close the window and leave its drafts in the caches until :meth:`settle`.

        Returns:
            The deferred window, for :meth:`settle`, :meth:`undo`, :meth:`cancel_deferred` or :meth:`forget`.

        Raises:
            RuntimeError: no window is open, or its :meth:`cancel` has begun.
        """
        window = self._window_to_commit("defer")
        self._stop_logging()
        deferred = Deferred(self._section, window.num_requests)
        self._deferred, self._window, self._state = self._deferred | {self._section: deferred}, None, State.CLOSED
        return deferred

    def settle(self, deferred: Deferred, num_rejected: Tensor) -> None:
        """Keep the accepted drafts of a deferred window and undo the rejected ones.

        Args:
            deferred: the object that :meth:`defer` returned.
            num_rejected: int32 ``[>= Q]`` on the manager's device: number of rejected drafts of each request.

        If this raises, the window is still deferred. If its outcome was already counted, that outcome is kept: call
        again to finish, and ``num_rejected`` of the second call is ignored.

        Raises:
            RuntimeError: the window was settled, cancelled or forgotten before, or its :meth:`cancel_deferred` has
                begun and failed.
            ValueError, TypeError: as :func:`nwor_ops.reject_rows_from_rejected`.
        """
        self._require_deferred("settle", deferred)
        section, buffers, rejected = deferred.section, self.buffers, self.buffers.row_rejected
        if deferred in self._cancelling:  # accepted drafts may be undone already
            raise RuntimeError(
                "settle: cancel_deferred() has begun for this window; call cancel_deferred() again, or forget()"
            )
        self._find_out()
        if deferred not in self._settling:
            self._counting = deferred
            ops.reject_rows_from_rejected(
                num_rejected, self._starts[section][: deferred.num_requests + 1], rejected[self._rows(section)],
                buffers.num_accepted, buffers.counters,
            )  # fmt: skip
            self._settling.add(deferred)
            self._counting = None
        self._restore(section, rejected)
        self._remove(deferred)

    def undo(self, deferred: Deferred, requests: Iterable[int]) -> None:
        """Undo all drafts of some requests now, before their outcome is known, because their slots are about to be
        reassigned.

        :meth:`settle` still counts these drafts as accepted or rejected.

        Args:
            deferred: the object that :meth:`defer` returned.
            requests: indices of requests in the batch of that window.

        Raises:
            RuntimeError: the window was settled, cancelled or forgotten before.
            ValueError, TypeError: an index is not in that batch; nothing is undone.
        """
        self._require_deferred("undo", deferred)
        last = deferred.num_requests - 1
        requests = validation.items("undo: requests", requests, "integers")
        places = [validation.integer("undo: requests", request, 0, last) for request in requests]
        buffers, rows = self.buffers, self._rows(deferred.section)
        ended = numbers_on(self.device, places)
        gone = torch.zeros_like(buffers.row_rejected)
        torch.any(buffers.row_requests[rows].unsqueeze(1) == ended, 1, out=gone[rows])
        self._restore(deferred.section, gone)
        buffers.row_slots.masked_fill_(gone, -1)  # these slots now belong to other requests

    def cancel(self) -> None:
        """Undo every draft of the open window and close it. Its drafts count as rejected. No other window changes.

        If this raises, the window is still open: call cancel again, or abandon.
        """
        window = self._open_window("cancel")
        if self._ending == "begin":
            self._undo_begin(window)
            return
        self._ending = "cancel"
        self._undo_all(self._section)
        self._count_as_rejected()
        self._end(cancelled=True)

    def cancel_deferred(self, deferred: Deferred) -> None:
        """Undo every draft of a deferred window and remove it, as :meth:`cancel` does for the open one.

        Args:
            deferred: the object that :meth:`defer` returned.

        If this raises, the window is still deferred: call this again, or :meth:`forget`.

        Raises:
            RuntimeError: the window was settled, cancelled or forgotten before.
        """
        self._require_deferred("cancel_deferred", deferred)
        self._cancelling.add(deferred)
        self._undo_all(deferred.section)
        self._uncount_outcome(deferred)
        self._add_rejected(self._uncounted_drafts(deferred))
        self._remove(deferred, cancelled=True)

    def abandon(self) -> None:
        """Close the open window and never undo its drafts."""
        window = self._open_window("abandon")
        if self._ending == "begin":
            self._undo_begin(window)
            return
        self._ending = "abandon"
        self._stop_logging()
        self._take_back_rejected(self._section)
        self._end(abandoned_drafts=self._abandoned_drafts + self._uncounted_drafts())

    def forget(self, deferred: Deferred) -> None:
        """Remove a deferred window and never undo its drafts, as :meth:`abandon` does for the open one.

        Args:
            deferred: the object that :meth:`defer` returned.

        Raises:
            RuntimeError: the window was settled, cancelled or forgotten before.
        """
        self._require_deferred("forget", deferred)
        self._uncount_outcome(deferred)
        self._take_back_rejected(deferred.section, deferred)
        self._remove(deferred, abandoned_drafts=self._abandoned_drafts + self._uncounted_drafts(deferred))

    def commit(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> None:
        """Raise RuntimeError: use :meth:`defer` and :meth:`settle`."""
        raise RuntimeError("commit: an InFlightManager has no immediate commit; call defer(), then settle()")

    def commit_rejected(self, num_rejected: Tensor) -> None:
        """Raise RuntimeError: use :meth:`defer` and :meth:`settle`."""
        raise RuntimeError("commit_rejected: an InFlightManager has no immediate commit; call defer(), then settle()")

    # ------------------------------------------------------------ inside

    def _rows(self, section: int) -> slice:
        return slice(section * self.max_draft_tokens, (section + 1) * self.max_draft_tokens)

    def _stop_logging(self) -> None:
        # A graph replayed in a step without drafts must not log: it would overwrite rows of deferred windows.
        self.buffers.log_rows.fill_(-1)

    def _remove(
        self, deferred: Deferred, cancelled: bool = False, abandoned_drafts: Tensor | int | None = None
    ) -> None:
        """Remove a window from the deferred ones and count how it ended, in one statement."""
        others = {section: other for section, other in self._deferred.items() if other is not deferred}
        abandoned, drafts = (0, self._abandoned_drafts) if abandoned_drafts is None else (1, abandoned_drafts)
        self._deferred, self._cancelled, self._abandoned, self._abandoned_drafts = (
            others, self._cancelled + cancelled, self._abandoned + abandoned, drafts
        )  # fmt: skip
        self._settling.discard(deferred)
        self._cancelling.discard(deferred)

    def _undo_all(self, section: int) -> None:
        gone = torch.zeros_like(self.buffers.row_rejected)
        gone[self._rows(section)] = True
        self._restore(section, gone)

    def _count_as_rejected(self) -> None:
        """Count the drafts of the open window, which were not counted before."""
        self._stop_logging()
        self._add_rejected(self._uncounted_drafts())

    def _take_back_rejected(self, section: int, deferred: Deferred | None = None) -> None:
        """Uncount the drafts of a window if a cancel that failed has counted them as rejected."""
        self._add_rejected(self._uncounted_drafts(deferred) - self._planned_drafts(self._rows(section)))

    def _uncounted_drafts(self, window: Deferred | None = None) -> Tensor:
        """Return the number of drafts of a window that count neither as accepted nor as rejected; None = the open one.

        The counters have the sum for all windows.
        """
        uncounted = super()._uncounted_drafts()
        for other in self._deferred.values():
            if other is not window and other not in self._settling:
                uncounted = uncounted - self._planned_drafts(self._rows(other.section))
        if window is not None and self._state is State.OPEN:
            uncounted = uncounted - self._planned_drafts(self._rows(self._section))
        return uncounted

    def _find_out(self) -> None:
        """After a settle that failed or was interrupted, ask the device whether its outcome was counted."""
        deferred = self._counting
        if deferred is not None and self._deferred.get(deferred.section) is deferred:
            if self._is_counted(self._uncounted_drafts(deferred), self._rows(deferred.section)):
                self._settling.add(deferred)
            else:
                self._settling.discard(deferred)
        self._counting = None

    def _uncount_outcome(self, deferred: Deferred) -> None:
        """Uncount the outcome of a window whose settle failed."""
        self._find_out()
        if deferred in self._settling:
            self._counting = deferred
            self._uncount(self._rows(deferred.section))
            self._settling.remove(deferred)
            self._counting = None

    def _restore(self, section: int, rejected: Tensor) -> None:
        """Restore the logged rows of one section. Rows of other windows carry another window number and are skipped."""
        assert isinstance(self.recovery, UndoLog)
        for launch in self.recovery.launches:
            caches, table = launch.planes.arguments()
            ops.restore_slots(
                caches, launch.log, launch.row_slots, rejected, launch.page_offsets, self._ids[section],
                launch.row_windows, None, table,
            )  # fmt: skip

    def _require_deferred(self, method: str, deferred: Deferred) -> None:
        validation.instance(f"{method}: deferred", deferred, Deferred, "what defer() returned")
        if self._deferred.get(deferred.section) is not deferred:
            raise RuntimeError(f"{method}: this window is not deferred; it was settled, cancelled or forgotten before")
