"""Arguments of ops, surrounded by foreign memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nwor_ops.testing.layouts import surrounded


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


def plan(
    query_start_loc: tuple[int, ...] = (0, 4, 5, 9, 9, 9),
    cu_num_draft_tokens: tuple[int, ...] = (3, 3, 6, 6),
    tokens: int = 12,
    groups: int = 1,
    rows: int = 6,
    token_offset: int | None = None,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> tuple[Any, ...]:
    """A batch without prompts: requests with 3, no and 3 drafts, a padded request, and padded tokens at the end."""
    slot_mappings = [int64(*(100 * (g + 1) + t if t < 11 else -1 for t in range(tokens))) for g in range(groups)]
    return (
        int32(*query_start_loc), int32(*cu_num_draft_tokens), slot_mappings, int32(*[77] * (tokens + 2)),
        surrounded(torch.full((groups, rows), 77, dtype=torch.int64)), int32(*[77] * rows),
        int32(*[77] * rows), int64(10, 20, 30, 40, 50), int32(*[77] * (len(cu_num_draft_tokens) + 3)), token_offset,
        num_bonus_tokens, leading_zero,
    )  # fmt: skip
