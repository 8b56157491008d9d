// The op copy_expand_inputs: a batch with new tokens after each query.
#pragma once

#include <algorithm>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

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

// ---------------------------------------------------------------- check

inline ExpandArguments check_expand(
    const char* op,
    const Tensor& target_input_ids,        // ids [num_tokens]
    const Tensor& target_positions,        // int64 [num_tokens]
    const Tensor& target_query_start_loc,  // int32 [num_rows + 1]
    const Tensor& num_rejected,            // ids [num_rows]
    const Tensor& next_token_ids,          // ids [num_rows], or [num_states] with idx_mapping
    const Tensor& input_ids,               // int32 [capacity], written
    const Tensor& positions,               // int64 [capacity], written
    const Tensor& is_rejected,             // bool [capacity], written
    const Tensor& is_masked,               // bool [capacity], written
    const Tensor& new_token_indices,       // ids [num_rows * num_new_tokens], written
    int64_t num_new_tokens, int64_t padding_token_id, int64_t mask_token_id, bool shift_input_ids,
    const std::optional<int64_t>& max_model_len,
    const std::optional<Tensor>& idx_mapping,          // ids [num_rows]
    const std::optional<Tensor>& hidden_state_mapping  // ids [num_tokens], written
) {
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
    add_given(inputs, op, "idx_mapping", idx_mapping);
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

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline Found problem_of_row(const ExpandArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kTargetQueriesDecrease)) return f;
    const int64_t end = a.starts[row + 1], new_end = a.out_start(row + 1);
    if (end > a.num_target_tokens) return {kTokensPastTarget, row, end, a.num_target_tokens};
    if (a.maps_hidden && end > a.hidden_mapping.length)
        return {kTokensPastHidden, row, end, a.hidden_mapping.length};
    if (new_end > a.input_ids.length) return {kTokensPastIds, row, new_end, a.input_ids.length};
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

}  // namespace nwor
