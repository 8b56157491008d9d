"""Cursors, folds and refusal counts that the layers of one engine share. A cursor says what is pending in a block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops


class GroupLayers:
    """The layers of one KV-cache group.

    Args:
        cursors: int32 ``[num_blocks, 2]``, shared by all groups: a block belongs to one group at a time.
        layers: :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer` objects whose caches are bound.

    Attributes:
        layers: the layers by name.
    """

    def __init__(self, cursors: Tensor, layers: Sequence[Any]) -> None:
        self.cursors = cursors
        self.layers = {layer.prefix: layer for layer in layers}
        records = [layer.records for layer in layers]
        self._states = [layer.kv_cache[1] for layer in layers]
        self._keys = [record.keys for record in records]
        self._norms = [record.norms for record in records]
        self._decays = [record.decays for record in records]
        self._values = [record.values for record in records]
        self._layer_windows = [layer.layer_window for layer in layers]

    def fold(self, plan: Tensor, sources: Tensor, targets: Tensor, rows: Tensor, keep_source: bool = False) -> None:
        """Fold the pending rows of blocks in all layers. Nothing is pending there afterwards.

        Args:
            plan: int32 ``[>= E, 4]``; **mutated**: buffer for the plan of the fold.
            sources: int32 ``[E]``: blocks whose state and record are read; 0 = skip this entry.
            targets: int32 ``[E]``: blocks whose state is written; 0 = skip this entry.
            rows: int32 ``[>= E]``: number of pending rows to apply.
            keep_source: whether rows stay pending in a source that is not its own target.
        """
        ops.plan_recurrent_fold(plan, self.cursors, sources, targets, rows, keep_source)
        ops.gated_delta_fold(
            self._states,
            self._keys,
            self._norms,
            self._decays,
            self._values,
            self._layer_windows,
            plan[: sources.shape[0]],
        )


def new_cursors(num_blocks: int, device: torch.device) -> Tensor:
    """Return cursors with nothing pending: zeros, int32 ``[num_blocks, 2]``."""
    return torch.zeros(num_blocks, 2, dtype=torch.int32, device=device)


class RefusedRequests:
    """Number of requests that windows skipped because their counts are invalid.

    The kernel that plans a window counts them on the device. :meth:`latest` does not synchronize: a few times per
    second, :meth:`copy` copies the counter to the host after a plan, on the same stream.

    Attributes:
        counter: int64 ``[1]`` on the device. A skipped request counts once for each window and KV-cache group.
    """

    PERIOD = 0.25  # seconds between two copies

    def __init__(self, device: torch.device) -> None:
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=self.counter.is_cuda)
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
