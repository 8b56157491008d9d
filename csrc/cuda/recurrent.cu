// Family recurrent on CUDA: one state per request, replayed and verified in one launch. Semantics:
// nwor_ops/ops/recurrent.py.
//
// A block owns rows of one head's state of one request, from load to store, in registers: eight lanes share a
// row, a thread has 64 elements of a few rows. The state comes through shared memory: loads into registers
// would have the first branch after them wait for all, and what a block works out meanwhile of the window's
// keys, queries and gates and of the record's rows has many. The state is stored as soon as the accepted rows
// are replayed, and the window runs on what is in registers. `StagedRows` says how states come and go.
//
// Bits are those of vLLM's Triton kernel as Triton 3.6 compiles it for num_warps=4: the same approximations
// of exp, log, 1/x and 1/sqrt(x), the same fused multiply-adds, and each sum in the same order. So products
// are written with the functions that the compiler does not fuse, and `multiply` and `add_lanes` say which
// sum is whose. Keys 96 wide are those of OLMo hybrid, which runs another kernel
// (`fused_recurrent_gated_delta_rule`, num_warps=1): there, bits are that one's.
//
// A width that is no power of two is computed as the next one, as Triton does: what is no memory is zero.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <numeric>

#include "../common/dispatch.h"
#include "../recurrent.h"
#include "async_copies.h"
#include "launch.h"

namespace nwor {
namespace {

constexpr int kLanes = 8;                // that share a row of a state
constexpr int kGroups = kWarp / kLanes;  // rows that a warp holds beside each other
constexpr int kRowsOfTile = 32;          // of a Triton program
constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kSharedWithoutAsking = 48 << 10;

// ---------------------------------------------------------------- arithmetic

__device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float exp_approx(float x) {
    return exp2_approx(__fmul_rn(x, 0x1.715476p+0f));  // log2(e)
}

__device__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float divide_approx(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ float sigmoid(float x) {
    return divide_approx(1.0f, __fadd_rn(exp_approx(-x), 1.0f));
}

// log(x) for x >= 1, as libdevice has it: the exponent, and a polynomial of a mantissa in [2/3, 4/3).
__device__ float log_from_one(float x) {
    const int bits = __float_as_int(x);
    if (bits >= 0x7f800000) return x;
    const int exponent = (bits - 0x3f2aaaab) & 0xff800000;
    const float m = __fadd_rn(__int_as_float(bits - exponent), -1.0f);
    float p = __fmaf_rn(__int_as_float(0xbe055027), m, __int_as_float(0x3e1039f6));
    p = __fmaf_rn(p, m, __int_as_float(0xbdf8cdcc));
    p = __fmaf_rn(p, m, __int_as_float(0x3e0f2955));
    p = __fmaf_rn(p, m, __int_as_float(0xbe2ad8b9));
    p = __fmaf_rn(p, m, __int_as_float(0x3e4ced0b));
    p = __fmaf_rn(p, m, __int_as_float(0xbe7fff22));
    p = __fmaf_rn(p, m, __int_as_float(0x3eaaaa78));
    p = __fmaf_rn(p, m, -0.5f);
    p = __fmaf_rn(__fmul_rn(m, p), m, m);
    return __fmaf_rn(__fmul_rn(static_cast<float>(exponent), 0x1p-23f), 0x1.62e430p-1f, p);
}

// exp(-exp(A_log) * softplus(x))
__device__ float decay_of(const VerifyArguments& c, float x, float log_rate) {
    const float scaled = __fmul_rn(c.softplus_beta, x);
    const float soft =
        __fmul_rn(divide_approx(1.0f, c.softplus_beta), log_from_one(__fadd_rn(exp_approx(scaled), 1.0f)));
    const float softplus = scaled <= c.softplus_threshold ? soft : x;
    return exp_approx(__fmul_rn(-exp_approx(log_rate), softplus));
}

__device__ float sum_of_warp(float x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
}

// ---------------------------------------------------------------- dtypes

__device__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ float to_float(__half x) {
    return __half2float(x);
}
__device__ void set(__nv_bfloat16* to, float x) {
    *to = __float2bfloat16_rn(x);
}
__device__ void set(__half* to, float x) {
    *to = __float2half_rn(x);
}

// Two elements side by side.
template <class Input>
struct Pair {
    float first, second;

    __device__ explicit Pair(uint32_t bits) {
        if constexpr (std::is_same_v<Input, __nv_bfloat16>) {
            first = __uint_as_float(bits << 16);
            second = __uint_as_float(bits & 0xffff0000);
        } else {
            const float2 two = __half22float2(reinterpret_cast<const __half2&>(bits));
            first = two.x;
            second = two.y;
        }
    }
};

// One of `Floats`, loaded but not looked at: nothing waits for it before it is needed. It is loaded in
// halves, which are the same where the dtype has 16 bits: loads that depend on the dtype would wait for each
// other.
struct LoadedFloat {
    const Floats& from;
    uint16_t low, high;

    __device__ LoadedFloat(const Floats& from, int64_t i, int64_t j = 0) : from(from) {
        const bool is_float = from.dtype == ScalarType::Float;
        const char* data = static_cast<const char*>(from.data) +
                           (i * from.strides[0] + j * from.strides[1]) * (is_float ? 4 : 2);
        low = *reinterpret_cast<const uint16_t*>(data);
        high = *reinterpret_cast<const uint16_t*>(data + (is_float ? 2 : 0));
    }
    __device__ float value() const {
        if (from.dtype == ScalarType::Half) return __half2float(__ushort_as_half(low));
        return __uint_as_float(static_cast<uint32_t>(high) << 16 |
                               (from.dtype == ScalarType::Float ? low : 0));
    }
};

// ---------------------------------------------------------------- rows of a state in registers

// What a warp holds of a state of `State` [dv, kWidth]: rows first + 4 * j + group for j < kRows. A chunk is
// what one access of 16 bytes moves; lane l of a row's eight has the chunks l, l + 8, ... Of keys 96 wide
// some lanes' last chunk of a bfloat16 state is none: it is zero.
template <class State, int kWidth>
struct Rows {
    static constexpr int kChunk = 16 / sizeof(State);
    static constexpr int kPadded = kWidth == 96 ? 128 : kWidth;
    static constexpr int kChunks = (kWidth + kLanes * kChunk - 1) / (kLanes * kChunk);
    static constexpr int kRowBytes = kWidth * sizeof(State);
    static constexpr int kRows = 512 / kPadded;
    static constexpr int kRowsOfWarp = kRows * kGroups;
    // Of Triton's program: one lane has one chunk of a row, and a row that needs more than a warp is summed
    // in parts. In the last rows of a tile, those in the last registers, or all, `dot_chunk` begins with the
    // first product; with num_warps=1 in none.
    static constexpr int kParts = kWidth > kWarp* kChunk ? kWidth / (kWarp * kChunk) : 1;
    static constexpr int kLastRows = kWidth == 96           ? 0
                                     : kChunk * 8 == kWidth ? kRowsOfTile
                                                            : kWarp * kChunk * 4 / kWidth;
    static constexpr int kLanesOfSum = kLanes / kRows;  // that hold the sum of the same row

    float h[kRows][kChunks][kChunk];

    // Whether a lane has its chunk c.
    static __device__ bool has(int c, int lane) {
        return (c + 1) * kLanes * kChunk <= kWidth || (c * kLanes + lane) * kChunk < kWidth;
    }
};

// Lane l of a row's eight, and which of the warp's rows beside each other it is in.
struct LaneOfRow {
    int lane, group;

    __device__ LaneOfRow() : lane(threadIdx.x % kLanes), group(threadIdx.x % kWarp / kLanes) {}
};

// A vector along the keys lies in shared memory such that the eight lanes of a row read 128 bytes in a row.
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

// The raw chunks of a warp's rows, loaded but not looked at. Where a page leaves a state no better place,
// they are moved by the element.
template <class State, int kWidth>
struct RawRows {
    using R = Rows<State, kWidth>;
    using Element = typename RawOf<sizeof(State)>::type;
    uint4 chunks[R::kRows][R::kChunks];

    // `state` is where the head's rows begin.
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
    static __device__ int place(int first, const LaneOfRow& at) {
        return (first + at.group) * R::kRowBytes + at.lane * 16;
    }
    static constexpr __device__ int offset(int j, int c) {
        return j * kGroups * R::kRowBytes + c * kLanes * 16;
    }
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

// Of one chunk. Triton's compiler begins with the second product, but in the last rows of a program, where it
// begins with the first one.
template <int kChunk>
__device__ float dot_chunk(const float (&h)[kChunk], const float (&x)[kChunk], bool first_begins) {
    float sum = first_begins ? __fmaf_rn(h[1], x[1], __fmul_rn(h[0], x[0]))
                             : __fmaf_rn(h[0], x[0], __fmul_rn(h[1], x[1]));
#pragma unroll
    for (int e = 2; e < kChunk; ++e) sum = __fmaf_rn(h[e], x[e], sum);
    return sum;
}

// A lane's part of the products of all rows with a vector.
template <class State, int kWidth>
struct Products {
    static constexpr int kCount = Rows<State, kWidth>::kRows * Rows<State, kWidth>::kParts;
    float sums[kCount];
};

// Of x, chunks added in the order of a warp's butterfly, from 16 lanes apart to neighbours: the distances 16
// and 8 are in one thread here. `last`: which of the rows are among a tile's last.
template <bool kOfKey, class State, int kWidth>
__device__ Products<State, kWidth> multiply(
    const Rows<State, kWidth>& rows,
    const float (&x)[Rows<State, kWidth>::kChunks][Rows<State, kWidth>::kChunk],
    const bool (&last)[Rows<State, kWidth>::kRows]) {
    using R = Rows<State, kWidth>;
    constexpr int kChunksOfPart = R::kChunks / R::kParts;
    constexpr int kLeaves = R::kPadded / (R::kParts * kLanes * R::kChunk);  // with chunks that are none
    Products<State, kWidth> products;
#pragma unroll
    for (int j = 0; j < R::kRows; ++j) {
#pragma unroll
        for (int part = 0; part < R::kParts; ++part) {
            float chunks[kLeaves] = {};
#pragma unroll
            for (int c = 0; c < kChunksOfPart; ++c)
                chunks[c] = dot_chunk(rows.h[j][part * kChunksOfPart + c], x[part * kChunksOfPart + c],
                                      kOfKey && last[j]);
#pragma unroll
            for (int distance = kLeaves / 2; distance > 0; distance /= 2)
#pragma unroll
                for (int c = 0; c < distance; ++c) chunks[c] = __fadd_rn(chunks[c], chunks[c + distance]);
            products.sums[j * R::kParts + part] = chunks[0];
        }
    }
    return products;
}

// The products, summed over the eight lanes: the other three distances. A lane returns that of the row
// j = at.lane / kLanesOfSum, and hands over the others.
template <class State, int kWidth>
__device__ float add_lanes(Products<State, kWidth> products, const LaneOfRow& at) {
    using R = Rows<State, kWidth>;
    float (&sums)[Products<State, kWidth>::kCount] = products.sums;
    int count = R::kRows * R::kParts;
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        const bool upper = at.lane & distance;
        if (count == 1) {
            sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], distance));
            continue;
        }
        count /= 2;
#pragma unroll
        for (int i = 0; i < R::kRows * R::kParts / 2; ++i) {
            if (i >= count) break;
            const float kept = upper ? sums[count + i] : sums[i];
            const float handed = upper ? sums[i] : sums[count + i];
            sums[i] = __fadd_rn(kept, __shfl_xor_sync(kAllLanes, handed, distance));
        }
    }
    if constexpr (R::kParts == 2)  // which are side by side: two lanes have each
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(kAllLanes, sums[0], R::kLanesOfSum / 2));
    return sums[0];
}

// ---------------------------------------------------------------- what a block copies to shared memory

// Where things lie in a block's shared memory, in bytes. Vectors along the keys are in `shared_place`s.
struct SharedPlaces {
    int keys, queries, decays, betas;                              // of the window
    int replay_keys, replay_norms, replay_decays, replay_updates;  // of the record
    int weights, gates, outputs;                                   // of the norm
    int values, raw_keys, raw_queries, raw_replay_keys;            // as they came
    int states, barriers;                                          // of `StagedRows`
    int bytes;

    // Of at most `tokens` tokens and `rows` rows of a record; `width` of keys, padded, `num_values` rows of a
    // state, of which `staged` bytes are here at once.
    SharedPlaces(int64_t tokens, int64_t rows, int64_t width, int64_t num_values, bool per_channel,
                 bool has_norm, int64_t staged) {
        int64_t end = 0;
        const auto take = [&end](int64_t bytes) {
            const int64_t begin = end;
            end += ceil_div(bytes, 16) * 16;
            return static_cast<int>(begin);
        };
        const int64_t decay = (per_channel ? width : 1) * 4;
        keys = take(tokens * width * 4);
        queries = take(tokens * width * 4);
        decays = take(tokens * decay);
        betas = take(tokens * 4);
        replay_keys = take(rows * width * 4);
        replay_norms = take(rows * 4);
        replay_decays = take(rows * decay);
        replay_updates = take(rows * num_values * 4);
        weights = take(has_norm ? num_values * 4 : 0);
        gates = take(has_norm ? tokens * num_values * 2 : 0);
        outputs = take(has_norm ? tokens * num_values * 2 : 0);
        values = take(tokens * num_values * 2);
        raw_keys = take(tokens * width * 2);
        raw_queries = take(tokens * width * 2);
        raw_replay_keys = take(rows * width * 2);
        states = take(staged);
        barriers = take(staged > 0 ? kThreads / kWarp * sizeof(BulkBarrier) : 0);
        bytes = static_cast<int>(end);
    }
};

extern __shared__ __align__(16) char shared_memory[];

template <class T>
__device__ T* shared_at(int place) {
    return reinterpret_cast<T*>(shared_memory + place);
}

// A warp's rows on their way between a state and registers, aligned chunks alone, in the warp's part of
// shared memory. Rows of float32 go both ways by bulk copies, as they lie in memory, where the device has
// those: lane 0 starts them. Others come by copies that each thread makes of its own chunks and reads back
// itself, so that it waits for no other thread, and go straight from the registers. (bfloat16 gained nothing
// by bulk copies.)
template <class State, int kWidth>
class StagedRows {
    using R = Rows<State, kWidth>;
    using Raw = RawRows<State, kWidth>;

  public:
    static constexpr bool kIsBulk = kHasBulkCopies && std::is_same_v<State, float>;
    static constexpr int kBytes = R::kRows * R::kChunks * kWarp * 16;  // of a warp
    static_assert(!std::is_same_v<State, float> || kBytes == R::kRowsOfWarp * R::kRowBytes,
                  "rows as they lie in memory");

    __device__ explicit StagedRows(const SharedPlaces& places) : places_(places) {}

    // By all lanes, as all that follows.
    __device__ void init() {
        if constexpr (kIsBulk) {
            if (lane() == 0) {
                barrier()->init();
                fence_shared_from_bulk_copies();
            }
            __syncwarp();
        }
    }
    // Sends for the rows from `first` on. `state` is where the head's rows begin, here and below.
    __device__ void fetch(const char* state, int first) {
        if constexpr (kIsBulk) {
            if (lane() != 0) return;
            fence_global_from_bulk_copies();
            barrier()->copy(chunks(), state + first * R::kRowBytes, kBytes);
        } else {
            const LaneOfRow at;
            const char* from = state + Raw::place(first, at);
#pragma unroll
            for (int j = 0; j < R::kRows; ++j)
#pragma unroll
                for (int c = 0; c < R::kChunks; ++c)
                    if (R::has(c, at.lane)) copy_async<16>(chunks() + offset(j, c), from + Raw::offset(j, c));
        }
    }
    // Waits for what was fetched.
    __device__ void read(Raw* raw) {
        if constexpr (kIsBulk) {
            barrier()->wait(parity_);
            parity_ ^= 1;
        } else {
            wait_for_copies<0>();
        }
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
#pragma unroll
            for (int c = 0; c < R::kChunks; ++c)
                raw->chunks[j][c] = R::has(c, LaneOfRow().lane)
                                        ? *reinterpret_cast<const uint4*>(chunks() + offset(j, c))
                                        : uint4{};
    }
    // In bulk alone.
    __device__ void store(char* state, int first, const Raw& raw) {
        if constexpr (kIsBulk) {
#pragma unroll
            for (int j = 0; j < R::kRows; ++j)
#pragma unroll
                for (int c = 0; c < R::kChunks; ++c)
                    *reinterpret_cast<uint4*>(chunks() + offset(j, c)) = raw.chunks[j][c];
            fence_shared_from_bulk_copies();
            __syncwarp();
            if (lane() == 0) copy_bulk(state + first * R::kRowBytes, chunks(), kBytes);
        }
    }
    // Before the next rows are fetched: all lanes have read these, and they are stored.
    __device__ void make_room() {
        if constexpr (kIsBulk) {
            fence_shared_from_bulk_copies();
            __syncwarp();
        }
        finish();
    }
    // Before the block ends.
    __device__ void finish() {
        if constexpr (kIsBulk)
            if (lane() == 0) wait_for_bulk_reads();
    }

  private:
    // Worked out anew where they are needed: kept from the beginning they would cost registers.
    static __device__ int lane() { return threadIdx.x % kWarp; }
    __device__ BulkBarrier* barrier() const {
        return shared_at<BulkBarrier>(places_.barriers) + threadIdx.x / kWarp;
    }
    // The thread's first chunk. That of lane 0 is where the warp's rows begin.
    __device__ char* chunks() const {
        return shared_at<char>(places_.states) + threadIdx.x / kWarp * kBytes +
               (kIsBulk ? Raw::place(0, LaneOfRow()) : lane() * 16);
    }
    static constexpr __device__ int offset(int j, int c) {
        return kIsBulk ? Raw::offset(j, c) : (j * R::kChunks + c) * kWarp * 16;
    }

    const SharedPlaces& places_;
    uint32_t parity_ = 0;
};

// A warp copies `bytes`, a multiple of 16, of elements of two bytes or more.
__device__ void copy_row(char* shared, const void* source, int bytes) {
    const char* from = static_cast<const char*>(source);
    const int lane = threadIdx.x % kWarp;
    const uintptr_t address = reinterpret_cast<uintptr_t>(from);
    if (address % 16 == 0) {
#pragma unroll 1
        for (int i = lane * 16; i < bytes; i += kWarp * 16) copy_async<16>(shared + i, from + i);
    } else if (address % 4 == 0) {
#pragma unroll 1
        for (int i = lane * 4; i < bytes; i += kWarp * 4) copy_async<4>(shared + i, from + i);
    } else {
#pragma unroll 1
        for (int i = lane * 2; i < bytes; i += kWarp * 2)
            *reinterpret_cast<uint16_t*>(shared + i) = *reinterpret_cast<const uint16_t*>(from + i);
    }
}

// Which head's rows of which request a block has.
struct BlockPlace {
    int64_t request, head, key_head;
    int first_value, num_values;      // rows of the state
    bool leads_head, leads_key_head;  // writes what all blocks of a value head or a key head share
};

// From the number of a block to its place.
struct BlockPlaces {
    FastDivisor by_splits, by_heads, by_group;
    int num_values;

    BlockPlaces(const RecurrentRecord& r, int64_t values_of_block)
        : by_splits(r.value_width / values_of_block),
          by_heads(r.num_value_heads),
          by_group(r.num_value_heads / r.num_key_heads),
          num_values(static_cast<int>(values_of_block)) {}

    __device__ BlockPlace operator[](uint32_t block) const {
        const uint32_t row = by_splits.quotient(block), split = block - row * by_splits.divisor;
        const uint32_t request = by_heads.quotient(row), head = row - request * by_heads.divisor;
        const uint32_t key_head = by_group.quotient(head);
        return {request,
                head,
                key_head,
                static_cast<int>(split) * num_values,
                num_values,
                split == 0,
                split == 0 && head == key_head * by_group.divisor};
    }
};

// The number of copies that `copy_replay` makes of a record's row.
constexpr int kCopiesOfReplay = 2;

// The record's rows that are to be replayed. Copies go in turn to the block's warps, from `copy` on.
template <class State, int kWidth, bool kPerChannel>
__device__ void copy_replay(const RecurrentRecord& r, const SharedPlaces& places, const RecurrentRow& row,
                            const BlockPlace& block, int copy) {
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    for (; copy < row.rows * kCopiesOfReplay; copy += warps) {
        const int i = copy / kCopiesOfReplay;
        if (copy % kCopiesOfReplay == 0) {
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

// From raw keys to keys, of the rows to replay.
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

// `first` is the warp's first row of the state, `value` the same among the block's.
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

// ---------------------------------------------------------------- gated_delta_verify

struct VerifyJob {
    VerifyArguments call;
    SharedPlaces shared;
    BlockPlaces blocks;
    bool is_aligned;  // states, of the slots and of `all_states`
    bool is_staged;   // states, on their way to registers; then they are aligned
    const char* report_as;
};

// A warp turns raw queries or keys of a token into what the window works with, and records keys.
template <class State, class Input, int kWidth>
__device__ void scale_window(const VerifyJob& job, const RecurrentRow& row, const BlockPlace& block,
                             int num_tokens) {
    constexpr int kPadded = Rows<State, kWidth>::kPadded;
    constexpr int kSegments = kWidth == 96   ? 1
                              : kWidth < 128 ? kWidth / kWarp
                                             : 4;             // Triton's warps, added last
    constexpr int kNeighbours = kPadded / kWarp / kSegments;  // elements of one lane
    const VerifyArguments& c = job.call;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    for (int i = warp; i < 2 * num_tokens; i += warps) {
        const int token = i / 2;
        const bool of_key = i % 2 == 0;
        const Input* raw =
            shared_at<Input>(of_key ? job.shared.raw_keys : job.shared.raw_queries) + token * kWidth;
        Input bits[kSegments][kNeighbours];
        float x[kSegments][kNeighbours], sums[kSegments];
#pragma unroll
        for (int s = 0; s < kSegments; ++s)
#pragma unroll
            for (int e = 0; e < kNeighbours; ++e) {
                const int place = (s * kWarp + lane) * kNeighbours + e;
                if (place < kWidth) bits[s][e] = raw[place];
                x[s][e] = place < kWidth ? to_float(bits[s][e]) : 0.0f;
            }
        float factor = 1.0f;
        if (c.use_qk_l2norm) {
#pragma unroll
            for (int s = 0; s < kSegments; ++s) {
                sums[s] = __fmul_rn(x[s][0], x[s][0]);  // squares of 16-bit floats are exact
#pragma unroll
                for (int e = 1; e < kNeighbours; ++e) sums[s] = __fmaf_rn(x[s][e], x[s][e], sums[s]);
                sums[s] = sum_of_warp(sums[s]);
            }
            if constexpr (kSegments == 1) {
                // x / sqrt(sum), of which div.full makes a product with an approximation of 1 / sqrt(sum).
                factor = divide_approx(1.0f, sqrt_approx(__fadd_rn(sums[0], 1e-6f)));
            } else {
                const float sum = kSegments == 2 ? __fadd_rn(sums[0], sums[1])
                                                 : __fadd_rn(__fadd_rn(sums[0], sums[kSegments / 2]),
                                                             __fadd_rn(sums[1], sums[kSegments - 1]));
                factor = rsqrt_approx(__fadd_rn(sum, 1e-6f));
            }
        }
        float* to = shared_at<float>(of_key ? job.shared.keys : job.shared.queries) + token * kPadded;
#pragma unroll
        for (int s = 0; s < kSegments; ++s)
#pragma unroll
            for (int e = 0; e < kNeighbours; ++e) {
                float scaled = __fmul_rn(x[s][e], factor);
                if (!of_key) scaled = __fmul_rn(scaled, c.scale);
                to[shared_place<State, kWidth>((s * kWarp + lane) * kNeighbours + e)] = scaled;
            }
        if (of_key && block.leads_key_head) {
            const RecurrentRecord& r = c.record;
            Input* keys = reinterpret_cast<Input*>(r.keys) +
                          r.key_offset(row.target, row.next_half(), token, block.key_head);
#pragma unroll
            for (int s = 0; s < kSegments; ++s)
#pragma unroll
                for (int e = 0; e < kNeighbours; ++e) {
                    const int place = (s * kWarp + lane) * kNeighbours + e;
                    if (place < kWidth) keys[place] = bits[s][e];
                }
            if (lane == 0)
                r.norms[r.norm_offset(row.target, row.next_half(), token, block.key_head)] = factor;
        }
    }
}

// gated_delta_verify's norm: a warp has a token. The outputs were rounded, as those of a kernel without it.
template <class Input>
__device__ void norm_outputs(const VerifyJob& job, const BlockPlace& block, int64_t first_token,
                             int num_tokens) {
    const VerifyArguments& c = job.call;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const float* weights = shared_at<float>(job.shared.weights);
    for (int token = warp; token < num_tokens; token += warps) {
        const Input* outputs = shared_at<Input>(job.shared.outputs) + token * block.num_values;
        const Input* gates = shared_at<Input>(job.shared.gates) + token * block.num_values;
        float sum = 0.0f;
        for (int i = lane; i < block.num_values; i += kWarp) {
            const float o = to_float(outputs[i]);
            sum = __fmaf_rn(o, o, sum);
        }
        sum = sum_of_warp(sum);
        const float factor = rsqrt_approx(sum / static_cast<float>(block.num_values) + c.norm_eps);
        Input* out = reinterpret_cast<Input*>(c.out.data) + c.out.offset(first_token + token, block.head);
        for (int i = lane; i < block.num_values; i += kWarp) {
            const float z = to_float(gates[i]);
            const float gate = c.gate_activation == GateActivation::kSilu ? z * sigmoid(z) : sigmoid(z);
            set(out + i, to_float(outputs[i]) * factor * weights[i] * gate);
        }
    }
}

template <class State, class Input, int kWidth, bool kPerChannel>
__global__ void __launch_bounds__(kThreads, 2) verify_kernel(const __grid_constant__ VerifyJob job) {
    using R = Rows<State, kWidth>;
    using Raw = RawRows<State, kWidth>;
    using Staged = StagedRows<State, kWidth>;
    const VerifyArguments& c = job.call;
    const RecurrentRecord& r = c.record;
    const BlockPlace block = job.blocks[blockIdx.x];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    Staged staged(job.shared);
    if (job.is_staged) staged.init();
    wait_for_earlier_kernels();
    // All of these are loaded before the first is looked at.
    const int64_t first_token = c.query_start_loc[block.request],
                  end_token = c.query_start_loc[block.request + 1];
    const RecurrentRow row = c.plan[block.request];
    if (blockIdx.x == 0 && threadIdx.x == 0) *c.layer_window = *c.window;
    if (const Found found = problem_of_request(c, block.request, first_token, end_token, row)) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return;
    }
    const int num_tokens = static_cast<int>(end_token - first_token);
    if (num_tokens == 0) return;
    if (!row.any()) {
        for (int64_t token = first_token; token < end_token; ++token) {
            Input* out = reinterpret_cast<Input*>(c.out.data) + c.out.offset(token, block.head);
            for (int i = threadIdx.x; i < block.num_values; i += blockDim.x)
                set(out + block.first_value + i, 0.0f);
        }
        return;
    }

    const auto state_of = [&](int64_t slot) {
        return c.states.data + c.states.row_offset(slot, block.head, 0) * sizeof(State);
    };
    if (Staged::kIsBulk && job.is_staged)
        staged.fetch(state_of(row.source), block.first_value + warp * R::kRowsOfWarp);

    // Small things set out before a state does that takes many copies. The last warp has the gates, a lane
    // those of a token.
    const bool has_gates = warp == warps - 1 && lane < num_tokens;
    const int64_t token_of_gates = first_token + (has_gates ? lane : 0);
    const LoadedFloat a(c.a, token_of_gates, block.head), b(c.b, token_of_gates, block.head),
        log_rate(c.A_log, block.head), bias(c.dt_bias, block.head);
    const bool has_norm = c.gate.data != nullptr;
    for (int copy = warp; copy < 4 * num_tokens; copy += warps) {
        const int kind = copy % 4, token = copy / 4;
        if (kind == 3 && !has_norm) continue;
        const HeadsView& from = kind == 0 ? c.k : kind == 1 ? c.q : kind == 2 ? c.v : c.gate;
        const int to = kind == 0   ? job.shared.raw_keys
                       : kind == 1 ? job.shared.raw_queries
                       : kind == 2 ? job.shared.values
                                   : job.shared.gates;
        const bool of_keys = kind < 2;
        const int64_t place = from.offset(first_token + token, of_keys ? block.key_head : block.head) +
                              (of_keys ? 0 : block.first_value);
        const int bytes = (of_keys ? kWidth : block.num_values) * 2;
        copy_row(shared_at<char>(to) + token * bytes, from.data + place * 2, bytes);
    }
    copy_replay<State, kWidth, kPerChannel>(r, job.shared, row, block, warps - 1 - warp);
    close_group_of_copies();

    const LaneOfRow at;
    const int row_of_lane = at.lane / R::kLanesOfSum * kGroups + at.group;
    const bool writes_row = at.lane % R::kLanesOfSum == 0;
    const char* source = state_of(row.source);
    char* target = state_of(row.target);
    int value = warp * R::kRowsOfWarp;  // the warp's first row among the block's
    if (!Staged::kIsBulk && job.is_staged) staged.fetch(source, block.first_value + value);
    close_group_of_copies();

    if (has_norm)
        for (int i = threadIdx.x; i < block.num_values; i += blockDim.x)
            shared_at<float>(job.shared.weights)[i] = LoadedFloat(c.norm_weight, i).value();
    wait_for_copies<1>();  // all but the state
    __syncthreads();
    if (has_gates) {
        shared_at<float>(job.shared.betas)[lane] = __fmul_rn(sigmoid(b.value()), c.beta_factor);
        if constexpr (!kPerChannel) {
            const float decay = decay_of(c, __fadd_rn(a.value(), bias.value()), log_rate.value());
            shared_at<float>(job.shared.decays)[lane] = decay;
            if (block.leads_head)
                r.decays[r.decay_offset(row.target, row.next_half(), lane, block.head)] = decay;
        }
    }
    if constexpr (kPerChannel)
        for (int i = threadIdx.x; i < num_tokens * R::kPadded; i += blockDim.x) {
            const int token = i / R::kPadded, k = i % R::kPadded;
            float& shared =
                shared_at<float>(job.shared.decays)[token * R::kPadded + shared_place<State, kWidth>(k)];
            if (k >= kWidth) {
                shared = 0.0f;
                continue;
            }
            const float x =
                __fadd_rn(c.a.at(first_token + token, block.head, k), c.dt_bias.at(block.head, k));
            const float decay = decay_of(c, x, log_rate.value());
            shared = decay;
            if (block.leads_head)
                r.decays[r.decay_offset(row.target, row.next_half(), token, block.head) + k] = decay;
        }
    scale_window<State, Input, kWidth>(job, row, block, num_tokens);
    scale_replay_keys<State, Input, kWidth>(job.shared, row.rows);
    __syncthreads();

    const float* const decays = shared_at<float>(job.shared.decays);
    const float* const betas = shared_at<float>(job.shared.betas);
    const int updates_stride = static_cast<int>(r.num_value_heads * r.value_width);
    while (true) {
        const int first = block.first_value + value;
        Raw raw;
        if (job.is_staged)
            staged.read(&raw);
        else
            raw.load(source, job.is_aligned, first, at);
        R rows;
        raw.widen(&rows);
        if (row.rows > 0 || row.source != row.target) {
            replay<State, kWidth, kPerChannel>(&rows, job.shared, row.rows, block.num_values, value, at);
            raw.round(rows);
            if (Staged::kIsBulk && job.is_staged)
                staged.store(target, first, raw);
            else
                raw.store(target, job.is_aligned, first, at);
            raw.widen(&rows);
        }

        bool last[R::kRows];  // of a tile
#pragma unroll
        for (int j = 0; j < R::kRows; ++j)
            last[j] = kGroups * (j + 1) + R::kLastRows > R::kRowsOfWarp &&
                      (first + kGroups * j + at.group) % kRowsOfTile >= kRowsOfTile - R::kLastRows;
        const int value_of_lane = first + row_of_lane;
        const float *keys = shared_at<float>(job.shared.keys),
                    *queries = shared_at<float>(job.shared.queries);
        const Input* values = shared_at<Input>(job.shared.values) + value + row_of_lane;
        float* updates = r.values + r.value_offset(row.target, 0, block.head) + value_of_lane;
        Input* out =
            reinterpret_cast<Input*>(c.out.data) + c.out.offset(first_token, block.head) + value_of_lane;
        Input* out_for_norm = shared_at<Input>(job.shared.outputs) + value + row_of_lane;
        const auto put = [&](float output) {
            if (has_norm) {
                if (writes_row) set(out_for_norm, output);
                out_for_norm += block.num_values;
            } else {
                if (writes_row) set(out, output);
                out += c.out.token_stride;
            }
        };
        float addend = 0.0f;
        // Of the token before: its lanes are added while those of this token's keys are, of which neither
        // has to wait for the other.
        Products<State, kWidth> outputs{};
        // One token at a time where states of all are stored: a store in the inner loop would cost it a move
        // of each element, whether it is done or not.
        for (int token = 0; token < num_tokens;) {
            const int end = c.all_states == nullptr ? num_tokens : token + 1;
#pragma unroll 1
            for (; token < end; ++token) {
                const float v = to_float(*values), beta = betas[token];
                values += block.num_values;
                decay_rows<State, kWidth, kPerChannel>(&rows, decays + token * (kPerChannel ? R::kPadded : 1),
                                                       addend, at);
                addend = -0.0f;
                float x[R::kChunks][R::kChunk];
                read_vector(x, keys, at);
                keys += R::kPadded;
                const Products<State, kWidth> products = multiply<true>(rows, x, last);
                const float output = add_lanes(outputs, at);
                const float update = __fmul_rn(__fadd_rn(v, -add_lanes(products, at)), beta);
                if (writes_row) *updates = update;
                updates += updates_stride;
                if (token > 0) put(output);
                float u[R::kRows];
#pragma unroll
                for (int j = 0; j < R::kRows; ++j)
                    u[j] = __shfl_sync(kAllLanes, update, j * R::kLanesOfSum, kLanes);
                update_rows(&rows, u, x);
                read_vector(x, queries, at);
                queries += R::kPadded;
                outputs = multiply<false>(rows, x, last);
            }
            if (c.all_states == nullptr) break;
            const int64_t place =
                (first_token + token - 1) * c.all_states_stride + block.head * c.states.value_width * kWidth;
            raw.round(rows);
            raw.store(c.all_states + place * static_cast<int64_t>(sizeof(State)), job.is_aligned, first, at);
        }
        put(add_lanes(outputs, at));
        value += warps * R::kRowsOfWarp;
        if (value >= block.num_values) break;
        if (job.is_staged) {
            staged.make_room();
            staged.fetch(source, block.first_value + value);
        }
        close_group_of_copies();
    }
    if (job.is_staged) staged.finish();
    if (!has_norm) return;
    __syncthreads();
    norm_outputs<Input>(job, block, first_token, num_tokens);
}

// ---------------------------------------------------------------- gated_delta_fold

// Layers that fit in a launch's parameters (4 KB in all); more take another launch.
constexpr int64_t kLayersPerLaunch = 72;

struct FoldJob {
    RecurrentStates states;  // of every layer; `data` is not used
    RecurrentRecord record;  // likewise
    RecurrentPlan plan;
    const int64_t* window;
    SharedPlaces shared;
    BlockPlaces blocks;
    FastDivisor by_entries;
    bool is_aligned;  // all states
    const char* report_as;
    FoldLayer layers[kLayersPerLaunch];
};
static_assert(sizeof(FoldJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

template <class State, class Input, int kWidth, bool kPerChannel>
__global__ void __launch_bounds__(kThreads, 2) fold_kernel(const __grid_constant__ FoldJob job) {
    using R = Rows<State, kWidth>;
    BlockPlace block = job.blocks[blockIdx.x];
    const uint32_t number = job.by_entries.quotient(static_cast<uint32_t>(block.request));
    const FoldLayer& layer = job.layers[number];
    const int64_t entry = block.request - number * job.by_entries.divisor;
    wait_for_earlier_kernels();
    const RecurrentRow row = job.plan[entry];
    const bool has_run = job.window != nullptr && *layer.window == *job.window;
    if (const Found found = problem_of_plan(row, entry, job.states.num_slots, job.record.rows)) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return;
    }
    if (!row.any() || has_run || (row.rows == 0 && row.source == row.target)) return;

    RecurrentRecord r = job.record;
    r.keys = const_cast<char*>(layer.keys);
    r.norms = const_cast<float*>(layer.norms);
    r.decays = const_cast<float*>(layer.decays);
    r.values = const_cast<float*>(layer.values);
    copy_replay<State, kWidth, kPerChannel>(r, job.shared, row, block, threadIdx.x / kWarp);
    const LaneOfRow at;
    const int64_t source = job.states.row_offset(row.source, block.head, 0) * sizeof(State),
                  target = job.states.row_offset(row.target, block.head, 0) * sizeof(State);
    const int value = threadIdx.x / kWarp * R::kRowsOfWarp;
    RawRows<State, kWidth> raw;
    raw.load(layer.states + source, job.is_aligned, block.first_value + value, at);
    close_group_of_copies();
    __syncwarp();  // else the compiler has the loads wait for the copies
    wait_for_copies<0>();
    __syncthreads();
    scale_replay_keys<State, Input, kWidth>(job.shared, row.rows);
    __syncthreads();
    R rows;
    raw.widen(&rows);
    replay<State, kWidth, kPerChannel>(&rows, job.shared, row.rows, block.num_values, value, at);
    raw.round(rows);
    raw.store(layer.states + target, job.is_aligned, block.first_value + value, at);
}

// ---------------------------------------------------------------- launches of both

template <class F>
void with_state_type(const RecurrentStates& states, const F& f) {
    if (states.is_bfloat16) return f(Tag<__nv_bfloat16>{});
    f(Tag<float>{});
}

template <class F>
void with_input_type(ScalarType dtype, const F& f) {
    if (dtype == ScalarType::BFloat16) return f(Tag<__nv_bfloat16>{});
    f(Tag<__half>{});
}

template <class F>
void with_key_width(int64_t width, const F& f) {
    if (width == 64) return f(std::integral_constant<int, 64>{});
    if (width == 96) return f(std::integral_constant<int, 96>{});
    if (width == 128) return f(std::integral_constant<int, 128>{});
    f(std::integral_constant<int, 256>{});
}

// Calls `f(Tag<State>, Tag<Input>, key width, per channel or not)`.
template <class F>
void with_types(const RecurrentStates& states, const RecurrentRecord& r, const F& f) {
    with_state_type(states, [&](auto state) {
        with_input_type(r.key_dtype, [&](auto input) {
            with_key_width(states.key_width, [&](auto width) {
                if (r.per_channel) return f(state, input, width, std::true_type{});
                f(state, input, width, std::false_type{});
            });
        });
    });
}

// Whether all chunks of all slots are moved at once.
bool is_aligned(const RecurrentStates& s, const void* data, int64_t slot_stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && slot_stride * (s.is_bfloat16 ? 2 : 4) % 16 == 0;
}

// That a block may have on this GPU.
int most_shared_memory(const Launch& launch) {
    int most = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, launch.device()));
    return most;
}

template <class Kernel>
void allow_shared_memory(const char* op, Kernel* kernel, const LaunchShape& shape, const Launch& launch) {
    const int bytes = static_cast<int>(shape.shared_bytes);
    if (bytes <= kSharedWithoutAsking) return;
    const int most = most_shared_memory(launch);
    if (bytes > most)
        fail(op, "record_rows must be so few that a block's copies of them fit ", most,
             " bytes of shared memory on this GPU, got rows that need ", bytes);
    // The most, not what this launch needs: another thread's launch of the same kernel may need more.
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
}

LaunchShape shape_for_heads(const char* op, int64_t heads, int64_t splits, int64_t threads,
                            int shared_bytes) {
    if (heads > INT32_MAX / splits) fail(op, "the heads of all requests must fit in one launch, got ", heads);
    return {dim3(static_cast<unsigned>(heads * splits)), dim3(static_cast<unsigned>(threads)),
            static_cast<size_t>(shared_bytes)};
}

// Rows of a state that a block takes: few while the blocks are few, so that they spread over the chip. Below
// 64, what each block does for all of its rows costs more than that gains.
int64_t values_of_block(const RecurrentRecord& r, int64_t heads, int64_t most) {
    int64_t values = std::gcd(r.value_width, most);
    while (values > 64 && heads * (r.value_width / values) < 2 * kEnoughBlocks) values /= 2;
    return values;
}

// Of a block of gated_delta_verify, at most. Four blocks of 128 share a multiprocessor as two of 256 do (the
// registers are the limit where it has 164 KB of shared memory), and overlap their waits for memory better.
// But what a block does for all of its rows grows with the window, least with small states and the norm,
// where a block has all rows of a head; and there few blocks of 128 leave a part of the chip idle.
int64_t threads_of_verify(const VerifyArguments& c, int64_t heads) {
    const bool has_norm = c.gate.data != nullptr;
    const int64_t short_window = has_norm && c.states.is_bfloat16 ? 8 : 5;
    const bool has_few_blocks = has_norm && heads <= kEnoughBlocks;
    return c.record.rows > short_window || has_few_blocks ? kThreads : kThreads / 2;
}

void run(const VerifyArguments& c, const Launch& launch) {
    const int64_t heads = c.num_requests * c.states.num_value_heads;
    if (heads == 0) {
        STD_CUDA_CHECK(cudaMemcpyAsync(c.layer_window, c.window, sizeof(int64_t), cudaMemcpyDeviceToDevice,
                                       launch.stream()));
        return check_launch(launch);
    }
    with_types(c.states, c.record, [&](auto state, auto input, auto width, auto per_channel) {
        using State = typename decltype(state)::type;
        constexpr int kWidth = decltype(width)::value;
        constexpr int64_t kRowsOfWarp = Rows<State, kWidth>::kRowsOfWarp;
        const int64_t most = kRowsOfWarp * (threads_of_verify(c, heads) / kWarp);
        const bool has_norm = c.gate.data != nullptr;
        int64_t values = c.states.value_width;
        const auto places = [&](int64_t staged) {
            return SharedPlaces(c.record.rows, c.record.rows, Rows<State, kWidth>::kPadded, values,
                                c.record.per_channel, has_norm, staged);
        };
        const auto fits = [&](int64_t staged) {
            const int bytes = places(staged).bytes;
            return bytes <= kSharedWithoutAsking || bytes <= most_shared_memory(launch);
        };
        // A block has all rows of a head, a few at a time: for the norm, and where heads are many, so that
        // what it does for all of its rows is done once. But long records may leave no room for them.
        if (!has_norm && (heads <= kEnoughBlocks || !fits(0)))
            values = values_of_block(c.record, heads, most);
        const int64_t warps = std::gcd(values, most) / kRowsOfWarp;
        const int64_t staged = warps * StagedRows<State, kWidth>::kBytes;
        const bool all_aligned = is_aligned(c.states, c.states.data, c.states.slot_stride) &&
                                 is_aligned(c.states, c.all_states, c.all_states_stride);
        // Where long windows leave no room, states go straight to registers.
        const bool is_staged = all_aligned && fits(staged);
        const VerifyJob job{c,
                            places(is_staged ? staged : 0),
                            BlockPlaces(c.record, values),
                            all_aligned,
                            is_staged,
                            report_as(c.op)};
        const auto kernel = verify_kernel<State, typename decltype(input)::type, kWidth, per_channel>;
        const LaunchShape shape =
            shape_for_heads(c.op, heads, c.states.value_width / values, warps * kWarp, job.shared.bytes);
        allow_shared_memory(c.op, kernel, shape, launch);
        launch.start(kernel, shape, job);
    });
    check_launch(launch);
}

void run(const FoldArguments& f, const Launch& launch) {
    const bool all_aligned = std::all_of(f.layers.begin(), f.layers.end(), [&](const FoldLayer& layer) {
        return is_aligned(f.states, layer.states, f.states.slot_stride);
    });
    with_types(f.states, f.record, [&](auto state, auto input, auto width, auto per_channel) {
        using State = typename decltype(state)::type;
        constexpr int kWidth = decltype(width)::value;
        constexpr int64_t kMost = Rows<State, kWidth>::kRowsOfWarp * (kThreads / kWarp);
        const int64_t num_layers = static_cast<int64_t>(f.layers.size());
        const int64_t heads_of_layer = f.plan.length * f.states.num_value_heads;
        const int64_t values = values_of_block(f.record, heads_of_layer * num_layers, kMost);
        FoldJob job{f.states,
                    f.record,
                    f.plan,
                    f.window,
                    SharedPlaces(0, f.record.rows, Rows<State, kWidth>::kPadded, values, f.record.per_channel,
                                 false, 0),
                    BlockPlaces(f.record, values),
                    FastDivisor(f.plan.length),
                    all_aligned,
                    report_as(f.op),
                    {}};
        const auto kernel = fold_kernel<State, typename decltype(input)::type, kWidth, per_channel>;
        for (int64_t first = 0; first < num_layers && heads_of_layer > 0; first += kLayersPerLaunch) {
            const int64_t count = std::min(kLayersPerLaunch, num_layers - first);
            std::copy_n(f.layers.begin() + first, count, job.layers);
            const LaunchShape shape =
                shape_for_heads(f.op, heads_of_layer * count, f.states.value_width / values,
                                values / Rows<State, kWidth>::kRowsOfWarp * kWarp, job.shared.bytes);
            allow_shared_memory(f.op, kernel, shape, launch);
            launch.start(kernel, shape, job);
        }
    });
    check_launch(launch);
}

// ---------------------------------------------------------------- plans

__global__ void __launch_bounds__(kThreads)
    window_plan_kernel(const __grid_constant__ RecurrentWindowArguments a, const char* report_as) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    wait_for_earlier_kernels();
    if (i == 0) ++*a.window;
    if (i >= a.plan.length) return;
    if (i >= a.num_requests) return a.plan.set(i, {});
    const RecurrentWindowStep step = window_step_of(a, i);
    if (step.found) {
        report(report_as, step.found);
        if (a.num_refused != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(a.num_refused), 1ull);
    }
    a.plan.set(i, step.row);
    if (step.sets_cursor) a.cursors.set(step.slot, step.cursor_rows, step.cursor_half);
}

void run(const RecurrentWindowArguments& a, const Launch& launch) {
    launch.start(window_plan_kernel, shape_for_items(a.plan.length), a, report_as(a.op));
    check_launch(launch);
}

// One block: all cursors are read before the first is written. In between, an entry that folds nothing but
// still clears its cursor is marked by its half.
constexpr int32_t kClears = 1;

__global__ void __launch_bounds__(kThreads)
    fold_plan_kernel(const __grid_constant__ RecurrentFoldPlanArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    for (int64_t i = threadIdx.x; i < a.plan.length; i += kThreads) {
        if (i >= a.num_entries) {
            a.plan.set(i, {});
            continue;
        }
        const RecurrentFoldStep step = fold_step_of(a, i);
        if (step.found) report(report_as, step.found);
        a.plan.set(i, !step.row.any() && step.cleared_target > 0 ? RecurrentRow{0, 0, kClears, 0} : step.row);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < a.num_entries; i += kThreads) {
        const RecurrentRow row = a.plan[i];
        if (row.any()) {
            a.cursors.set(row.target, 0, a.cursors.half(row.target));
            if (row.source != row.target && !a.keep_source)
                a.cursors.set(row.source, 0, a.cursors.half(row.source));
        } else if (row.half == kClears) {
            const int64_t target = a.target_slots[i];
            a.cursors.set(target, 0, a.cursors.half(target));
            a.plan.set(i, {});
        }
    }
}

void run(const RecurrentFoldPlanArguments& a, const Launch& launch) {
    launch.start(fold_plan_kernel, {dim3(1), dim3(kThreads)}, a, report_as(a.op));
    check_launch(launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_recurrent<Launch>(m);
}

}  // namespace nwor
