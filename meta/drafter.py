"""Fakes of the family drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_ops.meta.check import described, has_dims, has_dtype, is_vector, not_negative, positive, same_device
from nwor_ops.ops.registry import implement_fake

ROWS, TOKENS, STATES, CAPACITY = "[num_rows]", "[num_tokens]", "[num_states]", "[capacity]"
STARTS = "[num_rows + 1]"


def _ids(op: str, shape: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            has_dtype(op, name, tensor, torch.int32, torch.int64)
            has_dims(op, name, tensor, 1, shape)


def _vectors(op: str, dtype: torch.dtype, shape: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            is_vector(op, name, tensor, dtype, shape)


def _matrix_of_ids(op: str, shape: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        has_dtype(op, name, tensor, torch.int32, torch.int64)
        has_dims(op, name, tensor, 2, shape)


def _scalar(op: str, name: str, tensor: Tensor) -> None:
    has_dtype(op, name, tensor, torch.int64)
    if tensor.dim() > 1:
        raise ValueError(f"{op}: {name} must be one element, [] or [1], got {described(tensor)}")


def _devices(op: str, like: Tensor, **tensors: Tensor | None) -> None:
    same_device(op, like, **{name: tensor for name, tensor in tensors.items() if tensor is not None})


def _id_of_32_bits(op: str, **ids: int) -> None:
    for name, value in ids.items():
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{op}: {name} must fit 32 bits, got {value}")


def _block_table(op: str, name: str, table: Tensor) -> None:
    has_dtype(op, name, table, torch.int32)
    has_dims(op, name, table, 2, "[num_rows, max_num_blocks]")


def prepare_prefill_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    target_seq_lens: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    last_token_indices: Tensor,
    current_draft_step: Tensor,
) -> None:
    op = "prepare_prefill_inputs"
    _devices(
        op, target_input_ids, target_positions=target_positions, target_query_start_loc=target_query_start_loc,
        target_seq_lens=target_seq_lens, idx_mapping=idx_mapping, num_sampled=num_sampled,
        num_rejected=num_rejected, last_sampled=last_sampled, next_prefill_tokens=next_prefill_tokens,
        input_ids=input_ids, positions=positions, query_start_loc=query_start_loc, seq_lens=seq_lens,
        last_token_indices=last_token_indices, current_draft_step=current_draft_step,
    )  # fmt: skip
    _ids(op, TOKENS, target_input_ids=target_input_ids)
    _ids(op, ROWS, idx_mapping=idx_mapping, num_sampled=num_sampled, num_rejected=num_rejected)
    _ids(op, STATES, last_sampled=last_sampled, next_prefill_tokens=next_prefill_tokens)
    _vectors(op, torch.int64, TOKENS, target_positions=target_positions)
    _vectors(
        op, torch.int32, STARTS, target_query_start_loc=target_query_start_loc, query_start_loc=query_start_loc
    )  # fmt: skip
    _vectors(op, torch.int32, ROWS, target_seq_lens=target_seq_lens, seq_lens=seq_lens)
    _vectors(op, torch.int32, CAPACITY, input_ids=input_ids)
    _vectors(op, torch.int64, CAPACITY, positions=positions)
    _vectors(op, torch.int64, ROWS, last_token_indices=last_token_indices)
    _scalar(op, "current_draft_step", current_draft_step)


def prepare_decode_inputs(
    draft_tokens: Tensor,
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    idx_mapping: Tensor | None = None,
    sample_positions: Tensor | None = None,
    advance_positions: bool = True,
) -> None:
    op = "prepare_decode_inputs"
    _devices(
        op, draft_tokens, target_seq_lens=target_seq_lens, num_rejected=num_rejected, input_ids=input_ids,
        positions=positions, query_start_loc=query_start_loc, seq_lens=seq_lens, idx_mapping=idx_mapping,
        sample_positions=sample_positions,
    )  # fmt: skip
    _matrix_of_ids(op, "[num_rows, num_speculative_steps] with at least one column", draft_tokens=draft_tokens)
    _ids(op, ROWS, num_rejected=num_rejected, idx_mapping=idx_mapping)
    _vectors(op, torch.int32, ROWS, target_seq_lens=target_seq_lens, seq_lens=seq_lens, input_ids=input_ids)
    _vectors(op, torch.int32, STARTS, query_start_loc=query_start_loc)
    _vectors(op, torch.int64, ROWS, positions=positions, sample_positions=sample_positions)
    positive(op, max_model_len=max_model_len)


def update_draft_inputs(
    sampled: Tensor,
    current_draft_step: Tensor,
    draft_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    num_speculative_steps: int,
    max_model_len: int,
    idx_mapping: Tensor | None = None,
    hidden_states: Tensor | None = None,
    next_hidden_states: Tensor | None = None,
    sample_positions: Tensor | None = None,
    advance_positions: bool = True,
) -> None:
    op = "update_draft_inputs"
    _devices(
        op, sampled, current_draft_step=current_draft_step, draft_tokens=draft_tokens, input_ids=input_ids,
        positions=positions, seq_lens=seq_lens, idx_mapping=idx_mapping, hidden_states=hidden_states,
        next_hidden_states=next_hidden_states, sample_positions=sample_positions,
    )  # fmt: skip
    _ids(op, ROWS, sampled=sampled, idx_mapping=idx_mapping)
    _scalar(op, "current_draft_step", current_draft_step)
    _matrix_of_ids(op, "[num_rows, num_speculative_steps]", draft_tokens=draft_tokens)
    _vectors(op, torch.int32, ROWS, input_ids=input_ids, seq_lens=seq_lens)
    _vectors(op, torch.int64, ROWS, positions=positions, sample_positions=sample_positions)
    positive(op, num_speculative_steps=num_speculative_steps, max_model_len=max_model_len)
    if (hidden_states is None) != (next_hidden_states is None):
        raise ValueError(f"{op}: hidden_states and next_hidden_states must be given together")
    if hidden_states is not None and next_hidden_states is not None:
        has_dims(op, "hidden_states", hidden_states, 2, "[num_rows, hidden_size]")
        has_dims(op, "next_hidden_states", next_hidden_states, 2, "[num_rows, hidden_size]")
        has_dtype(op, "next_hidden_states", next_hidden_states, hidden_states.dtype)


def compute_slot_mappings(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_tables: list[Tensor],
    block_sizes: Sequence[int],
    slot_mappings: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    cp_sharded: Tensor | None = None,
) -> None:
    op = "compute_slot_mappings"
    _devices(
        op, idx_mapping, query_start_loc=query_start_loc, positions=positions, slot_mappings=slot_mappings,
        cp_sharded=cp_sharded, **{f"block_tables[{g}]": table for g, table in enumerate(block_tables)},
    )  # fmt: skip
    if not block_tables:
        raise ValueError(f"{op}: block_tables must hold 1 to 64 tables, got 0")
    if len(block_sizes) != len(block_tables):
        raise ValueError(
            f"{op}: block_sizes must hold one size for each of the {len(block_tables)} tables, got {len(block_sizes)}"
        )
    for group, (table, block_size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        _block_table(op, f"block_tables[{group}]", table)
        not_negative(op, block_sizes=block_size)
    _ids(op, ROWS, idx_mapping=idx_mapping)
    _vectors(op, torch.int32, STARTS, query_start_loc=query_start_loc)
    _vectors(op, torch.int64, TOKENS, positions=positions)
    _vectors(op, torch.bool, "[groups]", cp_sharded=cp_sharded)
    has_dtype(op, "slot_mappings", slot_mappings, torch.int64)
    has_dims(op, "slot_mappings", slot_mappings, 2, "[groups, capacity]")
    positive(op, cp_size=cp_size, cp_interleave=cp_interleave)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{op}: cp_rank must be in [0, {cp_size}), got {cp_rank}")


def eagle_step(
    positions: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    new_positions: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
) -> None:
    op = "eagle_step"
    _devices(
        op, positions, block_table=block_table, seq_lens=seq_lens, new_positions=new_positions,
        slot_mapping=slot_mapping,
    )  # fmt: skip
    _vectors(op, torch.int64, ROWS, positions=positions, new_positions=new_positions, slot_mapping=slot_mapping)
    _vectors(op, torch.int32, ROWS, seq_lens=seq_lens)
    _block_table(op, "block_table", block_table)
    positive(op, block_size=block_size, max_model_len=max_model_len)


def prepare_inputs_padded(
    cu_num_draft_tokens: Tensor,
    valid_sampled_count: Tensor,
    query_start_loc: Tensor,
    token_indices_to_sample: Tensor,
    num_rejected: Tensor,
    discarded: Tensor | None = None,
) -> None:
    op = "prepare_inputs_padded"
    _devices(
        op, cu_num_draft_tokens, valid_sampled_count=valid_sampled_count, query_start_loc=query_start_loc,
        token_indices_to_sample=token_indices_to_sample, num_rejected=num_rejected, discarded=discarded,
    )  # fmt: skip
    _vectors(
        op, torch.int32, ROWS, cu_num_draft_tokens=cu_num_draft_tokens, valid_sampled_count=valid_sampled_count
    )  # fmt: skip
    _vectors(op, torch.int32, STARTS, query_start_loc=query_start_loc)
    _ids(op, ROWS, token_indices_to_sample=token_indices_to_sample, num_rejected=num_rejected)
    _vectors(op, torch.bool, ROWS, discarded=discarded)


def prepare_next_token_padded(
    sampled_token_ids: Tensor,
    discarded: Tensor,
    backup_next_token_ids: Tensor,
    next_token_ids: Tensor,
    valid_sampled_count: Tensor,
    vocab_size: int,
) -> None:
    op = "prepare_next_token_padded"
    _devices(
        op, sampled_token_ids, discarded=discarded, backup_next_token_ids=backup_next_token_ids,
        next_token_ids=next_token_ids, valid_sampled_count=valid_sampled_count,
    )  # fmt: skip
    _matrix_of_ids(op, "[num_rows, num_sampled]", sampled_token_ids=sampled_token_ids)
    _vectors(op, torch.bool, ROWS, discarded=discarded)
    _ids(
        op, ROWS, backup_next_token_ids=backup_next_token_ids, next_token_ids=next_token_ids,
        valid_sampled_count=valid_sampled_count,
    )  # fmt: skip
    positive(op, vocab_size=vocab_size)


def gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    step: Tensor,
    sampled: Tensor,
    logits_cache: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    op = "gumbel_sample"
    _devices(
        op, logits, idx_mapping=idx_mapping, temperature=temperature, seeds=seeds, positions=positions, step=step,
        sampled=sampled, logits_cache=logits_cache, workspace=workspace,
    )  # fmt: skip
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"{op}: logits must have dtype torch.float32, torch.float16 or torch.bfloat16, got {described(logits)}"
        )
    has_dims(op, "logits", logits, 2, "[num_rows, vocab_size] with at least one token and fewer than 2^31")
    _ids(op, ROWS, idx_mapping=idx_mapping)
    _vectors(op, torch.float32, STATES, temperature=temperature)
    _vectors(op, torch.int64, STATES, seeds=seeds)
    _vectors(op, torch.int64, ROWS, positions=positions)
    has_dtype(op, "step", step, torch.int64)
    if step.dim() > 1:
        raise ValueError(f"{op}: step must be one element or one for each row, got {described(step)}")
    has_dtype(op, "sampled", sampled, torch.int32, torch.int64)
    if sampled.dim() not in (1, 2):
        raise ValueError(f"{op}: sampled must be [num_rows] or [num_rows, steps], got {described(sampled)}")
    if logits_cache is not None:
        has_dtype(op, "logits_cache", logits_cache, logits.dtype)
        has_dims(op, "logits_cache", logits_cache, 3, "[request states, steps, logits]")
    _vectors(op, torch.int64, "[2 * num_rows]", workspace=workspace)


def copy_expand_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    num_rejected: Tensor,
    next_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    is_rejected: Tensor,
    is_masked: Tensor,
    new_token_indices: Tensor,
    num_new_tokens: int = 1,
    padding_token_id: int = 0,
    mask_token_id: int = 0,
    shift_input_ids: bool = False,
    max_model_len: int | None = None,
    idx_mapping: Tensor | None = None,
    hidden_state_mapping: Tensor | None = None,
) -> None:
    op = "copy_expand_inputs"
    _devices(
        op, target_input_ids, target_positions=target_positions, target_query_start_loc=target_query_start_loc,
        num_rejected=num_rejected, next_token_ids=next_token_ids, input_ids=input_ids, positions=positions,
        is_rejected=is_rejected, is_masked=is_masked, new_token_indices=new_token_indices, idx_mapping=idx_mapping,
        hidden_state_mapping=hidden_state_mapping,
    )  # fmt: skip
    _ids(op, TOKENS, target_input_ids=target_input_ids, hidden_state_mapping=hidden_state_mapping)
    _ids(op, ROWS, num_rejected=num_rejected, next_token_ids=next_token_ids, idx_mapping=idx_mapping)
    _ids(op, "[num_rows * num_new_tokens]", new_token_indices=new_token_indices)
    _vectors(op, torch.int64, TOKENS, target_positions=target_positions)
    _vectors(op, torch.int32, STARTS, target_query_start_loc=target_query_start_loc)
    _vectors(op, torch.int32, CAPACITY, input_ids=input_ids)
    _vectors(op, torch.int64, CAPACITY, positions=positions)
    _vectors(op, torch.bool, CAPACITY, is_rejected=is_rejected, is_masked=is_masked)
    positive(op, num_new_tokens=num_new_tokens, max_model_len=max_model_len)
    _id_of_32_bits(op, padding_token_id=padding_token_id, mask_token_id=mask_token_id)
    if hidden_state_mapping is not None and not shift_input_ids:
        raise ValueError(
            f"{op}: hidden_state_mapping must be None without shift_input_ids, got {described(hidden_state_mapping)}"
        )


def extend_queries(
    target_query_start_loc: Tensor,
    target_seq_lens: Tensor,
    positions: Tensor,
    is_rejected: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
    num_new_tokens: int = 1,
    idx_mapping: Tensor | None = None,
) -> None:
    op = "extend_queries"
    _devices(
        op, target_query_start_loc, target_seq_lens=target_seq_lens, positions=positions, is_rejected=is_rejected,
        block_table=block_table, query_start_loc=query_start_loc, seq_lens=seq_lens, slot_mapping=slot_mapping,
        idx_mapping=idx_mapping,
    )  # fmt: skip
    _vectors(
        op, torch.int32, STARTS, target_query_start_loc=target_query_start_loc, query_start_loc=query_start_loc
    )  # fmt: skip
    _vectors(op, torch.int32, ROWS, target_seq_lens=target_seq_lens, seq_lens=seq_lens)
    _vectors(op, torch.int64, TOKENS, positions=positions)
    _vectors(op, torch.bool, TOKENS, is_rejected=is_rejected)
    _block_table(op, "block_table", block_table)
    _vectors(op, torch.int64, CAPACITY, slot_mapping=slot_mapping)
    _ids(op, ROWS, idx_mapping=idx_mapping)
    positive(op, block_size=block_size, max_model_len=max_model_len)
    not_negative(op, num_new_tokens=num_new_tokens)


def dcp_local_seq_lens(
    seq_lens: Tensor, local_seq_lens: Tensor, dcp_size: int, dcp_rank: int, cp_interleave: int = 1
) -> None:
    op = "dcp_local_seq_lens"
    _devices(op, seq_lens, local_seq_lens=local_seq_lens)
    _vectors(op, torch.int32, ROWS, seq_lens=seq_lens, local_seq_lens=local_seq_lens)
    positive(op, dcp_size=dcp_size, cp_interleave=cp_interleave)
    if not 0 <= dcp_rank < dcp_size:
        raise ValueError(f"{op}: dcp_rank must be in [0, {dcp_size}), got {dcp_rank}")


for _fake in (
    prepare_prefill_inputs,
    prepare_decode_inputs,
    update_draft_inputs,
    compute_slot_mappings,
    eagle_step,
    prepare_inputs_padded,
    prepare_next_token_padded,
    gumbel_sample,
    copy_expand_inputs,
    extend_queries,
    dcp_local_seq_lens,
):
    implement_fake(_fake.__name__, _fake)
