// Family recurrent: the plan of a step, the cursors that it reads and sets, and how one request is planned.
#pragma once

#include <optional>
#include <vector>

#include "common/op.h"
#include "common/overlap.h"
#include "common/problems.h"
#include "common/views.h"

namespace nwor {

// Maximum number of rows of a record, and of tokens of a window.
constexpr int64_t kMostRecordRows = 32;

// ---------------------------------------------------------------- plans

// A row of a plan. All zeros: padding.
struct RecurrentRow {
    int32_t source;  // slot whose state and record are read
    int32_t rows;    // rows of the record to reapply
    int32_t half;    // half of the record with these rows
    int32_t target;  // slot that is written

    NWOR_HOST_DEVICE bool any() const { return target > 0; }
    // The half of the record that the window writes.
    NWOR_HOST_DEVICE int32_t next_half() const { return 1 - half; }
};

struct RecurrentPlan {
    int32_t* data;  // [length, 4]
    int64_t length;

    NWOR_HOST_DEVICE RecurrentRow operator[](int64_t i) const {
        const int32_t* row = data + 4 * i;
        return {row[0], row[1], row[2], row[3]};
    }
    NWOR_HOST_DEVICE void set(int64_t i, const RecurrentRow& row) const {
        int32_t* to = data + 4 * i;
        to[0] = row.source;
        to[1] = row.rows;
        to[2] = row.half;
        to[3] = row.target;
    }
};

// The pending rows of each slot: their number, and their half of the record.
struct RecurrentCursors {
    int32_t* data;  // [length, 2]
    int64_t length;

    NWOR_HOST_DEVICE int32_t rows(int64_t slot) const { return data[2 * slot]; }
    NWOR_HOST_DEVICE int32_t half(int64_t slot) const { return data[2 * slot + 1]; }
    NWOR_HOST_DEVICE void set(int64_t slot, int32_t rows, int32_t half) const {
        data[2 * slot] = rows;
        data[2 * slot + 1] = half;
    }
};

inline RecurrentPlan recurrent_plan_view(const Argument& a, int64_t length) {
    a.dtype(ScalarType::Int);
    if (a.tensor.dim() != 2 || a.tensor.size(0) < length || a.tensor.size(1) != 4)
        a.must_be("[num_requests, 4] with at least ", length, " rows");
    a.contiguous();
    if (a.tensor.size(0) > INT32_MAX) a.must_be("of fewer than 2^31 rows");
    return {static_cast<int32_t*>(a.tensor.data_ptr()), a.tensor.size(0)};
}

inline RecurrentCursors cursors_view(const Argument& a) {
    a.dtype(ScalarType::Int);
    if (a.tensor.dim() != 2 || a.tensor.size(1) != 2) a.must_be("[num_slots, 2]");
    a.contiguous();
    return {static_cast<int32_t*>(a.tensor.data_ptr()), least(a.tensor.size(0), INT32_MAX)};
}

// ---------------------------------------------------------------- plan_recurrent_window

struct RecurrentWindowArguments {
    const char* op;
    RecurrentPlan plan;              // [>= Q, 4]
    RecurrentCursors cursors;        // [S, 2]
    int64_t* window_id;              // [1]
    int64_t num_requests;            // Q
    int64_t record_rows;             // W
    Ids state_slots;                 // [Q]
    const int32_t* query_start_loc;  // [Q + 1]
    const int32_t* num_kept;         // [Q]
    const bool* is_window;           // [Q]; null: all requests have windows
    int64_t* num_skipped;            // [1]; null: skipped requests are not counted
};

inline RecurrentWindowArguments check_recurrent_window(
    const char* op,                            //
    const Tensor& plan,                        // [>= Q, 4], int32
    const Tensor& cursors,                     // [S, 2], int32
    const Tensor& window_id,                   // [1], int64
    const Tensor& state_slots,                 // [Q], int32 or int64
    const Tensor& query_start_loc,             // [>= Q + 1], int32
    const Tensor& num_kept,                    // [>= Q], int32
    int64_t record_rows,                       // W
    const std::optional<Tensor>& is_window,    // [>= Q], bool
    const std::optional<Tensor>& num_skipped)  // [1], int64
{
    const Argument to{op, "plan", plan}, cur{op, "cursors", cursors}, number{op, "window_id", window_id},
        slots{op, "state_slots", state_slots}, qsl{op, "query_start_loc", query_start_loc},
        kept{op, "num_kept", num_kept};
    RecurrentWindowArguments a{};
    a.op = op;
    a.state_slots = ids_view(slots, 0, "[num_requests]");
    a.num_requests = a.state_slots.length;
    a.plan = recurrent_plan_view(to, a.num_requests);
    a.cursors = cursors_view(cur);
    number.vector(ScalarType::Long, 1, "[1]");
    a.window_id = static_cast<int64_t*>(window_id.data_ptr());
    a.query_start_loc = int32_view(qsl, a.num_requests + 1, "[num_requests + 1]").data;
    a.num_kept = int32_view(kept, a.num_requests, "[num_requests]").data;
    check_positive(op, "record_rows", record_rows);
    if (record_rows > kMostRecordRows)
        fail(op, "record_rows must be at most ", kMostRecordRows, ", got ", record_rows);
    a.record_rows = record_rows;
    std::vector<Argument> inputs{slots, qsl, kept};
    if (is_window.has_value()) {
        inputs.push_back({op, "is_window", *is_window});
        a.is_window = bool_view(inputs.back(), a.num_requests, "[num_requests]").data;
    }
    std::vector<Argument> outputs{to, cur, number};
    if (num_skipped.has_value()) {
        outputs.push_back({op, "num_skipped", *num_skipped});
        outputs.back().vector(ScalarType::Long, 1, "[1]");
        a.num_skipped = static_cast<int64_t*>(num_skipped->data_ptr());
    }
    check_placement(op, inputs, outputs);
    return a;
}

// The plan and the new cursor of one request. All requests are read before anything is stored.
struct RecurrentWindowStep {
    Found found;       // with a problem, the row is zero and the cursor stays
    RecurrentRow row;  // row of the plan
    bool sets_cursor;
    int32_t slot, cursor_rows, cursor_half;
};

NWOR_HOST_DEVICE inline RecurrentWindowStep window_step_of(const RecurrentWindowArguments& a, int64_t q) {
    RecurrentWindowStep step{};
    const int64_t begin = a.query_start_loc[q], end = a.query_start_loc[q + 1], slot = a.state_slots[q];
    if (begin < 0 || end < begin) {
        step.found = {kQueriesDecrease, q, end, begin};
        return step;
    }
    if (slot <= 0 || end == begin) return step;
    if (slot >= a.cursors.length) {
        step.found = {kStateSlots, q, slot, a.cursors.length};
        return step;
    }
    const int32_t pending = a.cursors.rows(slot), half = a.cursors.half(slot);
    const bool opens = a.is_window == nullptr || a.is_window[q];
    if (pending < 0 || pending > a.record_rows)
        step.found = {kCursorRows, slot, pending, a.record_rows};
    else if (half != 0 && half != 1)
        step.found = {kCursorHalf, slot, half, 1};
    else if (opens && end - begin > a.record_rows)
        step.found = {kWindowPastRecord, q, end - begin, a.record_rows};
    else if (opens && pending > 0 && (a.num_kept[q] < 1 || a.num_kept[q] > pending))
        step.found = {kNumKept, q, a.num_kept[q], pending};
    if (step.found) return step;
    step.slot = static_cast<int32_t>(slot);
    step.sets_cursor = true;
    step.cursor_half = half;
    if (!opens) return step;
    step.row = {step.slot, pending > 0 ? a.num_kept[q] : 0, half, step.slot};
    step.cursor_rows = static_cast<int32_t>(end - begin);
    step.cursor_half = 1 - half;
    return step;
}

// ---------------------------------------------------------------- plan_recurrent_fold

struct RecurrentFoldPlanArguments {
    const char* op;
    RecurrentPlan plan;        // [>= E, 4]
    RecurrentCursors cursors;  // [S, 2]
    int64_t num_entries;       // E
    Ids source_slots;          // [E]
    Ids target_slots;          // [E]
    const int32_t* num_rows;   // [E]
    bool keep_source;
};

inline RecurrentFoldPlanArguments check_recurrent_fold_plan(
    const char* op,              //
    const Tensor& plan,          // [>= E, 4], int32
    const Tensor& cursors,       // [S, 2], int32
    const Tensor& source_slots,  // [E], int32 or int64
    const Tensor& target_slots,  // [>= E], int32 or int64
    const Tensor& num_rows,      // [>= E], int32
    bool keep_source)            //
{
    const Argument to{op, "plan", plan}, cur{op, "cursors", cursors}, from{op, "source_slots", source_slots},
        target{op, "target_slots", target_slots}, rows{op, "num_rows", num_rows};
    RecurrentFoldPlanArguments a{};
    a.op = op;
    a.source_slots = ids_view(from, 0, "[num_entries]");
    a.num_entries = a.source_slots.length;
    a.plan = recurrent_plan_view(to, a.num_entries);
    a.cursors = cursors_view(cur);
    a.target_slots = ids_view(target, a.num_entries, "[num_entries]");
    a.num_rows = int32_view(rows, a.num_entries, "[num_entries]").data;
    a.keep_source = keep_source;
    check_placement(op, {from, target, rows}, {to, cur});
    return a;
}

// The plan of one entry, and the slots where nothing is pending afterwards (0 = none). All entries are read
// before anything is stored.
struct RecurrentFoldStep {
    Found found;  // with a problem, the row is zero and the cursors stay
    RecurrentRow row;
    int32_t cleared_target, cleared_source;
};

NWOR_HOST_DEVICE inline RecurrentFoldStep fold_step_of(const RecurrentFoldPlanArguments& a, int64_t entry) {
    RecurrentFoldStep step{};
    const int64_t source = a.source_slots[entry], target = a.target_slots[entry];
    if (source <= 0 || target <= 0) return step;
    if (source >= a.cursors.length) {
        step.found = {kFoldSourceSlots, entry, source, a.cursors.length};
        return step;
    }
    if (target >= a.cursors.length) {
        step.found = {kFoldTargetSlots, entry, target, a.cursors.length};
        return step;
    }
    const int32_t pending = a.cursors.rows(source), half = a.cursors.half(source);
    if (pending < 0 || pending > kMostRecordRows)
        step.found = {kCursorRows, source, pending, kMostRecordRows};
    else if (half != 0 && half != 1)
        step.found = {kCursorHalf, source, half, 1};
    if (step.found) return step;
    const int32_t rows = static_cast<int32_t>(most(least(a.num_rows[entry], pending), 0));
    if (rows > 0 || source != target)
        step.row = {static_cast<int32_t>(source), rows, half, static_cast<int32_t>(target)};
    step.cleared_target = static_cast<int32_t>(target);
    if (source != target && !a.keep_source) step.cleared_source = static_cast<int32_t>(source);
    return step;
}

}  // namespace nwor
