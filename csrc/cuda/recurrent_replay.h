// Family recurrent: the accepted rows of a record, copied to shared memory and replayed onto rows of a state.
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

// Starts to copy what is replayed of the record. The block's warps take copies in turn, this one from `copy`
// on.
template <class State, int kWidth, bool kPerChannel>
__device__ void copy_replay(const RecurrentRecord& r, const SharedPlaces& places, const RecurrentRow& row,
                            const BlockPlace& block, int copy) {
    constexpr int kCopies = 2;  // of a row
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    for (; copy < row.rows * kCopies; copy += warps) {
        const int i = copy / kCopies;
        if (copy % kCopies == 0) {
            const char* keys = r.keys + r.key_offset(row.source, row.half, i, block.key_head) * 2;
            copy_row(shared_at<char>(places.raw_replay_keys) + i * kWidth * 2, keys, kWidth * 2);
            if (lane == 0)
                copy_async<4>(shared_at<float>(places.replay_norms) + i,
                              r.norms + r.norm_offset(row.source, row.half, i, block.key_head));
            continue;
        }
        const float* updates = r.values + r.value_offset(row.source, i, block.head) + block.first_value;
        copy_row(shared_at<char>(places.replay_updates) + i * block.num_values * 4, updates,
                 block.num_values * 4);
        const float* decays = r.decays + r.decay_offset(row.source, row.half, i, block.head);
        float* to = shared_at<float>(places.replay_decays);
        if constexpr (kPerChannel) {
            constexpr int kPadded = Rows<State, kWidth>::kPadded;
            for (int k = lane; k < kPadded; k += kWarp) {
                float* place = to + i * kPadded + shared_place<State, kWidth>(k);
                if (k < kWidth)
                    copy_async<4>(place, decays + k);
                else
                    *place = 0.0f;
            }
        } else if (lane == 0) {
            copy_async<4>(to + i, decays);
        }
    }
}

// From raw keys, which have come, to keys.
template <class State, class Input, int kWidth>
__device__ void scale_replay_keys(const SharedPlaces& places, int num_rows) {
    const uint32_t* raw = shared_at<uint32_t>(places.raw_replay_keys);
    constexpr int kPadded = Rows<State, kWidth>::kPadded, kPairs = kPadded / 2;
    for (int i = threadIdx.x; i < num_rows * kPairs; i += blockDim.x) {
        const int row = i / kPairs, k = i % kPairs * 2;
        const float norm = shared_at<float>(places.replay_norms)[row];
        const Pair<Input> two(k < kWidth ? raw[(row * kWidth + k) / 2] : 0);
        *reinterpret_cast<float2*>(shared_at<float>(places.replay_keys) + row * kPadded +
                                   shared_place<State, kWidth>(k)) =
            make_float2(__fmul_rn(two.first, norm), __fmul_rn(two.second, norm));
    }
}

// Onto a warp's rows, of which `value` is the first among the `num_values` of the block.
template <class State, int kWidth, bool kPerChannel>
__device__ void replay(Rows<State, kWidth>* rows, const SharedPlaces& places, int num_rows, int num_values,
                       int value, const LaneOfRow& at) {
    using R = Rows<State, kWidth>;
    const float* updates = shared_at<float>(places.replay_updates) + value + at.group;
    float addend = 0.0f;
#pragma unroll 1
    for (int i = 0; i < num_rows; ++i) {
        decay_rows<State, kWidth, kPerChannel>(
            rows, shared_at<float>(places.replay_decays) + i * (kPerChannel ? R::kPadded : 1), addend, at);
        addend = -0.0f;
        float k[R::kChunks][R::kChunk], u[R::kRows];
        read_vector(k, shared_at<float>(places.replay_keys) + i * R::kPadded, at);
#pragma unroll
        for (int j = 0; j < R::kRows; ++j) u[j] = updates[i * num_values + j * kGroups];
        update_rows(rows, u, k);
    }
}

}  // namespace

}  // namespace nwor
