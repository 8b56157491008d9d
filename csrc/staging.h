// Family staging: argument checks of the ops, and the work for one row. The CPU kernels loop over these
// functions, and the CUDA kernels call them in each thread, so both devices behave the same.
#pragma once

#include <algorithm>
#include <vector>

#include "common/op.h"
#include "common/planes.h"
#include "common/problems.h"
#include "common/write.h"

namespace nwor {

// ---------------------------------------------------------------- stage_kv

struct StageArguments {
    const char* op;
    int64_t num_tokens, num_rows;
    const int32_t* stage_rows;
    // Index 0 is the key, index 1 the value.
    CacheView shapes[2];  // only heads, width and element size of a row are used
    RowsView sources[2], staged[2];
    RowWindows row_windows;
};

inline void check_staged(const Argument& staged, const Argument& source, int64_t num_tokens) {
    const Tensor &t = staged.tensor, &s = source.tensor;
    if (s.dim() != 3 || s.size(0) < num_tokens) source.must_be("[>= ", num_tokens, ", num_kv_heads, width]");
    staged.dtype(s.scalar_type());
    if (t.dim() != 3 || t.size(1) != s.size(1) || t.size(2) != s.size(2))
        staged.must_be("[num_rows, ", s.size(1), ", ", s.size(2), "]");
}

inline CacheView shape_of_rows(const Tensor& rows) {
    CacheView shape{};
    shape.num_blocks = shape.block_size = 1;
    shape.num_heads = rows.size(1);
    shape.width = rows.size(2);
    shape.element_size = static_cast<int32_t>(rows.element_size());
    return shape;
}

inline StageArguments check_stage(
    const char* op,
    const Tensor& key,                        // floats [>= num_tokens, num_kv_heads, width]
    const Tensor& value,                      // dtype of key [>= num_tokens, num_kv_heads, width]
    const Tensor& stage_rows,                 // int32 [num_tokens]
    const Tensor& staged_key,                 // dtype of key [num_rows, num_kv_heads, width], written
    const Tensor& staged_value,               // dtype of key [num_rows, num_kv_heads, width], written
    const std::optional<Tensor>& window_id,   // int64 [1]
    const std::optional<Tensor>& row_windows  // int64 [num_rows], written
) {
    const Argument k{op, "key", key}, v{op, "value", value}, rows{op, "stage_rows", stage_rows},
        sk{op, "staged_key", staged_key}, sv{op, "staged_value", staged_value};
    StageArguments a{};
    a.op = op;
    a.stage_rows = int32_view(rows, 0, "[num_tokens]").data;
    check_floats(k);
    v.dtype(key.scalar_type());
    a.num_tokens = stage_rows.size(0);
    check_staged(sk, k, a.num_tokens);
    check_staged(sv, v, a.num_tokens);
    if (value.size(1) != key.size(1)) v.must_be("of the heads of key, ", describe(key));
    a.num_rows = staged_key.size(0);
    if (staged_value.size(0) != a.num_rows)
        sv.must_be("of as many rows as staged_key, ", describe(staged_key));
    rows.same_device(key);
    a.shapes[0] = shape_of_rows(key);
    a.shapes[1] = shape_of_rows(value);
    a.sources[0] = rows_view(key);
    a.sources[1] = rows_view(value);
    a.staged[0] = rows_view(staged_key);
    a.staged[1] = rows_view(staged_value);
    a.row_windows = check_row_windows(op, window_id, row_windows, key, a.num_rows);
    std::vector<Argument> inputs{k, v, rows}, outputs{sv, sk};
    add_given(inputs, op, "window_id", window_id);
    add_given(outputs, op, "row_windows", row_windows);
    check_placement(op, inputs, outputs);
    return a;
}

// ---------------------------------------------------------------- accept_staged, commit_staged

inline Acceptance check_acceptance(const char* op, const Tensor& row_accepted, int64_t num_rows,
                                   const std::optional<Tensor>& row_requests,
                                   const std::optional<Tensor>& row_positions, const Tensor& like) {
    const Argument accepted{op, "row_accepted", row_accepted};
    Acceptance a{};
    if (row_requests.has_value() != row_positions.has_value())
        fail(op, "row_requests and row_positions must be given together");
    if (!row_requests.has_value()) {
        a.flags = bool_view(accepted, num_rows, "[num_rows]").data;
    } else {
        const Argument requests{op, "row_requests", *row_requests},
            places{op, "row_positions", *row_positions};
        a.lengths = int32_view(accepted, 0, "[num_requests]").data;
        a.row_requests = int32_view(requests, num_rows, "[num_rows]").data;
        a.row_positions = int32_view(places, num_rows, "[num_rows]").data;
        for (const Argument& rows : {requests, places}) rows.same_device(like);
        a.num_requests = row_accepted.size(0);
    }
    accepted.same_device(like);
    return a;
}

inline WriteArguments check_commit(
    const char* op,
    const Tensor& staged_key,    // floats [num_rows, num_kv_heads, width]
    const Tensor& staged_value,  // dtype of staged_key [num_rows, num_kv_heads, width]
    const Tensor& row_slots,     // int64 [num_rows]
    const Tensor& row_accepted,  // bool [num_rows] or int32 [num_requests]
    const Tensor& key_cache,     // [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& value_cache,   // dtype of key_cache [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& k_scale,       // float32 [1], [num_kv_heads] or [num_tokens, 1]
    const Tensor& v_scale,       // float32 [1], [num_kv_heads] or [num_tokens, 1]
    const std::string& kv_cache_dtype,
    const std::optional<Tensor>& row_requests,  // int32 [num_rows]
    const std::optional<Tensor>& row_positions  // int32 [num_rows]
) {
    WriteArguments w = check_write(op, staged_key, staged_value, key_cache, value_cache, row_slots, k_scale,
                                   v_scale, kv_cache_dtype, {"staged_key", "staged_value", "row_slots"});
    w.accepted = check_acceptance(op, row_accepted, w.num_tokens, row_requests, row_positions, staged_key);
    std::vector<Argument> inputs{{op, "staged_key", staged_key},
                                 {op, "staged_value", staged_value},
                                 {op, "row_slots", row_slots},
                                 {op, "row_accepted", row_accepted}};
    add_given(inputs, op, "row_requests", row_requests);
    add_given(inputs, op, "row_positions", row_positions);
    check_memory(op, with_scales(std::move(inputs), w, k_scale, v_scale),
                 {{op, "key_cache", key_cache}, {op, "value_cache", value_cache}});
    return w;
}

// Order of the `counters` tensor of accept_staged. STAGE_COUNTERS of nwor_ops has the names.
enum StageCounter {
    kStageWindows,
    kStageStaged,
    kStageOperations,
    kStageCommitted,
    kStageRejected,
    kStageIncomplete,
    kNumStageCounters
};

struct AcceptStagedArguments {
    const char* op;
    Acceptance accepted;
    int64_t num_rows, num_layers, num_slots;
    const int64_t* row_slots;
    RowWindows windows;  // [L, R]
    bool* row_committed;
    int64_t* counters;

    // Number of layers that have staged a row in this window.
    NWOR_HOST_DEVICE int64_t layers_of(int64_t row, int64_t window) const {
        int64_t layers = 0;
        for (int64_t layer = 0; layer < num_layers; ++layer)
            layers += windows.rows[layer * num_rows + row] == window;
        return layers;
    }
    NWOR_HOST_DEVICE bool wanted(int64_t row) const { return row_slots[row] >= 0 && accepted.accepts(row); }
    NWOR_HOST_DEVICE bool possible(int64_t row, int64_t layers) const {
        return layers == num_layers && row_slots[row] < num_slots;
    }
};

inline AcceptStagedArguments check_accept_staged(
    const char* op,
    const Tensor& row_accepted,  // bool [num_rows] or int32 [num_requests]
    const Tensor& row_slots,     // int64 [num_rows]
    const Tensor& window_id,     // int64 [1]
    const Tensor& row_windows,   // int64 [num_layers, num_rows]
    int64_t num_slots,
    const Tensor& row_committed,                // bool [num_rows], written
    const Tensor& counters,                     // int64 [len(STAGE_COUNTERS)], written
    const std::optional<Tensor>& row_requests,  // int32 [num_rows]
    const std::optional<Tensor>& row_positions  // int32 [num_rows]
) {
    const Argument slots{op, "row_slots", row_slots}, windows{op, "row_windows", row_windows},
        committed{op, "row_committed", row_committed}, counts{op, "counters", counters};
    AcceptStagedArguments a{};
    a.op = op;
    a.row_slots = int64_view(slots, 0, "[num_rows]").data;
    a.num_rows = row_slots.size(0);
    a.accepted = check_acceptance(op, row_accepted, a.num_rows, row_requests, row_positions, row_slots);
    windows.dtype(ScalarType::Long);
    if (row_windows.dim() != 2 || row_windows.size(0) < 1 || row_windows.size(1) != a.num_rows)
        windows.must_be("[>= 1, ", a.num_rows, "], one number for each row of each layer");
    a.num_layers = row_windows.size(0);
    a.windows = check_row_windows(op, window_id, row_windows, row_slots, a.num_rows, a.num_layers);
    if (num_slots < 0) fail(op, "num_slots must not be negative, got ", num_slots);
    a.num_slots = num_slots;
    a.row_committed = bool_view(committed, a.num_rows, "[num_rows]").data;
    a.counters = int64_view(counts, kNumStageCounters, "[len(STAGE_COUNTERS)]").data;
    for (const Argument& other : {committed, counts}) other.same_device(row_slots);
    std::vector<Argument> inputs{{op, "row_accepted", row_accepted}, slots, windows};
    add_given(inputs, op, "row_requests", row_requests);
    add_given(inputs, op, "row_positions", row_positions);
    check_memory(op, inputs, {committed, counts});
    // The window's number may be the first counter.
    const Argument id{op, "window_id", window_id};
    check_memory(op, {id}, {committed});
    return a;
}

// ---------------------------------------------------------------- move_slots

struct MoveArguments {
    const char* op;
    Planes planes;
    int64_t num_moves;
    const int64_t *from, *to;
    PageOffsets page_offsets;
};

// A plane given twice would be moved twice.
inline void check_distinct(const char* op, const Planes& planes) {
    std::vector<char*> starts = planes.data;
    std::sort(starts.begin(), starts.end());
    const auto twice = std::adjacent_find(starts.begin(), starts.end());
    if (twice == starts.end() || planes.bytes == 0) return;
    const auto first = std::find(planes.data.begin(), planes.data.end(), *twice);
    const auto second = std::find(first + 1, planes.data.end(), *twice);
    fail(op, "caches[", first - planes.data.begin(), "] and caches[", second - planes.data.begin(),
         "] must not share memory");
}

inline MoveArguments check_move(
    const char* op,
    const std::vector<Tensor>& caches,         // each [num_blocks, block_size, num_kv_heads, width], written
    const Tensor& src_slots,                   // int64 [num_moves]
    const Tensor& dst_slots,                   // int64 [num_moves]
    const std::optional<Tensor>& page_offsets  // int32 [block_size, width]
) {
    MoveArguments m{};
    m.op = op;
    m.planes = check_planes(op, caches);
    check_distinct(op, m.planes);
    const Argument from{op, "src_slots", src_slots}, to{op, "dst_slots", dst_slots};
    m.from = int64_view(from, 0, "[num_moves]").data;
    m.to = int64_view(to, 0, "[num_moves]").data;
    if (dst_slots.size(0) != src_slots.size(0))
        to.must_be("one slot for each of src_slots, ", describe(src_slots));
    for (const Argument& slots : {from, to}) slots.same_device(caches[0]);
    m.num_moves = src_slots.size(0);
    m.page_offsets = check_page_offsets(op, page_offsets, caches);
    std::vector<Argument> inputs{from, to};
    add_given(inputs, op, "page_offsets", page_offsets);
    check_outside_planes(op, m.planes, caches[0], inputs);
    return m;
}

// ---------------------------------------------------------------- the ops

template <class Device>
void register_staging(Library& m) {
    NWOR_OP(m, stage_kv, check_stage);
    NWOR_OP(m, accept_staged, check_accept_staged);
    NWOR_OP(m, commit_staged, check_commit);
    NWOR_OP(m, move_slots, check_move);
}

}  // namespace nwor
