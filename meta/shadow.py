"""Fakes of the family shadow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_ops.meta.accept import check_counts, check_reject_counts
from nwor_ops.meta.check import (
    check_page_offsets,
    check_planes,
    has_dims,
    has_dtype,
    is_vector,
    not_negative,
    same_device,
)
from nwor_ops.ops.registry import implement_fake
from nwor_ops.ops.shadow import MOST_GROUPS


def _check_window(
    op: str,
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    shadow_blocks: Tensor,
    saved_slots: Tensor,
    tail_pages: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    idx_mapping: Tensor | None,
    held_slots: Tensor | None,
    page_offsets: Tensor | None,
    num_bonus_tokens: int,
    plane_table: Tensor | None,
    leading_zero: bool,
) -> None:
    check_planes(op, caches, plane_table)
    check_page_offsets(op, caches[0], page_offsets)
    if not 1 <= len(planes_per_group) <= MOST_GROUPS:
        raise ValueError(f"{op}: planes_per_group must hold 1 to {MOST_GROUPS} groups, got {len(planes_per_group)}")
    for count in planes_per_group:
        not_negative(op, planes_per_group=count)
    if sum(planes_per_group) != len(caches):
        raise ValueError(f"{op}: planes_per_group must add up to the {len(caches)} planes, got {sum(planes_per_group)}")
    tensors = {
        "query_start_loc": query_start_loc, "cu_num_draft_tokens": cu_num_draft_tokens,
        "shadow_blocks": shadow_blocks, "saved_slots": saved_slots, "tail_pages": tail_pages,
    }  # fmt: skip
    same_device(op, caches[0], **tensors)
    is_vector(op, "query_start_loc", query_start_loc, torch.int32, "[num_requests + 1]")
    check_counts(op, cu_num_draft_tokens, num_bonus_tokens, leading_zero)
    by_group = [
        ("shadow_blocks", shadow_blocks, torch.int32, 3, "[num_groups, num_states, num_shadow_pages]"),
        ("saved_slots", saved_slots, torch.int64, 2, "[num_groups, num_tokens]"),
        ("tail_pages", tail_pages, torch.int32, 2, "[num_groups, num_requests]"),
    ]
    if held_slots is not None:
        same_device(op, caches[0], held_slots=held_slots)
        by_group.append(("held_slots", held_slots, torch.int64, 3, "[num_groups, num_states, num_shadow_pages]"))
    for name, tensor, dtype, dims, shape in by_group:
        has_dtype(op, name, tensor, dtype)
        has_dims(op, name, tensor, dims, shape)
    _check_tables(op, caches[0], len(planes_per_group), slot_mappings, block_tables)
    if idx_mapping is not None:
        same_device(op, caches[0], idx_mapping=idx_mapping)
        has_dtype(op, "idx_mapping", idx_mapping, torch.int32, torch.int64)
        has_dims(op, "idx_mapping", idx_mapping, 1, "[num_requests]")


def _check_tables(op: str, like: Tensor, groups: int, slot_mappings: list[Tensor], block_tables: list[Tensor]) -> None:
    for name, tensors in (("slot_mappings", slot_mappings), ("block_tables", block_tables)):
        if len(tensors) != (groups if slot_mappings else 0):
            raise ValueError(
                f"{op}: {name} must hold one tensor for each of the {groups} groups, or slot_mappings and "
                f"block_tables none, got {len(tensors)}"
            )
        same_device(op, like, **{f"{name}[{index}]": tensor for index, tensor in enumerate(tensors)})
    for index, (slots, table) in enumerate(zip(slot_mappings, block_tables, strict=True)):
        is_vector(op, f"slot_mappings[{index}]", slots, torch.int64, "[num_tokens]")
        has_dtype(op, f"block_tables[{index}]", table, torch.int32)
        has_dims(op, f"block_tables[{index}]", table, 2, "[num_requests, max_num_blocks]")


def open_window(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    shadow_blocks: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    saved_slots: Tensor,
    tail_pages: Tensor,
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    num_bonus_tokens: int = 0,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    op = "open_window"
    _check_window(
        op, caches, planes_per_group, query_start_loc, cu_num_draft_tokens, shadow_blocks, saved_slots, tail_pages,
        slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, num_bonus_tokens, plane_table, leading_zero,
    )  # fmt: skip
    same_device(op, caches[0], seq_lens=seq_lens, row_slots=row_slots)
    is_vector(op, "seq_lens", seq_lens, torch.int32, "[num_requests]")
    has_dtype(op, "row_slots", row_slots, torch.int64)
    has_dims(op, "row_slots", row_slots, 2, "[num_groups, num_rows]")


def close_window(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    shadow_blocks: Tensor,
    saved_slots: Tensor,
    tail_pages: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    num_bonus_tokens: int = 0,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    op = "close_window"
    _check_window(
        op, caches, planes_per_group, query_start_loc, cu_num_draft_tokens, shadow_blocks, saved_slots, tail_pages,
        slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, num_bonus_tokens, plane_table, leading_zero,
    )  # fmt: skip
    same_device(op, caches[0], row_rejected=row_rejected)
    is_vector(op, "row_rejected", row_rejected, torch.bool, "[num_rows]")


def close_window_from_rejected(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    num_rejected: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    shadow_blocks: Tensor,
    saved_slots: Tensor,
    tail_pages: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    num_bonus_tokens: int = 0,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    op = "close_window_from_rejected"
    _check_window(
        op, caches, planes_per_group, query_start_loc, cu_num_draft_tokens, shadow_blocks, saved_slots, tail_pages,
        slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, num_bonus_tokens, plane_table, leading_zero,
    )  # fmt: skip
    check_reject_counts(
        op, num_rejected, cu_num_draft_tokens, row_rejected, num_accepted, counters, num_bonus_tokens, leading_zero
    )


for _fake in (open_window, close_window, close_window_from_rejected):
    implement_fake(_fake.__name__, _fake)
