"""What a layer of the target model is: where its cache lies, and who writes it."""

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
        name: in vLLM.
        group: its KV-cache group.
        kv_cache: the tensor that vLLM bound to it.
        cache: that tensor as planes of slots.
        own_writer: vLLM's: (key, value, kv_cache, slot_mapping, *rest), where the rest is what its back end takes
            beyond these.
        fused: our kernel logs and writes; else it logs, and the layer's own writer writes.
        kv_cache_dtype: what our kernel writes, as in :func:`nwor_ops.write_kv`.
        scales: gives the layer's current key and value scale; None = 1.
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
    """What `tensor` is a view of, in another storage."""
    like = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return like.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
