"""Dtypes and numbers of dimensions of the tensors of every op. The fakes and the tests of bad input read them.

A key is a dtype and the allowed numbers of dimensions: ``"int32 1"``, ``"floats 1 2"``. ``ids`` are int32 or int64,
``floats`` are float32, float16 or bfloat16. ``"=key 3"`` has the dtype of the argument ``key``, or of the first tensor
of that list. ``"any"`` has no requirements. An argument ``OP.NAME`` is that of one op only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nwor_ops.ops import registry


class Spec(NamedTuple):
    """Requirements of a tensor, or of each tensor in a list. Nothing given: any."""

    dtypes: tuple[torch.dtype, ...] = ()
    dims: tuple[int, ...] = ()
    like: str | None = None  # name of the argument whose dtype it must have


_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "any": (),
    "bool": (torch.bool,),
    "flags": (torch.bool, torch.int32),  # flags of rows, or counts of requests
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "ids": (torch.int32, torch.int64),
    "float32": (torch.float32,),
    "floats": (torch.float32, torch.float16, torch.bfloat16),
    "states": (torch.float32, torch.bfloat16),
}

_ARGUMENTS = {
    "flags 1": "row_accepted",
    "bool 1": "row_rejected cp_sharded discarded is_rejected is_masked is_window row_committed",
    "states 4": "state states",
    "floats 1 2": "dt_bias",
    "floats 1": "A_log norm_weight",
    "floats 2 3": "a",
    "floats 2": "logits b",
    "floats 3": "gated_delta_verify.out key commit_staged.staged_key",
    "floats 5": "gated_delta_fold.record_keys",
    "float32 1": "temperature values",
    "float32 4 5": "record_decays",
    "float32 4": "record_norms record_updates",
    "ids 1 2": "gumbel_sample.sampled",
    "ids 1": "draft_token_ids num_rejected target_input_ids idx_mapping num_sampled last_sampled next_prefill_tokens "
    "gather_step_tokens.input_ids sampled prepare_next_token_padded.valid_sampled_count token_indices_to_sample "
    "backup_next_token_ids next_token_ids new_token_indices hidden_state_mapping "
    "update_draft_vocabulary.sampled_tokens context_tokens prompt_tokens tokens state_slots source_slots "
    "target_slots",
    "ids 2": "sampled_token_ids draft_tokens sampled_tokens",
    "int32 1": "query_start_loc cu_num_draft_tokens log_rows row_requests row_positions draft_start_loc "
    "acceptance_mask_from_rejected.num_rejected close_window_from_rejected.num_rejected "
    "restore_slots_from_rejected.num_rejected num_accepted target_query_start_loc target_seq_lens input_ids "
    "seq_lens valid_sampled_count local_seq_lens cu_num_logits row_of_token used hand num_kept num_rows "
    "source_columns target_columns num_computed_tokens stage_rows",
    "int32 2": "block_tables block_table plan cursors tail_pages page_offsets",
    "int32 3": "shadow_blocks",
    "int64 0 1": "current_draft_step step",
    "int64 1": "slot_mappings row_slots counters target_positions positions last_token_indices sample_positions "
    "new_positions slot_mapping seeds workspace token_ids window_id num_skipped layer_window layer_windows "
    "row_windows src_slots dst_slots",
    "int64 2": "compute_slot_mappings.slot_mappings plan_window.row_slots open_window.row_slots saved_slots "
    "accept_staged.row_windows restore_slots.row_windows restore_slots_from_rejected.row_windows",
    "int64 3": "held_slots",
    "any": "plane_table k_scale v_scale",
    "any 2": "hidden_states head",
    "=head 2": "weight",
    "=hidden_states 2": "next_hidden_states",
    "=logits 2": "out",
    "=cache 3": "log_slots.log",
    "=key 3": "value staged_key staged_value",
    "=key_cache 3": "key_log",
    "=logits 3": "logits_cache",
    "=out 3": "q k v gate",
    "=staged_key 3": "commit_staged.staged_value",
    "=value_cache 3": "value_log",
    "=caches 4": "caches log",
    "=key_cache 4": "value_cache",
    "=state 4": "all_states",
    "any 4": "key_cache cache",
    "=out 5": "record_keys",
}


def _spec(key: str) -> Spec:
    dtype, *dims = key.split()
    if dtype.startswith("="):
        return Spec((), tuple(map(int, dims)), dtype[1:])
    return Spec(_DTYPES[dtype], tuple(map(int, dims)))


_BY_NAME = {name: _spec(key) for key, names in _ARGUMENTS.items() for name in names.split()}

# Requirements of each tensor, by op and by name, in the order of the schema.
SPECS: dict[str, dict[str, Spec]] = {
    name: {
        argument.name: _BY_NAME.get(f"{name}.{argument.name}") or _BY_NAME[argument.name]
        for argument in op.overload._schema.arguments
        if "Tensor" in str(argument.type)
    }
    for name, op in registry.OPS.items()
}
