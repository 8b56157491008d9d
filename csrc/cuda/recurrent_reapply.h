// Family recurrent: copies the accepted rows of a record to shared memory, and reapplies them to rows of a
// state.
#pragma once

#include <cstdint>

#include "../recurrent.h"
#include "async_copies.h"
#include "recurrent_arithmetic.h"
#include "recurrent_delta_rule.h"
#include "recurrent_launch.h"
#include "recurrent_rows.h"
#include "recurrent_shared.h"

namespace nwor {
namespace {

// Starts the copies of the rows to reapply. The warps of the block take copies in turn, and this warp begins
// with `copy`.
template <class State, int kWidth, bool kPerChannel>
__device__ void copy_reapplied(const RecurrentRecord& r, const SharedPlaces& places,
                               const RecurrentEntry& entry, const BlockPlace& block, int copy) {
    constexpr int kCopies = 2;  // per row of the record
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    for (; copy < entry.rows * kCopies; copy += warps) {
        const int i = copy / kCopies;
        const int64_t place = r.row_of(entry.first, i);
        if (copy % kCopies == 0) {  // key and norm
            const char* keys = r.keys + r.key_offset(entry.source, place, block.key_head) * 2;
            copy_row(shared_at<char>(places.raw_reapplied_keys) + i * kWidth * 2, keys, kWidth * 2);
            if (lane == 0)
                copy_async<4>(shared_at<float>(places.reapplied_norms) + i,
                              r.norms + r.norm_offset(entry.source, place, block.key_head));
            continue;
        }
        // Update and decay
        const float* updates = r.updates +
                               r.update_offset(entry.source, r.update_row(entry.first, i), block.head) +
                               block.first_value;
        copy_row(shared_at<char>(places.reapplied_updates) + i * block.num_values * 4, updates,
                 block.num_values * 4);
        const float* decays = r.decays + r.decay_offset(entry.source, place, block.head);
        float* to = shared_at<float>(places.reapplied_decays);
        if constexpr (kPerChannel) {
            constexpr int kPadded = Rows<State, kWidth>::kPadded;
            for (int k = lane; k < kPadded; k += kWarp) {
                float* shared = to + i * kPadded + shared_place<State, kWidth>(k);
                if (k < kWidth)
                    copy_async<4>(shared, decays + k);
                else
                    *shared = 0.0f;
            }
        } else if (lane == 0) {
            copy_async<4>(to + i, decays);
        }
    }
}

// Normalizes the raw keys, whose copies have finished.
template <class State, class Input, int kWidth>
__device__ void scale_reapplied_keys(const SharedPlaces& places, int num_rows) {
    const uint32_t* raw = shared_at<uint32_t>(places.raw_reapplied_keys);
    constexpr int kPadded = Rows<State, kWidth>::kPadded, kPairs = kPadded / 2;
    for (int i = threadIdx.x; i < num_rows * kPairs; i += blockDim.x) {
        const int row = i / kPairs, k = i % kPairs * 2;
        const float norm = shared_at<float>(places.reapplied_norms)[row];
        const Pair<Input> two(k < kWidth ? raw[(row * kWidth + k) / 2] : 0);
        *reinterpret_cast<float2*>(shared_at<float>(places.reapplied_keys) + row * kPadded +
                                   shared_place<State, kWidth>(k)) =
            make_float2(__fmul_rn(two.first, norm), __fmul_rn(two.second, norm));
    }
}

// Reapplies rows of the record to the rows of a warp. `value` is the warp's first row, counted from the first
// of the `num_values` rows of the block.
template <class State, int kWidth, bool kPerChannel>
__device__ void reapply(Rows<State, kWidth>* rows, const SharedPlaces& places, int num_rows, int num_values,
                        int value, const LaneOfRow& at) {
    using R = Rows<State, kWidth>;
    const float* updates = shared_at<float>(places.reapplied_updates) + value + at.group;
    float addend = 0.0f;
#pragma unroll 1
    for (int i = 0; i < num_rows; ++i) {
        decay_rows<State, kWidth, kPerChannel>(
            rows, shared_at<float>(places.reapplied_decays) + i * (kPerChannel ? R::kPadded : 1), addend, at);
        addend = -0.0f;
        float k[R::kChunks][R::kChunk], u[R::kRows];
        read_vector(k, shared_at<float>(places.reapplied_keys) + i * R::kPadded, at);
#pragma unroll
        for (int j = 0; j < R::kRows; ++j) u[j] = updates[i * num_values + j * kGroups];
        update_rows(rows, u, k);
    }
}

}  // namespace

}  // namespace nwor
