"""What the layers of one engine share: which block has a window pending, and how that is folded."""

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
        cursors: int32 ``[num_blocks, 2]``, of all groups: a block belongs to one of them at a time.
        layers: :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`, their caches bound.

    Attributes:
        layers: by name.
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
        """Make what is pending in some blocks part of a state, in all layers; nothing is pending there afterwards.

        Args:
            plan: int32 ``[>= E, 4]``; **mutated**.
            sources: int32 ``[E]``: blocks whose state and record are read; 0 for none.
            targets: likewise, whose state is written.
            rows: int32 ``[>= E]``: tokens of the last window that stay; as many as are pending at most.
            keep_source: what is pending in a block whose state goes to another stays pending there.
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
    """Nothing is pending in any block."""
    return torch.zeros(num_blocks, 2, dtype=torch.int32, device=device)


class RefusedRequests:
    """Requests that a window left out because their numbers cannot be: counted on the device, by the kernel that plans
    it. Who asks does not wait: a copy follows a plan on its stream, a few times a second.

    Attributes:
        counter: int64 ``[1]``; each window adds to it, once for each request and KV-cache group.
    """

    PERIOD = 0.25  # seconds between two copies

    def __init__(self, device: torch.device) -> None:
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=self.counter.is_cuda)
        self._copied = -float("inf")  # when

    def copy(self) -> None:
        """Behind a plan. Does not wait, and mostly does nothing."""
        now = time.monotonic()
        if now - self._copied >= self.PERIOD:
            self._copied = now
            self._host.copy_(self.counter, non_blocking=True)

    def latest(self) -> int:
        """What had been counted when the last copy arrived. A request that was left out once is left out of all its
        windows: what is missing here comes with the next ones."""
        return int(self._host)

    def now(self) -> int:
        """Exact; waits for the device."""
        return int(self.counter)
