"""Cursors: the rows that are pending in each slot, the plans that read and change them, and the skipped requests."""

from __future__ import annotations

import time
from typing import Any

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
        skipped: counts the requests that windows skip.
    """

    def __init__(self, num_slots: int, device: torch.device, chunk: int = 0) -> None:
        self.chunk = chunk
        self.table = torch.zeros(num_slots, 3 if chunk else 2, dtype=torch.int32, device=device)
        self.skipped = SkippedRequests(device)

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
            self.skipped.counter, self.chunk,
        )  # fmt: skip

    def plan_fold(
        self, plan: Tensor, sources: Tensor, targets: Tensor, num_rows: Tensor, keep_source: bool = False
    ) -> None:
        """Plan a fold. See :func:`nwor_ops.plan_recurrent_fold`, which takes the same arguments."""
        ops.plan_recurrent_fold(plan, self.table, sources, targets, num_rows, keep_source)

    def plan_block_fold(self, plan: Tensor, *arguments: Any, **options: Any) -> None:
        """Plan folds between blocks. Arguments are those of :func:`nwor_ops.plan_recurrent_block_fold`."""
        options["num_skipped"] = self.skipped.counter
        ops.plan_recurrent_block_fold(plan, self.table, *arguments, **options)

    def drop(self, slots: Tensor) -> None:
        """Drop the pending rows of slots, int64 ``[E]``."""
        self.table[:, ::2].index_fill_(0, slots, 0)

    def drop_window(self, slots: Tensor) -> None:
        """Drop the rows of the last window of slots, int64 ``[E]``. With chunks, earlier accepted rows stay pending."""
        self.table[:, 0].index_fill_(0, slots, 0)

    def begin_chunk(self, slots: Tensor, positions: Tensor) -> None:
        """Let slots with nothing pending begin in the middle of a chunk, as if its earlier rows were pending.

        The caller has filled the records with rows that change nothing.

        Args:
            slots: int64 ``[E]``; 0 = skip this entry.
            positions: integers ``[E]``: number of tokens in each state.
        """
        rows = torch.zeros(slots.shape[0], 3, dtype=torch.int32, device=slots.device)
        rows[:, 1] = self.table[slots, 1]
        rows[:, 2] = positions % self.chunk * (slots > 0)
        self.table[slots] = rows

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy cursors, for records that are copied from slot to slot. Both arguments are int64 ``[E]``."""
        self.table[targets] = self.table[sources]


class SkippedRequests(BoundToMemory):
    """Number of requests that windows skipped because their counts are invalid.

    The kernel that plans a window counts them on the device. :meth:`latest` does not synchronize: a few times per
    second, :meth:`copy` copies the counter to the host after a plan, on the same stream.

    Attributes:
        counter: int64 ``[1]`` on the device. A skipped request counts once for each window and group of layers.
    """

    PERIOD = 0.25  # seconds between two copies

    def __init__(self, device: torch.device) -> None:
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self.counter.is_cuda)
        self._copied = -float("inf")  # time of the last copy, in seconds

    def copy(self) -> None:
        """Start a copy to the host if the last one is old enough. Call it after a plan; it does not synchronize."""
        now = time.monotonic()
        if now - self._copied >= self.PERIOD:
            self._copied = now
            self._host.copy_(self.counter, non_blocking=True)

    def latest(self) -> int:
        """Return the count of the last copy that arrived.

        Every later window skips the same request again, so the next copy includes it.
        """
        return int(self._host)

    def now(self) -> int:
        """Return the exact count. This synchronizes."""
        return int(self.counter)
