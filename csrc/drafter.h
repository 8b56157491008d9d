// Family drafter: checks of the arguments of its ops, and the work of each op for one row or one token. The
// CPU kernels loop over these functions, and each thread of a CUDA kernel calls one, so both devices share
// one implementation.
//
// For any data, these functions read and write only inside the buffers. The `problem_of_...` functions find
// invalid data: the CPU calls them before anything is written, CUDA calls them in debug mode.
#pragma once

#include <algorithm>
#include <vector>

#include "common/op.h"
#include "common/problems.h"
#include "common/views.h"

namespace nwor {

constexpr int64_t kPadSlot = -1;

// ---------------------------------------------------------------- rows and block tables

// The rows of a call. Real rows come first; a negative index marks the padded rows after them.
struct Rows {
    Ids idx_mapping;  // without data if every row is real
    int64_t count;

    NWOR_HOST_DEVICE bool is_real(int64_t row) const {
        return row < count && (idx_mapping.data == nullptr || idx_mapping[row] >= 0);
    }
    NWOR_HOST_DEVICE int64_t num_real() const {
        if (idx_mapping.data == nullptr) return count;
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (idx_mapping[middle] < 0)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }
};

// Return the row that owns `token`, or `rows` if none does. `starts` holds the first token of each row and
// the end. A row without tokens owns none.
NWOR_HOST_DEVICE inline int64_t row_of_token(const int32_t* starts, int64_t rows, int64_t token,
                                             int64_t growth = 0) {
    // In every step except the first, each row has one token and no search is needed.
    if (token < rows && growth == 0 && starts[token] <= token && token < starts[token + 1]) return token;
    int64_t low = 0, high = rows;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (starts[middle + 1] + (middle + 1) * growth > token)
            high = middle;
        else
            low = middle + 1;
    }
    return low < rows && token >= starts[low] + low * growth ? low : rows;
}

inline Rows rows_of(const char* op, const std::optional<Tensor>& idx_mapping, int64_t count) {
    if (!idx_mapping.has_value()) return {{}, count};
    return {ids_view({op, "idx_mapping", *idx_mapping}, count, "[num_rows]"), count};
}

// A block table [rows, columns] of one group of layers.
struct BlockTable {
    const int32_t* data;
    int64_t row_stride, rows, columns, block_size;

    NWOR_HOST_DEVICE int64_t slot(int64_t row, int64_t position) const {
        const int64_t column = position / block_size;
        if (position < 0 || row < 0 || row >= rows || column >= columns) return kPadSlot;
        return int64_t{data[row * row_stride + column]} * block_size + position % block_size;
    }
    NWOR_HOST_DEVICE int64_t num_positions() const { return columns * block_size; }
};

inline BlockTable block_table_view(const Argument& a, int64_t rows, int64_t block_size) {
    const Tensor& t = a.tensor;
    a.dtype(ScalarType::Int);
    if (t.dim() != 2 || t.size(0) < rows)
        a.must_be("[num_rows, max_num_blocks] with at least ", rows, " rows");
    if (t.size(1) > INT32_MAX) a.must_be("of fewer than 2^31 columns");
    if (t.size(1) > 1 && t.stride(1) != 1) a.must_be("of stride 1 along a row");
    return {static_cast<const int32_t*>(t.data_ptr()), t.stride(0), t.size(0), t.size(1), block_size};
}

// ---------------------------------------------------------------- problems of rows

NWOR_HOST_DEVICE inline Found problem_of_starts(const int32_t* starts, int64_t row) {
    if (starts[row] < 0 || starts[row + 1] < starts[row])
        return {kQueriesDecrease, row, starts[row + 1], starts[row]};
    return {};
}

NWOR_HOST_DEVICE inline Found problem_of_padding(const Rows& rows, int64_t row) {
    if (rows.idx_mapping.data != nullptr && row > 0 && rows.idx_mapping[row] >= 0 &&
        rows.idx_mapping[row - 1] < 0)
        return {kRealAfterPadded, row, rows.idx_mapping[row], 0};
    return {};
}

// ---------------------------------------------------------------- prepare_prefill_inputs

struct PrefillArguments {
    const char* op;
    Rows rows;
    int64_t num_target_tokens;
    Ids target_ids;
    const int64_t* target_positions;
    const int32_t* starts;
    const int32_t* target_seq_lens;
    Ids num_sampled, num_rejected, last_sampled, next_prefill_tokens;
    Vector<int32_t> input_ids;
    Vector<int64_t> positions;
    Vector<int32_t> query_start_loc, seq_lens;
    Vector<int64_t> last_token_indices;
    int64_t* step;

    int64_t num_items() const {
        return std::max({input_ids.length, query_start_loc.length, seq_lens.length, last_token_indices.length,
                         int64_t{1}});
    }
    NWOR_HOST_DEVICE int64_t num_valid(int64_t row) const {
        return most(int64_t{starts[row + 1]} - starts[row] - most(num_rejected[row], 0), 0);
    }
};

inline PrefillArguments check_prefill(const char* op, const Tensor& target_input_ids,
                                      const Tensor& target_positions, const Tensor& target_query_start_loc,
                                      const Tensor& target_seq_lens, const Tensor& idx_mapping,
                                      const Tensor& num_sampled, const Tensor& num_rejected,
                                      const Tensor& last_sampled, const Tensor& next_prefill_tokens,
                                      const Tensor& input_ids, const Tensor& positions,
                                      const Tensor& query_start_loc, const Tensor& seq_lens,
                                      const Tensor& last_token_indices, const Tensor& current_draft_step) {
    const Argument ti{op, "target_input_ids", target_input_ids}, tp{op, "target_positions", target_positions},
        tq{op, "target_query_start_loc", target_query_start_loc}, ts{op, "target_seq_lens", target_seq_lens},
        im{op, "idx_mapping", idx_mapping}, ns{op, "num_sampled", num_sampled},
        nr{op, "num_rejected", num_rejected}, ls{op, "last_sampled", last_sampled},
        np{op, "next_prefill_tokens", next_prefill_tokens}, ii{op, "input_ids", input_ids},
        po{op, "positions", positions}, qs{op, "query_start_loc", query_start_loc},
        sl{op, "seq_lens", seq_lens}, lt{op, "last_token_indices", last_token_indices},
        st{op, "current_draft_step", current_draft_step};
    PrefillArguments a{};
    a.op = op;
    a.rows.idx_mapping = ids_view(im, 0, "[num_rows]");
    const int64_t n = a.rows.count = idx_mapping.size(0);
    a.target_ids = ids_view(ti, 0, "[num_tokens]");
    a.target_positions = int64_view(tp, 0, "[num_tokens]").data;
    a.num_target_tokens = std::min(target_input_ids.size(0), target_positions.size(0));
    a.starts = int32_view(tq, n + 1, "[num_rows + 1]").data;
    a.target_seq_lens = int32_view(ts, n, "[num_rows]").data;
    a.num_sampled = ids_view(ns, n, "[num_rows]");
    a.num_rejected = ids_view(nr, n, "[num_rows]");
    a.last_sampled = ids_view(ls, 0, "[num_states]");
    a.next_prefill_tokens = ids_view(np, 0, "[num_states]");
    a.input_ids = int32_view(ii, 0, "[capacity]");
    a.positions = int64_view(po, 0, "[capacity]");
    if (positions.size(0) != input_ids.size(0)) po.must_be("as long as input_ids, ", describe(input_ids));
    a.query_start_loc = int32_view(qs, n + 1, "[num_rows + 1]");
    a.seq_lens = int32_view(sl, n, "[num_rows]");
    a.last_token_indices = int64_view(lt, n, "[num_rows]");
    a.step = scalar_view(st);
    check_placement(op, {ti, tp, tq, ts, im, ns, nr, ls, np}, {ii, po, qs, sl, lt, st});
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const PrefillArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    const int64_t state = a.rows.idx_mapping[row];
    if (state < 0) return {};
    if (const Found f = problem_of_starts(a.starts, row)) return f;
    if (a.starts[row + 1] > a.num_target_tokens)
        return {kTokensPastTarget, row, a.starts[row + 1], a.num_target_tokens};
    if (a.starts[row + 1] > a.input_ids.length)
        return {kTokensPastCapacity, row, a.starts[row + 1], a.input_ids.length};
    const Ids& source = a.num_sampled[row] > 0 ? a.last_sampled : a.next_prefill_tokens;
    if (state >= source.length) return {kStateOutside, row, state, source.length};
    return {};
}

// Write element i of every output that has one element per row.
NWOR_HOST_DEVICE inline void prefill_row(const PrefillArguments& a, int64_t i, int64_t num_real) {
    a.query_start_loc.set(i, a.starts[least(i, num_real)]);
    a.seq_lens.set(i, i < num_real ? a.target_seq_lens[i] : 0);
    const int64_t valid = i < num_real ? a.num_valid(i) : 0;
    a.last_token_indices.set(i, valid > 0 ? a.starts[i] + valid - 1 : 0);
    if (i == 0) *a.step = 0;
}

// Write token t of the outputs, t < capacity.
NWOR_HOST_DEVICE inline void prefill_token(const PrefillArguments& a, int64_t t, int64_t num_real) {
    const int64_t row = row_of_token(a.starts, num_real, t);
    const bool owned = row < num_real && t < a.num_target_tokens;
    a.positions[t] = owned ? a.target_positions[t] : 0;
    int64_t id = 0;
    if (owned) {
        const int64_t left = a.starts[row] + a.num_valid(row) - 1 - t;  // valid tokens after this one
        const int64_t state = a.rows.idx_mapping[row];
        if (left > 0)
            id = a.target_ids.at(t + 1);
        else if (left == 0)
            id = a.num_sampled[row] > 0 ? a.last_sampled.at(state) : a.next_prefill_tokens.at(state);
    }
    a.input_ids[t] = static_cast<int32_t>(id);
}

// ---------------------------------------------------------------- prepare_decode_inputs

struct DecodeArguments {
    const char* op;
    Rows rows;
    Ids first_drafts;
    const int32_t* target_seq_lens;
    Ids num_rejected;
    Vector<int32_t> input_ids;
    Vector<int64_t> positions;
    Vector<int32_t> query_start_loc, seq_lens;
    int64_t* sample_positions;  // null if not given
    int64_t max_model_len;
    bool advance;

    int64_t num_items() const { return std::max(query_start_loc.length, seq_lens.length); }
};

inline DecodeArguments check_decode(const char* op, const Tensor& draft_tokens, const Tensor& target_seq_lens,
                                    const Tensor& num_rejected, const Tensor& input_ids,
                                    const Tensor& positions, const Tensor& query_start_loc,
                                    const Tensor& seq_lens, int64_t max_model_len,
                                    const std::optional<Tensor>& idx_mapping,
                                    const std::optional<Tensor>& sample_positions, bool advance_positions) {
    const Argument dt{op, "draft_tokens", draft_tokens}, ts{op, "target_seq_lens", target_seq_lens},
        nr{op, "num_rejected", num_rejected}, ii{op, "input_ids", input_ids}, po{op, "positions", positions},
        qs{op, "query_start_loc", query_start_loc}, sl{op, "seq_lens", seq_lens};
    check_positive(op, "max_model_len", max_model_len);
    check_ids(dt);
    if (draft_tokens.dim() != 2 || draft_tokens.size(1) < 1)
        dt.must_be("[num_rows, num_speculative_steps] with at least one column");
    DecodeArguments a{};
    a.op = op;
    const int64_t n = draft_tokens.size(0);
    a.first_drafts = {draft_tokens.data_ptr(), draft_tokens.scalar_type() == ScalarType::Long,
                      draft_tokens.stride(0), n};
    a.rows = rows_of(op, idx_mapping, n);
    a.target_seq_lens = int32_view(ts, n, "[num_rows]").data;
    a.num_rejected = ids_view(nr, n, "[num_rows]");
    a.seq_lens = int32_view(sl, n, "[num_rows]");
    const int64_t m = seq_lens.size(0);
    a.input_ids = int32_view(ii, m, "[length of seq_lens]");
    a.positions = int64_view(po, m, "[length of seq_lens]");
    a.query_start_loc = int32_view(qs, n + 1, "[num_rows + 1]");
    a.max_model_len = max_model_len;
    a.advance = advance_positions;
    std::vector<Argument> inputs{dt, ts, nr}, outputs{ii, po, qs, sl};
    if (idx_mapping.has_value()) inputs.push_back({op, "idx_mapping", *idx_mapping});
    if (sample_positions.has_value()) {
        outputs.push_back({op, "sample_positions", *sample_positions});
        a.sample_positions = int64_view(outputs.back(), m, "[length of seq_lens]").data;
    }
    check_placement(op, inputs, outputs);
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const DecodeArguments& a, int64_t row) {
    return problem_of_padding(a.rows, row);
}

NWOR_HOST_DEVICE inline void decode_row(const DecodeArguments& a, int64_t i) {
    const bool real = a.rows.is_real(i);
    a.query_start_loc.set(i, real ? i : a.rows.num_real());
    if (i >= a.seq_lens.length) return;
    a.input_ids[i] = real ? static_cast<int32_t>(a.first_drafts[i]) : 0;
    if (!real)
        a.positions[i] = 0;
    else if (a.advance)
        a.positions[i] = sum_up_to(a.max_model_len - 1, a.positions[i], 1);
    int64_t length = 0;
    if (real) {
        length = a.target_seq_lens[i] - within_32_bits(a.num_rejected[i]);
        if (a.advance) length = least(length + 1, a.max_model_len);
    }
    a.seq_lens[i] = static_cast<int32_t>(within_32_bits(length));
    if (a.sample_positions != nullptr)
        a.sample_positions[i] = real ? sum_up_to(INT64_MAX, a.sample_positions[i], 1) : 0;
}

// ---------------------------------------------------------------- update_draft_inputs

struct UpdateArguments {
    const char* op;
    Rows rows;
    Ids sampled;
    const int64_t* step;
    MutableIdColumns draft_tokens;
    int32_t* input_ids;
    int64_t* positions;
    int32_t* seq_lens;
    int64_t* sample_positions;  // null if not given
    int64_t num_speculative_steps, max_model_len;
    bool advance;
    // One hidden row per row. Width 0 if there is nothing to copy. Strides are in elements.
    const char* hidden;
    char* next_hidden;
    int64_t width, hidden_row_stride, hidden_stride, next_row_stride, next_stride;
    int32_t element_size;

    NWOR_HOST_DEVICE bool is_last_step() const { return *step >= num_speculative_steps - 1; }
};

inline void check_hidden_states(UpdateArguments& a, const Argument& from, const Argument& to) {
    for (const Argument& h : {from, to}) {
        check_element_size(h);
        if (h.tensor.dim() != 2 || h.tensor.size(0) < a.rows.count)
            h.must_be("[num_rows, hidden_size] with at least ", a.rows.count, " rows");
    }
    to.dtype(from.tensor.scalar_type());
    if (from.tensor.size(1) != to.tensor.size(1))
        to.must_be("of the width of hidden_states, ", describe(from.tensor));
    from.same_device(to.tensor);
    if (same_view(from.tensor, to.tensor)) return;
    must_not_overlap(a.op, Placed(to), Placed(from));
    a.hidden = static_cast<const char*>(from.tensor.data_ptr());
    a.next_hidden = static_cast<char*>(to.tensor.data_ptr());
    a.width = from.tensor.size(1);
    a.hidden_row_stride = from.tensor.stride(0);
    a.hidden_stride = from.tensor.stride(1);
    a.next_row_stride = to.tensor.stride(0);
    a.next_stride = to.tensor.stride(1);
    a.element_size = static_cast<int32_t>(from.tensor.element_size());
}

inline UpdateArguments check_update(const char* op, const Tensor& sampled, const Tensor& current_draft_step,
                                    const Tensor& draft_tokens, const Tensor& input_ids,
                                    const Tensor& positions, const Tensor& seq_lens,
                                    int64_t num_speculative_steps, int64_t max_model_len,
                                    const std::optional<Tensor>& idx_mapping,
                                    const std::optional<Tensor>& hidden_states,
                                    const std::optional<Tensor>& next_hidden_states,
                                    const std::optional<Tensor>& sample_positions, bool advance_positions) {
    const Argument sa{op, "sampled", sampled}, st{op, "current_draft_step", current_draft_step},
        dt{op, "draft_tokens", draft_tokens}, ii{op, "input_ids", input_ids}, po{op, "positions", positions},
        sl{op, "seq_lens", seq_lens};
    check_positive(op, "num_speculative_steps", num_speculative_steps);
    check_positive(op, "max_model_len", max_model_len);
    UpdateArguments a{};
    a.op = op;
    a.sampled = ids_view(sa, 0, "[num_rows]");
    const int64_t n = sampled.size(0);
    a.rows = rows_of(op, idx_mapping, n);
    a.step = scalar_view(st);
    check_ids(dt);
    if (draft_tokens.dim() != 2 || draft_tokens.size(0) < n || draft_tokens.size(1) < num_speculative_steps)
        dt.must_be("[>= ", n, " rows, >= ", num_speculative_steps, " steps]");
    a.draft_tokens = mutable_columns_view(draft_tokens, n);
    a.input_ids = int32_view(ii, n, "[num_rows]").data;
    a.positions = int64_view(po, n, "[num_rows]").data;
    a.seq_lens = int32_view(sl, n, "[num_rows]").data;
    a.num_speculative_steps = num_speculative_steps;
    a.max_model_len = max_model_len;
    a.advance = advance_positions;
    if (hidden_states.has_value() != next_hidden_states.has_value())
        fail(op, "hidden_states and next_hidden_states must be given together");
    std::vector<Argument> inputs{sa, st}, outputs{dt, ii, po, sl};
    if (idx_mapping.has_value()) inputs.push_back({op, "idx_mapping", *idx_mapping});
    if (sample_positions.has_value()) {
        outputs.push_back({op, "sample_positions", *sample_positions});
        a.sample_positions = int64_view(outputs.back(), n, "[num_rows]").data;
    }
    if (hidden_states.has_value()) {
        const Argument from{op, "hidden_states", *hidden_states},
            to{op, "next_hidden_states", *next_hidden_states};
        from.same_device(sampled);
        check_hidden_states(a, from, to);
        if (!same_view(*hidden_states, *next_hidden_states)) inputs.push_back(from);
        outputs.push_back(to);
    }
    check_placement(op, inputs, outputs);
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const UpdateArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (a.rows.is_real(row) && !a.draft_tokens.has(*a.step))
        return {kStepOutside, row, *a.step, a.draft_tokens.count};
    return {};
}

// Update everything in a row except its hidden state.
NWOR_HOST_DEVICE inline void update_row(const UpdateArguments& a, int64_t i) {
    if (!a.rows.is_real(i)) return;
    const int64_t step = *a.step, token = a.sampled[i];
    if (!a.draft_tokens.has(step)) return;
    a.draft_tokens[step].set(i, token);
    if (a.is_last_step()) return;
    a.input_ids[i] = static_cast<int32_t>(token);
    if (a.sample_positions != nullptr) a.sample_positions[i] = sum_up_to(INT64_MAX, a.sample_positions[i], 1);
    if (!a.advance) return;
    a.positions[i] = sum_up_to(a.max_model_len - 1, a.positions[i], 1);
    a.seq_lens[i] = static_cast<int32_t>(least(int64_t{a.seq_lens[i]} + 1, a.max_model_len));
}

// Return whether the hidden state of row i is copied.
NWOR_HOST_DEVICE inline bool moves_hidden(const UpdateArguments& a, int64_t i) {
    return a.rows.is_real(i) && *a.step >= 0 && !a.is_last_step();
}

// ---------------------------------------------------------------- compute_slot_mappings

constexpr int64_t kMostTables = 64;  // their addresses are passed as kernel parameters

struct SlotArguments {
    const char* op;
    Rows rows;
    const int32_t* starts;
    Vector<const int64_t> positions;
    BlockTable tables[kMostTables];
    int64_t num_groups, capacity;
    int64_t* slots;
    int64_t slots_stride;
    int64_t cp_size, cp_rank, cp_interleave;
    const bool* cp_sharded;  // null: all groups
};

inline SlotArguments check_slot_mappings(const char* op, const Tensor& idx_mapping,
                                         const Tensor& query_start_loc, const Tensor& positions,
                                         const std::vector<Tensor>& block_tables,
                                         const std::vector<int64_t>& block_sizes, const Tensor& slot_mappings,
                                         int64_t cp_size, int64_t cp_rank, int64_t cp_interleave,
                                         const std::optional<Tensor>& cp_sharded) {
    const Argument im{op, "idx_mapping", idx_mapping}, qs{op, "query_start_loc", query_start_loc},
        po{op, "positions", positions}, sm{op, "slot_mappings", slot_mappings};
    SlotArguments a{};
    a.op = op;
    a.num_groups = static_cast<int64_t>(block_tables.size());
    if (a.num_groups < 1 || a.num_groups > kMostTables)
        fail(op, "block_tables must hold 1 to ", kMostTables, " tables, got ", a.num_groups);
    if (block_sizes.size() != block_tables.size())
        fail(op, "block_sizes must hold one size for each of the ", a.num_groups, " tables, got ",
             block_sizes.size());
    a.rows.idx_mapping = ids_view(im, 0, "[num_rows]");
    a.rows.count = idx_mapping.size(0);
    a.starts = int32_view(qs, a.rows.count + 1, "[num_rows + 1]").data;
    a.positions = {int64_view(po, 0, "[num_tokens]").data, positions.size(0)};
    sm.dtype(ScalarType::Long);
    if (slot_mappings.dim() != 2 || slot_mappings.size(0) != a.num_groups)
        sm.must_be("[", a.num_groups, " groups, capacity]");
    if (slot_mappings.size(1) > 1 && slot_mappings.stride(1) != 1) sm.must_be("of stride 1 along a row");
    a.capacity = slot_mappings.size(1);
    a.slots = static_cast<int64_t*>(slot_mappings.data_ptr());
    a.slots_stride = slot_mappings.stride(0);
    if (a.num_groups > 1 && a.slots_stride < a.capacity) sm.must_be("made of rows that do not overlap");
    check_positive(op, "cp_size", cp_size);
    check_positive(op, "cp_interleave", cp_interleave);
    if (cp_rank < 0 || cp_rank >= cp_size) fail(op, "cp_rank must be in [0, ", cp_size, "), got ", cp_rank);
    a.cp_size = cp_size;
    a.cp_rank = cp_rank;
    a.cp_interleave = cp_interleave;
    for (size_t g = 0; g < block_tables.size(); ++g) {
        const std::string name = "block_tables[" + std::to_string(g) + "]";
        const Argument table{op, name.c_str(), block_tables[g]};
        check_not_negative(op, "block_sizes", block_sizes[g]);
        a.tables[g] = block_table_view(table, 0, block_sizes[g]);
        table.same_device(idx_mapping);
        sm.same_device(idx_mapping);
        must_not_overlap(op, Placed(sm), Placed(table));
    }
    std::vector<Argument> inputs{im, qs, po};
    if (cp_sharded.has_value()) {
        inputs.push_back({op, "cp_sharded", *cp_sharded});
        a.cp_sharded = bool_view(inputs.back(), a.num_groups, "[groups]").data;
    }
    check_placement(op, inputs, {sm});
    return a;
}

// Return the position within this rank's share of the sequence, or -1 if another rank holds it.
NWOR_HOST_DEVICE inline int64_t local_position(const SlotArguments& a, int64_t group, int64_t position) {
    if (a.cp_size == 1 || position < 0 || (a.cp_sharded != nullptr && !a.cp_sharded[group])) return position;
    const int64_t of_all_ranks = a.tables[group].block_size * a.cp_size;
    const int64_t offset = position % of_all_ranks;
    if (offset / a.cp_interleave % a.cp_size != a.cp_rank) return -1;
    return position / of_all_ranks * a.tables[group].block_size +
           offset / (a.cp_interleave * a.cp_size) * a.cp_interleave + offset % a.cp_interleave;
}

NWOR_HOST_DEVICE inline int64_t slot_of_token(const SlotArguments& a, int64_t group, int64_t token) {
    if (a.tables[group].block_size == 0) return kPadSlot;
    const int64_t row = row_of_token(a.starts, a.rows.count, token);
    if (row == a.rows.count || token >= a.positions.length) return kPadSlot;
    const int64_t state = a.rows.idx_mapping[row];
    if (state < 0) return kPadSlot;
    return a.tables[group].slot(state, local_position(a, group, a.positions[token]));
}

NWOR_HOST_DEVICE inline Found problem_of_row(const SlotArguments& a, int64_t row) {
    if (const Found f = problem_of_starts(a.starts, row)) return f;
    const int64_t state = a.rows.idx_mapping[row], end = a.starts[row + 1];
    if (end > a.starts[row] && end > a.capacity) return {kTokensPastCapacity, row, end, a.capacity};
    if (state < 0 || end == a.starts[row]) return {};
    if (end > a.positions.length) return {kTokensPastTarget, row, end, a.positions.length};
    for (int64_t g = 0; g < a.num_groups; ++g) {
        const BlockTable& table = a.tables[g];
        if (table.block_size == 0) continue;
        if (state >= table.rows) return {kStateOutside, row, state, table.rows};
        for (int64_t t = a.starts[row]; t < end; ++t)
            if (a.positions[t] < 0 || local_position(a, g, a.positions[t]) >= table.num_positions())
                return {kPositionOutside, t, a.positions[t], table.num_positions()};
    }
    return {};
}

// ---------------------------------------------------------------- eagle_step

struct EagleArguments {
    const char* op;
    int64_t num_rows;
    const int64_t* positions;
    BlockTable table;
    int32_t* seq_lens;
    int64_t* new_positions;
    Vector<int64_t> slots;
    int64_t max_model_len;
};

inline EagleArguments check_eagle_step(const char* op, const Tensor& positions, const Tensor& block_table,
                                       const Tensor& seq_lens, const Tensor& new_positions,
                                       const Tensor& slot_mapping, int64_t block_size,
                                       int64_t max_model_len) {
    const Argument po{op, "positions", positions}, bt{op, "block_table", block_table},
        sl{op, "seq_lens", seq_lens}, np{op, "new_positions", new_positions},
        sm{op, "slot_mapping", slot_mapping};
    check_positive(op, "block_size", block_size);
    check_positive(op, "max_model_len", max_model_len);
    EagleArguments a{};
    a.op = op;
    a.positions = int64_view(po, 0, "[num_rows]").data;
    const int64_t n = a.num_rows = positions.size(0);
    a.table = block_table_view(bt, n, block_size);
    if (n > 0 && a.table.columns < 1) bt.must_be("[num_rows, max_num_blocks] with at least one column");
    a.seq_lens = int32_view(sl, n, "[num_rows]").data;
    a.new_positions = int64_view(np, n, "[num_rows]").data;
    a.slots = int64_view(sm, n, "[num_rows]");
    a.max_model_len = max_model_len;
    if (positions.data_ptr() == new_positions.data_ptr()) {
        po.same_device(block_table);
        check_placement(op, {bt}, {sl, np, sm});
    } else {
        check_placement(op, {po, bt}, {sl, np, sm});
    }
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const EagleArguments& a, int64_t row) {
    if (a.positions[row] < -1) return {kPositionOutside, row, a.positions[row] + 1, a.max_model_len};
    return {};
}

NWOR_HOST_DEVICE inline void eagle_row(const EagleArguments& a, int64_t i) {
    if (i >= a.num_rows) {
        a.slots.set(i, kPadSlot);
        return;
    }
    const bool outside = a.positions[i] >= a.max_model_len - 1;
    const int64_t next = outside ? 0 : a.positions[i] + 1;
    int64_t slot = kPadSlot;
    if (!outside && next >= 0) {
        const int64_t column = least(next / a.table.block_size, a.table.columns - 1);
        slot = int64_t{a.table.data[i * a.table.row_stride + column]} * a.table.block_size +
               next % a.table.block_size;
    }
    const int64_t length = outside ? 1 : int64_t{a.seq_lens[i]} + 1;
    a.new_positions[i] = next;
    a.slots.set(i, slot);
    a.seq_lens[i] = static_cast<int32_t>(least(length, a.max_model_len));
}

// ---------------------------------------------------------------- prepare_inputs_padded

struct PaddedInputsArguments {
    const char* op;
    int64_t num_rows;
    const int32_t* cu_num_drafts;
    const int32_t* valid_count;
    const int32_t* starts;
    const bool* discarded;  // null if not given
    MutableIds indices, num_rejected;

    int64_t num_items() const { return std::max(indices.length, num_rejected.length); }
};

inline PaddedInputsArguments check_inputs_padded(const char* op, const Tensor& cu_num_draft_tokens,
                                                 const Tensor& valid_sampled_count,
                                                 const Tensor& query_start_loc,
                                                 const Tensor& token_indices_to_sample,
                                                 const Tensor& num_rejected,
                                                 const std::optional<Tensor>& discarded) {
    const Argument cu{op, "cu_num_draft_tokens", cu_num_draft_tokens},
        vc{op, "valid_sampled_count", valid_sampled_count}, qs{op, "query_start_loc", query_start_loc},
        ti{op, "token_indices_to_sample", token_indices_to_sample}, nr{op, "num_rejected", num_rejected};
    PaddedInputsArguments a{};
    a.op = op;
    a.cu_num_drafts = int32_view(cu, 0, "[num_rows]").data;
    const int64_t n = a.num_rows = cu_num_draft_tokens.size(0);
    a.valid_count = int32_view(vc, n, "[num_rows]").data;
    a.starts = int32_view(qs, n + 1, "[num_rows + 1]").data;
    a.indices = mutable_ids_view(ti, n, "[num_rows]");
    a.num_rejected = mutable_ids_view(nr, n, "[num_rows]");
    std::vector<Argument> inputs{cu, vc, qs};
    if (discarded.has_value()) {
        inputs.push_back({op, "discarded", *discarded});
        a.discarded = bool_view(inputs.back(), n, "[num_rows]").data;
    }
    check_placement(op, inputs, {ti, nr});
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const PaddedInputsArguments& a, int64_t row) {
    const int64_t before = row == 0 ? 0 : a.cu_num_drafts[row - 1];
    if (a.cu_num_drafts[row] < before) return {kDraftsDecrease, row, a.cu_num_drafts[row], before};
    return problem_of_starts(a.starts, row);
}

NWOR_HOST_DEVICE inline void padded_inputs_row(const PaddedInputsArguments& a, int64_t i) {
    int64_t index = 0, rejected = 0;
    if (i < a.num_rows) {
        const int64_t drafts = int64_t{a.cu_num_drafts[i]} - (i == 0 ? 0 : a.cu_num_drafts[i - 1]);
        const int64_t begin = a.starts[i], end = a.starts[i + 1];
        const bool is_discarded =
            (a.discarded != nullptr && a.discarded[i]) || (drafts > 0 && a.valid_count[i] <= 0);
        if (end > begin && !is_discarded) {
            rejected = drafts > 0 ? most(drafts + 1 - a.valid_count[i], 0) : 0;
            index = most(end - 1 - rejected, 0);
        }
    }
    if (i < a.indices.length) a.indices.set(i, index);
    if (i < a.num_rejected.length) a.num_rejected.set(i, rejected);
}

// ---------------------------------------------------------------- prepare_next_token_padded

struct NextTokenArguments {
    const char* op;
    int64_t num_rows, columns;
    Ids sampled;  // column 0
    int64_t column_stride;
    const bool* discarded;
    Ids backup;
    MutableIds next_ids, valid_count;
    int64_t vocab_size;

    int64_t num_items() const { return std::max(next_ids.length, valid_count.length); }
};

inline NextTokenArguments check_next_token_padded(const char* op, const Tensor& sampled_token_ids,
                                                  const Tensor& discarded,
                                                  const Tensor& backup_next_token_ids,
                                                  const Tensor& next_token_ids,
                                                  const Tensor& valid_sampled_count, int64_t vocab_size) {
    const Argument sa{op, "sampled_token_ids", sampled_token_ids}, di{op, "discarded", discarded},
        ba{op, "backup_next_token_ids", backup_next_token_ids}, nt{op, "next_token_ids", next_token_ids},
        vc{op, "valid_sampled_count", valid_sampled_count};
    check_positive(op, "vocab_size", vocab_size);
    check_ids(sa);
    if (sampled_token_ids.dim() != 2) sa.must_be("[num_rows, num_sampled]");
    NextTokenArguments a{};
    a.op = op;
    const int64_t n = a.num_rows = sampled_token_ids.size(0);
    a.columns = sampled_token_ids.size(1);
    a.sampled = {sampled_token_ids.data_ptr(), sampled_token_ids.scalar_type() == ScalarType::Long,
                 sampled_token_ids.stride(0), n};
    a.column_stride = sampled_token_ids.stride(1);
    a.discarded = bool_view(di, n, "[num_rows]").data;
    a.backup = ids_view(ba, n, "[num_rows]");
    a.next_ids = mutable_ids_view(nt, n, "[num_rows]");
    a.valid_count = mutable_ids_view(vc, n, "[num_rows]");
    a.vocab_size = vocab_size;
    check_placement(op, {sa, di, ba}, {nt, vc});
    return a;
}

NWOR_HOST_DEVICE inline void next_token_row(const NextTokenArguments& a, int64_t i) {
    int64_t next = 0, count = 0;
    if (i < a.num_rows) {
        next = a.backup[i];
        Ids row = a.sampled;
        row.stride = 1;
        const int64_t start = i * a.sampled.stride;
        for (int64_t c = 0; !a.discarded[i] && c < a.columns; ++c) {
            const int64_t id = row[start + c * a.column_stride];
            if (id < 0 || id >= a.vocab_size) continue;
            next = id;
            ++count;
        }
    }
    if (i < a.next_ids.length) a.next_ids.set(i, next);
    if (i < a.valid_count.length) a.valid_count.set(i, count);
}

// ---------------------------------------------------------------- gumbel_sample

struct SampleArguments {
    const char* op;
    int64_t num_rows, vocab_size, num_states;
    const char* logits;
    int64_t row_stride, vocab_stride;
    ScalarType dtype;
    int32_t element_size;
    Ids idx_mapping;
    const float* temperature;
    const int64_t* seeds;
    const int64_t* positions;
    const int64_t* step;
    int64_t step_stride;       // 0: one step for all rows
    MutableIdColumns sampled;  // without columns: a vector
    char* cache;               // null if not given
    int64_t cache_state_stride, cache_column_stride, cache_vocab_stride, cache_columns;
    int64_t* workspace;  // null if not given

    NWOR_HOST_DEVICE int64_t step_of(int64_t row) const { return step[row * step_stride]; }
    // Return the request state of a row, or -1 if the row is padded or its index is out of range.
    NWOR_HOST_DEVICE int64_t state_of(int64_t row) const {
        const int64_t state = idx_mapping[row];
        return state >= 0 && state < num_states ? state : -1;
    }
};

inline void check_logits_cache(SampleArguments& a, const Argument& c, const Tensor& logits) {
    const Tensor& cache = c.tensor;
    c.dtype(logits.scalar_type());
    if (cache.dim() != 3 || cache.size(0) < a.num_states || cache.size(2) < a.vocab_size)
        c.must_be("[>= ", a.num_states, " request states, steps, >= ", a.vocab_size, " logits]");
    a.cache = static_cast<char*>(cache.data_ptr());
    a.cache_columns = cache.size(1);
    a.cache_state_stride = cache.stride(0);
    a.cache_column_stride = cache.stride(1);
    a.cache_vocab_stride = cache.stride(2);
}

inline SampleArguments check_gumbel_sample(const char* op, const Tensor& logits, const Tensor& idx_mapping,
                                           const Tensor& temperature, const Tensor& seeds,
                                           const Tensor& positions, const Tensor& step, const Tensor& sampled,
                                           const std::optional<Tensor>& logits_cache,
                                           const std::optional<Tensor>& workspace) {
    const Argument lo{op, "logits", logits}, im{op, "idx_mapping", idx_mapping},
        te{op, "temperature", temperature}, se{op, "seeds", seeds}, po{op, "positions", positions},
        st{op, "step", step}, sa{op, "sampled", sampled};
    SampleArguments a{};
    a.op = op;
    a.dtype = logits.scalar_type();
    check_floats(lo);
    if (logits.dim() != 2 || logits.size(1) < 1 || logits.size(1) > INT32_MAX)
        lo.must_be("[num_rows, vocab_size] with at least one token and fewer than 2^31");
    const int64_t n = a.num_rows = logits.size(0);
    a.vocab_size = logits.size(1);
    a.logits = static_cast<const char*>(logits.data_ptr());
    a.row_stride = logits.stride(0);
    a.vocab_stride = logits.stride(1);
    a.element_size = static_cast<int32_t>(logits.element_size());
    a.idx_mapping = ids_view(im, n, "[num_rows]");
    a.temperature = vector_view<float>(te, ScalarType::Float, 0, "[num_states]").data;
    a.seeds = int64_view(se, 0, "[num_states]").data;
    if (seeds.size(0) != temperature.size(0))
        se.must_be("one for each entry of temperature, ", describe(temperature));
    a.num_states = temperature.size(0);
    a.positions = int64_view(po, n, "[num_rows]").data;
    st.dtype(ScalarType::Long);
    if (step.dim() > 1 || (step.numel() != 1 && step.numel() < n))
        st.must_be("one element or one for each of ", n, " rows");
    st.contiguous();
    a.step = static_cast<const int64_t*>(step.data_ptr());
    a.step_stride = step.dim() == 1 && step.size(0) != 1 ? 1 : 0;
    check_ids(sa);
    if (sampled.dim() < 1 || sampled.dim() > 2 || sampled.size(0) < n)
        sa.must_be("[num_rows] or [num_rows, steps] with at least ", n, " rows");
    a.sampled = mutable_columns_view(sampled, n);
    if (sampled.dim() == 2 && a.sampled.count == 0) sa.must_be("[num_rows, steps] with at least one step");
    std::vector<Argument> outputs{sa};
    if (logits_cache.has_value()) {
        outputs.push_back({op, "logits_cache", *logits_cache});
        check_logits_cache(a, outputs.back(), logits);
    }
    if (workspace.has_value()) {
        outputs.push_back({op, "workspace", *workspace});
        a.workspace = int64_view(outputs.back(), 2 * n, "[2 * num_rows]").data;
    }
    check_placement(op, {lo, im, te, se, po, st}, outputs);
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const SampleArguments& a, int64_t row) {
    const int64_t state = a.idx_mapping[row], step = a.step_of(row);
    if (state < 0) return {};
    if (state >= a.num_states) return {kStateOutside, row, state, a.num_states};
    if (a.sampled.count > 0 && !a.sampled.has(step)) return {kStepOutside, row, step, a.sampled.count};
    if (a.cache != nullptr && (step < 0 || step >= a.cache_columns))
        return {kStepOutside, row, step, a.cache_columns};
    return {};
}

NWOR_HOST_DEVICE inline void set_sampled(const SampleArguments& a, int64_t row, int64_t token) {
    if (a.sampled.count == 0) return a.sampled.first.set(row, token);
    const int64_t step = a.step_of(row);
    if (a.sampled.has(step)) a.sampled[step].set(row, token);
}

// Return the place in the cache for the logits of a row, or null.
NWOR_HOST_DEVICE inline char* cache_row(const SampleArguments& a, int64_t row) {
    const int64_t step = a.step_of(row), state = a.state_of(row);
    if (a.cache == nullptr || state < 0 || step < 0 || step >= a.cache_columns) return nullptr;
    return a.cache + (state * a.cache_state_stride + step * a.cache_column_stride) * a.element_size;
}

// ---------------------------------------------------------------- copy_expand_inputs

struct ExpandArguments {
    const char* op;
    Rows rows;
    int64_t num_target_tokens;
    Ids target_ids;
    const int64_t* target_positions;
    const int32_t* starts;
    Ids num_rejected, next_tokens;
    bool by_state;  // next_tokens is indexed by request state
    Vector<int32_t> input_ids;
    Vector<int64_t> positions;
    Vector<bool> is_rejected, is_masked;
    MutableIds new_indices;
    bool maps_hidden;
    MutableIds hidden_mapping;  // only if maps_hidden
    int64_t num_new, growth, max_position;
    int64_t padding_id, mask_id;
    bool shift;

    int64_t num_items() const {
        return std::max({input_ids.length, new_indices.length, maps_hidden ? hidden_mapping.length : 0});
    }
    NWOR_HOST_DEVICE int64_t num_tokens(int64_t row) const { return int64_t{starts[row + 1]} - starts[row]; }
    // Return the number of target tokens that are copied.
    NWOR_HOST_DEVICE int64_t num_copied(int64_t row) const {
        const int64_t tokens = num_tokens(row);
        return most(tokens - least(most(num_rejected[row], 0), tokens) - (shift ? 1 : 0), 0);
    }
    NWOR_HOST_DEVICE int64_t out_start(int64_t row) const { return starts[row] + row * growth; }
};

inline ExpandArguments check_expand(
    const char* op, const Tensor& target_input_ids, const Tensor& target_positions,
    const Tensor& target_query_start_loc, const Tensor& num_rejected, const Tensor& next_token_ids,
    const Tensor& input_ids, const Tensor& positions, const Tensor& is_rejected, const Tensor& is_masked,
    const Tensor& new_token_indices, int64_t num_new_tokens, int64_t padding_token_id, int64_t mask_token_id,
    bool shift_input_ids, const std::optional<int64_t>& max_model_len,
    const std::optional<Tensor>& idx_mapping, const std::optional<Tensor>& hidden_state_mapping) {
    const Argument ti{op, "target_input_ids", target_input_ids}, tp{op, "target_positions", target_positions},
        tq{op, "target_query_start_loc", target_query_start_loc}, nr{op, "num_rejected", num_rejected},
        nt{op, "next_token_ids", next_token_ids}, ii{op, "input_ids", input_ids},
        po{op, "positions", positions}, ir{op, "is_rejected", is_rejected}, ms{op, "is_masked", is_masked},
        ni{op, "new_token_indices", new_token_indices};
    check_positive(op, "num_new_tokens", num_new_tokens);
    check_id(op, "padding_token_id", padding_token_id);
    check_id(op, "mask_token_id", mask_token_id);
    if (max_model_len.has_value()) check_positive(op, "max_model_len", *max_model_len);
    ExpandArguments a{};
    a.op = op;
    a.num_rejected = ids_view(nr, 0, "[num_rows]");
    const int64_t n = num_rejected.size(0);
    a.rows = rows_of(op, idx_mapping, n);
    a.target_ids = ids_view(ti, 0, "[num_tokens]");
    a.target_positions = int64_view(tp, 0, "[num_tokens]").data;
    a.num_target_tokens = std::min(target_input_ids.size(0), target_positions.size(0));
    a.starts = int32_view(tq, n + 1, "[num_rows + 1]").data;
    a.by_state = idx_mapping.has_value();
    a.next_tokens = ids_view(nt, a.by_state ? 0 : n, a.by_state ? "[num_states]" : "[num_rows]");
    a.input_ids = int32_view(ii, 0, "[capacity]");
    const int64_t capacity = input_ids.size(0);
    a.positions = int64_view(po, 0, "[capacity]");
    a.is_rejected = bool_view(ir, 0, "[capacity]");
    a.is_masked = bool_view(ms, 0, "[capacity]");
    for (const Argument& out : {po, ir, ms})
        if (out.tensor.size(0) != capacity) out.must_be("as long as input_ids, ", describe(input_ids));
    a.new_indices = mutable_ids_view(ni, n * num_new_tokens, "[num_rows * num_new_tokens]");
    a.num_new = num_new_tokens;
    a.growth = num_new_tokens - (shift_input_ids ? 1 : 0);
    a.max_position = max_model_len.has_value() ? *max_model_len - 1 : INT64_MAX;
    a.padding_id = padding_token_id;
    a.mask_id = mask_token_id;
    a.shift = shift_input_ids;
    std::vector<Argument> inputs{ti, tp, tq, nr, nt}, outputs{ii, po, ir, ms, ni};
    if (idx_mapping.has_value()) inputs.push_back({op, "idx_mapping", *idx_mapping});
    if (hidden_state_mapping.has_value()) {
        if (!shift_input_ids)
            fail(op, "hidden_state_mapping must be None without shift_input_ids, got ",
                 describe(*hidden_state_mapping));
        outputs.push_back({op, "hidden_state_mapping", *hidden_state_mapping});
        a.maps_hidden = true;
        a.hidden_mapping = mutable_ids_view(outputs.back(), 0, "[num_tokens]");
    }
    check_placement(op, inputs, outputs);
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const ExpandArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (a.by_state && a.rows.idx_mapping[row] < 0) return {};
    if (const Found f = problem_of_starts(a.starts, row)) return f;
    const int64_t end = a.starts[row + 1], new_end = a.out_start(row + 1);
    if (end > a.num_target_tokens) return {kTokensPastTarget, row, end, a.num_target_tokens};
    if (a.maps_hidden && end > a.hidden_mapping.length)
        return {kTokensPastCapacity, row, end, a.hidden_mapping.length};
    if (new_end > a.input_ids.length) return {kTokensPastCapacity, row, new_end, a.input_ids.length};
    if (a.by_state && a.rows.idx_mapping[row] >= a.next_tokens.length)
        return {kStateOutside, row, a.rows.idx_mapping[row], a.next_tokens.length};
    return {};
}

// Write token t of the outputs, t < capacity.
NWOR_HOST_DEVICE inline void expand_token(const ExpandArguments& a, int64_t t, int64_t num_real) {
    const int64_t row = row_of_token(a.starts, num_real, t, a.growth);
    int64_t id = a.padding_id, position = 0;
    bool rejected = true, masked = false;
    if (row < num_real && a.num_tokens(row) > 0 && a.starts[row] < a.num_target_tokens) {
        const int64_t j = t - a.out_start(row), copied = a.num_copied(row);
        position = sum_up_to(a.max_position, a.target_positions[most(a.starts[row], 0)], j);
        rejected = j >= copied + a.num_new;
        masked = j > copied && !rejected;
        if (j < copied)
            id = a.target_ids.at(a.starts[row] + j + (a.shift ? 1 : 0));
        else if (j == copied)
            id = a.next_tokens.at(a.by_state ? a.rows.idx_mapping[row] : row);
        else if (masked)
            id = a.mask_id;
    }
    a.input_ids[t] = static_cast<int32_t>(id);
    a.positions[t] = position;
    a.is_rejected[t] = rejected;
    a.is_masked[t] = masked;
}

// Write element i of the outputs that do not have the length of the expanded batch.
NWOR_HOST_DEVICE inline void expand_index(const ExpandArguments& a, int64_t i, int64_t num_real) {
    if (i < a.new_indices.length) {
        const int64_t row = i / a.num_new;
        const bool has_tokens = row < num_real && a.num_tokens(row) > 0;
        a.new_indices.set(i, has_tokens ? a.out_start(row) + a.num_copied(row) + i % a.num_new : 0);
    }
    if (a.maps_hidden && i < a.hidden_mapping.length) {
        const int64_t row = row_of_token(a.starts, num_real, i);
        a.hidden_mapping.set(i, row < num_real ? i + row * a.growth : -1);
    }
}

// ---------------------------------------------------------------- extend_queries

struct ExtendArguments {
    const char* op;
    Rows rows;
    const int32_t* starts;
    const int32_t* target_seq_lens;
    Vector<const int64_t> positions;
    Vector<const bool> is_rejected;
    BlockTable table;
    Vector<int32_t> query_start_loc, seq_lens;
    Vector<int64_t> slots;
    int64_t growth, max_model_len;

    int64_t num_items() const { return std::max({query_start_loc.length, seq_lens.length, slots.length}); }
    NWOR_HOST_DEVICE int64_t out_start(int64_t row) const { return starts[row] + row * growth; }
    NWOR_HOST_DEVICE int64_t num_tokens() const { return least(positions.length, is_rejected.length); }
};

inline ExtendArguments check_extend(const char* op, const Tensor& target_query_start_loc,
                                    const Tensor& target_seq_lens, const Tensor& positions,
                                    const Tensor& is_rejected, const Tensor& block_table,
                                    const Tensor& query_start_loc, const Tensor& seq_lens,
                                    const Tensor& slot_mapping, int64_t block_size, int64_t max_model_len,
                                    int64_t num_new_tokens, const std::optional<Tensor>& idx_mapping) {
    const Argument tq{op, "target_query_start_loc", target_query_start_loc},
        ts{op, "target_seq_lens", target_seq_lens}, po{op, "positions", positions},
        ir{op, "is_rejected", is_rejected}, bt{op, "block_table", block_table},
        qs{op, "query_start_loc", query_start_loc}, sl{op, "seq_lens", seq_lens},
        sm{op, "slot_mapping", slot_mapping};
    check_positive(op, "block_size", block_size);
    check_positive(op, "max_model_len", max_model_len);
    check_not_negative(op, "num_new_tokens", num_new_tokens);
    ExtendArguments a{};
    a.op = op;
    a.target_seq_lens = int32_view(ts, 0, "[num_rows]").data;
    const int64_t n = target_seq_lens.size(0);
    a.rows = rows_of(op, idx_mapping, n);
    a.starts = int32_view(tq, n + 1, "[num_rows + 1]").data;
    a.positions = {int64_view(po, 0, "[num_tokens]").data, positions.size(0)};
    a.is_rejected = {bool_view(ir, 0, "[num_tokens]").data, is_rejected.size(0)};
    a.table = block_table_view(bt, n, block_size);
    if (block_table.size(0) != n) bt.must_be("of as many rows as there are queries, ", n);
    a.query_start_loc = int32_view(qs, n + 1, "[num_rows + 1]");
    a.seq_lens = int32_view(sl, n, "[num_rows]");
    a.slots = int64_view(sm, 0, "[capacity]");
    a.growth = num_new_tokens;
    a.max_model_len = max_model_len;
    std::vector<Argument> inputs{tq, ts, po, ir, bt};
    if (idx_mapping.has_value()) inputs.push_back({op, "idx_mapping", *idx_mapping});
    check_placement(op, inputs, {qs, sl, sm});
    return a;
}

NWOR_HOST_DEVICE inline bool needs_slot(const ExtendArguments& a, int64_t token) {
    return !a.is_rejected[token] && a.positions[token] < a.max_model_len;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const ExtendArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (a.rows.idx_mapping.data != nullptr && a.rows.idx_mapping[row] < 0) return {};
    if (const Found f = problem_of_starts(a.starts, row)) return f;
    const int64_t end = a.out_start(row + 1);
    if (end > a.num_tokens()) return {kTokensPastTarget, row, end, a.num_tokens()};
    if (end > a.slots.length) return {kTokensPastCapacity, row, end, a.slots.length};
    for (int64_t t = a.out_start(row); t < end; ++t)
        if (needs_slot(a, t) && (a.positions[t] < 0 || a.positions[t] >= a.table.num_positions()))
            return {kPositionOutside, t, a.positions[t], a.table.num_positions()};
    return {};
}

NWOR_HOST_DEVICE inline void extend_item(const ExtendArguments& a, int64_t i, int64_t num_real) {
    a.query_start_loc.set(i, a.out_start(least(i, num_real)));
    a.seq_lens.set(i, i < num_real ? least(int64_t{a.target_seq_lens[i]} + a.growth, a.max_model_len) : 0);
    if (i >= a.slots.length) return;
    const int64_t row = row_of_token(a.starts, num_real, i, a.growth);
    const bool owned = row < num_real && i < a.num_tokens();
    a.slots[i] = owned && needs_slot(a, i) ? a.table.slot(row, a.positions[i]) : kPadSlot;
}

// ---------------------------------------------------------------- dcp_local_seq_lens

struct LocalLensArguments {
    const char* op;
    int64_t num_rows;
    const int32_t* seq_lens;
    Vector<int32_t> local;
    int64_t size, rank, interleave;
};

inline LocalLensArguments check_local_seq_lens(const char* op, const Tensor& seq_lens,
                                               const Tensor& local_seq_lens, int64_t dcp_size,
                                               int64_t dcp_rank, int64_t cp_interleave) {
    const Argument sl{op, "seq_lens", seq_lens}, lo{op, "local_seq_lens", local_seq_lens};
    check_positive(op, "dcp_size", dcp_size);
    check_positive(op, "cp_interleave", cp_interleave);
    if (dcp_rank < 0 || dcp_rank >= dcp_size)
        fail(op, "dcp_rank must be in [0, ", dcp_size, "), got ", dcp_rank);
    LocalLensArguments a{};
    a.op = op;
    a.seq_lens = int32_view(sl, 0, "[num_rows]").data;
    a.num_rows = seq_lens.size(0);
    a.local = int32_view(lo, a.num_rows, "[num_rows]");
    a.size = dcp_size;
    a.rank = dcp_rank;
    a.interleave = cp_interleave;
    if (seq_lens.data_ptr() == local_seq_lens.data_ptr())
        lo.same_device(seq_lens);
    else
        check_placement(op, {sl}, {lo});
    return a;
}

NWOR_HOST_DEVICE inline void local_lens_row(const LocalLensArguments& a, int64_t i) {
    int64_t local = 0;
    if (i < a.num_rows) {
        const int64_t round = a.size * a.interleave, length = most(a.seq_lens[i], 0);
        const int64_t rest = most(length % round - a.rank * a.interleave, 0);
        local = length / round * a.interleave + least(rest, a.interleave);
    }
    a.local.set(i, local);
}

// ---------------------------------------------------------------- the ops

template <class Device>
void register_drafter(Library& m) {
    NWOR_OP(m, prepare_prefill_inputs, check_prefill);
    NWOR_OP(m, prepare_decode_inputs, check_decode);
    NWOR_OP(m, update_draft_inputs, check_update);
    NWOR_OP(m, compute_slot_mappings, check_slot_mappings);
    NWOR_OP(m, eagle_step, check_eagle_step);
    NWOR_OP(m, prepare_inputs_padded, check_inputs_padded);
    NWOR_OP(m, prepare_next_token_padded, check_next_token_padded);
    NWOR_OP(m, gumbel_sample, check_gumbel_sample);
    NWOR_OP(m, copy_expand_inputs, check_expand);
    NWOR_OP(m, extend_queries, check_extend);
    NWOR_OP(m, dcp_local_seq_lens, check_local_seq_lens);
}

}  // namespace nwor
