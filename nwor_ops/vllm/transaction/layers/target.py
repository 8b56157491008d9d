"""A layer of the target model: the position of its cache, and the code that writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_ops.kv_cache import LayerCache, Plane

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TargetLayer:
    """A layer of the target model whose cache writes belong to the transaction.

    Attributes:
        name: name of the layer in vLLM.
        group: number of its KV-cache group, as a string.
        kv_cache: the tensor that vLLM bound to the layer.
        cache: that tensor as planes of slots.
        own_writer: vLLM's writer ``(key, value, kv_cache, slot_mapping, *rest)``. ``rest`` are further arguments of its
            back end.
        fused: True if our kernel logs and writes. False if it only logs, and ``own_writer`` writes.
        kv_cache_dtype: the format that our kernel writes, as in :func:`nwor_ops.write_kv`.
        scales: returns the layer's current key scale and value scale. None means 1.
    """

    name: str
    group: str
    kv_cache: Tensor
    cache: LayerCache
    own_writer: Callable[..., None]
    fused: bool = False
    kv_cache_dtype: str = "auto"
    scales: Callable[[], tuple[Tensor, Tensor]] | None = None


def same_place(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of another storage, with the offset, shape and strides of `tensor`."""
    like = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return like.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def elements(image: torch.UntypedStorage | Tensor, plane: Plane) -> Tensor:
    """Return a tensor's storage as a flat tensor of integers with the element size of a plane."""
    storage = image.untyped_storage() if isinstance(image, Tensor) else image
    return torch.empty(0, dtype=_INTEGERS[plane.view.element_size()], device=storage.device).set_(storage)


def positions(plane: Plane, slots: Tensor) -> Tensor:
    """Return the positions of the elements of some slots in :func:`elements`: int64 ``[slots, heads, width]``."""
    view = plane.view
    slots = slots.to(view.device)
    blocks, offsets = slots // view.shape[1], slots % view.shape[1]
    if plane.page_offsets is None:
        columns = offsets[:, None] * view.stride(1) + torch.arange(view.shape[3], device=view.device) * view.stride(3)
    else:
        columns = plane.page_offsets[offsets].long()
    heads = torch.arange(view.shape[2], device=view.device) * view.stride(2)
    starts = int(view.storage_offset()) + blocks * view.stride(0)
    return starts[:, None, None] + heads[:, None] + columns[:, None]
