"""The bytes of a storage that the audit of the cache compares in one step, and those that it leaves to vLLM.

A cache has GiBs, and a step writes few of its pages. So a storage is divided into tiles. A step watches the tiles of
the attention pages that it may write, and some of the rest. The rest takes turns: each byte is watched again after a
number of steps that depends on the sizes. A small cache is watched whole in every step.

Block b of a recurrent group of a hybrid model is the same memory as block b of an attention group, and belongs to one
of them at a time. vLLM's kernels overwrite the states as the batch runs, and vLLM copies them from block to block. The
audit excludes the states, and nothing else, in two kinds of blocks:

- Blocks that the group's table names for a request of this batch, from the one with the state before this step on.
  Earlier entries name blocks that the scheduler took back, and may have given to an attention group.
- Block 0, which no request owns. vLLM writes the states of padded rows there, and states that it skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops.recurrent.cache import RecurrentCache

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


class Tiles:
    """The tiles that a step watches, of all storages with the same layout.

    Args:
        storage: one of them.
        rest_bytes: number of bytes of the rest that each step watches in each of them.

    Attributes:
        size: bytes of a tile.
        numbers: the watched tiles, int64, ascending.
    """

    def __init__(self, storage: torch.UntypedStorage, rest_bytes: int) -> None:
        num_bytes = storage.nbytes()
        self.size = min(_LARGEST_TILE, num_bytes & -num_bytes)
        self._marks = torch.zeros(num_bytes // self.size, dtype=torch.bool, device=storage.device)
        self._rest, self._next = min(-(-rest_bytes // self.size), len(self._marks)), 0
        self.numbers = torch.zeros(0, dtype=torch.int64, device=storage.device)

    def watch(self, pages: Iterable[Pages]) -> None:
        """Watch these pages and the next part of the rest, from now on."""
        count, device = len(self._marks), self._marks.device
        self._marks.zero_()
        for page in pages:
            first, last = page.starts // self.size, (page.starts + page.length - 1) // self.size
            tiles = first[:, None] + torch.arange(page.length // self.size + 2, device=device)
            self._marks[torch.minimum(tiles, last[:, None])] = True
        self._marks[(self._next + torch.arange(self._rest, device=device)) % count] = True
        self._next = (self._next + self._rest) % count
        self.numbers = self._marks.nonzero().flatten()


class WatchedStorage:
    """One storage of the cache, and its image: the bytes that it must hold.

    Args:
        storage: the storage.
        tiles: the tiles that a step watches.

    Attributes:
        image: a copy of the storage, of which only watched bytes are valid.
    """

    def __init__(self, storage: torch.UntypedStorage, tiles: Tiles) -> None:
        self.storage, self.image = storage, torch.empty_like(bytes_of(storage)).untyped_storage()
        self.tiles = tiles
        self._all_marks: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes that this step watches."""
        return len(self.tiles.numbers) * self.tiles.size

    def read(self, storage: torch.UntypedStorage | None = None) -> Tensor:
        """Return the watched bytes of the storage, or of another one of its size: ``[tiles, bytes]``, uint8."""
        tiles = self._words(storage or self.storage)
        if len(self.tiles.numbers) < len(tiles):
            tiles = tiles.index_select(0, self.tiles.numbers)
        return tiles.view(torch.uint8)

    def expect(self, values: Tensor) -> None:
        """Write the watched bytes of the image."""
        self._write(self.image, values)

    def marks(self, values: Tensor | int) -> Tensor:
        """Return marks of the storage, a byte for each of its bytes, with these values for the watched bytes.

        The others are arbitrary. The next call overwrites the marks.
        """
        if self._all_marks is None:
            self._all_marks = torch.zeros_like(bytes_of(self.storage))
        if isinstance(values, int):
            self._all_marks.view(-1, self.tiles.size).index_fill_(0, self.tiles.numbers, values)
        else:
            self._write(self._all_marks.untyped_storage(), values)
        return self._all_marks

    def marked(self, marks: Tensor) -> Tensor:
        """Return which watched bytes are marked, bool ``[tiles, bytes]``."""
        return self.read(marks.untyped_storage()) != 0

    def differences(self, left_out: Callable[[], Tensor | None]) -> Tensor | None:
        """Return marks of the bytes in which storage and image differ, or None.

        ``left_out`` is called if they differ, and returns the watched bytes that may: bool ``[tiles, bytes]``, or None.
        """
        present, expected = self.read(), self.read(self.image)
        if torch.equal(present.view(-1), expected.view(-1)):
            return None
        wrong = present != expected
        if (may := left_out()) is not None:
            wrong &= ~may
        return self.marks(wrong) if wrong.any() else None

    def offsets(self, marks: Tensor) -> Tensor:
        """Return the offsets of the marked bytes in the storage."""
        rows, within = self.marked(marks).nonzero().unbind(1)
        return self.tiles.numbers[rows] * self.tiles.size + within

    def _write(self, storage: torch.UntypedStorage, values: Tensor) -> None:
        words = self._words(storage)
        words.index_copy_(0, self.tiles.numbers, values.view(words.dtype))

    def _words(self, storage: torch.UntypedStorage) -> Tensor:
        dtype = torch.int64 if self.tiles.size % 8 == 0 else torch.uint8
        return bytes_of(storage).view(dtype).view(storage.nbytes() // self.tiles.size, -1)


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

    def blocks(self) -> Tensor:
        """Return the blocks whose states this batch may change, and block 0: int64 on the device of the states."""
        named = {block for computed, row in self.rows() for block in row[max(computed - 1, 0) // self.block_size :]}
        return torch.tensor(sorted(named | {_NULL_BLOCK}), device=self.states[0].device)
