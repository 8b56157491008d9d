// Family undo: argument checks, and which log rows are restored. The CPU kernels loop over these functions,
// and the CUDA kernels call them in each thread, so both devices behave the same.
#pragma once

#include "accept.h"
#include "common/op.h"
#include "common/planes.h"
#include "common/write.h"

namespace nwor {

// ---------------------------------------------------------------- write_kv, write_kv_logged

inline WriteArguments check_write_kv(
    const char* op,
    const Tensor& key,           // floats [>= num_tokens, num_kv_heads, width]
    const Tensor& value,         // dtype of key [>= num_tokens, num_kv_heads, width]
    const Tensor& key_cache,     // [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& value_cache,   // dtype of key_cache [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& slot_mapping,  // int64 [num_tokens]
    const Tensor& k_scale,       // float32 [1], [num_kv_heads] or [num_tokens, 1]
    const Tensor& v_scale,       // float32 [1], [num_kv_heads] or [num_tokens, 1]
    const std::string& kv_cache_dtype) {
    const WriteArguments w =
        check_write(op, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype);
    check_memory(op,
                 with_scales({{op, "key", key}, {op, "value", value}, {op, "slot_mapping", slot_mapping}}, w,
                             k_scale, v_scale),
                 {{op, "key_cache", key_cache}, {op, "value_cache", value_cache}});
    return w;
}

inline RowsView log_view(const Argument& a, const Tensor& cache, const CacheView& view) {
    const Tensor& t = a.tensor;
    if (t.dim() != 3 || t.size(1) != view.num_heads || t.size(2) != view.width)
        a.must_be("[num_log_rows, ", view.num_heads, ", ", view.width, "]");
    a.dtype(cache.scalar_type());
    a.same_device(cache);
    return rows_view(t);
}

inline WriteArguments check_write_logged(
    const char* op,
    const Tensor& key,           // floats [>= num_tokens, num_kv_heads, width]
    const Tensor& value,         // dtype of key [>= num_tokens, num_kv_heads, width]
    const Tensor& key_cache,     // [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& value_cache,   // dtype of key_cache [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& slot_mapping,  // int64 [num_tokens]
    const Tensor& k_scale,       // float32 [1], [num_kv_heads] or [num_tokens, 1]
    const Tensor& v_scale,       // float32 [1], [num_kv_heads] or [num_tokens, 1]
    const std::string& kv_cache_dtype,
    const Tensor& log_rows,   // int32 [num_tokens]
    const Tensor& key_log,    // dtype of key_cache [num_log_rows, num_kv_heads, width], written
    const Tensor& value_log,  // dtype of value_cache [num_log_rows, num_kv_heads, width], written
    const std::optional<Tensor>& window_id,   // int64 [1]
    const std::optional<Tensor>& row_windows  // int64 [num_rows], written
) {
    WriteArguments w =
        check_write(op, key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype);
    const Argument rows{op, "log_rows", log_rows}, kl{op, "key_log", key_log}, vl{op, "value_log", value_log};
    w.log_rows = int32_view(rows, w.num_tokens, "[num_tokens]").data;
    rows.same_device(key);
    w.key_log = log_view(kl, key_cache, w.key_cache);
    w.value_log = log_view(vl, value_cache, w.value_cache);
    w.num_log_rows = key_log.size(0);
    if (value_log.size(0) != w.num_log_rows) vl.must_be("of as many rows as key_log, ", describe(key_log));
    w.row_windows = check_row_windows(op, window_id, row_windows, key, w.num_log_rows);
    std::vector<Argument> inputs{
        {op, "key", key}, {op, "value", value}, {op, "slot_mapping", slot_mapping}, rows};
    std::vector<Argument> outputs{{op, "key_cache", key_cache}, {op, "value_cache", value_cache}, vl, kl};
    add_given(inputs, op, "window_id", window_id);
    add_given(outputs, op, "row_windows", row_windows);
    check_memory(op, with_scales(std::move(inputs), w, k_scale, v_scale), outputs);
    return w;
}

// ---------------------------------------------------------------- log_slots

struct LogArguments {
    const char* op;
    int64_t num_tokens;
    const int64_t* slot_mapping;
    const int32_t* log_rows;
    int64_t num_log_rows;
    CacheView cache;
    RowsView log;
    PageOffsets page_offsets;
    RowWindows row_windows;
};

inline LogArguments check_log_slots(
    const char* op,
    const Tensor& cache,                        // [num_blocks, block_size, num_kv_heads, width]
    const Tensor& slot_mapping,                 // int64 [num_tokens]
    const Tensor& log_rows,                     // int32 [num_tokens]
    const Tensor& log,                          // dtype of cache [num_log_rows, num_kv_heads, width], written
    const std::optional<Tensor>& page_offsets,  // int32 [block_size, width]
    const std::optional<Tensor>& window_id,     // int64 [1]
    const std::optional<Tensor>& row_windows    // int64 [num_rows], written
) {
    LogArguments l{};
    l.op = op;
    const Argument c{op, "cache", cache}, slots{op, "slot_mapping", slot_mapping},
        rows{op, "log_rows", log_rows}, to{op, "log", log};
    l.cache = cache_view(c);
    check_element_size(c);
    l.slot_mapping = int64_view(slots, 0, "[num_tokens]").data;
    slots.same_device(cache);
    l.num_tokens = slot_mapping.size(0);
    l.log_rows = int32_view(rows, l.num_tokens, "[num_tokens]").data;
    rows.same_device(cache);
    l.log = log_view(to, cache, l.cache);
    l.num_log_rows = log.size(0);
    l.page_offsets = check_page_offsets(op, page_offsets, cache);
    l.row_windows = check_row_windows(op, window_id, row_windows, cache, l.num_log_rows);
    std::vector<Argument> inputs{c, slots, rows}, outputs{to};
    add_given(inputs, op, "page_offsets", page_offsets);
    add_given(inputs, op, "window_id", window_id);
    add_given(outputs, op, "row_windows", row_windows);
    check_memory(op, inputs, outputs);
    return l;
}

// ---------------------------------------------------------------- restore_slots

struct RestoreArguments {
    const char* op;
    int64_t num_rows;  // number of rows to look at; the log may have more
    int64_t windows_layer_stride;
    const int64_t* row_slots;
    const bool* row_rejected;
    Planes planes;  // one plane per layer
    RowsView log;   // log of layer 0
    int64_t log_layer_stride;
    PageOffsets page_offsets;
    RowWindows row_windows;
};

inline RestoreArguments check_restore(
    const char* op,
    const std::vector<Tensor>& caches,  // each [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& log,                  // dtype of caches [num_layers, num_log_rows, num_kv_heads, width]
    const Tensor& row_slots,            // int64 [num_log_rows]
    const Tensor& row_rejected,         // bool [num_log_rows]
    const std::optional<Tensor>& page_offsets,  // int32 [block_size, width]
    const std::optional<Tensor>& window_id,     // int64 [1]
    const std::optional<Tensor>& row_windows,   // int64 [num_layers, num_rows]
    const std::optional<int64_t>& num_rows,
    const std::optional<Tensor>& plane_table  // int64 [planes, 2], see planes.h
) {
    RestoreArguments r{};
    r.op = op;
    r.planes = check_planes(op, caches, plane_table);
    const CacheView& cache = r.planes.view;
    const Tensor& first = caches[0];
    const Argument l{op, "log", log};
    const int64_t num_layers = r.planes.count();
    if (log.dim() != 4 || log.size(0) != num_layers || log.size(2) != cache.num_heads ||
        log.size(3) != cache.width)
        l.must_be("[", num_layers, ", num_log_rows, ", cache.num_heads, ", ", cache.width, "]");
    l.dtype(first.scalar_type());
    l.same_device(first);
    const int64_t log_rows = log.size(1);
    const Argument slots{op, "row_slots", row_slots}, rejected{op, "row_rejected", row_rejected};
    r.row_slots = int64_view(slots, 0, "[num_log_rows]").data;
    r.row_rejected = bool_view(rejected, 0, "[num_log_rows]").data;
    if (row_slots.size(0) != log_rows) slots.must_be("one slot for each row of log, ", describe(log));
    if (row_rejected.size(0) != log_rows) rejected.must_be("one flag for each row of log, ", describe(log));
    r.num_rows = num_rows.value_or(log_rows);
    if (r.num_rows < 0 || r.num_rows > log_rows)
        fail(op, "num_rows must be from 0 to the ", log_rows, " rows of log, got ", r.num_rows);
    r.windows_layer_stride = log_rows;
    slots.same_device(first);
    rejected.same_device(first);
    r.log = rows_view(log, 1);
    r.log_layer_stride = log.stride(0);
    r.page_offsets = check_page_offsets(op, page_offsets, caches, plane_table);
    r.row_windows = check_row_windows(op, window_id, row_windows, first, log_rows, num_layers);
    std::vector<Argument> inputs{l, slots, rejected};
    add_given(inputs, op, "page_offsets", page_offsets);
    add_given(inputs, op, "window_id", window_id);
    add_given(inputs, op, "row_windows", row_windows);
    check_outside_planes(op, r.planes, first, inputs);
    return r;
}

inline void set_step(RestoreArguments& r, const RestoreArguments&, const StepArguments& step) {
    const int64_t log_rows = r.windows_layer_stride;
    r.num_rows = step.window.num_rows < 0 ? log_rows : step.window.num_rows;
    if (r.num_rows > log_rows)
        fail(r.op, "num_rows must be from 0 to the ", log_rows, " rows of log, got ", r.num_rows);
}

// An op that determines the outcome of drafts in the same launch, before it restores.
struct RestoreCall {
    RestoreArguments restore;
    AcceptArguments accept;
};

inline RestoreCall check_restore_from_rejected(
    const char* op,
    const std::vector<Tensor>& caches,  // each [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& log,                  // dtype of caches [num_layers, num_log_rows, num_kv_heads, width]
    const Tensor& row_slots,            // int64 [num_log_rows]
    const Tensor& num_rejected,         // int32 [num_requests]
    const Tensor& draft_start_loc,      // int32 [num_requests + 1]
    const Tensor& row_rejected,         // bool [num_log_rows], written
    const Tensor& num_accepted,         // int32 [num_requests], written
    const Tensor& counters,             // int64 [len(COUNTERS)], written
    const std::optional<Tensor>& page_offsets,  // int32 [block_size, width]
    const std::optional<Tensor>& window_id,     // int64 [1]
    const std::optional<Tensor>& row_windows,   // int64 [num_layers, num_rows]
    const std::optional<int64_t>& num_rows,
    const std::optional<Tensor>& plane_table  // int64 [planes, 2], see planes.h
) {
    RestoreCall call{check_restore(op, caches, log, row_slots, row_rejected, page_offsets, window_id,
                                   row_windows, num_rows, plane_table),
                     {}};
    Argument{op, "draft_start_loc", draft_start_loc}.same_device(caches[0]);
    std::vector<Argument> inputs{{op, "row_slots", row_slots}, {op, "log", log}};
    add_given(inputs, op, "page_offsets", page_offsets);
    add_given(inputs, op, "row_windows", row_windows);
    // The number of the window may be the first counter.
    std::vector<Argument> id;
    add_given(id, op, "window_id", window_id);
    const Argument rejected{op, "row_rejected", row_rejected}, accepted{op, "num_accepted", num_accepted};
    check_memory(op, id, {rejected, accepted});
    check_outside_planes(op, call.restore.planes, caches[0],
                         {{op, "num_rejected", num_rejected},
                          {op, "draft_start_loc", draft_start_loc},
                          accepted,
                          {op, "counters", counters}});
    call.accept =
        check_reject_counts(op, num_rejected, draft_start_loc, row_rejected, num_accepted, counters, inputs);
    return call;
}

template <class F>
void each_written(const RestoreCall& call, const F& f) {
    each_plane_range(call.restore.planes, f);
    each_written(call.accept, f);
}

inline void set_step(RestoreCall& call, const RestoreCall& checked, const StepArguments& step) {
    set_step(call.accept, checked.accept, step, checked);
    set_step(call.restore, checked.restore, step);
}

// ---------------------------------------------------------------- the ops

template <class Device>
void register_undo(Library& m) {
    NWOR_OP(m, write_kv, check_write_kv);
    NWOR_OP(m, write_kv_logged, check_write_logged);
    NWOR_OP(m, log_slots, check_log_slots);
    NWOR_BINDABLE_OP(m, restore_slots, check_restore);
    NWOR_BINDABLE_OP(m, restore_slots_from_rejected, check_restore_from_rejected);
}

}  // namespace nwor
