"""Argument requirements of the family accept."""

from nwor_ops.meta.check import by_name, flags, ids, int32, int64

# Shared by every family that maps draft counts to rows.
COUNTS = by_name({
    int32("[num_requests + 1]"): "query_start_loc draft_start_loc",
    int32("[num_requests]"): "num_rejected num_accepted",
    int64("[len(COUNTERS)]"): "counters",
    flags("[num_log_rows]"): "row_rejected",
})  # fmt: skip

ARGUMENTS = COUNTS | by_name({
    ids("[num_draft_tokens]"): "draft_token_ids",
    ids("[num_requests, most drafts (+ 1)]"): "sampled_token_ids",
    int32("[num_requests]"): "cu_num_draft_tokens",
    int32("[num_tokens]"): "log_rows",
    int32("[num_log_rows]"): "row_requests row_positions",
    int64("[num_tokens]"): "slot_mappings",
    int64("[groups, num_log_rows]"): "row_slots",
})  # fmt: skip
