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

// An entry of a plan: one of its rows. All zeros: padding.
struct RecurrentEntry {
    int32_t source;  // slot whose state and record are read
    int32_t rows;    // rows of the record to reapply
    int32_t first;   // half of the record that holds these rows; with chunk, the index of the first row
    int32_t target;  // slot whose state is stored; 0: the state stays as it is

    NWOR_HOST_DEVICE bool any() const { return source > 0 || target > 0; }
    NWOR_HOST_DEVICE bool stores() const { return target > 0; }
    // The slot whose record the window writes.
    NWOR_HOST_DEVICE int32_t recorded() const { return target > 0 ? target : source; }
};

struct RecurrentPlan {
    int32_t* data;  // [length, 4]
    int64_t length;

    NWOR_HOST_DEVICE RecurrentEntry operator[](int64_t i) const {
        const int32_t* row = data + 4 * i;
        return {row[0], row[1], row[2], row[3]};
    }
    NWOR_HOST_DEVICE void set(int64_t i, const RecurrentEntry& entry) const {
        int32_t* to = data + 4 * i;
        to[0] = entry.source;
        to[1] = entry.rows;
        to[2] = entry.first;
        to[3] = entry.target;
    }
};

// The pending rows of a slot.
struct RecurrentCursor {
    int32_t rows;     // recorded by the last window
    int32_t first;    // half of the record with these rows; in a ring the first pending row
    int32_t earlier;  // only in a ring: rows before those of the last window, all accepted

    // Nothing is pending.
    NWOR_HOST_DEVICE RecurrentCursor cleared() const { return {0, first, 0}; }
};

struct RecurrentCursors {
    int32_t* data;  // [length, columns]
    int64_t length;
    int32_t columns;  // 2, or 3 with a ring

    NWOR_HOST_DEVICE bool of_ring() const { return columns == 3; }
    NWOR_HOST_DEVICE RecurrentCursor operator[](int64_t slot) const {
        const int32_t* cursor = data + columns * slot;
        return {cursor[0], cursor[1], of_ring() ? cursor[2] : 0};
    }
    NWOR_HOST_DEVICE void set(int64_t slot, const RecurrentCursor& cursor) const {
        int32_t* to = data + columns * slot;
        to[0] = cursor.rows;
        to[1] = cursor.first;
        if (of_ring()) to[2] = cursor.earlier;
    }
    NWOR_HOST_DEVICE void clear(int64_t slot) const { set(slot, (*this)[slot].cleared()); }
};

// The problem of a slot's cursor whose window has up to `window_rows` rows and whose ring has `all_rows`.
NWOR_HOST_DEVICE inline Found problem_of_cursor(const RecurrentCursors& cursors, int64_t slot,
                                                int64_t window_rows, int64_t all_rows) {
    const RecurrentCursor cursor = cursors[slot];
    if (cursor.rows < 0 || cursor.rows > window_rows) return {kCursorRows, slot, cursor.rows, window_rows};
    const int64_t most_earlier = all_rows - cursor.rows;
    if (cursor.earlier < 0 || cursor.earlier > most_earlier)
        return {kCursorRows, slot, cursor.earlier, most_earlier};
    if (!cursors.of_ring() && cursor.first != 0 && cursor.first != 1)
        return {kCursorHalf, slot, cursor.first, 1};
    if (cursors.of_ring() && (cursor.first < 0 || cursor.first >= all_rows))
        return {kCursorRing, slot, cursor.first, all_rows};
    return {};
}

inline RecurrentPlan recurrent_plan_view(const Argument& a, int64_t length) {
    a.dtype(ScalarType::Int);
    if (a.tensor.dim() != 2 || a.tensor.size(0) < length || a.tensor.size(1) != 4)
        a.must_be("[num_requests, 4] with at least ", length, " rows");
    a.contiguous();
    if (a.tensor.size(0) > INT32_MAX) a.must_be("of fewer than 2^31 rows");
    return {static_cast<int32_t*>(a.tensor.data_ptr()), a.tensor.size(0)};
}

// Checks cursors with `columns` columns; 0: of either number.
inline RecurrentCursors cursors_view(const Argument& a, int64_t columns) {
    a.dtype(ScalarType::Int);
    const int64_t found = a.tensor.dim() == 2 ? a.tensor.size(1) : 0;
    if (columns > 0 && found != columns)
        a.must_be("[num_slots, ", columns, "] ", columns == 3 ? "with" : "without", " chunk");
    if (found != 2 && found != 3) a.must_be("[num_slots, 2], or [num_slots, 3] with chunk");
    a.contiguous();
    return {static_cast<int32_t*>(a.tensor.data_ptr()), least(a.tensor.size(0), INT32_MAX),
            static_cast<int32_t>(found)};
}

// Rows that a store folds in the chunk form, and the longest window that the form has kernels for.
constexpr int64_t kChunkRows = 16;
constexpr int64_t kMostChunkWindow = 8;

inline void check_chunk(const char* op, int64_t chunk) {
    if (chunk != 0 && chunk != kChunkRows) fail(op, "chunk must be 0 or ", kChunkRows, ", got ", chunk);
}

// Rows that may be pending before a window of up to `window_rows` tokens. In the chunk form a slot has up to
// chunk - 1 accepted rows and those of the last window, in a ring that also has room for the next window.
NWOR_HOST_DEVICE inline int64_t most_pending_rows(int64_t window_rows, int64_t chunk) {
    return chunk == 0 ? window_rows : chunk - 1 + window_rows;
}

// ---------------------------------------------------------------- plan_recurrent_window

struct RecurrentWindowArguments {
    const char* op;
    RecurrentPlan plan;              // [>= Q, 4]
    RecurrentCursors cursors;        // [S, 2], or [S, 3] with chunk
    int64_t* window_id;              // [1]
    int64_t num_requests;            // Q
    int64_t record_rows;             // W
    Ids state_slots;                 // [Q]
    const int32_t* query_start_loc;  // [Q + 1]
    const int32_t* num_kept;         // [Q]
    const bool* is_window;           // [Q]; null: all requests have windows
    int64_t* num_skipped;            // [1]; null: skipped requests are not counted
    int64_t chunk;                   // C; 0: a store folds all rows
};

inline RecurrentWindowArguments check_recurrent_window(
    const char* op,                            //
    const Tensor& plan,                        // [>= Q, 4], int32
    const Tensor& cursors,                     // [S, 2] or [S, 3], int32
    const Tensor& window_id,                   // [1], int64
    const Tensor& state_slots,                 // [Q], int32 or int64
    const Tensor& query_start_loc,             // [>= Q + 1], int32
    const Tensor& num_kept,                    // [>= Q], int32
    int64_t record_rows,                       // W
    const std::optional<Tensor>& is_window,    // [>= Q], bool
    const std::optional<Tensor>& num_skipped,  // [1], int64
    int64_t chunk)                             // C
{
    const Argument to{op, "plan", plan}, cur{op, "cursors", cursors}, number{op, "window_id", window_id},
        slots{op, "state_slots", state_slots}, qsl{op, "query_start_loc", query_start_loc},
        kept{op, "num_kept", num_kept};
    RecurrentWindowArguments a{};
    a.op = op;
    a.state_slots = ids_view(slots, 0, "[num_requests]");
    a.num_requests = a.state_slots.length;
    a.plan = recurrent_plan_view(to, a.num_requests);
    check_chunk(op, chunk);
    a.chunk = chunk;
    a.cursors = cursors_view(cur, chunk == 0 ? 2 : 3);
    number.vector(ScalarType::Long, 1, "[1]");
    a.window_id = static_cast<int64_t*>(window_id.data_ptr());
    a.query_start_loc = int32_view(qsl, a.num_requests + 1, "[num_requests + 1]").data;
    a.num_kept = int32_view(kept, a.num_requests, "[num_requests]").data;
    check_positive(op, "record_rows", record_rows);
    if (record_rows > kMostRecordRows)
        fail(op, "record_rows must be at most ", kMostRecordRows, ", got ", record_rows);
    a.record_rows = record_rows;
    if (chunk > 0 && record_rows > kMostChunkWindow)
        fail(op, "record_rows must be at most ", kMostChunkWindow, " with chunk, got ", record_rows);
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
    Found found;  // with a problem, the entry is zero and the cursor stays
    RecurrentEntry entry;
    bool sets_cursor;
    int32_t slot;
    RecurrentCursor cursor;
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
    const RecurrentCursor cursor = a.cursors[slot];
    const int32_t pending = cursor.rows;
    const int64_t all_rows = most_pending_rows(a.record_rows, a.chunk) + a.record_rows;  // of a ring
    const bool opens = a.is_window == nullptr || a.is_window[q];
    step.found = problem_of_cursor(a.cursors, slot, a.record_rows, all_rows);
    if (step.found) return step;
    if (a.chunk > 0 && pending > 0 && cursor.earlier >= a.chunk)
        step.found = {kCursorRows, slot, cursor.earlier, a.chunk - 1};
    else if (opens && end - begin > a.record_rows)
        step.found = {kWindowPastRecord, q, end - begin, a.record_rows};
    else if (opens && pending > 0 && (a.num_kept[q] < 1 || a.num_kept[q] > pending))
        step.found = {kNumKept, q, a.num_kept[q], pending};
    if (step.found) return step;
    step.slot = static_cast<int32_t>(slot);
    step.sets_cursor = true;
    step.cursor = cursor.cleared();
    if (!opens) return step;
    const int32_t tokens = static_cast<int32_t>(end - begin),
                  rows = cursor.earlier + (pending > 0 ? a.num_kept[q] : 0);
    step.entry = {step.slot, rows, cursor.first, step.slot};
    if (a.chunk == 0) {
        step.cursor = {tokens, 1 - cursor.first, 0};
    } else if (rows >= a.chunk) {  // the rows after the chunk stay pending
        const int32_t chunk = static_cast<int32_t>(a.chunk);
        step.cursor = {tokens, static_cast<int32_t>((cursor.first + chunk) % all_rows), rows - chunk};
    } else {
        step.entry.target = 0;
        step.cursor = {tokens, cursor.first, rows};
    }
    return step;
}

// ---------------------------------------------------------------- folds

// A fold that a caller asks for. A source or target of 0 or less: padding.
struct RecurrentFold {
    Found found;  // with a problem, nothing is folded
    int64_t source, target, num_rows;
};

// The common arguments of the ops that plan folds.
struct RecurrentFoldPlan {
    const char* op;
    RecurrentPlan plan;        // [>= E, 4]
    RecurrentCursors cursors;  // [S, 2], or [S, 3] with chunk
    int64_t num_entries;       // E
    bool keep_source;          // rows stay pending in a source
    bool moves_rows;           // rows move to the target with its cursor, and nothing is folded
    int64_t* num_skipped;      // [1]; null: entries with a problem are not counted
};

// The plan of one entry, and what becomes of the cursors of its slots (0 = none). All entries are read before
// anything is stored.
struct RecurrentFoldStep {
    Found found;  // with a problem, the entry is zero and the cursors stay
    RecurrentEntry entry;
    int32_t source, target, cleared_source;
};

// `Arguments` is a RecurrentFoldPlan with `fold_of(entry)`.
template <class Arguments>
NWOR_HOST_DEVICE inline RecurrentFoldStep fold_step_of(const Arguments& a, int64_t entry) {
    RecurrentFoldStep step{};
    const RecurrentFold fold = a.fold_of(entry);
    step.found = fold.found;
    if (fold.found || fold.source <= 0 || fold.target <= 0) return step;
    const RecurrentCursor cursor = a.cursors[fold.source];
    step.found = problem_of_cursor(a.cursors, fold.source, kMostRecordRows, kMostRecordRows);
    if (step.found) return step;
    const int32_t rows = cursor.earlier + static_cast<int32_t>(most(least(fold.num_rows, cursor.rows), 0));
    step.source = static_cast<int32_t>(fold.source);
    step.target = static_cast<int32_t>(fold.target);
    if (rows > 0 || step.source != step.target) step.entry = {step.source, rows, cursor.first, step.target};
    if (step.source != step.target && !a.keep_source) step.cleared_source = step.source;
    return step;
}

// Sets the cursor of an entry's target. A moved row counts as one before those of the last window.
NWOR_HOST_DEVICE inline void set_target(const RecurrentFoldPlan& a, const RecurrentEntry& entry) {
    if (a.moves_rows)
        a.cursors.set(entry.target, {0, entry.first, entry.rows});
    else
        a.cursors.clear(entry.target);
}

// ---------------------------------------------------------------- plan_recurrent_fold

struct RecurrentFoldPlanArguments : RecurrentFoldPlan {
    Ids source_slots;         // [E]
    Ids target_slots;         // [E]
    const int32_t* num_rows;  // [E]

    NWOR_HOST_DEVICE RecurrentFold fold_of(int64_t entry) const {
        const int64_t source = source_slots[entry], target = target_slots[entry];
        if (source <= 0 || target <= 0) return {};
        if (source >= cursors.length) return {{kFoldSourceSlots, entry, source, cursors.length}, 0, 0, 0};
        if (target >= cursors.length) return {{kFoldTargetSlots, entry, target, cursors.length}, 0, 0, 0};
        return {{}, source, target, num_rows[entry]};
    }
};

inline RecurrentFoldPlanArguments check_recurrent_fold_plan(
    const char* op,              //
    const Tensor& plan,          // [>= E, 4], int32
    const Tensor& cursors,       // [S, 2] or [S, 3], int32
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
    a.cursors = cursors_view(cur, 0);
    a.target_slots = ids_view(target, a.num_entries, "[num_entries]");
    a.num_rows = int32_view(rows, a.num_entries, "[num_entries]").data;
    a.keep_source = keep_source;
    check_placement(op, {from, target, rows}, {to, cur});
    return a;
}

// ---------------------------------------------------------------- plan_recurrent_block_fold

// The parameters of a launch are limited to 4 KB.
constexpr int64_t kMostBlockTables = 64;

struct StateBlocks {
    const int32_t* data;  // [N, columns]
    int64_t row_stride, columns;
};

// The entries of a plan: groups x requests.
struct RecurrentBlockFoldArguments : RecurrentFoldPlan {
    int64_t num_requests;                // Q
    int64_t num_rows_of_tables;          // N
    int64_t block_size;                  // 0: the columns of the targets are given
    Ids idx_mapping;                     // [Q]
    const int32_t* source_columns;       // [N]
    const int32_t* num_kept;             // [N]
    const int32_t* target_columns;       // [N], or null
    const int32_t* num_computed_tokens;  // [N], or null
    StateBlocks tables[kMostBlockTables];

    NWOR_HOST_DEVICE RecurrentFold fold_of(int64_t entry) const {
        const int64_t group = quotient(entry, num_requests), request = entry - group * num_requests;
        const int64_t row = idx_mapping[request];
        if (row < 0) return {};
        if (row >= num_rows_of_tables) return {{kBlockRequest, request, row, num_rows_of_tables}, 0, 0, 0};
        const int64_t source = source_columns[row], kept = num_kept[row];
        int64_t target = source, rows = kept;
        if (source < 0) return {};
        if (target_columns != nullptr) {
            target = target_columns[row];
            if (target < 0 || target == source) return {};
        } else {
            const int64_t computed = num_computed_tokens[row], first = computed - kept + 1;
            if (computed <= 0) return {};
            const int64_t full_blocks = quotient(computed, block_size), full = full_blocks * block_size;
            if (full_blocks == 0) return {};
            if (full >= first) {
                target = full_blocks - 1;
                rows = full - first + 1;
            } else if (kept > 0) {
                return {};
            }
        }
        const StateBlocks& table = tables[group];
        const int64_t last = most(source, target);
        if (last >= table.columns) return {{kBlockColumn, request, last, table.columns}, 0, 0, 0};
        const int32_t* blocks = table.data + row * table.row_stride;
        for (const int64_t block : {blocks[source], blocks[target]})
            if (block >= cursors.length) return {{kBlockSlot, request, block, cursors.length}, 0, 0, 0};
        const int64_t pending = blocks[source] > 0 ? cursors[blocks[source]].rows : 0;
        if (pending > 0 && (kept < 1 || kept > pending)) return {{kNumKept, row, kept, pending}, 0, 0, 0};
        if (rows < 1 && target_columns == nullptr) return {};
        return {{}, blocks[source], blocks[target], rows};
    }
};

inline RecurrentBlockFoldArguments check_recurrent_block_fold(
    const char* op,                                    //
    const Tensor& plan,                                // [>= G * Q, 4], int32
    const Tensor& cursors,                             // [S, 2] or [S, 3], int32
    const std::vector<Tensor>& block_tables,           // G x [N, columns], int32
    const Tensor& idx_mapping,                         // [Q], int32 or int64
    const Tensor& source_columns,                      // [>= N], int32
    const Tensor& num_kept,                            // [>= N], int32
    const std::optional<Tensor>& target_columns,       // [>= N], int32
    const std::optional<Tensor>& num_computed_tokens,  // [>= N], int32
    int64_t block_size, bool moves_rows,
    const std::optional<Tensor>& num_skipped)  // [1], int64
{
    const int64_t groups = static_cast<int64_t>(block_tables.size());
    if (groups < 1 || groups > kMostBlockTables)
        fail(op, "block_tables must hold 1 to ", kMostBlockTables, " tables, got ", groups);
    const Argument to{op, "plan", plan}, cur{op, "cursors", cursors}, ids{op, "idx_mapping", idx_mapping},
        sources{op, "source_columns", source_columns}, kept{op, "num_kept", num_kept};
    RecurrentBlockFoldArguments a{};
    a.op = op;
    a.idx_mapping = ids_view(ids, 0, "[num_requests]");
    a.num_requests = a.idx_mapping.length;
    a.num_entries = groups * a.num_requests;
    if (a.num_entries > INT32_MAX) ids.must_be("of fewer than 2^31 requests for all tables");
    a.plan = recurrent_plan_view(to, a.num_entries);
    a.cursors = cursors_view(cur, 0);
    if (moves_rows && !a.cursors.of_ring()) cur.must_be("[num_slots, 3], those of chunks, with moves_rows");
    std::vector<std::string> names;
    for (int64_t g = 0; g < groups; ++g) names.push_back("block_tables[" + std::to_string(g) + "]");
    std::vector<Argument> inputs{ids, sources, kept};
    for (size_t g = 0; g < names.size(); ++g) {
        const Argument table{op, names[g].c_str(), block_tables[g]};
        const Tensor& t = table.tensor;
        table.dtype(ScalarType::Int);
        if (t.dim() != 2) table.must_be("[num_states, max_num_blocks]");
        if (g == 0) a.num_rows_of_tables = least(t.size(0), INT32_MAX);
        if (t.size(0) != block_tables[0].size(0))
            table.must_be("of as many rows as block_tables[0], ", describe(block_tables[0]));
        if (t.size(1) > 1 && t.stride(1) != 1) table.must_be("contiguous along a row");
        a.tables[g] = {static_cast<const int32_t*>(t.data_ptr()), t.stride(0), t.size(1)};
        inputs.push_back(table);
    }
    const auto of_states = [&](const Argument& given) {
        return int32_view(given, a.num_rows_of_tables, "[num_states]").data;
    };
    a.source_columns = of_states(sources);
    a.num_kept = of_states(kept);
    if (target_columns.has_value() == num_computed_tokens.has_value())
        fail(op, "target_columns or num_computed_tokens must be given, and not both");
    if (target_columns.has_value()) {
        inputs.push_back({op, "target_columns", *target_columns});
        a.target_columns = of_states(inputs.back());
        if (block_size != 0) fail(op, "block_size must be 0 with target_columns, got ", block_size);
    } else {
        inputs.push_back({op, "num_computed_tokens", *num_computed_tokens});
        a.num_computed_tokens = of_states(inputs.back());
        check_positive(op, "block_size", block_size);
        if (moves_rows) fail(op, "moves_rows must be False with num_computed_tokens, got True");
    }
    a.block_size = block_size;
    a.keep_source = num_computed_tokens.has_value();
    a.moves_rows = moves_rows;
    std::vector<Argument> outputs{to, cur};
    if (num_skipped.has_value()) {
        outputs.push_back({op, "num_skipped", *num_skipped});
        outputs.back().vector(ScalarType::Long, 1, "[1]");
        a.num_skipped = static_cast<int64_t*>(num_skipped->data_ptr());
    }
    check_placement(op, inputs, outputs);
    return a;
}

}  // namespace nwor
