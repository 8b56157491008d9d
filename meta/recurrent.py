"""Shapes and dtypes of the arguments of the recurrent ops."""

import torch

from nwor_ops.meta.check import (
    SOURCES,
    Array,
    by_name,
    flags,
    ids,
    int32,
    int64,
)

STATE = "[num_slots, num_value_heads, value_width, key_width]"
DECAYS = (
    "[num_slots, 2, record_rows, num_value_heads] or [num_slots, 2, record_rows, num_value_heads, key_width] with a "
    "decay per channel"
)
KEYS, VALUES = "[num_tokens, num_key_heads, key_width]", "[num_tokens, num_value_heads, value_width]"
CHANNELS = "[num_tokens, num_value_heads] or [num_tokens, num_value_heads, key_width] with a decay per channel"
FLOAT = (torch.float32,)

ARGUMENTS = by_name({
    Array(STATE, (torch.float32, torch.bfloat16)): "state states",
    Array("[num_tokens, num_value_heads, value_width, key_width]", like="state"): "all_states",
    Array("[num_slots, 2, record_rows, num_key_heads, key_width]", SOURCES): "gated_delta_fold.record_keys",
    Array("[num_slots, 2, record_rows, num_key_heads, key_width]", like="out"): "record_keys",
    Array("[num_slots, 2, record_rows, num_key_heads]", FLOAT): "record_norms",
    Array(DECAYS, FLOAT): "record_decays",
    Array("[num_slots, record_rows, num_value_heads, value_width]", FLOAT): "record_updates",
    Array(VALUES, SOURCES): "out",
    Array(VALUES, like="out"): "v gate",
    Array(KEYS, like="out"): "q k",
    Array(CHANNELS, SOURCES): "a",
    Array("[num_tokens, num_value_heads]", SOURCES): "b",
    Array("[num_value_heads]", SOURCES): "A_log",
    Array("[num_value_heads] or [num_value_heads, key_width] with a decay per channel", SOURCES): "dt_bias",
    Array("[value_width]", SOURCES): "norm_weight",
    int32("[num_requests, 4]"): "plan",
    int32("[num_slots, 2] or [num_slots, 3] with chunk"): "cursors",
    int32("[num_requests + 1]"): "query_start_loc",
    int32("[num_requests]"): "num_kept",
    int32("[num_entries]"): "num_rows",
    int32("[num_states, max_num_blocks]"): "block_tables",
    int32("[num_states]"): "source_columns target_columns num_computed_tokens plan_recurrent_block_fold.num_kept",
    int64("[1]"): "window_id layer_window layer_windows num_skipped",
    ids("[num_requests]"): "state_slots idx_mapping",
    ids("[num_entries]"): "source_slots target_slots",
    flags("[num_requests]"): "is_window",
})  # fmt: skip
