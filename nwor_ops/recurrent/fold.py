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
        by_geometry: dict[tuple[object, ...], list[str]] = {}
        for name, layer in layers.items():
            by_geometry.setdefault(layer.cache.geometry, []).append(name)
        self._launches = [_Launch({name: layers[name] for name in names}) for names in by_geometry.values()]

    def apply(self, plan: Tensor, window_id: Tensor | None = None) -> None:
        """Fold the rows of a plan in all layers.

        Args:
            plan: int32 ``[E, 4]``: a plan of :meth:`.Cursors.plan_fold`, or of an open window to cancel it.
            window_id: int64 ``[1]`` or None. Layers that are marked with this number are left out, and the others
                are marked with it. So a call can be repeated after an error. None = fold all layers and mark none.
        """
        for launch in self._launches:
            launch.run(plan, window_id)

    def check(self, method: str, plan: Tensor, window_id: Tensor) -> None:
        """Check the layers with a plan of zeros, which changes no state.

        Args:
            method: name of the calling method, for the message.

        Raises:
            ValueError, TypeError: :func:`nwor_ops.gated_delta_fold` does not support a layer.
        """
        for launch in self._launches:
            launch.check(method, plan, window_id)


class _Launch(BoundToMemory):
    """Layers of equal geometry, which one launch folds."""

    def __init__(self, layers: Mapping[str, RecurrentLayer]) -> None:
        self._names = ", ".join(layers)
        self._windows = [layer.layer_window for layer in layers.values()]
        self._chunk = next(iter(layers.values())).cache.chunk  # part of the geometry
        self._states = [layer.cache.state for layer in layers.values()]
        records = (layer.cache.records for layer in layers.values())
        self._records = [list(tensors) for tensors in zip(*records, strict=True)]

    def run(self, plan: Tensor, window_id: Tensor | None) -> None:
        keys, norms, decays, updates = self._records
        ops.gated_delta_fold(
            self._states, keys, norms, decays, updates, self._windows, plan, window_id, self._chunk
        )  # fmt: skip

    def check(self, method: str, plan: Tensor, window_id: Tensor) -> None:
        try:
            self.run(plan, window_id)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{method}: cannot fold {self._names}: {error}") from error
