"""Images of the caches: copies of whole storages, and the elements of blocks and slots in them.

The caches of several layers and groups may lie in one storage, and may even share bytes. An image therefore copies a
storage, and a mask has one byte for each byte of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.kv_cache import Plane

Images = dict[int, torch.UntypedStorage]  # by the address of the storage that each of them copies

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def unmarked(storage: torch.UntypedStorage) -> Tensor:
    """Return a mask of zeros, uint8, with one byte for each byte of a storage."""
    return torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device)


def elements(image: torch.UntypedStorage | Tensor, plane: Plane) -> Tensor:
    """Return an image or a mask as a flat tensor of integers with the element size of a plane."""
    storage = image.untyped_storage() if isinstance(image, Tensor) else image
    return torch.empty(0, dtype=_INTEGERS[plane.view.element_size()], device=storage.device).set_(storage)


def pages(mask: Tensor, plane: Plane) -> Tensor:
    """Return a mask with the shape and strides of a plane, as integers."""
    view = plane.view
    return elements(mask, plane).as_strided(view.shape, view.stride(), int(view.storage_offset()))


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
