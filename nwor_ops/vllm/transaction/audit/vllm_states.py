"""The recurrent states of a hybrid model, whose bytes lie among those that the audit compares.

vLLM's KV-cache groups overlay each other: block b of a group of Mamba, Gated DeltaNet or short-convolution layers is
the same memory as block b of a group of attention layers, and belongs to one of them at a time. States are vLLM's: its
kernels overwrite them as the batch runs, and it copies them from block to block before and behind the forward. A step
may do that to these bytes and no others, so these alone are not compared:

- the states themselves, not the padding behind them nor what else such a page covers;
- in the blocks that the recurrent group's table names for a request of this batch, from the one on that holds the state
  behind the tokens computed before this step. The worker's tables only grow: earlier entries name blocks that the
  scheduler took back, and may have given to an attention group;
- in block 0, which no request owns: states of padded rows, and those that vLLM skips, are written there.

What is left is compared as in any other model: each byte of a block of an attention group, whoever owns it and whether
it takes part in this step; free blocks; cached states of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops.recurrent.cache import RecurrentCache
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
        block_size: tokens after which a request's state moves on to the next entry of its row of the block table; where
            it never does, the longest a request can be.
        states: of all its layers, each ``[num_blocks, ...]``, views of the cache.
        rows: of each request of the batch that was prepared last, how many tokens of it were computed before, and the
            blocks in its row. Waits for the device.
    """

    block_size: int
    states: tuple[Tensor, ...]
    rows: Callable[[], Iterable[tuple[int, list[int]]]]

    def blocks(self) -> set[int]:
        """Those whose states this batch may change, but for block 0."""
        named = {block for computed, row in self.rows() for block in row[max(computed - 1, 0) // self.block_size :]}
        return named - {_NULL_BLOCK}

    def mark(self, blocks: set[int], marked: torch.UntypedStorage, address: int) -> None:
        """Set the bytes of the states in these blocks, and in block 0, to 1.

        Args:
            blocks: of this group.
            marked: of the size of the storage at `address`: only the states there are marked.
            address: of a storage of caches.
        """
        numbers = torch.tensor([_NULL_BLOCK, *sorted(blocks)], device=marked.device)
        for state in self.states:
            if state.untyped_storage().data_ptr() == address:
                same_place(state.view(torch.uint8), marked)[numbers] = 1
