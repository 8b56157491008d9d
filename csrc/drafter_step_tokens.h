// The op gather_step_tokens: the tokens that a step sampled, and the other tokens that it computed.
#pragma once

#include <algorithm>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

struct StepTokensArguments {
    const char* op;
    Rows rows;
    Ids input_ids;
    const int32_t* starts;
    const int32_t* logit_starts;
    Ids num_sampled, last_sampled;
    MutableIdColumns sampled;
    MutableIds context;

    int64_t num_items() const { return std::max(sampled.first.length * sampled.count, context.length); }
    NWOR_HOST_DEVICE int64_t num_drafts(int64_t row) const {
        const int64_t drafts = int64_t{logit_starts[row + 1]} - logit_starts[row] - 1;
        return least(most(drafts, 0), most(int64_t{starts[row + 1]} - starts[row], 0));
    }
};

// ---------------------------------------------------------------- check

inline StepTokensArguments check_step_tokens(
    const char* op,
    const Tensor& input_ids,        // ids [num_tokens]
    const Tensor& query_start_loc,  // int32 [num_rows + 1]
    const Tensor& cu_num_logits,    // int32 [num_rows + 1]
    const Tensor& idx_mapping,      // ids [num_rows]
    const Tensor& num_sampled,      // ids [num_rows]
    const Tensor& last_sampled,     // ids [num_states]
    const Tensor& sampled_tokens,   // ids [num_rows, most sampled tokens], written
    const Tensor& context_tokens    // ids [num_tokens], written
) {
    const Argument ii{op, "input_ids", input_ids}, qs{op, "query_start_loc", query_start_loc},
        cl{op, "cu_num_logits", cu_num_logits}, im{op, "idx_mapping", idx_mapping},
        ns{op, "num_sampled", num_sampled}, ls{op, "last_sampled", last_sampled},
        st{op, "sampled_tokens", sampled_tokens}, ct{op, "context_tokens", context_tokens};
    StepTokensArguments a{};
    a.op = op;
    a.rows.idx_mapping = ids_view(im, 0, "[num_rows]");
    const int64_t n = a.rows.count = idx_mapping.size(0);
    a.input_ids = ids_view(ii, 0, "[num_tokens]");
    a.starts = int32_view(qs, n + 1, "[num_rows + 1]").data;
    a.logit_starts = int32_view(cl, n + 1, "[num_rows + 1]").data;
    a.num_sampled = ids_view(ns, n, "[num_rows]");
    a.last_sampled = ids_view(ls, 0, "[num_states]");
    check_ids(st);
    if (sampled_tokens.dim() != 2 || sampled_tokens.size(0) < n || sampled_tokens.size(1) < 1)
        st.must_be("[num_rows, most sampled tokens] with at least ", n, " rows and one column");
    a.sampled = mutable_columns_view(sampled_tokens, n);
    a.sampled.first.length = sampled_tokens.size(0);
    a.context = mutable_ids_view(ct, 0, "[num_tokens]");
    check_placement(op, {ii, qs, cl, im, ns, ls}, {st, ct});
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline Found problem_of_row(const StepTokensArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kQueriesDecrease)) return f;
    if (a.starts[row + 1] > a.input_ids.length)
        return {kTokensPastIds, row, a.starts[row + 1], a.input_ids.length};
    if (a.num_sampled[row] > 0 && a.rows.idx_mapping[row] >= a.last_sampled.length)
        return {kStateOutside, row, a.rows.idx_mapping[row], a.last_sampled.length};
    return {};
}

// Write column `column` of row `row` of the sampled tokens: accepted drafts, the target's own token, then -1.
NWOR_HOST_DEVICE inline void sampled_item(const StepTokensArguments& a, int64_t row, int64_t column) {
    int64_t id = -1;
    if (a.rows.is_real(row)) {
        const int64_t accepted = a.num_sampled[row] - 1;
        const int64_t first_draft = a.starts[row + 1] - a.num_drafts(row);
        if (column == accepted) {
            const int64_t state = a.rows.idx_mapping[row];
            if (state < a.last_sampled.length) id = a.last_sampled[state];
        } else if (column < least(accepted, a.num_drafts(row)) && first_draft >= 0 &&
                   first_draft + column < a.input_ids.length) {
            id = a.input_ids[first_draft + column];
        }
    }
    a.sampled[column].set(row, id);
}

// Write token t of the context: the step's input, without its drafts.
NWOR_HOST_DEVICE inline void context_item(const StepTokensArguments& a, int64_t t, int64_t num_real) {
    const int64_t row = row_of_token(a.starts, num_real, t);
    const bool is_context =
        row < num_real && t < a.input_ids.length && t < a.starts[row + 1] - a.num_drafts(row);
    a.context.set(t, is_context ? a.input_ids[t] : -1);
}

NWOR_HOST_DEVICE inline void step_tokens_item(const StepTokensArguments& a, int64_t i, int64_t num_real) {
    if (i < a.sampled.first.length * a.sampled.count)
        sampled_item(a, i / a.sampled.count, i % a.sampled.count);
    if (i < a.context.length) context_item(a, i, num_real);
}

}  // namespace nwor
