"""Deferred windows: the outcome of a window arrives after later windows have begun.

A pipeline rank that samples nothing needs this, and so does an engine with several batches in progress.

The undo log has one section of rows per window. The section of a window is data: the log row numbers of its drafts are
shifted, so compiled and captured code does not change. The logged bytes of a window stay until its section is used
again. A section has its own counters, which are added to the manager's after all rejected rows are restored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.transaction.manager import DraftCommitManager, layout_of, tensors_of_groups
from nwor_ops.transaction.protocol import State
from nwor_ops.transaction.undo_log import UndoLog
from nwor_ops.transaction.window import Layout, Window, numbers_on


@dataclass(eq=False)
class Deferred:
    """A window whose forward is over and whose outcome is not known yet.

    Attributes:
        section: section of the undo log.
        num_requests: number of requests, including padded ones.
        cancelling: whether its cancel has begun. Accepted drafts may be undone then.
    """

    section: int
    num_requests: int
    cancelling: bool = False


class _Handles(NamedTuple):
    layout: Layout
    slot_mappings: list[Tensor]


class InFlightManager(DraftCommitManager):
    """A manager in mode ``"cow"`` with several deferred windows.

    Args:
        windows: largest number of windows that are begun and not settled. The log has this many times the rows.
        limits: as for :class:`DraftCommitManager`. ``max_draft_tokens`` is the limit of one window.

    The tokens of deferred windows must have distinct slots. Reassign a slot only after :meth:`settle` or :meth:`undo`.
    There is no immediate commit: :meth:`commit` raises. After an exception call :meth:`cancel` for the open window, or
    :meth:`cancel_deferred` for a deferred one.

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
        >>> manager.settle(deferred, torch.tensor([1], dtype=torch.int32))  # the draft was rejected
        >>> cache.view(8, 8)[4:6, 0].tolist()
        [1.0, 0.0]
    """

    _closing = "defer() or cancel()"
    recovery: UndoLog

    def __init__(self, *, windows: int, **limits: Any) -> None:
        self._windows = validation.integer("InFlightManager: windows", windows, 1)
        super().__init__(**limits)
        if self.mode != "cow":
            raise ValueError(
                f"InFlightManager: mode must be cow, got {self.mode!r}; shadow pages serve one window at a time"
            )
        self._deferred: dict[int, Deferred] = {}  # by section
        self._section = 0  # section of the open window

    @property
    def launches_per_window(self) -> int:
        return super().launches_per_window + 8  # copies, shifted and cleared log rows, and counters

    def allocate(self) -> None:
        super().allocate()
        buffers, windows = self.buffers, self._windows
        self._row_slots = buffers.row_slots.new_full((len(self.groups), self.max_draft_tokens), -1)
        self._starts = buffers.draft_start_loc.new_zeros(windows, self.max_num_requests + 1)
        self._ids = buffers.counters.new_zeros(windows, 1)
        self._counters = buffers.counters.new_zeros(windows, len(ops.COUNTERS))

    def _handles_of(self, layout: Layout) -> _Handles:
        return _Handles(layout, tensors_of_groups("slot_mappings", layout.slot_mappings, self.groups))

    # ------------------------------------------------------------ the transaction

    def begin(self, window: Window) -> None:
        self._require(State.CLOSED, "begin")
        handles = self._bound if window.slot_mappings is None else self._handles_of(layout_of(window))
        if handles is None:
            raise ValueError("begin: window must have slot_mappings, or bind() must be called first")
        section = next((section for section in range(self._windows) if section not in self._deferred), None)
        if section is None:
            raise RuntimeError(
                f"begin: all {self._windows} windows of the undo log are deferred; call settle(), cancel_deferred() or "
                "forget() for one of them first"
            )
        buffers, rows = self.buffers, self._rows(section)
        self._section, self._handles, self._window = section, handles, window
        self._unfinished, self._state = "begin", State.OPEN
        try:
            section_of: dict[str, Any] = {
                "row_slots": self._row_slots,
                "row_requests": buffers.row_requests[rows],
                "row_positions": buffers.row_positions[rows],
                "draft_start_loc": self._starts[section],
                "num_bonus_tokens": handles.layout.num_bonus_tokens,
                "leading_zero": handles.layout.leading_zero,
            }
            ops.plan_window(
                window.query_start_loc, window.cu_num_draft_tokens, handles.slot_mappings,
                **buffers.plan_arguments() | section_of,
            )  # fmt: skip
            buffers.row_slots[:, rows].copy_(self._row_slots)
            self._ids[section].copy_(buffers.window_id)
            if rows.start:
                buffers.log_rows.add_((buffers.log_rows >= 0).to(torch.int32), alpha=rows.start)
        except Exception:
            self.cancel()
            raise
        self._unfinished = ""

    def defer(self) -> Deferred:
        """Close the window and leave its drafts in the caches until :meth:`settle`, which takes the returned object."""
        window = self._window_to_commit("defer")
        self._stop_logging()
        deferred = Deferred(self._section, self._num_requests(window))
        self._deferred[self._section] = deferred
        self._window, self._state = None, State.CLOSED
        return deferred

    def settle(self, deferred: Deferred, num_rejected: Tensor) -> None:
        """Keep the accepted drafts of a deferred window and undo the rejected ones.

        Args:
            deferred: the object that :meth:`defer` returned.
            num_rejected: int32 ``[>= Q]`` on the manager's device: number of rejected drafts of each request.

        If this raises, the window is still deferred. Call it again with the same counts, or :meth:`cancel_deferred`.
        """
        self._require_deferred("settle", deferred)
        if deferred.cancelling:
            raise RuntimeError(
                "settle: cancel_deferred() has begun for this window; call cancel_deferred() again, or forget()"
            )
        section, rejected = deferred.section, self.buffers.row_rejected
        counters = self._counters[section].zero_()
        ops.reject_rows_from_rejected(
            num_rejected, self._starts[section, : deferred.num_requests + 1], rejected[self._rows(section)],
            self.buffers.num_accepted, counters,
        )  # fmt: skip
        self.recovery.restore(rejected, self._ids[section])
        self.buffers.counters.add_(counters)
        del self._deferred[section]

    def undo(self, deferred: Deferred, requests: Iterable[int]) -> None:
        """Undo all drafts of some requests now, before their outcome is known, because their slots are about to be
        reassigned.

        :meth:`settle` still counts these drafts as accepted or rejected.

        Args:
            deferred: the object that :meth:`defer` returned.
            requests: indices of requests in the batch of that window.
        """
        self._require_deferred("undo", deferred)
        last = deferred.num_requests - 1
        indices = [validation.integer("undo: requests", request, 0, last) for request in requests]
        buffers, rows = self.buffers, self._rows(deferred.section)
        gone = torch.zeros_like(buffers.row_rejected)
        torch.any(buffers.row_requests[rows].unsqueeze(1) == numbers_on(self.device, indices), 1, out=gone[rows])
        self.recovery.restore(gone, self._ids[deferred.section])
        buffers.row_slots.masked_fill_(gone, -1)  # these slots now belong to other requests

    def cancel(self) -> None:
        """Undo the open window, as :meth:`DraftCommitManager.cancel`. No other window changes."""
        if self._state is not State.OPEN:
            return
        self._deferred.pop(self._section, None)  # of a defer() that was interrupted
        if self._unfinished == "begin":
            self._stop_logging()
            self._undo_begin()
            return
        self._unfinished = "cancel"
        self._undo_all(self._section)
        self._stop_logging()
        self._count("rejected", self._uncounted_drafts())
        self._end(cancelled=True)

    def cancel_deferred(self, deferred: Deferred) -> None:
        """Undo every draft of a deferred window and remove it, as :meth:`cancel` does for the open one.

        If this raises, the window is still deferred: call this again, or :meth:`forget`.
        """
        self._require_deferred("cancel_deferred", deferred)
        deferred.cancelling = True
        self._undo_all(deferred.section)
        self._count("rejected", self._planned_drafts(deferred))
        del self._deferred[deferred.section]
        self._cancelled += 1

    def abandon(self) -> None:
        """Close the open window and never undo its drafts."""
        self._require(State.OPEN, "abandon")
        if self._unfinished == "begin":
            self.cancel()
            return
        self._unfinished = "abandon"
        self._stop_logging()
        self._end(abandoned_drafts=self._abandoned_drafts + self._uncounted_drafts())

    def forget(self, deferred: Deferred) -> None:
        """Remove a deferred window and never undo its drafts, as :meth:`abandon` does for the open one."""
        self._require_deferred("forget", deferred)
        self._abandoned_drafts = self._abandoned_drafts + self._planned_drafts(deferred)
        del self._deferred[deferred.section]
        self._abandoned += 1

    def commit(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> NoReturn:
        """Raise RuntimeError: use :meth:`defer` and :meth:`settle`."""
        raise RuntimeError("commit: an InFlightManager has no immediate commit; call defer(), then settle()")

    def commit_rejected(self, num_rejected: Tensor) -> NoReturn:
        """Raise RuntimeError: use :meth:`defer` and :meth:`settle`."""
        self.commit(num_rejected, num_rejected)

    # ------------------------------------------------------------ inside

    def _rows(self, section: int) -> slice:
        return slice(section * self.max_draft_tokens, (section + 1) * self.max_draft_tokens)

    def _stop_logging(self) -> None:
        # A graph replayed in a step without drafts must not log: it would overwrite rows of deferred windows.
        self.buffers.log_rows.fill_(-1)

    def _undo_all(self, section: int) -> None:
        gone = torch.zeros_like(self.buffers.row_rejected)
        gone[self._rows(section)] = True
        self.recovery.restore(gone, self._ids[section])  # it skips rows of windows with another number

    def _planned_drafts(self, deferred: Deferred) -> Tensor:
        return (self.buffers.row_requests[self._rows(deferred.section)] >= 0).sum()

    def _uncounted_drafts(self) -> Tensor:
        uncounted = super()._uncounted_drafts()
        for deferred in self._deferred.values():
            uncounted = uncounted - self._planned_drafts(deferred)
        return uncounted

    def _require_deferred(self, method: str, deferred: Deferred) -> None:
        validation.instance(f"{method}: deferred", deferred, Deferred, "what defer() returned")
        if self._deferred.get(deferred.section) is not deferred:
            raise RuntimeError(f"{method}: this window is not deferred; it was settled, cancelled or forgotten before")
