"""Cursors: the rows that are pending in each slot, the plans that read and change them, and the skipped requests."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.validation import BoundToMemory


class Cursors(BoundToMemory):
    """The recorded rows of each slot that are not in its state yet.

    Windows and folds are planned here: a plan reads the cursors of its requests and changes them, for all layers.
    Several groups of layers may share the cursors if a slot belongs to one group at a time.

    Args:
        num_slots: number of slots, with slot 0.
        device: device of the cursors.
        chunk: rows that a store folds in the chunk form; 0 = all.

    Attributes:
        table: int32 ``[num_slots, 2]``, or ``[num_slots, 3]`` with chunks: ``cursors`` of
            :func:`nwor_ops.plan_recurrent_window`.
        num_skipped: int64 ``[1]``: requests that windows skipped because their counts are invalid. The kernels that
            plan count each once for each window and group of layers.
    """

    COPY_PERIOD = 0.25  # seconds between two copies of num_skipped

    def __init__(self, num_slots: int, device: torch.device, chunk: int = 0) -> None:
        self.chunk = chunk
        self.table = torch.zeros(num_slots, 3 if chunk else 2, dtype=torch.int32, device=device)
        self.num_skipped = torch.zeros(1, dtype=torch.int64, device=device)
        self._skipped_on_host = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self.table.is_cuda)
        self._copied = -float("inf")  # time of the last copy, in seconds

    def plan_window(
        self,
        plan: Tensor,
        window_id: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
        num_kept: Tensor,
        max_window: int,
        is_window: Tensor | None = None,
    ) -> None:
        """Open a window. See :func:`nwor_ops.plan_recurrent_window`, which takes the same arguments."""
        ops.plan_recurrent_window(
            plan, self.table, window_id, slots, query_start_loc, num_kept, max_window, is_window,
            self.num_skipped, self.chunk,
        )  # fmt: skip

    def drop(self, slots: Tensor) -> None:
        """Drop the pending rows of slots, int64 ``[E]``."""
        self.table[:, ::2].index_fill_(0, slots, 0)

    def copy_skipped(self) -> None:
        """Start a copy of ``num_skipped`` to the host if the last one is old enough. Call it after a plan, on the same
        stream; it does not synchronize."""
        now = time.monotonic()
        if now - self._copied >= self.COPY_PERIOD:
            self._copied = now
            self._skipped_on_host.copy_(self.num_skipped, non_blocking=True)

    def latest_skipped(self) -> int:
        """Return the count of the last copy that arrived. Every later window skips the request again."""
        return int(self._skipped_on_host)
