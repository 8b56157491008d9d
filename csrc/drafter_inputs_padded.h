// The op prepare_inputs_padded: the token to sample from, if rejected tokens stay in the batch.
#pragma once

#include <algorithm>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

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

// ---------------------------------------------------------------- check

inline PaddedInputsArguments check_inputs_padded(
    const char* op,
    const Tensor& cu_num_draft_tokens,      // int32 [num_rows]
    const Tensor& valid_sampled_count,      // int32 [num_rows]
    const Tensor& query_start_loc,          // int32 [num_rows + 1]
    const Tensor& token_indices_to_sample,  // ids [num_rows], written
    const Tensor& num_rejected,             // ids [num_rows], written
    const std::optional<Tensor>& discarded  // bool [num_rows]
) {
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

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline Found problem_of_row(const PaddedInputsArguments& a, int64_t row) {
    const int64_t before = row == 0 ? 0 : a.cu_num_drafts[row - 1];
    if (a.cu_num_drafts[row] < before) return {kDraftsDecrease, row, a.cu_num_drafts[row], before};
    return problem_of_starts(a.starts, row, kQueriesDecrease);
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

}  // namespace nwor
