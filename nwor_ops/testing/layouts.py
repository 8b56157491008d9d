"""Paged caches in every layout of serving engines, inside memory of random bytes.

Every byte of a backing tensor is random, including the bytes between and around the planes. A stray write, or a byte
moved to the wrong place, is therefore found by comparing the whole memory. `twin` copies the memory of any arguments,
and `memory` lists it. A test runs an op on one twin and the oracle on the other, and compares all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
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
# Each returns the planes [B, N, H, D] of a layer, as views of memory that `take` gives in order.

_Take = Callable[..., Tensor]  # of a shape
_Planes = tuple[Tensor, Tensor]


def _nhd(s: Shape, take: _Take) -> _Planes:
    """Two planes [B, N, H, D], with foreign elements after each."""
    key, _ = take(s.blocks, s.block_size, s.heads, s.key_width), take(3)
    value, _ = take(s.blocks, s.block_size, s.heads, s.value_width), take(2)
    return key, value


def _hnd(s: Shape, take: _Take) -> _Planes:
    """Two planes stored [B, H, N, D]."""
    key, value = (take(s.blocks, s.heads, s.block_size, width) for width in (s.key_width, s.value_width))
    return key.transpose(1, 2), value.transpose(1, 2)


def _split(rows: Tensor, s: Shape, gap: int = 0) -> _Planes:
    return rows[..., : s.key_width], rows[..., s.key_width + gap :][..., : s.value_width]


def _packed(s: Shape, take: _Take) -> _Planes:
    """[B, N, H, K | V]: key and value of a token in one row (vLLM >= 0.26)."""
    return _split(take(s.blocks, s.block_size, s.heads, s.key_width + s.value_width), s)


def _packed_hnd(s: Shape, take: _Take) -> _Planes:
    """[B, H, N, K | V]."""
    return _split(take(s.blocks, s.heads, s.block_size, s.key_width + s.value_width).transpose(1, 2), s)


def _padded(s: Shape, take: _Take) -> _Planes:
    """[B, N, H, K | V] with unused elements after every row, slot and block."""
    row = s.key_width + s.value_width + 3
    slot = s.heads * row + 1
    slots = take(s.blocks, s.block_size * slot + 7)[:, :-7].unflatten(1, (s.block_size, slot))
    return _split(slots[..., :-1].unflatten(2, (s.heads, row)), s, gap=1)


def _vec(s: Shape, take: _Take) -> _Planes:
    """The vLLM CPU pages `vec` and `vec16`: [B, H, page] with transposed K, so the width stride of K is not 1."""
    pages, keys = take(s.blocks, s.heads, s.block_size * (s.key_width + s.value_width)), s.block_size * s.key_width
    key = pages[..., :keys].unflatten(2, (s.key_width, s.block_size)).permute(0, 3, 1, 2)
    return key, pages[..., keys:].unflatten(2, (s.block_size, s.value_width)).transpose(1, 2)


LAYOUTS: dict[str, Callable[[Shape, _Take], _Planes]] = {
    "nhd": _nhd,
    "hnd": _hnd,
    "packed": _packed,
    "packed_hnd": _packed_hnd,
    "one_backing": _packed,  # [B, L, N, H, K | V]: a block holds the pages of all layers (vLLM >= 0.32)
    "padded": _padded,
    "vec": _vec,
}


def make_pages(layout: str, shape: Shape, dtype: torch.dtype, offset: int = 0, seed: int = 0) -> Pages:
    """Caches of `shape` whose first plane starts `offset` elements after a 64-byte boundary."""
    row, start = shape.key_width + shape.value_width, 64 + offset
    most = shape.blocks * (shape.block_size * (shape.heads * (row + 3) + 1) + 7)  # elements of a layer
    backing = random_bytes(start + shape.layers * most + EDGE, dtype, seed)

    def take(*sizes: int) -> Tensor:
        nonlocal start
        start += math.prod(sizes)
        return backing[start - math.prod(sizes) : start].view(sizes)

    if layout == "one_backing":
        pages = take(shape.blocks, shape.layers, shape.block_size, shape.heads, row)
        planes = [_split(of_layer, shape) for of_layer in pages.unbind(1)]
    else:
        planes = [LAYOUTS[layout](shape, take) for _ in range(shape.layers)]
    return Pages([key for key, _ in planes], [value for _, value in planes])


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


# ---------------------------------------------------------------- rows


def raw(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size. An assignment moves bytes, and so preserves NaN payloads."""
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
