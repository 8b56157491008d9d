"""A layer of the target model: the position of its cache, and the code that writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_ops.kv_cache import LayerCache


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
