"""Fold: apply pending rows to the states of several layers and store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nwor_ops import ops
from nwor_ops.recurrent.cache import RecurrentCache
from nwor_ops.validation import BoundToMemory


@dataclass(frozen=True)
class RecurrentLayer(BoundToMemory):
    """A layer with one state per request.

    Attributes:
        cache: its states and records.
        layer_window: int64 ``[1]``: the last window in which the layer ran.
    """

    cache: RecurrentCache
    layer_window: Tensor


class Fold(BoundToMemory):
    """The launches that fold layers: one for all layers of equal geometry.

    Args:
        layers: the layers by name.
    """

    def __init__(self, layers: Mapping[str, RecurrentLayer]) -> None:
        by_geometry: dict[tuple[object, ...], list[RecurrentLayer]] = {}
        for layer in layers.values():
            by_geometry.setdefault(layer.cache.geometry, []).append(layer)
        self._launches = [
            (
                [
                    [layer.cache.state for layer in group],
                    *map(list, zip(*(layer.cache.records for layer in group), strict=True)),
                    [layer.layer_window for layer in group],
                ],
                group[0].cache.chunk,
            )
            for group in by_geometry.values()
        ]

    def apply(self, plan: Tensor, window_id: Tensor | None = None) -> None:
        """Fold the rows of a plan in all layers.

        Args:
            plan: int32 ``[E, 4]``: a plan of :meth:`.Cursors.plan_fold`, or of an open window to cancel it.
            window_id: int64 ``[1]`` or None. Layers that are marked with this number are left out, and the others
                are marked with it. So a call can be repeated after an error. None = fold all layers and mark none.
        """
        for (states, keys, norms, decays, updates, windows), chunk in self._launches:
            ops.gated_delta_fold(states, keys, norms, decays, updates, windows, plan, window_id, chunk)
