// Family recurrent: the rows of a state that a warp has in registers, their loads and stores, and vectors
// along the keys with the same order of elements.
//
// A width that is not a power of two is padded with zeros to the next one, as in Triton.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../common/dispatch.h"
#include "launch.h"

namespace nwor {
namespace {

constexpr int kLanes = 8;                // lanes that share a row of a state
constexpr int kGroups = kWarp / kLanes;  // rows that the lanes of a warp hold at the same index j

// The rows of a state [dv, kWidth] that a warp holds: first + 4 * j + group for j < kRows. One access of 16
// bytes moves a chunk. Lane l of the eight lanes of a row has the chunks l, l + 8, ... With keys of 96 the
// last chunk of some lanes of a bfloat16 state is padding.
template <class State, int kWidth>
struct Rows {
    static constexpr int kChunk = 16 / sizeof(State);
    static constexpr int kPadded = kWidth == 96 ? 128 : kWidth;
    static constexpr int kChunks = (kWidth + kLanes * kChunk - 1) / (kLanes * kChunk);
    static constexpr int kRowBytes = kWidth * sizeof(State);
    static constexpr int kRows = 512 / kPadded;
    static constexpr int kRowsOfWarp = kRows * kGroups;

    float h[kRows][kChunks][kChunk];

    // Whether chunk c of a lane is not padding.
    static __device__ bool has(int c, int lane) {
        return (c + 1) * kLanes * kChunk <= kWidth || (c * kLanes + lane) * kChunk < kWidth;
    }
};

// The place of a thread: its lane among the eight lanes of a row, and the group of these lanes in the warp.
struct LaneOfRow {
    int lane, group;

    __device__ LaneOfRow() : lane(threadIdx.x % kLanes), group(threadIdx.x % kWarp / kLanes) {}
};

// The chunks of a warp's rows as they are in memory. Nothing waits for a load before `widen` converts it. If
// a state does not begin at a multiple of 16 bytes, single elements are moved.
template <class State, int kWidth>
struct RawRows {
    using R = Rows<State, kWidth>;
    using Element = typename RawOf<sizeof(State)>::type;
    uint4 chunks[R::kRows][R::kChunks];

    // Here and below, `state` is the address of the head's first row, and `first` is the warp's first row.
    __device__ void load(const char* state, bool is_aligned, int first, const LaneOfRow& at) {
        const char* from = state + place(first, at);
        if (is_aligned) {
#pragma unroll
            for (int j = 0; j < R::kRows; ++j)
#pragma unroll
                for (int c = 0; c < R::kChunks; ++c)
                    chunks[j][c] = R::has(c, at.lane)
                                       ? __ldcs(reinterpret_cast<const uint4*>(from + offset(j, c)))
                                       : uint4{};
            return;
        }
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c) {
                const Element* elements = reinterpret_cast<const Element*>(from + offset(j, c));
                uint32_t words[4] = {};
                if (R::has(c, at.lane))
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        if constexpr (sizeof(State) == 4)
                            words[w] = elements[w];
                        else
                            words[w] = elements[2 * w] | static_cast<uint32_t>(elements[2 * w + 1]) << 16;
                    }
                chunks[j][c] = make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
    __device__ void store(char* state, bool is_aligned, int first, const LaneOfRow& at) const {
        char* to = state + place(first, at);
        if (is_aligned) {
#pragma unroll
            for (int j = 0; j < R::kRows; ++j)
#pragma unroll
                for (int c = 0; c < R::kChunks; ++c)
                    if (R::has(c, at.lane)) __stcs(reinterpret_cast<uint4*>(to + offset(j, c)), chunks[j][c]);
            return;
        }
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c) {
                if (!R::has(c, at.lane)) continue;
                Element* elements = reinterpret_cast<Element*>(to + offset(j, c));
                const uint32_t words[4] = {chunks[j][c].x, chunks[j][c].y, chunks[j][c].z, chunks[j][c].w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    if constexpr (sizeof(State) == 4) {
                        elements[w] = words[w];
                    } else {
                        elements[2 * w] = static_cast<Element>(words[w]);
                        elements[2 * w + 1] = static_cast<Element>(words[w] >> 16);
                    }
                }
            }
    }
    // Offsets in bytes: of a lane's first chunk, and from there to chunk c of its row j.
    static __device__ int place(int first, const LaneOfRow& at) {
        return (first + at.group) * R::kRowBytes + at.lane * 16;
    }
    static constexpr __device__ int offset(int j, int c) {
        return j * kGroups * R::kRowBytes + c * kLanes * 16;
    }
    // Converts to float32.
    __device__ void widen(R* rows) const {
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c) {
                const uint32_t words[4] = {chunks[j][c].x, chunks[j][c].y, chunks[j][c].z, chunks[j][c].w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    if constexpr (sizeof(State) == 4) {
                        rows->h[j][c][w] = __uint_as_float(words[w]);
                    } else {
                        rows->h[j][c][2 * w] = __uint_as_float(words[w] << 16);
                        rows->h[j][c][2 * w + 1] = __uint_as_float(words[w] & 0xffff0000);
                    }
                }
            }
    }
    // Rounds to the dtype of the state.
    __device__ void round(const R& rows) {
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c) {
                uint32_t words[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    if constexpr (sizeof(State) == 4) {
                        words[w] = __float_as_uint(rows.h[j][c][w]);
                    } else {
                        const __nv_bfloat162 two =
                            __floats2bfloat162_rn(rows.h[j][c][2 * w], rows.h[j][c][2 * w + 1]);
                        words[w] = reinterpret_cast<const uint32_t&>(two);
                    }
                }
                chunks[j][c] = make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
};

// ---------------------------------------------------------------- vectors along the keys

// Returns the place of element k of a vector in shared memory. The eight lanes of a row read 128 adjacent
// bytes together.
template <class State, int kWidth>
__device__ int shared_place(int k) {
    constexpr int kChunk = Rows<State, kWidth>::kChunk;
    const int in_chunk = k % kChunk;
    return k / (kLanes * kChunk) * (kLanes * kChunk) + in_chunk / 4 * (kLanes * 4) + k / kChunk % kLanes * 4 +
           in_chunk % 4;
}

template <int kChunks, int kChunk>
__device__ void read_vector(float (&x)[kChunks][kChunk], const float* shared, const LaneOfRow& at) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int e = 0; e < kChunk; e += 4) {
            const float4 four =
                *reinterpret_cast<const float4*>(shared + c * kLanes * kChunk + e * kLanes + at.lane * 4);
            x[c][e] = four.x, x[c][e + 1] = four.y, x[c][e + 2] = four.z, x[c][e + 3] = four.w;
        }
}

}  // namespace

}  // namespace nwor
