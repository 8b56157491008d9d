"""The bytes of a storage that the audit of the cache compares in one step, and those that it leaves to vLLM.

A cache has GiBs, and a step writes few of its pages. So a storage is divided into tiles. A step watches the tiles of
the pages that it may write, and some of the rest. The rest takes turns: each byte is watched again after a number of
steps that depends on the sizes. A small cache is watched whole in every step.

Masks are bool ``[watched tiles, bytes of a tile]``.

Block b of a recurrent group of a hybrid model is the same memory as block b of an attention group, and belongs to one
of them at a time. vLLM's kernels overwrite the states as the batch runs, and vLLM copies them from block to block. The
audit excludes the states, and nothing else, in two kinds of blocks:

- Blocks that the group's table names for a request of this batch, from the one with the state before this step on.
  Earlier entries name blocks that the scheduler took back, and may have given to an attention group.
- Block 0, which no request owns. vLLM writes the states of padded rows there, and states that it skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops.kv_cache import Plane
from nwor_ops.recurrent.cache import RecurrentCache
from nwor_ops.vllm.transaction.layers.target import elements, positions, same_place

REST_BYTES = 16 << 20  # of the rest, in each step
_LARGEST_TILE = 4096  # bytes
_NULL_BLOCK = 0


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def differing_bytes(some: Tensor, others: Tensor) -> int:
    """Return in how many bytes two tensors differ."""
    return int((some.contiguous().view(torch.uint8) != others.contiguous().view(torch.uint8)).sum())


class Pages:
    """The pages of some blocks in a layer's cache.

    Args:
        view: the cache, ``[num_blocks, ...]``. If a block of all layers is one page, that page is meant.
        blocks: numbers of blocks, int64.

    Attributes:
        starts: first byte of each page in the storage, int64.
        length: bytes of a page.
    """

    def __init__(self, view: Tensor, blocks: Tensor) -> None:
        size = view.element_size()
        self._blocks, self._count, self._stride = blocks.to(view.device), view.shape[0], view.stride(0) * size
        if self._count * self._stride == view.untyped_storage().nbytes():
            self._first, self.length = 0, self._stride
        else:
            self._first = int(view.storage_offset()) * size
            steps = zip(view.shape[1:], view.stride()[1:], strict=True)
            self.length = (1 + sum((n - 1) * step for n, step in steps)) * size
        self.starts = self._first + self._blocks * self._stride

    def mark(self, marks: Tensor, value: int) -> None:
        """Set the pages in marks of the storage, which have a byte for each of its bytes."""
        marks.as_strided((self._count, self.length), (self._stride, 1), self._first)[self._blocks] = value


class WatchedStorage:
    """One storage of the cache, and its image: the bytes that it must hold.

    Args:
        storage: the storage.
        rest_bytes: number of bytes of the rest that each step watches.

    Attributes:
        image: a copy of the storage, of which only watched bytes are valid.
        left_out: mask of the bytes that others may change in this step, or None.
    """

    def __init__(self, storage: torch.UntypedStorage, rest_bytes: int) -> None:
        size = storage.nbytes()
        self.storage, self.image = storage, torch.empty_like(bytes_of(storage)).untyped_storage()
        self.left_out: Tensor | None = None
        self._marks: Tensor | None = None
        self._tile = min(_LARGEST_TILE, size & -size)
        self._watched = torch.zeros(size // self._tile, dtype=torch.bool, device=storage.device)
        self._rest, self._next = min(-(-rest_bytes // self._tile), len(self._watched)), 0
        self._rows = torch.zeros(len(self._watched), dtype=torch.int64, device=storage.device)
        self.tiles = self._rows[:0]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that this step watches."""
        return len(self.tiles) * self._tile

    def watch(self, pages: Iterable[Pages]) -> None:
        """Watch these pages and the next part of the rest, from now on."""
        count, device = len(self._watched), self._watched.device
        self._watched.zero_()
        self.left_out = None
        for page in pages:
            first, last = page.starts // self._tile, (page.starts + page.length - 1) // self._tile
            tiles = first[:, None] + torch.arange(page.length // self._tile + 2, device=device)
            self._watched[torch.minimum(tiles, last[:, None])] = True
        self._watched[(self._next + torch.arange(self._rest, device=device)) % count] = True
        self._next = (self._next + self._rest) % count
        self.tiles = self._watched.nonzero().flatten()
        self._rows.fill_(count)  # out of range: a tile that is not watched
        self._rows[self.tiles] = torch.arange(len(self.tiles), device=device)

    def read(self, storage: torch.UntypedStorage | None = None) -> Tensor:
        """Return the watched bytes of the storage, or of another one of its size: ``[tiles, bytes]``, uint8."""
        tiles = self._words(storage or self.storage)
        if len(self.tiles) < len(tiles):
            tiles = tiles.index_select(0, self.tiles)
        return tiles.view(torch.uint8)

    def expect(self, values: Tensor) -> None:
        """Write the watched bytes of the image."""
        words = self._words(self.image)
        words.index_copy_(0, self.tiles, values.view(words.dtype))

    def marked(self, value: int) -> Tensor:
        """Return a byte for each byte of the storage. Those of the watched bytes have this value."""
        if self._marks is None:
            self._marks = torch.zeros_like(bytes_of(self.storage))
        self._marks.view(-1, self._tile)[self.tiles] = value
        return self._marks

    def differences(self) -> Tensor | None:
        """Return the mask of the bytes in which storage and image differ, without those left out. None: there are
        none."""
        present, expected = self.read(), self.read(self.image)
        if torch.equal(present.view(-1), expected.view(-1)):
            return None
        wrong = present != expected
        if self.left_out is not None:
            wrong &= ~self.left_out
        return wrong if wrong.any() else None

    def row_values(self, mask: Tensor, plane: Plane, slots: Sequence[int]) -> Tensor:
        """Return for each slot whether its row of a plane has a byte in a mask. The slots are watched."""
        flat, size = self._flat(mask, plane)
        return (flat[self._inside(plane, slots, size)] != 0).flatten(1).any(1)

    def clear_rows(self, mask: Tensor, plane: Plane, slots: Sequence[int]) -> None:
        """Remove the rows of some slots from a mask. The slots are watched."""
        flat, size = self._flat(mask, plane)
        flat[self._inside(plane, slots, size)] = 0

    def offsets(self, mask: Tensor) -> Tensor:
        """Return the offsets of a mask's bytes in the storage."""
        rows, within = mask.nonzero().unbind(1)
        return self.tiles[rows] * self._tile + within

    def _words(self, storage: torch.UntypedStorage) -> Tensor:
        dtype = torch.int64 if self._tile % 8 == 0 else torch.uint8
        return bytes_of(storage).view(dtype).view(len(self._watched), -1)

    def _flat(self, mask: Tensor, plane: Plane) -> tuple[Tensor, int]:
        """Return a mask as a flat tensor of integers with the element size of a plane, and elements per tile."""
        flat = elements(mask.view(torch.uint8), plane)
        return flat, self._tile // flat.element_size()

    def _inside(self, plane: Plane, slots: Sequence[int], size: int) -> Tensor:
        """Return the positions of the elements of some slots in :meth:`_flat`."""
        numbers = positions(plane, torch.tensor(slots, dtype=torch.int64, device="cpu"))
        return self._rows[numbers // size] * size + numbers % size


def states_of(layer: Any) -> tuple[Tensor, ...]:
    """Return the states of a recurrent layer in the cache, each ``[num_blocks, ...]``. With one state per request, a
    page also holds a record, whose parts are included."""
    cache: RecurrentCache | None = getattr(layer, "recurrent_cache", None)
    return (*layer.kv_cache, *(() if cache is None else cache.records))


@dataclass(frozen=True)
class RecurrentGroup:
    """A KV-cache group of recurrent layers.

    Attributes:
        block_size: number of tokens after which a request's state moves to the next entry of its row in the block
            table. If it never moves, the maximum length of a request.
        states: the states of all its layers, each ``[num_blocks, ...]``, as views of the cache.
        rows: returns a pair for each request of the batch that was prepared last: its number of tokens computed before,
            and the blocks in its row. Waits for the device.
    """

    block_size: int
    states: tuple[Tensor, ...]
    rows: Callable[[], Iterable[tuple[int, list[int]]]]

    def blocks(self) -> set[int]:
        """Return the blocks whose states this batch may change, except block 0."""
        named = {block for computed, row in self.rows() for block in row[max(computed - 1, 0) // self.block_size :]}
        return named - {_NULL_BLOCK}

    def pages(self, blocks: set[int], address: int) -> Iterator[Pages]:
        """Yield the pages of these blocks, and of block 0, in the storage with this address."""
        numbers = torch.tensor([_NULL_BLOCK, *sorted(blocks)], device="cpu")
        return (Pages(state, numbers) for state in self._states_in(address))

    def mark(self, blocks: set[int], marks: Tensor, address: int) -> int:
        """Set the bytes of the states in these blocks, and in block 0, to 1. Return their number."""
        numbers = torch.tensor([_NULL_BLOCK, *sorted(blocks)], device=marks.device)
        states = self._states_in(address)
        for state in states:
            same_place(state.view(torch.uint8), marks.untyped_storage())[numbers] = 1
        return len(numbers) * sum(state[0].numel() * state.element_size() for state in states)

    def _states_in(self, address: int) -> list[Tensor]:
        return [state for state in self.states if state.untyped_storage().data_ptr() == address]
