"""A few calls of every op of family accept."""

from __future__ import annotations

from typing import Any

import torch
from tensors import NUM_LOG_ROWS, flags, int32, int64
from torch import Tensor

from nwor_ops.testing.layouts import surrounded


def outcome_buffers(rows: int = NUM_LOG_ROWS, requests: int = 3) -> tuple[Tensor, ...]:
    """Output buffers of an outcome: flags of rows, accepted drafts of requests, counters."""
    return flags(*[1] * rows), int32(*[77] * requests), int64(10, 20, 30, 40, 50)


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


def accept_samples(op: str) -> list[tuple[Any, ...]]:
    if op == "plan_window":
        return [
            plan(),
            plan(groups=2, token_offset=4, tokens=5),
            plan(rows=9),
            plan(cu_num_draft_tokens=(4, 5, 9, 10), num_bonus_tokens=1),
            plan(cu_num_draft_tokens=(0, 4, 5, 9, 10), num_bonus_tokens=1, leading_zero=True),
        ]
    drafts, cu = (11, 12, 13, 14, 15, 16, 17), (0, 3, 3, 7)
    sampled = torch.tensor([[11, 12, 99, -1, -1], [50, -1, -1, -1, -1], [14, 15, 16, 17, 60]])
    of_tokens = [
        (int64(*drafts), surrounded(sampled), int32(*cu)),
        (int32(*drafts, 0, 0), surrounded(sampled.int().T).T, int32(*cu, 7, 7)[:4]),
        (int64(), int64().view(0, 1), int32(0)),
    ]
    of_counts = [(int32(1, 0, 4), int32(*cu)), (int32(-3, 9, 9, 9), int32(*cu)), (int32(), int32(0))]
    if op == "acceptance_mask":
        return of_tokens
    if op == "acceptance_mask_from_rejected":
        return [(*counts, 7 + i if len(counts[0]) else 0) for i, counts in enumerate(of_counts)]

    inputs = of_tokens if op == "reject_rows" else of_counts
    return [
        (*i, *outcome_buffers(rows, requests)) for i, rows, requests in zip(inputs, (7, 9, 4), (3, 5, 0), strict=True)
    ]


# ---------------------------------------------------------------- acceptance, computed by hand

# drafts of each request, sampled tokens of each request, accepted drafts of each request
DECIDED = {
    "all": ([[1, 2, 3], [4]], [[1, 2, 3, 9], [4, 9, -1, -1]], [3, 1]),
    "none": ([[1, 2, 3], [4]], [[9, -1, -1, -1], [5, -1, -1, -1]], [0, 0]),
    "half": ([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, -1, -1], [5, 9, -1, -1, -1]], [2, 1]),
    "replaced by the same token": ([[1, 2, 3]], [[1, 2, -1, -1]], [1]),
    "equal again after a mismatch": ([[1, 2, 3]], [[1, 9, 3, 9]], [1]),
    "no drafts between": ([[1], [], [2]], [[1, 9], [9, -1], [9, -1]], [1, 0, 0]),
    "no bonus column": ([[1, 2]], [[1, 2]], [2]),
    "fewer columns than drafts": ([[1, 2, 3]], [[1, 2]], [2]),
    "more requests sampled than planned": ([[1]], [[1, 9], [9, 9], [9, 9]], [1]),
    "token 0": ([[0, 0]], [[0, 0, 0]], [2]),
    "beyond 32 bits": ([[2**40]], [[2**40, 1]], [1]),
    "same low 32 bits": ([[2**40 + 5]], [[5, 1]], [0]),
    "no token for an invalid draft": ([[1], [-1]], [[1], [-1]], [1, 0]),
}
WIDE_IDS = [case for case in DECIDED if "32 bits" in case]  # these need int64
OTHER_IDS = [case for case in DECIDED if "32 bits" not in case]


def decided(
    case: str, draft_dtype: torch.dtype = torch.int64, sampled_dtype: torch.dtype = torch.int64
) -> tuple[tuple[Tensor, Tensor, Tensor], list[int]]:
    """The arguments of `acceptance_mask` for a case, and the number of accepted drafts of each request."""
    drafts, sampled, accepted = DECIDED[case]
    starts = [sum(map(len, drafts[:q])) for q in range(len(drafts) + 1)]
    flat = surrounded(torch.tensor([d for ids in drafts for d in ids], dtype=draft_dtype))
    return (flat, surrounded(torch.tensor(sampled, dtype=sampled_dtype)), int32(*starts)), accepted
