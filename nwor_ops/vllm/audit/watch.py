"""The bytes of a storage that the audit of the cache compares in one step.

A cache has GiBs, and a step writes few of its pages. So a storage is divided into tiles. A step watches the tiles of
the pages that it may write, and some of the rest. The rest takes turns: each byte is watched again after a number of
steps that depends on the sizes. A small cache is watched whole in every step.

Masks are bool ``[watched tiles, bytes of a tile]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nwor_ops.kv_cache import Plane
from nwor_ops.vllm.transaction.layers.target import elements, positions

REST_BYTES = 16 << 20  # of the rest, in each step
_LARGEST_TILE = 4096  # bytes


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
    """One storage of the cache.

    Args:
        storage: the storage.
        rest_bytes: number of bytes of the rest that each step watches.
    """

    def __init__(self, storage: torch.UntypedStorage, rest_bytes: int) -> None:
        size = storage.nbytes()
        self._storage = storage
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
        for page in pages:
            first, last = page.starts // self._tile, (page.starts + page.length - 1) // self._tile
            tiles = first[:, None] + torch.arange(page.length // self._tile + 2, device=device)
            self._watched[torch.minimum(tiles, last[:, None])] = True
        self._watched[(self._next + torch.arange(self._rest, device=device)) % count] = True
        self._next = (self._next + self._rest) % count
        self.tiles = self._watched.nonzero().flatten()
        self._rows.fill_(count)  # out of range: a tile that is not watched
        self._rows[self.tiles] = torch.arange(len(self.tiles), device=device)

    def read(self, image: torch.UntypedStorage | None = None) -> Tensor:
        """Return the watched bytes of an image of the storage, or of the storage: ``[tiles, bytes]``, uint8."""
        tiles = self._words(image or self._storage)
        if len(self.tiles) < len(tiles):
            tiles = tiles.index_select(0, self.tiles)
        return tiles.view(torch.uint8)

    def write(self, image: torch.UntypedStorage, values: Tensor) -> None:
        """Write the watched bytes of an image."""
        words = self._words(image)
        words.index_copy_(0, self.tiles, values.view(words.dtype))

    def differences(self, image: torch.UntypedStorage) -> Tensor | None:
        """Return the mask of the bytes in which the storage and an image differ. None: there are none."""
        present, expected = self.read(), self.read(image)
        return None if torch.equal(present.view(-1), expected.view(-1)) else present != expected

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
