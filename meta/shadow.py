"""Argument requirements of the family shadow."""

from nwor_ops.meta.accept import COUNTS
from nwor_ops.meta.check import by_name, ids, int32, int64
from nwor_ops.meta.undo import PLANES

ARGUMENTS = COUNTS | PLANES | by_name({
    ids("[num_requests]"): "idx_mapping",
    int32("[num_requests]"): "seq_lens",
    int32("[num_requests, max_num_blocks]"): "block_tables",
    int32("[num_groups, num_requests]"): "tail_pages",
    int32("[num_groups, num_states, num_shadow_pages]"): "shadow_blocks",
    int64("[num_tokens]"): "slot_mappings",
    int64("[num_groups, num_rows]"): "row_slots",
    int64("[num_groups, num_tokens]"): "saved_slots",
    int64("[num_groups, num_states, num_shadow_pages]"): "held_slots",
})  # fmt: skip
