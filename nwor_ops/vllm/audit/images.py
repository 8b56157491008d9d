"""Images of the caches: copies of whole storages, and the elements of blocks and slots in them.

The caches of several layers and groups may lie in one storage, and may even share bytes. An image therefore copies a
storage, and a mask has one byte for each byte of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.kv_cache import Plane
from nwor_ops.vllm.transaction.layers.target import elements

Images = dict[int, torch.UntypedStorage]  # by the address of the storage that each of them copies


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def unmarked(storage: torch.UntypedStorage) -> Tensor:
    """Return a mask of zeros, uint8, with one byte for each byte of a storage."""
    return torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device)


def pages(mask: Tensor, plane: Plane) -> Tensor:
    """Return a mask with the shape and strides of a plane, as integers."""
    view = plane.view
    return elements(mask, plane).as_strided(view.shape, view.stride(), int(view.storage_offset()))
