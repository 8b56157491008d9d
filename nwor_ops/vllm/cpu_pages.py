"""The pages of vLLM's CPU attention back end, as planes.

``layer.kv_cache`` is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, but the bytes of one
(block, head) page are in an order of the instruction set's choosing: all keys, then all values
(``vllm/csrc/cpu/cpu_attn_*.hpp``). With o = slot % block_size, N = block_size, D = head_size and
d < D, element (o, d) lies at

- ``vec``, ``vec16``: key ``d * N + o`` (transposed), value ``N * D + o * D + d``;
- ``amx``: key ``(o // 16) * 16 * D + (d // 2) * 32 + (o % 16) * 2 + d % 2``,
  value ``N * D + (d // 16) * 16 * N + (o // 2) * 32 + (d % 16) * 2 + o % 2``.

The first is a matter of strides, the second needs a table. No formula is trusted:
:func:`verify_pages` lets vLLM's own writer write a token and looks where it went.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from nwor_ops.cache import LayerCache, Plane

STRIDED = ("vec", "vec16")
TABLED = ("amx",)
SUPPORTED = STRIDED + TABLED


@lru_cache
def amx_page_offsets(block_size: int, head_size: int) -> Tensor:
    """int32 ``[N, 2 * D]``: where in a page the key and the value of each slot lie."""
    offset = torch.arange(block_size)[:, None]
    d = torch.arange(head_size)[None, :]
    key = offset // 16 * 16 * head_size + d // 2 * 32 + offset % 16 * 2 + d % 2
    value = block_size * head_size + d // 16 * 16 * block_size + offset // 2 * 32 + d % 16 * 2 + offset % 2
    return torch.cat((key, value), dim=1).to(torch.int32)


def strided_pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value views ``[B, N, H, D]`` of ``vec`` and ``vec16`` pages."""
    num_blocks, num_heads, block_size, width = kv_cache.shape
    head_size = width // 2
    shape = (num_blocks, block_size, num_heads, head_size)
    block_stride, head_stride = kv_cache.stride(0), kv_cache.stride(1)
    start = kv_cache.storage_offset()
    key = kv_cache.as_strided(shape, (block_stride, 1, head_stride, block_size), start)
    value = kv_cache.as_strided(shape, (block_stride, head_size, head_stride, 1), start + block_size * head_size)
    return key, value


def layer_cache(kv_cache: Tensor, isa: str, writable: bool) -> LayerCache:
    """The planes of one layer.

    Args:
        kv_cache: ``[B, H, N, 2 * D]`` as vLLM binds it.
        isa: ``layer.isa``.
        writable: whether our writer may fill the planes (strided pages without quantisation).

    Raises:
        ValueError: another instruction set, or pages that are not contiguous.
    """
    _, _, block_size, width = kv_cache.shape
    if isa not in SUPPORTED:
        raise ValueError(
            f"the CPU cache pages of instruction set {isa!r} are not known; known are {', '.join(SUPPORTED)}"
        )
    if kv_cache.stride(3) != 1 or kv_cache.stride(2) != width:
        raise ValueError(f"CPU cache pages must be contiguous, got strides {kv_cache.stride()}")
    if isa in TABLED:
        return LayerCache.opaque(Plane(kv_cache.transpose(1, 2), amx_page_offsets(block_size, width // 2)))
    key, value = strided_pages(kv_cache)
    return LayerCache.split(key, value) if writable else LayerCache.opaque(key, value)


Writer = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # key, value, kv_cache, slot_mapping


def _slot_elements(kv_cache: Tensor, cache: LayerCache, slot: int) -> Tensor:
    """bool, shaped like ``kv_cache``: the elements that the planes say belong to a slot."""
    marked = torch.zeros_like(kv_cache, dtype=torch.int8)
    block, offset = divmod(slot, kv_cache.shape[2])
    for plane in cache.planes:
        view = plane.view
        if plane.page_offsets is not None:
            marked.reshape(*kv_cache.shape[:2], -1)[block][:, plane.page_offsets[offset].long()] = 1
            continue
        start = view.storage_offset() - kv_cache.storage_offset()
        marked.as_strided(view.shape, view.stride(), start)[block, offset] = 1
    return marked.bool()


def verify_pages(write: Writer, like: Tensor, isa: str, source_dtype: torch.dtype, writable: bool) -> None:
    """Write single tokens with vLLM's own writer and check that exactly the planes' elements changed.

    Args:
        write: vLLM's writer of one layer.
        like: a cache of that layer, for its shape and dtype; not written.
        isa: its instruction set.
        source_dtype: dtype of keys and values.
        writable: as in :func:`layer_cache`.

    Raises:
        ValueError: the writer put something elsewhere than the planes say.
    """
    _, num_heads, block_size, width = like.shape
    generator = torch.Generator().manual_seed(0)
    for slot in {0, 1, block_size - 1, block_size + block_size // 2 + 1}:
        scratch = torch.zeros((2, num_heads, block_size, width), dtype=like.dtype)
        # At least 1 in magnitude: no quantisation turns it into zero.
        row = torch.rand((2, 1, num_heads, width // 2), generator=generator) + 1
        key, value = row.to(source_dtype).unbind(0)
        write(key, value, scratch, torch.tensor([slot]))
        expected = _slot_elements(scratch, layer_cache(scratch, isa, writable), slot)
        written = scratch.view(torch.uint8 if scratch.element_size() == 1 else scratch.dtype) != 0
        if not torch.equal(written, expected):
            raise ValueError(
                f"vLLM's CPU writer ({isa}, {like.dtype}, block size {block_size}, head size {width // 2}) puts "
                f"slot {slot} elsewhere than expected: {int((written & ~expected).sum())} elements outside the "
                f"slot changed, {int((expected & ~written).sum())} inside did not"
            )
