"""Paged caches in every layout of serving engines, inside memory of random bytes.

Every byte of a backing tensor is random, including the bytes between and around the planes. A stray write, or a byte
moved to the wrong place, is therefore found by comparing the whole memory. `twin` copies the memory of any arguments,
and `memory` lists it. A test runs an op on one twin and the oracle on the other, and compares all of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

EDGE = 37  # elements of foreign memory before and after the planes; odd, so that planes are misaligned


class Shape(NamedTuple):
    blocks: int
    block_size: int
    heads: int
    key_width: int
    value_width: int
    layers: int = 1


class Pages(NamedTuple):
    key_caches: list[Tensor]  # per layer [B, N, H, Dk]
    value_caches: list[Tensor]  # per layer [B, N, H, Dv]
    key_offsets: Tensor | None = None  # page_offsets [N, Dk], if no strides can express the page
    value_offsets: Tensor | None = None


def random_bytes(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`count` elements of any bit pattern, including NaNs with payloads, infinities and subnormals."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


def surrounded(content: Tensor, edge: int = EDGE) -> Tensor:
    """A contiguous copy of `content`, on its device, with random bytes before and after it in one storage."""
    edges = (random_bytes(edge, torch.uint8, seed).to(content.device) for seed in (1, 2))
    before, after = (e.bool() if content.dtype == torch.bool else e.to(content.dtype) for e in edges)
    return torch.cat([before, content.reshape(-1), after])[edge : edge + content.numel()].view(content.shape)


# ---------------------------------------------------------------- layouts
#
# Plain numbers as in an engine, all in elements.


class _Plan(NamedTuple):
    key_strides: tuple[int, int, int, int]
    value_strides: tuple[int, int, int, int]
    value_start: int  # from the start of the key plane of the same layer
    layer_stride: int
    total: int  # for all layers


def _nhd(s: Shape) -> _Plan:
    """Two planes [B, N, H, D] per layer."""
    key, value = s.heads * s.key_width, s.heads * s.value_width
    slots = s.blocks * s.block_size
    layer = slots * (key + value) + 5
    return _Plan(
        (s.block_size * key, key, s.key_width, 1),
        (s.block_size * value, value, s.value_width, 1),
        slots * key + 3, layer, s.layers * layer,
    )  # fmt: skip


def _hnd(s: Shape) -> _Plan:
    """Two planes stored [B, H, N, D] per layer."""
    key, value = s.block_size * s.key_width, s.block_size * s.value_width
    layer = s.blocks * s.heads * (key + value)
    return _Plan(
        (s.heads * key, s.key_width, key, 1),
        (s.heads * value, s.value_width, value, 1),
        s.blocks * s.heads * key, layer, s.layers * layer,
    )  # fmt: skip


def _packed(s: Shape) -> _Plan:
    """[B, N, H, K | V]: key and value of a token in one row (vLLM >= 0.26)."""
    row = s.key_width + s.value_width
    strides = (s.block_size * s.heads * row, s.heads * row, row, 1)
    layer = s.blocks * strides[0]
    return _Plan(strides, strides, s.key_width, layer, s.layers * layer)


def _packed_hnd(s: Shape) -> _Plan:
    """[B, H, N, K | V]."""
    row = s.key_width + s.value_width
    strides = (s.heads * s.block_size * row, row, s.block_size * row, 1)
    layer = s.blocks * strides[0]
    return _Plan(strides, strides, s.key_width, layer, s.layers * layer)


def _one_backing(s: Shape) -> _Plan:
    """[B, L, N, H, K | V]: a block holds the pages of all layers (vLLM >= 0.32)."""
    row = s.key_width + s.value_width
    page = s.block_size * s.heads * row
    strides = (s.layers * page, s.heads * row, row, 1)
    return _Plan(strides, strides, s.key_width, page, s.blocks * s.layers * page)


def _padded(s: Shape) -> _Plan:
    """[B, N, H, K | V] with unused elements after every row, slot and block."""
    row = s.key_width + s.value_width + 3
    slot = s.heads * row + 1
    strides = (s.block_size * slot + 7, slot, row, 1)
    layer = s.blocks * strides[0]
    return _Plan(strides, strides, s.key_width + 1, layer, s.layers * layer)


def _vec(s: Shape) -> _Plan:
    """The vLLM CPU pages `vec` and `vec16`: [B, H, page] with transposed K, so the width stride of K is not 1."""
    page = s.block_size * (s.key_width + s.value_width)
    return _Plan(
        (s.heads * page, 1, page, s.block_size),
        (s.heads * page, s.value_width, page, 1),
        s.block_size * s.key_width, s.blocks * s.heads * page, s.layers * s.blocks * s.heads * page,
    )  # fmt: skip


LAYOUTS = {
    "nhd": _nhd,
    "hnd": _hnd,
    "packed": _packed,
    "packed_hnd": _packed_hnd,
    "one_backing": _one_backing,
    "padded": _padded,
    "vec": _vec,
}


def make_pages(layout: str, shape: Shape, dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Pages:
    """Caches of `shape` whose first plane starts `offset` elements after a 64-byte boundary."""
    plan = LAYOUTS[layout](shape)
    start = 64 + offset
    backing = random_bytes(start + plan.total + EDGE, dtype, seed)
    b, n, h = shape.blocks, shape.block_size, shape.heads
    starts = [start + layer * plan.layer_stride for layer in range(shape.layers)]
    return Pages(
        [backing.as_strided((b, n, h, shape.key_width), plan.key_strides, s) for s in starts],
        [backing.as_strided((b, n, h, shape.value_width), plan.value_strides, s + plan.value_start) for s in starts],
    )


def amx_offsets(block_size: int, width: int) -> tuple[Tensor, Tensor]:
    """Order of the vLLM CPU pages `amx`: offsets of K in its region and of V in its region."""
    n, d = torch.arange(block_size)[:, None], torch.arange(width)[None, :]
    key = (n // 16) * 16 * width + (d // 2) * 32 + (n % 16) * 2 + d % 2
    value = (d // 16) * 16 * block_size + (n // 2) * 32 + (d % 16) * 2 + n % 2
    return key.int().contiguous(), value.int().contiguous()


def make_amx_pages(shape: Shape, dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Pages:
    """Pages [B, H, K region | V region] whose inner order needs a table."""
    assert shape.key_width == shape.value_width
    pages = make_pages("vec", shape, dtype, offset, seed)
    return Pages(pages.key_caches, pages.value_caches, *amx_offsets(shape.block_size, shape.key_width))


# ---------------------------------------------------------------- memory of arguments


def storages(arguments: Any) -> dict[int, torch.UntypedStorage]:
    """Every distinct storage of nested arguments, in the order of first use."""
    leaves = tree_flatten(arguments)[0]
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def twin(arguments: Any, device: str | torch.device | None = None) -> Any:
    """The same arguments on a copy of all their memory. Views of one storage stay views of one storage."""
    copies = {}
    for key, storage in storages(arguments).items():
        source = bytes_of(storage)
        copies[key] = torch.empty_like(source, device=device or storage.device).copy_(source).untyped_storage()

    def on_copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = copies[leaf.untyped_storage()._cdata]
        empty = torch.empty(0, dtype=leaf.dtype, device=copy.device)
        return empty.set_(copy, leaf.storage_offset(), leaf.shape, leaf.stride())

    return tree_map(on_copy, arguments)


def memory(arguments: Any) -> list[Tensor]:
    """Copies of all bytes of all memory of the arguments, on the CPU."""
    return [bytes_of(storage).cpu().clone() for storage in storages(arguments).values()]


def same_memory(a: Any, b: Any) -> bool:
    """Return whether two twins have the same bytes everywhere, including bytes outside their views."""
    ours, theirs = memory(a), memory(b)
    return len(ours) == len(theirs) and all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
