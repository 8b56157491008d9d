// The op prepare_decode_inputs: the inputs of the second pass, of one token per row.
#pragma once

#include <algorithm>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

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

// ---------------------------------------------------------------- check

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

// ---------------------------------------------------------------- one row or token

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

}  // namespace nwor
