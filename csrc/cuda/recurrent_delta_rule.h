// Family recurrent: the gated delta rule on rows of a state in registers. For each token, the state h becomes
// h * decay, and then h + u k^T with the update u = beta * (v - h k). The output is the new h times the
// query.
//
// The order of additions is that of a Triton kernel (recurrent_arithmetic.h), for the same bits.
#pragma once

#include <algorithm>

#include "launch.h"
#include "recurrent_arithmetic.h"
#include "recurrent_rows.h"

namespace nwor {
namespace {

// h = h * decay + addend, with one decay for all or one for each key channel. The first `addend` after a load
// is 0: it turns -0 into +0, as in Triton's kernel. Later ones are -0, which changes nothing.
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

// A lane's part of the products of all rows with a vector. Triton uses one lane per chunk of a row. With more
// than 32 chunks it sums the row in parts.
template <class State, int kWidth>
struct Products {
    using R = Rows<State, kWidth>;
    static constexpr int kParts = std::max(kWidth / (kWarp * R::kChunk), 1);
    static constexpr int kLanesOfSum =
        kLanes / R::kRows;  // lanes in which `add_lanes` leaves the sum of a row

    float sums[R::kRows * kParts];
};

// Multiplies the rows by x. Triton adds the chunks of a row by butterfly: first the chunks that are 16 lanes
// apart, at the end neighbours. Here one thread has the chunks that are 16 and 8 lanes apart.
template <class State, int kWidth>
__device__ Products<State, kWidth> multiply(
    const Rows<State, kWidth>& rows,
    const float (&x)[Rows<State, kWidth>::kChunks][Rows<State, kWidth>::kChunk]) {
    using R = Rows<State, kWidth>;
    constexpr int kParts = Products<State, kWidth>::kParts, kChunksOfPart = R::kChunks / kParts;
    constexpr int kLeaves = R::kPadded / (kParts * kLanes * R::kChunk);  // with the chunks of the padding
    Products<State, kWidth> products;
#pragma unroll
    for (int j = 0; j < R::kRows; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            float chunks[kLeaves] = {};
#pragma unroll
            for (int c = 0; c < kChunksOfPart; ++c)
                chunks[c] = dot_neighbours<R::kChunk>(rows.h[j][part * kChunksOfPart + c],
                                                      x[part * kChunksOfPart + c]);
#pragma unroll
            for (int distance = kLeaves / 2; distance > 0; distance /= 2)
#pragma unroll
                for (int c = 0; c < distance; ++c) chunks[c] = __fadd_rn(chunks[c], chunks[c + distance]);
            products.sums[j * kParts + part] = chunks[0];
        }
    }
    return products;
}

// Sums the products over the eight lanes of a row: chunks 4, 2 and 1 apart. A lane returns the sum of row j =
// at.lane / kLanesOfSum, and passes its parts of the other rows on.
template <class State, int kWidth>
__device__ float add_lanes(Products<State, kWidth> products, const LaneOfRow& at) {
    using P = Products<State, kWidth>;
    constexpr int kCount = P::R::kRows * P::kParts;
    static_assert(kCount <= kLanes, "a lane must be left with one sum");
    static_assert(P::kParts <= 2, "the last step adds two parts");
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
    if constexpr (P::kParts == 2)  // two adjacent lanes have one part each
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], P::kLanesOfSum / 2));
    return sums[0];
}

// The row whose sum `add_lanes` returns, counted from the warp's first row, and whether the lane is the first
// one with this sum.
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
