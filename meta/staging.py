"""Argument requirements of the family staging."""

import torch

from nwor_ops.meta.check import SOURCES, Array, by_name, flags, int32, int64
from nwor_ops.meta.undo import PLANES, SOURCE_ROWS, WRITE

ROWS, STAGED = "[num_rows]", "[num_rows, num_kv_heads, width]"

ARGUMENTS = PLANES | WRITE | SOURCE_ROWS | by_name({
    Array(STAGED, SOURCES): "staged_key",
    Array(STAGED, like="staged_key"): "staged_value",
    Array(STAGED, like="key"): "stage_kv.staged_key stage_kv.staged_value",
    Array(ROWS, (torch.bool, torch.int32)): "row_accepted",  # flags per row, or counts per request
    int32("[num_tokens]"): "stage_rows",
    int32(ROWS): "row_requests row_positions",
    int64(ROWS): "row_slots stage_kv.row_windows",
    int64("[1]"): "window_id",
    int64("[num_layers, num_rows]"): "row_windows",
    int64("[len(STAGE_COUNTERS)]"): "counters",
    int64("[num_moves]"): "src_slots dst_slots",
    flags(ROWS): "row_committed",
})  # fmt: skip
