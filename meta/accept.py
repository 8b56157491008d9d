"""Fakes of the family accept."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.meta.check import described, has_dims, has_dtype, is_vector, not_negative, same_device
from nwor_ops.ops.registry import implement_fake


def plan_window(
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    slot_mappings: list[Tensor],
    log_rows: Tensor,
    row_slots: Tensor,
    row_requests: Tensor,
    row_positions: Tensor,
    counters: Tensor,
    token_offset: int | None = None,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    op = "plan_window"
    if not slot_mappings:
        raise ValueError(f"{op}: slot_mappings must hold at least one slot mapping, got none")
    not_negative(op, token_offset=token_offset or 0)
    same_device(op, query_start_loc, **{f"slot_mappings[{g}]": slots for g, slots in enumerate(slot_mappings)})
    same_device(
        op, query_start_loc, cu_num_draft_tokens=cu_num_draft_tokens, log_rows=log_rows, row_slots=row_slots,
        row_requests=row_requests, row_positions=row_positions, counters=counters,
    )  # fmt: skip
    is_vector(op, "query_start_loc", query_start_loc, torch.int32, "[num_requests + 1]")
    check_counts(op, cu_num_draft_tokens, num_bonus_tokens, leading_zero)
    for group, slot_mapping in enumerate(slot_mappings):
        is_vector(op, f"slot_mappings[{group}]", slot_mapping, torch.int64, "[num_tokens]")
    is_vector(op, "log_rows", log_rows, torch.int32, "[num_tokens]")
    has_dtype(op, "row_slots", row_slots, torch.int64)
    has_dims(op, "row_slots", row_slots, 2, "[groups, num_log_rows]")
    is_vector(op, "row_requests", row_requests, torch.int32, "[num_log_rows]")
    is_vector(op, "row_positions", row_positions, torch.int32, "[num_log_rows]")
    is_vector(op, "counters", counters, torch.int64, "[len(COUNTERS)]")


def check_counts(op: str, cu_num_draft_tokens: Tensor, num_bonus_tokens: int = 0, leading_zero: bool = False) -> None:
    not_negative(op, num_bonus_tokens=num_bonus_tokens)
    shape = "[num_requests + 1]" if leading_zero else "[num_requests]"
    is_vector(op, "cu_num_draft_tokens", cu_num_draft_tokens, torch.int32, shape)
    length = cu_num_draft_tokens.shape[0]
    if leading_zero and isinstance(length, int) and length == 0:  # not a symbol of a trace
        raise ValueError(
            f"{op}: cu_num_draft_tokens must be {shape} with at least 1 elements, got {described(cu_num_draft_tokens)}"
        )


def _check_tokens(op: str, draft_token_ids: Tensor, sampled_token_ids: Tensor, cu_num_draft_tokens: Tensor) -> None:
    same_device(op, cu_num_draft_tokens, draft_token_ids=draft_token_ids, sampled_token_ids=sampled_token_ids)
    has_dtype(op, "draft_token_ids", draft_token_ids, torch.int32, torch.int64)
    has_dims(op, "draft_token_ids", draft_token_ids, 1, "[num_draft_tokens]")
    has_dtype(op, "sampled_token_ids", sampled_token_ids, torch.int32, torch.int64)
    has_dims(op, "sampled_token_ids", sampled_token_ids, 2, "[num_requests, most drafts (+ 1)]")


def _check_rows(op: str, row_rejected: Tensor, num_accepted: Tensor, counters: Tensor) -> None:
    is_vector(op, "row_rejected", row_rejected, torch.bool, "[num_log_rows]")
    is_vector(op, "num_accepted", num_accepted, torch.int32, "[num_requests]")
    is_vector(op, "counters", counters, torch.int64, "[len(COUNTERS)]")


def _new_mask(like: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    accepted = like.new_empty(num_draft_tokens, dtype=torch.bool)
    return accepted, like.new_empty(like.shape[0], dtype=torch.int32)


def acceptance_mask(
    draft_token_ids: Tensor, sampled_token_ids: Tensor, cu_num_draft_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    _check_tokens("acceptance_mask", draft_token_ids, sampled_token_ids, cu_num_draft_tokens)
    check_counts("acceptance_mask", cu_num_draft_tokens)
    return _new_mask(cu_num_draft_tokens, draft_token_ids.shape[0])


def acceptance_mask_from_rejected(
    num_rejected: Tensor, cu_num_draft_tokens: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    op = "acceptance_mask_from_rejected"
    same_device(op, cu_num_draft_tokens, num_rejected=num_rejected)
    is_vector(op, "num_rejected", num_rejected, torch.int32, "[num_requests]")
    check_counts(op, cu_num_draft_tokens)
    not_negative(op, num_draft_tokens=num_draft_tokens)
    return _new_mask(cu_num_draft_tokens, num_draft_tokens)


def reject_rows(
    draft_token_ids: Tensor,
    sampled_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    _check_tokens("reject_rows", draft_token_ids, sampled_token_ids, cu_num_draft_tokens)
    same_device(
        "reject_rows",
        cu_num_draft_tokens,
        row_rejected=row_rejected,
        num_accepted=num_accepted,
        counters=counters,
    )
    _check_rows("reject_rows", row_rejected, num_accepted, counters)
    check_counts("reject_rows", cu_num_draft_tokens, num_bonus_tokens, leading_zero)


def check_reject_counts(
    op: str,
    num_rejected: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int,
    leading_zero: bool,
) -> None:
    same_device(
        op, cu_num_draft_tokens, num_rejected=num_rejected, row_rejected=row_rejected, num_accepted=num_accepted,
        counters=counters,
    )  # fmt: skip
    is_vector(op, "num_rejected", num_rejected, torch.int32, "[num_requests]")
    check_counts(op, cu_num_draft_tokens, num_bonus_tokens, leading_zero)
    _check_rows(op, row_rejected, num_accepted, counters)


def reject_rows_from_rejected(
    num_rejected: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    check_reject_counts(
        "reject_rows_from_rejected", num_rejected, cu_num_draft_tokens, row_rejected, num_accepted, counters,
        num_bonus_tokens, leading_zero,
    )  # fmt: skip


for _fake in (
    plan_window,
    acceptance_mask,
    acceptance_mask_from_rejected,
    reject_rows,
    reject_rows_from_rejected,
):
    implement_fake(_fake.__name__, _fake)
