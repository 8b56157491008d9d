"""Argument requirements of the family undo."""

from nwor_ops.meta.accept import COUNTS
from nwor_ops.meta.check import ANY, CACHE, SOURCES, Array, by_name, int32, int64

SOURCE, LOG = "[>= num_tokens, num_kv_heads, width]", "[num_log_rows, num_kv_heads, width]"

PLANES = by_name({
    Array(CACHE, like="caches"): "caches",
    int32("[block_size, width]"): "page_offsets",
    ANY: "plane_table",
})  # fmt: skip
WRITE = by_name({Array(CACHE): "key_cache", Array(CACHE, like="key_cache"): "value_cache", ANY: "k_scale v_scale"})
SOURCE_ROWS = by_name({Array(SOURCE, SOURCES): "key", Array(SOURCE, like="key"): "value"})

ARGUMENTS = COUNTS | PLANES | WRITE | SOURCE_ROWS | by_name({
    Array(CACHE): "cache",
    Array(LOG, like="key_cache"): "key_log",
    Array(LOG, like="value_cache"): "value_log",
    Array(LOG, like="cache"): "log_slots.log",
    Array("[num_layers, num_log_rows, num_kv_heads, width]", like="caches"): "log",
    int32("[num_tokens]"): "log_rows",
    int64("[num_tokens]"): "slot_mapping",
    int64("[num_log_rows]"): "row_slots",
    int64("[1]"): "window_id",
    int64("[num_rows]"): "row_windows",
    int64("[num_layers, num_rows]"): "restore_slots.row_windows restore_slots_from_rejected.row_windows",
})  # fmt: skip
