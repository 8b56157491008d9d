// The op update_draft_inputs: keeps the sampled tokens and moves the inputs on by one token.
#pragma once

#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

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

// ---------------------------------------------------------------- check

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

// ---------------------------------------------------------------- one row or token

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

}  // namespace nwor
