"""A draft model of a few lines, for comparisons of the drafters in vLLM with ours.

Each token's key goes to its slot, and the next token is a hash of all visible keys, in order. One wrong slot, position,
length, block or start therefore changes the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROWS, K, LONGEST, VOCABULARY = 6, 4, 48, 97
MAX_TOKENS = 64
BATCHES = 40
PRIME = 1_000_003


def attend(metadata: Any, cache: Tensor, block_size: int, tokens: int) -> Tensor:
    """Return the hash of the keys that each token sees, through the block table."""
    seen = torch.zeros(tokens, dtype=torch.int64)
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            value = 7
            for position in range(length - (starts[row + 1] - token) + 1):
                block = int(metadata.block_table_tensor[row, position // block_size])
                value = (value * 31 + int(cache[block * block_size + position % block_size])) % PRIME
            seen[token] = value
    return seen


def scores(hidden: Tensor, vocabulary: int) -> Tensor:
    """Return the logits of hashes."""
    token = torch.arange(vocabulary)
    return ((hidden[:, None] * 7919 + token * 104_729 + hidden[:, None] * token * 13) % 9973).float() / 1500.0


class Model(torch.nn.Module):
    """A layer for each block size, with its own cache. The next token depends on all of them.

    Args:
        block_sizes: block sizes of the layers.
        num_blocks: number of blocks of each cache.
        carries: whether it takes hidden states, as a drafter that follows the target. Its keys depend on them too.
        is_pair: whether it returns a pair, with the hidden states of the next step.
        vocabulary: number of tokens.
    """

    def __init__(
        self, block_sizes: Sequence[int], num_blocks: int, carries: bool = False, is_pair: bool = False,
        vocabulary: int = VOCABULARY,
    ) -> None:  # fmt: skip
        torch.nn.Module.__init__(self)  # not super(): subclasses have further bases
        self.caches = [torch.zeros(num_blocks * size, dtype=torch.int64) for size in block_sizes]
        self._sizes, self._carries, self._is_pair, self._vocabulary = block_sizes, carries, is_pair, vocabulary

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: None = None, hidden_states: Tensor | None = None
    ) -> Any:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        assert (hidden_states is not None) == self._carries
        before = hidden_states[:, 0].long() if hidden_states is not None else torch.zeros_like(positions)
        hidden = torch.zeros(len(input_ids), dtype=torch.int64)
        for number, (cache, size) in enumerate(zip(self.caches, self._sizes, strict=True)):
            metadata, slots = context.attn_metadata[f"draft.{number}"], context.slot_mapping[f"draft.{number}"]
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    cache[slot] = (int(input_ids[token]) * 100 + int(positions[token]) + int(before[token]) + 1) % PRIME
            hidden += attend(metadata, cache, size, len(input_ids))
        last = hidden[:, None].double()
        return (last, ((hidden * 17 + before) % 4001)[:, None].double()) if self._is_pair else last

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return scores(hidden_states[:, 0].long(), self._vocabulary)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.sum(-1, keepdim=True)
