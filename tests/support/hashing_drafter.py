"""A draft model of a few lines, for comparisons of the drafters in vLLM with ours.

Each token's key goes to its slot, and the next token is a hash of all visible keys, in order. One wrong slot, position,
length, block or start therefore changes the drafts.
"""

from __future__ import annotations

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
