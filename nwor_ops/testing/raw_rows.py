"""Rows of paged caches as integers of the element size, so that NaN payloads are preserved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size. An assignment moves bytes without interpreting them."""
    return tensor.view(_INTEGER[tensor.element_size()])


def _row(cache: Tensor, slot: int, page_offsets: Tensor | None) -> tuple[Tensor, Any]:
    """Return a tensor of integers and an index, which selects one slot of a plane as ``[H, W]``."""
    block, offset = divmod(slot, cache.shape[1])
    if page_offsets is None:
        return raw(cache), (block, offset)
    heads = torch.arange(cache.shape[2])[:, None] * cache.stride(2)  # the inner order of a page is a table
    places = cache.storage_offset() + block * cache.stride(0) + heads + page_offsets[offset]
    size = cache.untyped_storage().nbytes() // cache.element_size()
    return raw(cache.as_strided((size,), (1,), 0)), (places,)


def read_row(cache: Tensor, slot: int, page_offsets: Tensor | None) -> Tensor:
    """A copy of one slot of a plane: integers [H, W]."""
    integers, index = _row(cache, slot, page_offsets)
    return integers[index].clone()


def write_row(cache: Tensor, slot: int, row: Tensor, page_offsets: Tensor | None) -> None:
    integers, index = _row(cache, slot, page_offsets)
    integers[index] = row
