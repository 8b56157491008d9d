"""Fakes of the family staging."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.meta.check import (
    check_page_offsets,
    check_planes,
    check_windows,
    described,
    has_dims,
    has_dtype,
    is_vector,
    same_device,
)
from nwor_ops.meta.undo import check_write
from nwor_ops.ops.registry import implement_fake

_ROWS = "[num_rows, num_kv_heads, width]"
_SOURCES = (torch.float32, torch.float16, torch.bfloat16)


def stage_kv(
    key: Tensor,
    value: Tensor,
    stage_rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    op = "stage_kv"
    same_device(op, key, value=value, stage_rows=stage_rows, staged_key=staged_key, staged_value=staged_value)
    is_vector(op, "stage_rows", stage_rows, torch.int32, "[num_tokens]")
    has_dtype(op, "key", key, *_SOURCES)
    has_dtype(op, "value", value, key.dtype)
    for name, source, staged in (("key", key, staged_key), ("value", value, staged_value)):
        has_dims(op, name, source, 3, "[>= num_tokens, num_kv_heads, width]")
        has_dtype(op, f"staged_{name}", staged, key.dtype)
        has_dims(op, f"staged_{name}", staged, 3, _ROWS)
        if staged.shape[1:] != source.shape[1:]:
            raise ValueError(
                f"{op}: staged_{name} must be [num_rows, {source.shape[1]}, {source.shape[2]}], got {described(staged)}"
            )
    check_windows(op, key, window_id, row_windows, 1)


def _check_acceptance(
    op: str, like: Tensor, row_accepted: Tensor, row_requests: Tensor | None, row_positions: Tensor | None
) -> None:
    if (row_requests is None) != (row_positions is None):
        raise ValueError(f"{op}: row_requests and row_positions must be given together")
    same_device(op, like, row_accepted=row_accepted)
    if row_requests is None or row_positions is None:
        is_vector(op, "row_accepted", row_accepted, torch.bool, "[num_rows]")
        return
    same_device(op, like, row_requests=row_requests, row_positions=row_positions)
    is_vector(op, "row_accepted", row_accepted, torch.int32, "[num_requests]")
    is_vector(op, "row_requests", row_requests, torch.int32, "[num_rows]")
    is_vector(op, "row_positions", row_positions, torch.int32, "[num_rows]")


def accept_staged(
    row_accepted: Tensor,
    row_slots: Tensor,
    window_id: Tensor,
    row_windows: Tensor,
    num_slots: int,
    row_committed: Tensor,
    counters: Tensor,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
) -> None:
    op = "accept_staged"
    same_device(op, row_slots, row_committed=row_committed, counters=counters)
    is_vector(op, "row_slots", row_slots, torch.int64, "[num_rows]")
    _check_acceptance(op, row_slots, row_accepted, row_requests, row_positions)
    check_windows(op, row_slots, window_id, row_windows, 2)
    if num_slots < 0:
        raise ValueError(f"{op}: num_slots must not be negative, got {num_slots}")
    is_vector(op, "row_committed", row_committed, torch.bool, "[num_rows]")
    is_vector(op, "counters", counters, torch.int64, "[len(STAGE_COUNTERS)]")


def commit_staged(
    staged_key: Tensor,
    staged_value: Tensor,
    row_slots: Tensor,
    row_accepted: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
) -> None:
    op, names = "commit_staged", ("staged_key", "staged_value", "row_slots")
    check_write(
        op, staged_key, staged_value, key_cache, value_cache, row_slots, k_scale, v_scale, kv_cache_dtype, names
    )
    _check_acceptance(op, staged_key, row_accepted, row_requests, row_positions)


def move_slots(caches: list[Tensor], src_slots: Tensor, dst_slots: Tensor, page_offsets: Tensor | None = None) -> None:
    op = "move_slots"
    check_planes(op, caches)
    same_device(op, caches[0], src_slots=src_slots, dst_slots=dst_slots)
    is_vector(op, "src_slots", src_slots, torch.int64, "[num_moves]")
    is_vector(op, "dst_slots", dst_slots, torch.int64, "[num_moves]")
    check_page_offsets(op, caches[0], page_offsets)


for _fake in (stage_kv, accept_staged, commit_staged, move_slots):
    implement_fake(_fake.__name__, _fake)
