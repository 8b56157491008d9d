"""Arguments of ops, surrounded by foreign memory."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.testing.layouts import Shape, random_bytes, surrounded

SMALL = Shape(blocks=3, block_size=4, heads=4, key_width=8, value_width=8, layers=2)
WIDE_VALUES = Shape(blocks=3, block_size=5, heads=2, key_width=16, value_width=24)
LATENT = Shape(blocks=2, block_size=4, heads=1, key_width=24, value_width=8)

# Shapes of the tests that compare whole caches.
SHAPES = {
    "d64": Shape(3, 16, 2, 64, 64, layers=2),
    "d80": Shape(3, 16, 4, 80, 80, layers=2),
    "d128": Shape(3, 16, 8, 128, 128, layers=2),
    "d192_v128": Shape(2, 16, 3, 192, 128, layers=2),
    "block_size_is_num_heads": Shape(4, 8, 8, 16, 16, layers=2),
    "odd": Shape(3, 5, 3, 7, 7, layers=3),
    "odd_values": Shape(3, 5, 3, 7, 9, layers=3),
    "wide_values": Shape(3, 12, 2, 16, 24, layers=2),
    "mla_latent": Shape(2, 16, 1, 576, 64, layers=2),
    "one_element": Shape(13, 1, 1, 1, 1, layers=2),
}

# Shapes whose rows have no bytes.
NO_BYTES = {
    "no heads": Shape(blocks=3, block_size=4, heads=0, key_width=8, value_width=8),
    "no width": Shape(blocks=3, block_size=4, heads=4, key_width=0, value_width=0),
}

NUM_LOG_ROWS = 4


def int64(*values: int) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.int64))


def int32(*values: int) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.int32))


def flags(*values: int) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.bool))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Finite values of every size, including zero and both signs, surrounded by foreign memory."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = torch.randn(shape, generator=generator)
    exponents = torch.randint(-12, 12, shape, generator=generator).float()
    return surrounded((mantissas * torch.exp2(exponents)).to(dtype))


def log_for(cache: Tensor, rows: int = NUM_LOG_ROWS, seed: int = 7) -> Tensor:
    """A log [R, H, W] of random bytes for one plane."""
    count = rows * cache.size(2) * cache.size(3)
    return random_bytes(count + 8, cache.dtype, seed)[5 : 5 + count].view(rows, cache.size(2), cache.size(3))


def surrounded_layers(logs: list[Tensor]) -> Tensor:
    """Logs of several layers as one [L, R, H, W] inside foreign memory."""
    stacked = torch.stack(logs)
    backing = random_bytes(stacked.numel() + 8, stacked.dtype, seed=31)
    view = backing[3 : 3 + stacked.numel()].view(stacked.shape)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[stacked.element_size()]
    view.view(raw).copy_(stacked.view(raw))
    return view


# A window number for write_kv_logged, log_slots and restore_slots, and an earlier one.
WINDOW, EARLIER_WINDOW = 2**33 + 5, 5


def row_windows(*shape: int) -> Tensor:
    """Rows that an earlier window logged. The low 32 bits of its number equal those of this window."""
    return surrounded(torch.full(shape, EARLIER_WINDOW, dtype=torch.int64))
