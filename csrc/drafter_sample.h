// The op gumbel_sample: arguments, and the places of its outputs. The kernels draw the tokens.
#pragma once

#include <vector>

#include "drafter_rows.h"

namespace nwor {

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

inline SampleArguments check_gumbel_sample(
    const char* op,
    const Tensor& logits,       // floats [num_rows, vocab_size] with at least one token and fewer than 2^31
    const Tensor& idx_mapping,  // ids [num_rows]
    const Tensor& temperature,  // float32 [num_states]
    const Tensor& seeds,        // int64 [num_states]
    const Tensor& positions,    // int64 [num_rows]
    const Tensor& step,         // int64 one element, [], or one for each row, [num_rows]
    const Tensor& sampled,      // ids [num_rows] or [num_rows, steps], written
    const std::optional<Tensor>& logits_cache,  // dtype of logits [request states, steps, logits], written
    const std::optional<Tensor>& workspace      // int64 [2 * num_rows], written
) {
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

}  // namespace nwor
