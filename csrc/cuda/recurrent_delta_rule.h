// Family recurrent: the gated delta rule on rows of a state in registers. A token makes of a state h first
// h * decay, then h + u k^T, where its update u is beta * (v - h k); its output is the new h times its query.
//
// Each sum is in the order of Triton's program, whose bits these are (recurrent_arithmetic.h).
#pragma once

#include <algorithm>

#include "launch.h"
#include "recurrent_rows.h"

namespace nwor {
namespace {

// h = h * decay, one decay for all or one for each key channel. A state that was just loaded has +0 where it
// may have -0, as one that 0 was added to: `addend` is 0 for it, and -0, which changes nothing, afterwards.
template <class State, int kWidth, bool kPerChannel>
__device__ void decay_rows(Rows<State, kWidth>* rows, const float* decays, float addend,
                           const LaneOfRow& at) {
    using R = Rows<State, kWidth>;
    if constexpr (kPerChannel) {
        float d[R::kChunks][R::kChunk];
        read_vector(d, decays, at);
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c)
#pragma unroll
                for (int e = 0; e < R::kChunk; ++e)
                    rows->h[j][c][e] = __fmaf_rn(rows->h[j][c][e], d[c][e], addend);
    } else {
        const float d = *decays;
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c)
#pragma unroll
                for (int e = 0; e < R::kChunk; ++e) rows->h[j][c][e] = __fmaf_rn(rows->h[j][c][e], d, addend);
    }
}

// h = h + u k^T
template <class State, int kWidth>
__device__ void update_rows(Rows<State, kWidth>* rows, const float (&u)[Rows<State, kWidth>::kRows],
                            const float (&k)[Rows<State, kWidth>::kChunks][Rows<State, kWidth>::kChunk]) {
    using R = Rows<State, kWidth>;
#pragma unroll
    for (int j = 0; j < R::kRows; ++j)
#pragma unroll
        for (int c = 0; c < R::kChunks; ++c)
#pragma unroll
            for (int e = 0; e < R::kChunk; ++e) rows->h[j][c][e] = __fmaf_rn(k[c][e], u[j], rows->h[j][c][e]);
}

constexpr int kRowsOfTile = 32;  // of a Triton program

// A lane's part of the products of all rows with a vector. A row of Triton's program has a lane for each
// chunk; where that is more than a warp, it is summed in parts.
template <class State, int kWidth>
struct Products {
    using R = Rows<State, kWidth>;
    static constexpr int kParts = std::max(kWidth / (kWarp * R::kChunk), 1);
    static constexpr int kLanesOfSum = kLanes / R::kRows;  // in which `add_lanes` leaves a row's sum
    // The last rows of a tile, in which `dot_chunk` begins with a key's first product: those in a program's
    // last registers, or all; with num_warps=1 none.
    static constexpr int kLastRows = kWidth == 96              ? 0
                                     : R::kChunk * 8 == kWidth ? kRowsOfTile
                                                               : kWarp * R::kChunk * 4 / kWidth;

    float sums[R::kRows * kParts];

    // Of a warp's row j, where `first` is its first of the state.
    static __device__ bool is_last_of_tile(int j, int first, const LaneOfRow& at) {
        return kGroups * (j + 1) + kLastRows > R::kRowsOfWarp &&
               (first + kGroups * j + at.group) % kRowsOfTile >= kRowsOfTile - kLastRows;
    }
};

// The product of one chunk. Triton's compiler begins with the second element, in a tile's last rows with the
// first.
template <int kChunk>
__device__ float dot_chunk(const float (&h)[kChunk], const float (&x)[kChunk], bool first_begins) {
    float sum = first_begins ? __fmaf_rn(h[1], x[1], __fmul_rn(h[0], x[0]))
                             : __fmaf_rn(h[0], x[0], __fmul_rn(h[1], x[1]));
#pragma unroll
    for (int e = 2; e < kChunk; ++e) sum = __fmaf_rn(h[e], x[e], sum);
    return sum;
}

// The products with x. Triton adds a row's chunks by butterfly: those 16 lanes apart first, neighbours last.
// Chunks 16 and 8 apart are in one thread here. `last`: which of the rows are among a tile's last.
template <bool kOfKey, class State, int kWidth>
__device__ Products<State, kWidth> multiply(
    const Rows<State, kWidth>& rows,
    const float (&x)[Rows<State, kWidth>::kChunks][Rows<State, kWidth>::kChunk],
    const bool (&last)[Rows<State, kWidth>::kRows]) {
    using R = Rows<State, kWidth>;
    constexpr int kParts = Products<State, kWidth>::kParts, kChunksOfPart = R::kChunks / kParts;
    constexpr int kLeaves = R::kPadded / (kParts * kLanes * R::kChunk);  // with chunks that are none
    Products<State, kWidth> products;
#pragma unroll
    for (int j = 0; j < R::kRows; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float chunks[kLeaves] = {};
#pragma unroll
            for (int c = 0; c < kChunksOfPart; ++c)
                chunks[c] = dot_chunk(rows.h[j][part * kChunksOfPart + c], x[part * kChunksOfPart + c],
                                      kOfKey && last[j]);
#pragma unroll
            for (int distance = kLeaves / 2; distance > 0; distance /= 2)
#pragma unroll
                for (int c = 0; c < distance; ++c) chunks[c] = __fadd_rn(chunks[c], chunks[c + distance]);
            products.sums[j * kParts + part] = chunks[0];
        }
    }
    return products;
}

// The products, summed over the eight lanes of a row: chunks 4, 2 and 1 apart. A lane returns that of the
// warp's row j = at.lane / kLanesOfSum, and hands over the others.
template <class State, int kWidth>
__device__ float add_lanes(Products<State, kWidth> products, const LaneOfRow& at) {
    using P = Products<State, kWidth>;
    constexpr int kCount = P::R::kRows * P::kParts;
    float (&sums)[kCount] = products.sums;
    int count = kCount;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        const bool upper = at.lane & distance;
        if (count == 1) {
            sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], distance));
            continue;
        }
        count /= 2;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            if (i >= count) break;
            const float kept = upper ? sums[count + i] : sums[i];
            const float handed = upper ? sums[i] : sums[count + i];
            sums[i] = __fadd_rn(kept, __shfl_xor_sync(kAllLanes, handed, distance));
        }
    }
    if constexpr (P::kParts == 2)  // which are side by side: two lanes have each
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], P::kLanesOfSum / 2));
    return sums[0];
}

// The row whose sum `add_lanes` returns, counted from the warp's first, and whether the lane is the first of
// those that have it.
template <class State, int kWidth>
struct LaneOfSum {
    int row;
    bool leads;

    __device__ explicit LaneOfSum(const LaneOfRow& at)
        : row(at.lane / Products<State, kWidth>::kLanesOfSum * kGroups + at.group),
          leads(at.lane % Products<State, kWidth>::kLanesOfSum == 0) {}
};

}  // namespace

}  // namespace nwor
