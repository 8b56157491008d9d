"""Rows of paged caches as integers of the element size, so that NaN payloads are preserved."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size. An assignment moves bytes without interpreting them."""
    return tensor.view(_INTEGER[tensor.element_size()])


def element_view(cache: Tensor, block: int, offset: int, head: int, width: int, page_offsets: Tensor) -> Tensor:
    """One element of a page whose inner order is a table: a view [1] of the same storage."""
    place = block * cache.stride(0) + head * cache.stride(2) + int(page_offsets[offset, width])
    return raw(cache.as_strided((1,), (1,), cache.storage_offset() + place))


def read_row(cache: Tensor, slot: int, page_offsets: Tensor | None) -> Tensor:
    """A copy of one slot of a plane: integers [H, W]."""
    block, offset = divmod(slot, cache.shape[1])
    if page_offsets is None:
        return raw(cache)[block, offset].clone()
    _, _, heads, width = cache.shape
    rows = [
        [int(element_view(cache, block, offset, h, w, page_offsets)[0]) for w in range(width)] for h in range(heads)
    ]
    return torch.tensor(rows).view(heads, width)


def write_row(cache: Tensor, slot: int, row: Tensor, page_offsets: Tensor | None) -> None:
    block, offset = divmod(slot, cache.shape[1])
    if page_offsets is None:
        raw(cache)[block, offset] = row
        return
    for h in range(cache.shape[2]):
        for w in range(cache.shape[3]):
            element_view(cache, block, offset, h, w, page_offsets)[0] = row[h, w]
