"""The layers of a KV-cache group, and their folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.recurrent.fold import Fold, RecurrentLayer


class GroupLayers:
    """The layers of one KV-cache group.

    Args:
        cursors: shared by all groups: a block belongs to one group at a time.
        layers: :class:`~nwor_ops.vllm.recurrent.layer.RecurrentLayer` objects whose caches are bound.

    Attributes:
        layers: the layers by name.
    """

    def __init__(self, cursors: Cursors, layers: Sequence[Any]) -> None:
        self.cursors = cursors
        self.layers = {layer.prefix: layer for layer in layers}
        self._neutral: Tensor | None = None  # layers of a group have records of one geometry
        self._fold = Fold({layer.prefix: RecurrentLayer(layer.recurrent_cache, layer.layer_window) for layer in layers})

    def begin_chunk(self, slots: Tensor, positions: Tensor) -> None:
        """Fill the records of blocks with rows that change nothing, for the part of a chunk before their states.

        A chunk ends at a multiple of its length, but a prompt ends anywhere. Such a row has a decay of 1 and adds 0.

        Args:
            slots: int64 ``[E]``: blocks with nothing pending; 0 = skip this entry.
            positions: integers ``[E]``: number of tokens in each state.
        """
        for layer in self.layers.values():  # one launch per layer
            geometry = layer.geometry
            if self._neutral is None:
                self._neutral = geometry.neutral_record(slots.device)
            record = self._neutral.expand(slots.shape[0], -1)
            geometry.whole_records(layer.recurrent_cache).index_copy_(0, slots, record)
        self.cursors.begin_chunk(slots, positions)

    def fold(self, plan: Tensor, sources: Tensor, targets: Tensor, rows: Tensor, keep_source: bool = False) -> None:
        """Fold the pending rows of blocks in all layers. Nothing is pending there afterwards.

        Args:
            plan: int32 ``[>= E, 4]``; **mutated**: buffer for the plan of the fold.
            sources: int32 ``[E]``: blocks whose state and record are read; 0 = skip this entry.
            targets: int32 ``[E]``: blocks whose state is written; 0 = skip this entry.
            rows: int32 ``[>= E]``: number of pending rows to apply.
            keep_source: whether rows stay pending in a source that is not its own target.
        """
        self.cursors.plan_fold(plan, sources, targets, rows, keep_source)
        self.fold_planned(plan[: sources.shape[0]])

    def fold_planned(self, plan: Tensor) -> None:
        """Fold all layers by a plan of :meth:`.Cursors.plan_fold`, int32 ``[E, 4]``."""
        self._fold.apply(plan)
