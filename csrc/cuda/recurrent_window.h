// Family recurrent: the two norms of gated_delta_verify. Before the pass over the state, keys and queries are
// normalized and scaled, and keys are recorded. After the pass, outputs are normalized and gated.
#pragma once

#include <cstdint>

#include "../recurrent.h"
#include "launch.h"
#include "recurrent_arithmetic.h"
#include "recurrent_launch.h"
#include "recurrent_rows.h"
#include "recurrent_shared.h"

namespace nwor {
namespace {

struct VerifyJob {
    VerifyArguments call;
    SharedPlaces shared;
    BlockPlaces blocks;
    bool is_aligned;        // whether the states of slots and of `all_states` are aligned
    bool uses_shared_rows;  // whether states are loaded through shared memory; then they are aligned
    const char* report_as;
};

// The window of a request, for the rows of a block.
struct Window {
    const BlockPlace& block;
    const RecurrentRecord& record;
    int32_t slot, first;  // of the record that the window writes; `RecurrentRecord::row_of`
    int64_t first_token;
    int num_tokens;
    bool has_norm;
};

// ---------------------------------------------------------------- keys and queries

// Returns the factor that scales a query or a key to norm 1. In Triton each warp adds up one segment, and
// then the sums of the segments are added.
template <int kSegments, int kNeighbours>
__device__ float norm_factor(const float (&x)[kSegments][kNeighbours]) {
    float sums[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) sums[s] = sum_of_warp(dot_neighbours<kNeighbours>(x[s], x[s]));
    if constexpr (kSegments == 1) {
        // Triton computes x / sqrt(sum). div.full turns it into a product with an approximation of 1 /
        // sqrt(sum).
        return divide_approx(1.0f, sqrt_approx(__fadd_rn(sums[0], 1e-6f)));
    } else {
        const float sum = kSegments == 2 ? __fadd_rn(sums[0], sums[1])
                                         : __fadd_rn(__fadd_rn(sums[0], sums[kSegments / 2]),
                                                     __fadd_rn(sums[1], sums[kSegments - 1]));
        return rsqrt_approx(__fadd_rn(sum, 1e-6f));
    }
}

// Records the raw key of a token, which the warp has in `bits`, and the factor that normalizes it.
template <int kWidth, class Input, int kSegments, int kNeighbours>
__device__ void record_key(const Window& w, int token, const Input (&bits)[kSegments][kNeighbours],
                           float norm) {
    const RecurrentRecord& r = w.record;
    const int lane = threadIdx.x % kWarp;
    const int64_t row = r.row_of(w.first, token);
    Input* keys = reinterpret_cast<Input*>(r.keys) + r.key_offset(w.slot, row, w.block.key_head);
#pragma unroll
    for (int s = 0; s < kSegments; ++s)
#pragma unroll
        for (int e = 0; e < kNeighbours; ++e) {
            const int place = (s * kWarp + lane) * kNeighbours + e;
            if (place < kWidth) keys[place] = bits[s][e];
        }
    if (lane == 0) r.norms[r.norm_offset(w.slot, row, w.block.key_head)] = norm;
}

// Normalizes the raw keys and scales the raw queries, whose copies have finished. A warp takes one of them at
// a time. Keys are recorded.
template <class State, class Input, int kWidth>
__device__ void scale_window(const VerifyJob& job, const Window& w) {
    constexpr int kPadded = Rows<State, kWidth>::kPadded;
    constexpr int kSegments = kWidth == 96 ? 1 : kWidth < 128 ? kWidth / kWarp : 4;
    constexpr int kNeighbours = kPadded / kWarp / kSegments;  // elements of one lane
    const VerifyArguments& c = job.call;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    for (int i = warp; i < 2 * w.num_tokens; i += warps) {
        const int token = i / 2;
        const bool of_key = i % 2 == 0;
        const Input* raw =
            shared_at<Input>(of_key ? job.shared.raw_keys : job.shared.raw_queries) + token * kWidth;
        Input bits[kSegments][kNeighbours];
        float x[kSegments][kNeighbours];
#pragma unroll
        for (int s = 0; s < kSegments; ++s)
#pragma unroll
            for (int e = 0; e < kNeighbours; ++e) {
                const int place = (s * kWarp + lane) * kNeighbours + e;
                if (place < kWidth) bits[s][e] = raw[place];
                x[s][e] = place < kWidth ? to_float(bits[s][e]) : 0.0f;
            }
        const float factor = c.use_qk_l2norm ? norm_factor(x) : 1.0f;
        float* to = shared_at<float>(of_key ? job.shared.keys : job.shared.queries) + token * kPadded;
#pragma unroll
        for (int s = 0; s < kSegments; ++s)
#pragma unroll
            for (int e = 0; e < kNeighbours; ++e) {
                float scaled = __fmul_rn(x[s][e], factor);
                if (!of_key) scaled = __fmul_rn(scaled, c.scale);
                to[shared_place<State, kWidth>((s * kWarp + lane) * kNeighbours + e)] = scaled;
            }
        if (of_key && w.block.leads_key_head) record_key<kWidth>(w, token, bits, factor);
    }
}

// ---------------------------------------------------------------- outputs

// Writes zeros for the tokens of a request without a state.
template <class Input>
__device__ void zero_outputs(const HeadsView& out,  // [T, HV, dv]
                             const BlockPlace& block, int64_t first_token, int64_t end_token) {
    for (int64_t token = first_token; token < end_token; ++token) {
        Input* to = reinterpret_cast<Input*>(out.data) + out.offset(token, block.head) + block.first_value;
        for (int i = threadIdx.x; i < block.num_values; i += blockDim.x) set(to + i, 0.0f);
    }
}

// Normalizes and gates the outputs, one token per warp. They were rounded, as in a kernel without the norm.
// `Job`: `VerifyJob`, or that of the chunk form.
template <class Input, class Job>
__device__ void norm_outputs(const Job& job, const Window& w) {
    const VerifyArguments& c = job.call;
    const BlockPlace& block = w.block;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const float* weights = shared_at<float>(job.shared.weights);
    for (int token = warp; token < w.num_tokens; token += warps) {
        const Input* outputs = shared_at<Input>(job.shared.outputs) + token * block.num_values;
        const Input* gates = shared_at<Input>(job.shared.gates) + token * block.num_values;
        float sum = 0.0f;
        for (int i = lane; i < block.num_values; i += kWarp) {
            const float o = to_float(outputs[i]);
            sum = __fmaf_rn(o, o, sum);
        }
        sum = sum_of_warp(sum);
        const float factor = rsqrt_approx(sum / static_cast<float>(block.num_values) + c.norm_eps);
        Input* out = reinterpret_cast<Input*>(c.out.data) + c.out.offset(w.first_token + token, block.head);
        for (int i = lane; i < block.num_values; i += kWarp) {
            const float z = to_float(gates[i]);
            const float gate = c.gate_activation == GateActivation::kSilu ? z * sigmoid(z) : sigmoid(z);
            set(out + i, to_float(outputs[i]) * factor * weights[i] * gate);
        }
    }
}

}  // namespace

}  // namespace nwor
