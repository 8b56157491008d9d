// The op prepare_prefill_inputs: the inputs of a drafter's first pass.
#pragma once

#include <algorithm>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

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

// ---------------------------------------------------------------- check

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

// ---------------------------------------------------------------- one row or token

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

}  // namespace nwor
