// Part of family drafter: the inputs of a pass of the loop.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

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

inline PrefillArguments check_prefill(
    const char* op,
    const Tensor& target_input_ids,        // ids [num_tokens]
    const Tensor& target_positions,        // int64 [num_tokens]
    const Tensor& target_query_start_loc,  // int32 [num_rows + 1]
    const Tensor& target_seq_lens,         // int32 [num_rows]
    const Tensor& idx_mapping,             // ids [num_rows]
    const Tensor& num_sampled,             // ids [num_rows]
    const Tensor& num_rejected,            // ids [num_rows]
    const Tensor& last_sampled,            // ids [num_states]
    const Tensor& next_prefill_tokens,     // ids [num_states]
    const Tensor& input_ids,               // int32 [capacity], written
    const Tensor& positions,               // int64 [capacity], written
    const Tensor& query_start_loc,         // int32 [num_rows + 1], written
    const Tensor& seq_lens,                // int32 [num_rows], written
    const Tensor& last_token_indices,      // int64 [num_rows], written
    const Tensor& current_draft_step       // int64 one element, [] or [1], written
) {
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
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kTargetQueriesDecrease)) return f;
    if (a.starts[row + 1] > a.num_target_tokens)
        return {kTokensPastTarget, row, a.starts[row + 1], a.num_target_tokens};
    if (a.starts[row + 1] > a.input_ids.length)
        return {kTokensPastIds, row, a.starts[row + 1], a.input_ids.length};
    const Ids& source = a.num_sampled[row] > 0 ? a.last_sampled : a.next_prefill_tokens;
    const int64_t state = a.rows.idx_mapping[row];
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

NWOR_HOST_DEVICE inline void write_item(const PrefillArguments& a, int64_t i) {
    const int64_t num_real = a.rows.num_real();
    prefill_row(a, i, num_real);
    if (i < a.input_ids.length) prefill_token(a, i, num_real);
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

inline DecodeArguments check_decode(
    const char* op,
    const Tensor& draft_tokens,     // ids [num_rows, num_speculative_steps] with at least one column
    const Tensor& target_seq_lens,  // int32 [num_rows]
    const Tensor& num_rejected,     // ids [num_rows]
    const Tensor& input_ids,        // int32 [num_rows], written
    const Tensor& positions,        // int64 [num_rows], written
    const Tensor& query_start_loc,  // int32 [num_rows + 1], written
    const Tensor& seq_lens,         // int32 [num_rows], written
    int64_t max_model_len,
    const std::optional<Tensor>& idx_mapping,       // ids [num_rows]
    const std::optional<Tensor>& sample_positions,  // int64 [num_rows], written
    bool advance_positions) {
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
    add_given(inputs, op, "idx_mapping", idx_mapping);
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

NWOR_HOST_DEVICE inline void write_item(const DecodeArguments& a, int64_t i) {
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
    if (same_start_and_strides(from.tensor, to.tensor)) return;
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

inline UpdateArguments check_update(
    const char* op,
    const Tensor& sampled,             // ids [num_rows]
    const Tensor& current_draft_step,  // int64 one element, [] or [1]
    const Tensor& draft_tokens,        // ids [num_rows, num_speculative_steps], written
    const Tensor& input_ids,           // int32 [num_rows], written
    const Tensor& positions,           // int64 [num_rows], written
    const Tensor& seq_lens,            // int32 [num_rows], written
    int64_t num_speculative_steps, int64_t max_model_len,
    const std::optional<Tensor>& idx_mapping,    // ids [num_rows]
    const std::optional<Tensor>& hidden_states,  // [num_rows, hidden_size]
    const std::optional<Tensor>&
        next_hidden_states,                         // dtype of hidden_states [num_rows, hidden_size], written
    const std::optional<Tensor>& sample_positions,  // int64 [num_rows], written
    bool advance_positions) {
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
    add_given(inputs, op, "idx_mapping", idx_mapping);
    if (sample_positions.has_value()) {
        outputs.push_back({op, "sample_positions", *sample_positions});
        a.sample_positions = int64_view(outputs.back(), n, "[num_rows]").data;
    }
    if (hidden_states.has_value()) {
        const Argument from{op, "hidden_states", *hidden_states},
            to{op, "next_hidden_states", *next_hidden_states};
        from.same_device(sampled);
        check_hidden_states(a, from, to);
        if (!same_start_and_strides(*hidden_states, *next_hidden_states)) inputs.push_back(from);
        outputs.push_back(to);
    }
    check_placement(op, inputs, outputs);
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const UpdateArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (a.rows.is_real(row) && !a.draft_tokens.has(*a.step))
        return {kDraftStepOutside, row, *a.step, a.draft_tokens.count};
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

// ---------------------------------------------------------------- eagle_step

struct EagleArguments {
    const char* op;
    Rows rows;
    const int64_t* positions;
    BlockTable table;
    int32_t* seq_lens;
    int64_t* new_positions;
    Vector<int64_t> slots;
    int64_t max_model_len;

    int64_t num_items() const { return slots.length; }
};

inline EagleArguments check_eagle_step(const char* op,
                                       const Tensor& positions,      // int64 [num_rows]
                                       const Tensor& block_table,    // int32 [num_rows, max_num_blocks]
                                       const Tensor& seq_lens,       // int32 [num_rows], written
                                       const Tensor& new_positions,  // int64 [num_rows], written
                                       const Tensor& slot_mapping,   // int64 [num_rows], written
                                       int64_t block_size, int64_t max_model_len) {
    const Argument po{op, "positions", positions}, bt{op, "block_table", block_table},
        sl{op, "seq_lens", seq_lens}, np{op, "new_positions", new_positions},
        sm{op, "slot_mapping", slot_mapping};
    check_positive(op, "block_size", block_size);
    check_positive(op, "max_model_len", max_model_len);
    EagleArguments a{};
    a.op = op;
    a.positions = int64_view(po, 0, "[num_rows]").data;
    const int64_t n = a.rows.count = positions.size(0);
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
    if (a.positions[row] < -1) return {kPositionBelow, row, a.positions[row], -1};
    return {};
}

NWOR_HOST_DEVICE inline void write_item(const EagleArguments& a, int64_t i) {
    if (i >= a.rows.count) {
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

inline SlotArguments check_slot_mappings(
    const char* op,
    const Tensor& idx_mapping,                // ids [num_rows]
    const Tensor& query_start_loc,            // int32 [num_rows + 1]
    const Tensor& positions,                  // int64 [num_tokens]
    const std::vector<Tensor>& block_tables,  // each int32 [num_rows, max_num_blocks]
    const std::vector<int64_t>& block_sizes,
    const Tensor& slot_mappings,  // int64 [groups, capacity], written
    int64_t cp_size, int64_t cp_rank, int64_t cp_interleave,
    const std::optional<Tensor>& cp_sharded  // bool [groups]
) {
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
        if (cp_size > 1 && !cp_sharded.has_value() && block_sizes[g] % cp_interleave != 0)
            fail(op, "block_sizes[", g, "] must be a multiple of cp_interleave (", cp_interleave,
                 ") with cp_size > 1, got ", block_sizes[g]);
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

NWOR_HOST_DEVICE inline bool ranks_share(const SlotArguments& a, int64_t group) {
    return a.cp_size > 1 && (a.cp_sharded == nullptr || a.cp_sharded[group]);
}

// Return whether a run of tokens of one rank crosses the end of a block. Two tokens would then get one slot.
NWOR_HOST_DEVICE inline bool blocks_split_runs(const SlotArguments& a, int64_t group) {
    return ranks_share(a, group) && a.tables[group].block_size % a.cp_interleave != 0;
}

// Return the position within this rank's share of the sequence, or -1 if another rank holds it.
NWOR_HOST_DEVICE inline int64_t local_position(const SlotArguments& a, int64_t group, int64_t position) {
    if (position < 0 || !ranks_share(a, group)) return position;
    const int64_t of_all_ranks = a.tables[group].block_size * a.cp_size;
    const int64_t offset = position % of_all_ranks;
    if (offset / a.cp_interleave % a.cp_size != a.cp_rank) return -1;
    return position / of_all_ranks * a.tables[group].block_size +
           offset / (a.cp_interleave * a.cp_size) * a.cp_interleave + offset % a.cp_interleave;
}

NWOR_HOST_DEVICE inline int64_t slot_of_token(const SlotArguments& a, int64_t group, int64_t token) {
    if (a.tables[group].block_size == 0 || blocks_split_runs(a, group)) return kPadSlot;
    const int64_t row = row_of_token(a.starts, a.rows.count, token);
    if (row == a.rows.count || token >= a.positions.length) return kPadSlot;
    const int64_t state = a.rows.idx_mapping[row];
    if (state < 0) return kPadSlot;
    return a.tables[group].slot(state, local_position(a, group, a.positions[token]));
}

NWOR_HOST_DEVICE inline Found problem_of_row(const SlotArguments& a, int64_t row) {
    if (const Found f = problem_of_starts(a.starts, row, kQueriesDecrease)) return f;
    const int64_t state = a.rows.idx_mapping[row], end = a.starts[row + 1];
    if (end > a.starts[row] && end > a.capacity) return {kTokensPastMappings, row, end, a.capacity};
    if (state < 0 || end == a.starts[row]) return {};
    if (end > a.positions.length) return {kTokensPastPositions, row, end, a.positions.length};
    for (int64_t g = 0; g < a.num_groups; ++g) {
        const BlockTable& table = a.tables[g];
        if (table.block_size == 0) continue;
        if (blocks_split_runs(a, g)) return {kBlocksSplitRuns, g, table.block_size, a.cp_interleave};
        if (state >= table.rows) return {kStateOutside, row, state, table.rows};
        for (int64_t t = a.starts[row]; t < end; ++t)
            if (a.positions[t] < 0 || local_position(a, g, a.positions[t]) >= table.num_positions())
                return {kPositionOutside, t, a.positions[t], table.num_positions()};
    }
    return {};
}

}  // namespace nwor
