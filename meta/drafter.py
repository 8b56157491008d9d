"""What the arguments of the family drafter must be."""

import torch

from nwor_ops.meta.check import SOURCES, Array, by_name, flags, ids, int32, int64

ROWS, TOKENS, STATES, CAPACITY = "[num_rows]", "[num_tokens]", "[num_states]", "[capacity]"
STARTS, DRAFTS = "[num_rows + 1]", "[num_rows, num_speculative_steps]"

ARGUMENTS = by_name({
    ids(ROWS): "idx_mapping num_sampled num_rejected sampled backup_next_token_ids next_token_ids valid_sampled_count "
    "token_indices_to_sample tokens",
    ids(TOKENS): "target_input_ids hidden_state_mapping sampled_tokens prompt_tokens gather_step_tokens.input_ids "
    "context_tokens",
    ids(STATES): "last_sampled next_prefill_tokens",
    ids(DRAFTS): "draft_tokens",
    ids(f"{DRAFTS} with at least one column"): "prepare_decode_inputs.draft_tokens",
    ids("[num_rows, num_sampled]"): "sampled_token_ids",
    ids("[num_rows, most sampled tokens] with at least one column"): "gather_step_tokens.sampled_tokens",
    ids("[num_rows] or [num_rows, steps]"): "gumbel_sample.sampled",
    ids("[num_rows * num_new_tokens]"): "new_token_indices",
    int32(ROWS): "target_seq_lens seq_lens local_seq_lens cu_num_draft_tokens prepare_decode_inputs.input_ids "
    "update_draft_inputs.input_ids prepare_inputs_padded.valid_sampled_count",
    int32(STARTS): "target_query_start_loc query_start_loc cu_num_logits",
    int32(CAPACITY): "input_ids",
    int32("[vocab_size]"): "row_of_token",
    int32("[num_rows / 32]"): "used",
    int32("[1]"): "hand",
    int32("[num_rows, max_num_blocks]"): "block_table block_tables",
    int64(ROWS): "positions new_positions sample_positions last_token_indices eagle_step.slot_mapping "
    "update_draft_vocabulary.token_ids",
    int64(TOKENS): "target_positions compute_slot_mappings.positions extend_queries.positions",
    int64(CAPACITY): "slot_mapping prepare_prefill_inputs.positions copy_expand_inputs.positions",
    int64(STATES): "seeds",
    int64("[num_logits]"): "token_ids",
    int64("[2]"): "counters",
    int64("[groups, capacity]"): "slot_mappings",
    int64("[2 * num_rows]"): "workspace",
    int64("one element, [] or [1]"): "current_draft_step",
    int64("one element, [], or one for each row, [num_rows]"): "step",
    flags(ROWS): "discarded",
    flags(TOKENS): "extend_queries.is_rejected",
    flags(CAPACITY): "is_rejected is_masked",
    flags("[groups]"): "cp_sharded",
    Array(STATES, (torch.float32,)): "temperature",
    Array("[num_rows, vocab_size] with at least one token and fewer than 2^31", SOURCES): "logits",
    Array("[num_rows, num_logits]", SOURCES): "argmax_draft_tokens.logits expand_draft_logits.logits",
    Array("[num_rows, vocab_size]", like="logits"): "out",
    Array(ROWS, (torch.float32,)): "values",
    Array("[vocab_size, hidden_size]"): "head",
    Array("[num_rows, hidden_size]", like="head"): "weight",
    Array("[request states, steps, logits]", like="logits"): "logits_cache",
    Array("[num_rows, hidden_size]"): "hidden_states",
    Array("[num_rows, hidden_size]", like="hidden_states"): "next_hidden_states",
})  # fmt: skip
