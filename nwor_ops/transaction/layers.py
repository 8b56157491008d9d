"""The layers of a manager: which planes share a launch, and how a traced graph accesses them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwor_ops.kv_cache import LayerCache, Plane, occupies_memory
from nwor_ops.torch_fixes import static, static_int
from nwor_ops.validation import BoundToMemory


@dataclass
class LayerClass(BoundToMemory):
    """Layers of one group whose planes have the same geometries. One launch per plane serves all of them."""

    number: int  # index of this class
    group: str
    planes: tuple[Plane, ...]
    names: list[str] = field(default_factory=list)
    caches: list[list[Tensor]] = field(default_factory=list)  # per plane, per layer


@dataclass
class Layer(BoundToMemory):
    name: str
    cache: LayerCache
    layer_class: LayerClass
    index: int  # index of the layer in its class
    # Filled by LayerTable.prepare().
    key_value: tuple[Tensor, Tensor] | None = None  # the caches; None if the planes are opaque
    # How a traced graph makes the planes: root, shape, strides, offset. Empty: it uses the planes themselves.
    traced_planes: tuple[tuple[Tensor, tuple[int, ...], tuple[int, ...], int], ...] = ()

    def caches(self) -> tuple[Tensor, Tensor]:
        """Return the key and value cache of this layer, in the form for eager calls or for a trace."""
        if not torch.compiler.is_compiling():
            assert self.key_value is not None
            return self.key_value
        if not self.traced_planes:
            return self.cache.key_value(tuple(static(plane.view) for plane in self.cache.planes))
        return self.cache.key_value(
            tuple(
                static(root).as_strided([*map(static_int, shape)], [*map(static_int, stride)], static_int(offset))
                for root, shape, stride, offset in self.traced_planes
            )
        )


class LayerTable(BoundToMemory, dict[str, Layer]):
    """Layers by name.

    Attributes:
        groups: names of the groups, in the order of ``WindowBuffers.row_slots``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[str] = []
        self.classes: list[LayerClass] = []

    def add(self, name: str, cache: LayerCache, group: str) -> None:
        if group not in self.groups:
            self.groups.append(group)
        layer_class = self._class_of(group, cache)
        for caches, plane in zip(layer_class.caches, cache.planes, strict=True):
            caches.append(plane.view)
        self[name] = Layer(name, cache, layer_class, len(layer_class.names))
        layer_class.names.append(name)

    def owner_of(self, cache: LayerCache, group: str) -> str | None:
        """Return a layer of this group that has one of these planes, or None.

        Planes that begin at one address share an element. No other overlap is looked for: layers may be interleaved.
        """
        own = _addresses(cache)
        others = (layer for layer in self.values() if layer.layer_class.group == group)
        return next((layer.name for layer in others if own & _addresses(layer.cache)), None)

    def _class_of(self, group: str, cache: LayerCache) -> LayerClass:
        geometries = [plane.geometry for plane in cache.planes]
        for layer_class in self.classes:
            if layer_class.group == group and [p.geometry for p in layer_class.planes] == geometries:
                return layer_class
        self.classes.append(LayerClass(len(self.classes), group, cache.planes, caches=[[] for _ in cache.planes]))
        return self.classes[-1]

    def planes_of(self, group: str) -> list[Plane]:
        """Return the planes of all layers of a group."""
        return [
            Plane(view, plane.page_offsets)
            for layer_class in self.classes if layer_class.group == group
            for plane, views in zip(layer_class.planes, layer_class.caches, strict=True) for view in views
        ]  # fmt: skip

    def prepare(self) -> None:
        """Prepare the results of :meth:`Layer.caches`, after all layers are added."""
        every_view = (plane.view for layer in self.values() for plane in layer.cache.planes)
        offset = {view.untyped_storage()._cdata for view in every_view if view.storage_offset() != 0}
        flat: dict[tuple[int, torch.dtype], Tensor] = {}
        for layer in self.values():
            views = tuple(plane.view for plane in layer.cache.planes)
            if layer.cache.writable:
                layer.key_value = layer.cache.key_value(views)
            if any(view.untyped_storage()._cdata in offset for view in views):
                layer.traced_planes = tuple(
                    (_traced_root(view, flat), tuple(view.shape), view.stride(), int(view.storage_offset()))
                    for view in views
                )


def _addresses(cache: LayerCache) -> set[int]:
    """Return where the planes begin that have memory."""
    return {plane.view.data_ptr() for plane in cache.planes if occupies_memory(plane.view)}


def _traced_root(view: Tensor, flat: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """Return the tensor from which a traced graph should make a plane that does not start its storage.

    torch 2.13 loses the storage offset of a graph input when it recreates a mutated slice of it (try_use_slice in
    torch/_higher_order_ops/auto_functionalize.py). It also treats layers that are interleaved in one storage as
    overlapping inputs.

    A root starts its storage, and all layers of that storage share it as one input. It is the tensor that autograd
    records as the base of the planes, so that a model may read them as well. Otherwise it is a flat view of the whole
    storage.
    """
    root = view if view._base is None else view._base
    if root.dtype == view.dtype and root.storage_offset() == 0:
        return root
    storage = view.untyped_storage()
    key = storage._cdata, view.dtype
    if key not in flat:
        flat[key] = torch.empty(0, dtype=view.dtype, device=view.device).set_(storage)
    return flat[key]
