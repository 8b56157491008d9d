// The op copy_expand_inputs: a batch with a new token in each query.
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
    Vector<bool> is_rejected;
    MutableIds new_indices;
    int64_t max_position;

    int64_t num_items() const { return std::max(input_ids.length, new_indices.length); }
    NWOR_HOST_DEVICE int64_t num_tokens(int64_t row) const { return int64_t{starts[row + 1]} - starts[row]; }
    // Return the number of target tokens that are copied.
    NWOR_HOST_DEVICE int64_t num_copied(int64_t row) const {
        const int64_t tokens = num_tokens(row);
        return most(tokens - least(most(num_rejected[row], 0), tokens), 0);
    }
    NWOR_HOST_DEVICE int64_t out_start(int64_t row) const { return starts[row] + row; }
};

// ---------------------------------------------------------------- check

inline ExpandArguments check_expand(const char* op,
                                    const Tensor& target_input_ids,        // ids [num_tokens]
                                    const Tensor& target_positions,        // int64 [num_tokens]
                                    const Tensor& target_query_start_loc,  // int32 [num_rows + 1]
                                    const Tensor& num_rejected,            // ids [num_rows]
                                    const Tensor& next_token_ids,          // ids [num_rows], or [num_states]
                                    const Tensor& input_ids,               // int32 [capacity], written
                                    const Tensor& positions,               // int64 [capacity], written
                                    const Tensor& is_rejected,             // bool [capacity], written
                                    const Tensor& new_token_indices,       // ids [num_rows], written
                                    const std::optional<int64_t>& max_model_len,
                                    const std::optional<Tensor>& idx_mapping  // ids [num_rows]
) {
    const Argument ti{op, "target_input_ids", target_input_ids}, tp{op, "target_positions", target_positions},
        tq{op, "target_query_start_loc", target_query_start_loc}, nr{op, "num_rejected", num_rejected},
        nt{op, "next_token_ids", next_token_ids}, ii{op, "input_ids", input_ids},
        po{op, "positions", positions}, ir{op, "is_rejected", is_rejected},
        ni{op, "new_token_indices", new_token_indices};
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
    a.positions = int64_view(po, 0, "[capacity]");
    a.is_rejected = bool_view(ir, 0, "[capacity]");
    for (const Argument& out : {po, ir})
        if (out.tensor.size(0) != input_ids.size(0))
            out.must_be("as long as input_ids, ", describe(input_ids));
    a.new_indices = mutable_ids_view(ni, n, "[num_rows]");
    a.max_position = max_model_len.has_value() ? *max_model_len - 1 : INT64_MAX;
    std::vector<Argument> inputs{ti, tp, tq, nr, nt};
    add_given(inputs, op, "idx_mapping", idx_mapping);
    check_placement(op, inputs, {ii, po, ir, ni});
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline Found problem_of_row(const ExpandArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kTargetQueriesDecrease)) return f;
    const int64_t end = a.starts[row + 1], new_end = a.out_start(row + 1);
    if (end > a.num_target_tokens) return {kTokensPastTarget, row, end, a.num_target_tokens};
    if (new_end > a.input_ids.length) return {kTokensPastIds, row, new_end, a.input_ids.length};
    if (a.by_state && a.rows.idx_mapping[row] >= a.next_tokens.length)
        return {kStateOutside, row, a.rows.idx_mapping[row], a.next_tokens.length};
    return {};
}

// Write token t of the outputs, t < capacity.
NWOR_HOST_DEVICE inline void expand_token(const ExpandArguments& a, int64_t t, int64_t num_real) {
    const int64_t row = row_of_token(a.starts, num_real, t, 1);
    int64_t id = 0, position = 0;
    bool rejected = true;
    if (row < num_real && a.num_tokens(row) > 0 && a.starts[row] < a.num_target_tokens) {
        const int64_t j = t - a.out_start(row), copied = a.num_copied(row);
        position = sum_up_to(a.max_position, a.target_positions[most(a.starts[row], 0)], j);
        rejected = j > copied;
        if (j < copied)
            id = a.target_ids.at(a.starts[row] + j);
        else if (j == copied)
            id = a.next_tokens.at(a.by_state ? a.rows.idx_mapping[row] : row);
    }
    a.input_ids[t] = static_cast<int32_t>(id);
    a.positions[t] = position;
    a.is_rejected[t] = rejected;
}

// Write the index of the new token of row i.
NWOR_HOST_DEVICE inline void expand_index(const ExpandArguments& a, int64_t i, int64_t num_real) {
    if (i >= a.new_indices.length) return;
    a.new_indices.set(i, i < num_real && a.num_tokens(i) > 0 ? a.out_start(i) + a.num_copied(i) : 0);
}

}  // namespace nwor
