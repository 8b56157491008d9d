"""Pages of the CPU attention back end of vLLM, as planes.

``layer.kv_cache`` is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``. vLLM chooses the order of bytes within
one (block, head) page by processor, dtype and sizes (``vllm/csrc/cpu/cpu_attn_*.hpp``). On x86-64, transposed keys
precede the values, or the page has the tiles of AMX. This module does not assume an order. :func:`learn_pages` runs
vLLM's own writer and finds out where each element went. Strides can express the first of these orders, and our writer
can fill such pages; any other order needs a table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nwor_ops.kv_cache import LayerCache, Plane
from nwor_ops.vllm.support.refusals import OTHER_SIZE

Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # key, value, kv_cache, slot_mapping

_known: dict[tuple[int, int, bytes], Tensor] = {}  # one table per order, shared by all planes of that order


def strided_pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value views ``[B, N, H, D]`` of pages in which transposed keys precede the values."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    head_size = width // 2
    shape = (num_blocks, block_size, num_heads, head_size)
    block_stride, head_stride = kv_cache.stride(0), kv_cache.stride(1)
    start = kv_cache.storage_offset()
    key = kv_cache.as_strided(shape, (block_stride, 1, head_stride, block_size), start)
    value = kv_cache.as_strided(shape, (block_stride, head_size, head_stride, 1), start + block_size * head_size)
    return key, value


def learn_pages(write: Writer, like: Tensor, source_dtype: torch.dtype) -> Tensor | None:
    """Find out how vLLM's writer orders the elements of a page. Only shape ``[B, H, N, 2 * D]`` and dtype of ``like``
    are read.

    Return None if the order is that of :func:`strided_pages`. Otherwise return int32 ``[N, 2 * D]``: the position in
    the page of each element of each slot's key and value.
    """
    if 1 < like.element_size() != source_dtype.itemsize:  # one byte: fp8, to which the writer converts
        raise OTHER_SIZE.because(source=source_dtype, cache=like.dtype)
    _, num_heads, block_size, width = like.shape
    # Write one bit of each element's number at a time, as values that no quantization turns into zero or back.
    numbers = torch.arange(1, block_size * width + 1, device=like.device)
    numbers = numbers.view(block_size, 1, width).expand(-1, num_heads, -1)
    slots = torch.arange(block_size, 2 * block_size, device=like.device)
    numbered = torch.zeros((2, num_heads, block_size * width), dtype=torch.int32, device=like.device)
    for bit in range((block_size * width).bit_length()):
        row = (numbers >> bit & 1).to(source_dtype) * 1.5
        scratch = like.new_zeros((2, num_heads, block_size, width))
        write(row[..., : width // 2].contiguous(), row[..., width // 2 :].contiguous(), scratch, slots)
        numbered |= _written(scratch).view_as(numbered).int() << bit
    order = numbered[1, 0]
    if (
        numbered[0].any()
        or (numbered[1] != order).any()
        or not torch.equal(order.sort().values, numbers[:, 0].flatten())
    ):
        raise ValueError(
            f"vLLM's CPU writer ({like.dtype}, block size {block_size}, head size {width // 2}): filling one block "
            "must write each element of keys and values exactly once, at the same position for every head"
        )
    offsets = order.argsort().to(torch.int32).view(block_size, width)
    page = torch.arange(block_size * width, dtype=torch.int32, device=like.device).view(1, 1, block_size, width)
    if torch.equal(offsets, torch.cat(strided_pages(page), dim=-1)[0, :, 0]):
        return None
    return _known.setdefault((block_size, width, offsets.numpy().tobytes()), offsets)


def layer_cache(kv_cache: Tensor, page_offsets: Tensor | None, writable: bool) -> LayerCache:
    """Return the planes of one layer."""
    if kv_cache.stride(3) != 1 or kv_cache.stride(2) != kv_cache.shape[3]:
        raise ValueError(f"CPU cache pages must be contiguous, got strides {kv_cache.stride()}")
    if page_offsets is not None:
        return LayerCache.opaque(Plane(kv_cache.transpose(1, 2), page_offsets))
    key, value = strided_pages(kv_cache)
    return LayerCache.split(key, value) if writable else LayerCache.opaque(key, value)


def _written(scratch: Tensor) -> Tensor:
    """Return a mask of the elements of a cache of zeros that are no longer zero."""
    return scratch.view(torch.uint8 if scratch.element_size() == 1 else scratch.dtype) != 0
