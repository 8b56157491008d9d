"""Fakes of the family undo."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.meta.accept import check_reject_counts
from nwor_ops.meta.check import (
    CACHE_SHAPE,
    check_page_offsets,
    check_planes,
    check_windows,
    described,
    has_dims,
    has_dtype,
    is_vector,
    same_device,
)
from nwor_ops.ops.registry import implement_fake

_FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def check_write(
    op: str,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    dtype: str,
    names: tuple[str, str, str] = ("key", "value", "slot_mapping"),
) -> None:
    key_name, value_name, slots_name = names
    same_device(
        op, key, key_cache=key_cache, value_cache=value_cache, k_scale=k_scale, v_scale=v_scale,
        **{value_name: value, slots_name: slot_mapping},
    )  # fmt: skip
    is_vector(op, slots_name, slot_mapping, torch.int64, "[num_tokens]")
    has_dims(op, "key_cache", key_cache, 4, CACHE_SHAPE)
    has_dims(op, "value_cache", value_cache, 4, CACHE_SHAPE)
    has_dtype(op, key_name, key, torch.float32, torch.float16, torch.bfloat16)
    has_dtype(op, value_name, value, key.dtype)
    for name, source, cache in ((key_name, key, key_cache), (value_name, value, value_cache)):
        if source.dim() != 3 or source.shape[1] != cache.shape[2] or source.shape[2] != cache.shape[3]:
            raise ValueError(
                f"{op}: {name} must be [>= num_tokens, {cache.shape[2]}, {cache.shape[3]}] "
                f"(num_kv_heads and width of its cache), got {described(source)}"
            )
    if dtype == "auto":
        allowed: tuple[torch.dtype, ...] = (key.dtype,)
    elif dtype in _FORMATS:
        allowed = (torch.uint8, _FORMATS[dtype])
    else:
        raise ValueError(f"{op}: kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got {dtype}")
    if dtype != "auto":
        has_dtype(op, "k_scale", k_scale, torch.float32)
        has_dtype(op, "v_scale", v_scale, torch.float32)
    has_dtype(op, "key_cache", key_cache, *allowed)
    has_dtype(op, "value_cache", value_cache, key_cache.dtype)


def _check_log(op: str, name: str, log: Tensor, cache: Tensor) -> None:
    has_dtype(op, name, log, cache.dtype)
    if log.dim() != 3 or log.shape[1] != cache.shape[2] or log.shape[2] != cache.shape[3]:
        raise ValueError(
            f"{op}: {name} must be [num_log_rows, {cache.shape[2]}, {cache.shape[3]}], got {described(log)}"
        )


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
) -> None:
    check_write("write_kv", key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype)


def write_kv_logged(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
    log_rows: Tensor,
    key_log: Tensor,
    value_log: Tensor,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    op = "write_kv_logged"
    check_write(op, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype)
    same_device(op, key, log_rows=log_rows, key_log=key_log, value_log=value_log)
    is_vector(op, "log_rows", log_rows, torch.int32, "[num_tokens]")
    _check_log(op, "key_log", key_log, key_cache)
    _check_log(op, "value_log", value_log, value_cache)
    check_windows(op, key, window_id, row_windows, 1)


def log_slots(
    cache: Tensor,
    slot_mapping: Tensor,
    log_rows: Tensor,
    log: Tensor,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    op = "log_slots"
    same_device(op, cache, slot_mapping=slot_mapping, log_rows=log_rows, log=log)
    has_dims(op, "cache", cache, 4, CACHE_SHAPE)
    is_vector(op, "slot_mapping", slot_mapping, torch.int64, "[num_tokens]")
    is_vector(op, "log_rows", log_rows, torch.int32, "[num_tokens]")
    _check_log(op, "log", log, cache)
    check_page_offsets(op, cache, page_offsets)
    check_windows(op, cache, window_id, row_windows, 1)


def _check_restore(
    op: str,
    caches: list[Tensor],
    log: Tensor,
    row_slots: Tensor,
    row_rejected: Tensor,
    page_offsets: Tensor | None,
    window_id: Tensor | None,
    row_windows: Tensor | None,
    num_rows: int | None,
    plane_table: Tensor | None,
) -> None:
    check_planes(op, caches, plane_table)
    same_device(op, caches[0], log=log, row_slots=row_slots, row_rejected=row_rejected)
    has_dtype(op, "log", log, caches[0].dtype)
    if log.dim() != 4 or log.shape[0] != len(caches) or log.shape[2:] != caches[0].shape[2:]:
        raise ValueError(
            f"{op}: log must be [{len(caches)}, num_log_rows, {caches[0].shape[2]}, {caches[0].shape[3]}], "
            f"got {described(log)}"
        )
    is_vector(op, "row_slots", row_slots, torch.int64, "[num_log_rows]")
    is_vector(op, "row_rejected", row_rejected, torch.bool, "[num_log_rows]")
    check_page_offsets(op, caches[0], page_offsets)
    check_windows(op, caches[0], window_id, row_windows, 2)
    if num_rows is not None and not 0 <= num_rows <= log.shape[1]:
        raise ValueError(f"{op}: num_rows must be from 0 to the {log.shape[1]} rows of log, got {num_rows}")


def restore_slots(
    caches: list[Tensor],
    log: Tensor,
    row_slots: Tensor,
    row_rejected: Tensor,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
    num_rows: int | None = None,
    plane_table: Tensor | None = None,
) -> None:
    _check_restore(
        "restore_slots", caches, log, row_slots, row_rejected, page_offsets, window_id, row_windows, num_rows,
        plane_table,
    )  # fmt: skip


def restore_slots_from_rejected(
    caches: list[Tensor],
    log: Tensor,
    row_slots: Tensor,
    num_rejected: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int = 0,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
    num_rows: int | None = None,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    op = "restore_slots_from_rejected"
    _check_restore(
        op, caches, log, row_slots, row_rejected, page_offsets, window_id, row_windows, num_rows, plane_table
    )
    same_device(op, caches[0], cu_num_draft_tokens=cu_num_draft_tokens)
    check_reject_counts(
        op, num_rejected, cu_num_draft_tokens, row_rejected, num_accepted, counters, num_bonus_tokens, leading_zero
    )


for _fake in (write_kv, write_kv_logged, log_slots, restore_slots, restore_slots_from_rejected):
    implement_fake(_fake.__name__, _fake)
