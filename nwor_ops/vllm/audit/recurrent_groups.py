"""Recurrent states of a hybrid model: the bytes of the cache that the audit leaves to vLLM.

Block b of a recurrent group is the same memory as block b of an attention group, and belongs to one of them at a time.
vLLM's kernels overwrite the states as the batch runs, and vLLM copies them from block to block. The audit therefore
excludes the states, and nothing else, in two kinds of blocks:

- Blocks that the group's table names for a request of this batch, from the one with the state before this step on.
  Earlier entries name blocks that the scheduler took back, and may have given to an attention group.
- Block 0, which no request owns. vLLM writes the states of padded rows there, and states that it skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops.recurrent.cache import RecurrentCache
from nwor_ops.vllm.audit.watch import Pages
from nwor_ops.vllm.transaction.layers.target import same_place

_NULL_BLOCK = 0


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
