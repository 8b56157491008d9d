// Family drafter: the best token of a chunk of logits, for gumbel_sample.
//
// A thread loads its share of its block's chunk in 16-byte vectors, all at the same time. The exact score
// of a token (noisy_score, with the same bits as on the CPU) costs a few hundred instructions. A block
// therefore first bounds every score by the first 16 bits of the noise. It then computes only the scores
// that may be the best by these bounds, two or three per block.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "../common/gumbel.h"
#include "launch.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- logits

constexpr int kVectors = 4;  // outstanding 16-byte loads of each thread

struct Float32Logits {
    using Raw = uint32_t;
    static constexpr Raw kMinusInfinity = 0xFF800000u;
    static __device__ float value(Raw raw) { return __uint_as_float(raw); }
};

struct HalfLogits {
    using Raw = uint16_t;
    static constexpr Raw kMinusInfinity = 0xFC00u;
    static __device__ float value(Raw raw) { return __half2float(__ushort_as_half(raw)); }
};

struct BFloat16Logits {
    using Raw = uint16_t;
    static constexpr Raw kMinusInfinity = 0xFF80u;
    static __device__ float value(Raw raw) { return __uint_as_float(static_cast<uint32_t>(raw) << 16); }
};

template <class Format>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(typename Format::Raw));
template <class Format>
constexpr int kChunk = kThreads * kVectors * kPerVector<Format>;  // tokens per block

// The share of a chunk that one of the block's threads loads, in 16-byte vectors.
template <class Format, int kBlock = kThreads>
struct Share {
    using Raw = typename Format::Raw;
    static constexpr int kPer = kPerVector<Format>;

    const Raw* row;
    int64_t stride, vocab_size;
    uint32_t first;  // first token of the thread's first vector
    uint32_t words[kVectors][4];

    __device__ uint32_t token(int vector, int element) const {
        return first + vector * (kBlock * kPer) + element;
    }
    __device__ Raw raw(int vector, int element) const {
        if (sizeof(Raw) == 4) return static_cast<Raw>(words[vector][element]);
        return static_cast<Raw>(words[vector][element / 2] >> (element % 2 * 16));
    }
    __device__ float logit(int vector, int element) const { return Format::value(raw(vector, element)); }

    template <bool kAligned>
    __device__ void load() {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (kAligned && int64_t{token(v, 0)} + kPer <= vocab_size) {
                const uint4 vector = *reinterpret_cast<const uint4*>(row + token(v, 0));
                words[v][0] = vector.x;
                words[v][1] = vector.y;
                words[v][2] = vector.z;
                words[v][3] = vector.w;
                continue;
            }
#pragma unroll
            for (int w = 0; w < 4; ++w) words[v][w] = 0;
#pragma unroll
            for (int e = 0; e < kPer; ++e) {
                const int64_t t = token(v, e);
                const uint32_t x = t < vocab_size ? row[t * stride] : Format::kMinusInfinity;
                if (sizeof(Raw) == 4)
                    words[v][e % 4] = x;
                else
                    words[v][e / 2] |= x << (e % 2 * 16);
            }
        }
    }

    __device__ void store(Raw* to, int64_t to_stride, bool in_vectors) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (in_vectors && int64_t{token(v, 0)} + kPer <= vocab_size) {
                *reinterpret_cast<uint4*>(to + token(v, 0)) =
                    make_uint4(words[v][0], words[v][1], words[v][2], words[v][3]);
                continue;
            }
#pragma unroll
            for (int e = 0; e < kPer; ++e)
                if (int64_t{token(v, e)} < vocab_size) to[token(v, e) * to_stride] = raw(v, e);
        }
    }
};

// ---------------------------------------------------------------- candidates

// Map a float to an integer with the same order; -0 and 0 map to the same integer.
__device__ uint32_t ordered(float x) {
    const uint32_t bits = x == 0.0f ? 0 : __float_as_uint(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float from_ordered(uint32_t bits) {
    return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7FFFFFFFu : ~bits);
}

// The larger score wins; if scores are equal, the lower token wins. 0 means no token.
using Candidate = unsigned long long;

__device__ Candidate candidate(float score, uint32_t token) {
    return static_cast<Candidate>(ordered(score)) << 32 | (0xFFFFFFFFu - token);
}

__device__ int64_t token_of(Candidate c) {
    return c == 0 ? 0 : static_cast<int64_t>(0xFFFFFFFFu - static_cast<uint32_t>(c));
}

struct BlockState {
    NoiseKey key;
    uint32_t top;  // maximum of all threads, as an ordered integer
    int tight;
    Candidate best;
};

// Return the largest `x` of the block. `state.top` must be cleared before the last barrier.
__device__ float block_maximum(BlockState& state, float x) {
    const uint32_t of_warp = __reduce_max_sync(kAllLanes, ordered(x));
    if (threadIdx.x % kWarp == 0) atomicMax(&state.top, of_warp);
    __syncthreads();
    return from_ordered(state.top);
}

// ---------------------------------------------------------------- temperature 0

template <class Format>
__device__ void offer_argmax(BlockState& state, const Share<Format>& share) {
    float top = -INFINITY;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int e = 0; e < share.kPer; ++e) top = fmaxf(top, share.logit(v, e));  // ignores NaN
    const float best = block_maximum(state, top);
    if (best == -INFINITY || top != best) return;
    uint32_t token = 0xFFFFFFFFu;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int e = 0; e < share.kPer; ++e)
            if (share.logit(v, e) == best) token = min(token, share.token(v, e));
    atomicMax(&state.best, candidate(best, token));
}

// ---------------------------------------------------------------- with noise

// Let c be the first 16 bits of a token's noise. Then u is between c / 2^16 and (c + 1) / 2^16, and
// coarse(c) = -ln((c + 1) / 2^16). The noise is G = -ln(E) with E = -ln(1 - u), and E is between u and u /
// (1 - u):
//   G <= -ln u <= coarse + ln 2 (= 0.6931) for c > 0;
//   G < kMostNoise = coarse(0) + 33 ln 2 (= 22.87) for c = 0;
//   G >= coarse - ln(2 ln 2) (= 0.3267) for u <= 1/2;
//   G >= coarse - ln(49 ln 2) (= 3.53) for any u.
// The constants below add a margin for the rounding of floats; kRelativeError is for large scaled logits.
constexpr float kAbove = 0.71f, kAboveZero = 23.0f;
constexpr float kBelowTight = 0.33f, kBelow = 3.6f;
constexpr float kRelativeError = 1.0f / (1 << 20);
constexpr float kLn2 = static_cast<float>(kNaturalLogOf2);
static_assert(kAbove > kNaturalLogOf2 && kAboveZero > kMostNoise - 16 * kNaturalLogOf2);

// Return coarse(c) of the low or the high half of `both`.
template <int kHalf>
__device__ float coarse_of_half(uint32_t both) {
    // The bits of c below those of 2^23 are the float 2^23 + c.
    const float c = __uint_as_float(__byte_perm(both, 0x4B000000u, kHalf == 0 ? 0x7610u : 0x7632u));
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(c - 8388607.0f));
    return fmaf(log2, -kLn2, 16.0f * kLn2);
}

template <class Format>
__device__ void bounds_of_pair(const Share<Format>& share, const NoiseKey& key, float reciprocal, int v,
                               int e, uint32_t& both, float& even, float& odd) {
    both = coarse_noise_of_pair(key, share.token(v, e) / 2);
    even = fmaf(share.logit(v, e), reciprocal, coarse_of_half<0>(both));
    odd = fmaf(share.logit(v, e + 1), reciprocal, coarse_of_half<1>(both));
}

// Return whether the exact score can reach `limit`. True if either is NaN.
__device__ bool may_reach(float bound, uint32_t coarse, float limit) {
    return !(bound + (coarse == 0 ? kAboveZero : 0.0f) < limit);
}

template <class Format>
__device__ void offer_noisy(BlockState& state, const Share<Format>& share, float temperature) {
    const NoiseKey key = state.key;
    const float reciprocal = 1.0f / temperature;
    float tops[kVectors];
    uint32_t smallest = 0xFFFFFFFFu;  // minimum of the coarse noise, in each half
    float top = -INFINITY;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        tops[v] = -INFINITY;
#pragma unroll
        for (int e = 0; e < share.kPer; e += 2) {
            uint32_t both;
            float even, odd;
            bounds_of_pair(share, key, reciprocal, v, e, both, even, odd);
            smallest = __vminu2(smallest, both);
            tops[v] = fmaxf(tops[v], fmaxf(even, odd));
        }
        top = fmaxf(top, tops[v]);
    }
    const float block_top = block_maximum(state, top);
    if (block_top == -INFINITY) return;  // the whole block has only -inf and NaN

    // Maximum distance of the top token's score below its bound.
    if (top == block_top) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (tops[v] != block_top) continue;
#pragma unroll
            for (int e = 0; e < share.kPer; e += 2) {
                uint32_t both;
                float even, odd;
                bounds_of_pair(share, key, reciprocal, v, e, both, even, odd);
                if ((even == block_top && (both & 0x8000u) == 0) ||
                    (odd == block_top && (both & 0x80000000u) == 0))
                    atomicMax(&state.tight, 1);
            }
        }
    }
    __syncthreads();
    const float reached = block_top - (state.tight != 0 ? kBelowTight : kBelow);
    const float limit = fmaf(-fabsf(reached), kRelativeError, reached - kAbove);

    // One bit per token: whether its exact score is needed.
    uint32_t wanted = 0;
    const bool has_zero = (smallest & 0xFFFFu) == 0 || smallest >> 16 == 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has_zero && tops[v] < limit) continue;
#pragma unroll
        for (int e = 0; e < share.kPer; e += 2) {
            uint32_t both;
            float even, odd;
            bounds_of_pair(share, key, reciprocal, v, e, both, even, odd);
            if (may_reach(even, both & 0xFFFFu, limit)) wanted |= 1u << (v * share.kPer + e);
            if (may_reach(odd, both >> 16, limit)) wanted |= 2u << (v * share.kPer + e);
        }
    }
    Candidate best = 0;
    while (wanted != 0) {
        const int place = __ffs(static_cast<int>(wanted)) - 1;
        wanted &= wanted - 1;
        const uint32_t token = share.token(place / share.kPer, place % share.kPer);
        if (int64_t{token} >= share.vocab_size) continue;
        const float logit = Format::value(share.row[token * share.stride]);
        const float score = noisy_score(key, token, logit, temperature);
        if (score > -INFINITY) best = max(best, candidate(score, token));
    }
    if (best != 0) atomicMax(&state.best, best);
}

}  // namespace

}  // namespace nwor
