"""The writer of a layer whose rows hold keys and values side by side, as vLLM's writers do it, in Python."""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``[T, H, D]`` keys and values to ``[B, N, H, 2 * D]``. A negative slot is padding."""
    block_size = kv_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, slot % block_size] = torch.cat((key[token], value[token]), -1)
