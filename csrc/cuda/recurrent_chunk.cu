// Family recurrent on CUDA: the chunk form. Semantics: nwor_ops/ops/recurrent.py, and `run_chunk` in
// csrc/cpu/recurrent.cpp.
//
// A window does not build the states of its tokens. S is the stored state at the base of a token's chunk. For
// each row i, c(i) is the product of its key with the token's key, times the decays between them. The update
// is
//
//     u = beta (v - decay S k - sum of c(i) u(i) over the chunk's rows before the token)
//
// The output is the same sum for the query instead of the key, and includes u itself. Tensor cores multiply S
// with all keys and queries of the window. They also multiply keys with keys and queries.
//
// Raw keys and queries are bfloat16, which tensor cores multiply exactly. A float32 state is split into two
// parts of tf32 (22 bits of the mantissa), and an update into three parts of bfloat16 (24 bits).
//
// The bits of a token depend only on S and on the chunk's rows up to it. Each column of a product is
// separate. All other sums and products begin at the chunk's first row. `fold` adds the rows of a chunk to S.
// Verify and fold call it in the same way, so both compute the same bits of a state.
//
// The instructions of a block, not its bytes, limit a kernel of few tokens. So addresses are computed once
// per block, and rows that begin at multiples of 16 bytes are copied without a check of each. (Bulk copies,
// eight warps per block and more blocks per multiprocessor were slower on an H200.)
#include <cstdint>
#include <type_traits>

#include "../common/dispatch.h"
#include "async_copies.h"
#include "launch.h"
#include "recurrent_arithmetic.h"
#include "recurrent_chunk.h"
#include "recurrent_fold_job.h"
#include "recurrent_launch.h"
#include "recurrent_shared.h"
#include "recurrent_window.h"

namespace nwor {
namespace {

using Input = __nv_bfloat16;

constexpr int kWidth = 128;        // of keys and of values
constexpr int kC = kChunkRows;     // rows of a chunk
constexpr int kRowsOfTile = 16;    // rows of a state that a warp has in registers
constexpr int kVectorBytes = 288;  // between raw keys in shared memory: 256, and 32 against bank conflicts
constexpr int kMostRows = kC - 1 + kMostChunkWindow;  // after a base
static_assert(kC == 16, "the depth of a tensor-core product");

// Offsets in the shared memory of a block, in bytes.
struct ChunkPlaces {
    int keys, vectors;            // raw: keys of the record; of each token the key and the query
    int values, updates;          // [tokens, values], [rows + tokens, values]
    int decays, norms;            // [rows + tokens]: of the record, then of the window
    int query_norms, betas;       // [tokens]
    int totals, coefficients;     // [tokens], [kMostRows, tokens]: for a token's key and for its query
    int weights, gates, outputs;  // of the norm
    int states;
    int bytes;

    ChunkPlaces(int64_t tokens, int64_t rows, int64_t num_values, bool has_norm, int64_t state_bytes) {
        int64_t end = 0;
        const auto take = [&end](int64_t bytes) {
            const int64_t begin = end;
            end += ceil_div(bytes, 16) * 16;
            return static_cast<int>(begin);
        };
        keys = take(rows * kVectorBytes);
        vectors = take(2 * tokens * kVectorBytes);
        values = take(tokens * num_values * 2);
        updates = take((rows + tokens) * num_values * 4);
        decays = take((rows + tokens) * 4);
        norms = take((rows + tokens) * 4);
        query_norms = take(tokens * 4);
        betas = take(tokens * 4);
        totals = take(tokens * 8);
        coefficients = take(kMostRows * tokens * 8);
        weights = take(has_norm ? num_values * 4 : 0);
        gates = take(has_norm ? tokens * num_values * 2 : 0);
        outputs = take(has_norm ? tokens * num_values * 2 : 0);
        states = take(state_bytes);
        bytes = static_cast<int>(end);
    }
};

// The rows in shared memory: those of the record that the plan names, then those of the window.
struct ChunkRows {
    const ChunkPlaces& places;
    int recorded, num_values;

    __device__ const char* key(int row) const {
        return row < recorded ? shared_at<char>(places.keys) + row * kVectorBytes
                              : shared_at<char>(places.vectors) + 2 * (row - recorded) * kVectorBytes;
    }
    __device__ const float* decays() const { return shared_at<float>(places.decays); }
    __device__ const float* norms() const { return shared_at<float>(places.norms); }
    // Returns the updates of two adjacent rows of the state.
    __device__ float2* updates(int row, int value) const {
        return reinterpret_cast<float2*>(shared_at<float>(places.updates) + row * num_values + value);
    }
};

// ---------------------------------------------------------------- tensor cores

__device__ void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ float low_of(uint32_t two) {
    return __uint_as_float(two << 16);
}
__device__ float high_of(uint32_t two) {
    return __uint_as_float(two & 0xffff0000);
}
__device__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(two);
}

// The place of a thread in a product of tensor cores: the row of the left side, and the column.
struct LaneOfTile {
    int row, column;  // 0 to 7, 0 to 3

    __device__ LaneOfTile() : row(threadIdx.x % kWarp / 4), column(threadIdx.x % 4) {}
};

// ---------------------------------------------------------------- rows of a state

// 16 rows of a state in a warp, as they are in memory. A lane has rows 2 * row and 2 * row + 1, and of each
// the chunks of 16 bytes column, column + 4, ... In the products these are rows `row` and `row + 8`.
template <class State>
struct Tile {
    static constexpr bool kIsFloat = sizeof(State) == 4;
    static constexpr int kChunk = 16 / sizeof(State);
    static constexpr int kChunks = kWidth / (4 * kChunk);
    static constexpr int kRowBytes = kWidth * sizeof(State);
    static constexpr int kBytes = kRowsOfTile * kRowBytes;
    using Element = typename RawOf<sizeof(State)>::type;

    using Keys = typename std::conditional<kIsFloat, uint2, uint4>::type;  // a chunk's columns of a raw key
    uint4 chunks[2][kChunks];

    // Offsets in bytes: in memory from the first row, and in the shared memory of the warp. Each thread reads
    // back what it copied itself, so it waits for no other one.
    static __device__ int offset(int r, int s) {
        const LaneOfTile at;
        return (2 * at.row + r) * kRowBytes + s * 64 + at.column * 16;
    }
    static __device__ char* shared(int place, int r, int s) {
        return shared_at<char>(place) + threadIdx.x / kWarp * kBytes +
               ((r * kChunks + s) * kWarp + static_cast<int>(threadIdx.x) % kWarp) * 16;
    }

    // Starts to copy rows to shared memory. Here and below, `state` is the address of the first row.
    static __device__ void fetch(const char* state, bool is_aligned, int place) {
        if (is_aligned) {
            const char* const from = state + offset(0, 0);
            char* const to = shared(place, 0, 0);
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int s = 0; s < kChunks; ++s)
                    copy_async<16>(to + (r * kChunks + s) * kWarp * 16, from + r * kRowBytes + s * 64);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < 2 * kChunks; ++i) {
            const Element* from = reinterpret_cast<const Element*>(state + offset(i % 2, i / 2));
            Element* to = reinterpret_cast<Element*>(shared(place, i % 2, i / 2));
#pragma unroll 1
            for (int e = 0; e < kChunk; ++e) to[e] = from[e];
        }
    }
    // Waits for the rows of `fetch`, and reads them.
    __device__ void read(int place) {
        wait_for_copies<0>();
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int s = 0; s < kChunks; ++s)
                chunks[r][s] = *reinterpret_cast<const uint4*>(shared(place, r, s));
    }
    // Writes the rows where `fetch` and `read` have them.
    __device__ void put(int place) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int s = 0; s < kChunks; ++s) *reinterpret_cast<uint4*>(shared(place, r, s)) = chunks[r][s];
    }
    // Rows that are not aligned go through shared memory: unrolled stores of elements would take registers
    // for their addresses.
    __device__ void store(char* state, bool is_aligned, int place) const {
        if (is_aligned) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int s = 0; s < kChunks; ++s)
                    __stcs(reinterpret_cast<uint4*>(state + offset(r, s)), chunks[r][s]);
            return;
        }
        put(place);
#pragma unroll 1
        for (int i = 0; i < 2 * kChunks; ++i) {
            const Element* from = reinterpret_cast<const Element*>(shared(place, i % 2, i / 2));
            Element* to = reinterpret_cast<Element*>(state + offset(i % 2, i / 2));
#pragma unroll 1
            for (int e = 0; e < kChunk; ++e) to[e] = from[e];
        }
    }
    // The two adjacent columns `2 * p` and `2 * p + 1` of chunk `s`, in float32. `set_pair` rounds them.
    __device__ float2 pair(int r, int s, int p) const {
        const uint32_t words[4] = {chunks[r][s].x, chunks[r][s].y, chunks[r][s].z, chunks[r][s].w};
        if constexpr (kIsFloat)
            return make_float2(__uint_as_float(words[2 * p]), __uint_as_float(words[2 * p + 1]));
        else
            return make_float2(low_of(words[p]), high_of(words[p]));
    }
    __device__ void set_pair(int r, int s, int p, float low, float high) {
        uint4& chunk = chunks[r][s];
        if constexpr (kIsFloat) {
            (p == 0 ? chunk.x : chunk.z) = __float_as_uint(low);
            (p == 0 ? chunk.y : chunk.w) = __float_as_uint(high);
        } else {
            (p == 0 ? chunk.x : p == 1 ? chunk.y : p == 2 ? chunk.z : chunk.w) = bf16_pair(low, high);
        }
    }
};

// Adds `count` rows, at most a chunk, from row `first` on, and rounds: the decayed state, and the updates
// times the keys as one product. `value` is the first of the lane's two rows of the state, counted from the
// block's first.
template <class State>
__device__ void fold(Tile<State>* tile, const ChunkRows& rows, int first, int count, int value) {
    using T = Tile<State>;
    const LaneOfTile at;
    const float *decays = rows.decays() + first, *norms = rows.norms() + first;

    // Of lane i the decays after row i, and of lane kC all decays
    const int lane = threadIdx.x % kWarp, after = lane < kC ? lane : -1;
    float product = 1.0f;
#pragma unroll 4
    for (int i = 0; i < count; ++i)
        if (i > after) product = __fmul_rn(product, decays[i]);
    const float total = __shfl_sync(kAllLanes, product, kC);
    if (lane < count) product = __fmul_rn(product, norms[lane]);
    const auto row_of = [&](int k) { return 2 * at.column + k / 2 * 8 + k % 2; };

    // The left side: updates of the lane's rows of the state, in three parts
    uint32_t parts[3][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float x[2][2];  // row of the state, row of the chunk
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int k = 2 * half + e, i = row_of(k);
            const bool has = i < count;
            const float2 u = has ? *rows.updates(first + i, value) : make_float2(0.0f, 0.0f);
            const float weight = __shfl_sync(kAllLanes, product, i);
            x[0][e] = __fmul_rn(u.x, weight);
            x[1][e] = __fmul_rn(u.y, weight);
        }
#pragma unroll
        for (int part = 0; part < 3; ++part)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t two = bf16_pair(x[r][0], x[r][1]);
                parts[part][2 * half + r] = two;
                x[r][0] = __fadd_rn(x[r][0], -low_of(two));
                x[r][1] = __fadd_rn(x[r][1], -high_of(two));
            }
    }

    // The right side: raw keys, two rows by eight columns at a time. A row that is not there has updates of 0
    const char* keys[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        keys[k] = rows.key(first + min(row_of(k), count - 1)) + at.row / 2 * T::kChunk * 2;
    const uint32_t column =
        at.row % 2 == 0 ? 0x5410 : 0x7632;  // of two words, their low or their high halves
#pragma unroll
    for (int s = 0; s < T::kChunks; ++s) {
        typename T::Keys four[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            four[k] = *reinterpret_cast<const typename T::Keys*>(keys[k] + s * 4 * T::kChunk * 2);
#pragma unroll
        for (int p = 0; p < T::kChunk / 2; ++p) {
            const auto word = [&](int k) { return reinterpret_cast<const uint32_t*>(&four[k])[p]; };
            const uint32_t b0 = __byte_perm(word(0), word(1), column),
                           b1 = __byte_perm(word(2), word(3), column);
            const float2 one = tile->pair(0, s, p), two = tile->pair(1, s, p);
            float sums[4] = {__fmul_rn(one.x, total), __fmul_rn(one.y, total), __fmul_rn(two.x, total),
                             __fmul_rn(two.y, total)};
#pragma unroll
            for (int part = 2; part >= 0; --part) multiply_bf16(sums, parts[part], b0, b1);
            tile->set_pair(0, s, p, sums[0], sums[1]);
            tile->set_pair(1, s, p, sums[2], sums[3]);
        }
    }
}

// Multiplies the rows with the raw keys and queries of the window. Of token 4 * t + column a lane gets
// {key, query} of its first row, and then of its second row.
template <class State, int kTiles>
__device__ void multiply(float (&y)[kTiles][4], const Tile<State>& tile, const char* vectors) {
    using T = Tile<State>;
    const LaneOfTile at;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) y[t][0] = y[t][1] = y[t][2] = y[t][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < T::kChunks; ++s) {
        const uint4 one = tile.chunks[0][s], two = tile.chunks[1][s];
        const uint32_t x[2][4] = {{one.x, one.y, one.z, one.w}, {two.x, two.y, two.z, two.w}};
        const char* from = vectors + at.row * kVectorBytes + (s * 4 + at.column) * T::kChunk * 2;
        if constexpr (T::kIsFloat) {
            uint32_t z[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint2 four = *reinterpret_cast<const uint2*>(from + t * 8 * kVectorBytes);
                z[t][0] = four.x << 16, z[t][1] = four.x & 0xffff0000;
                z[t][2] = four.y << 16, z[t][3] = four.y & 0xffff0000;
            }
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const uint32_t all[4] = {x[0][e], x[1][e], x[0][e + 1], x[1][e + 1]};
                uint32_t high[4], low[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    high[n] = all[n] & 0xffffe000;
                    low[n] = __float_as_uint(__fadd_rn(__uint_as_float(all[n]), -__uint_as_float(high[n]))) &
                             0xffffe000;
                }
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    multiply_tf32(y[t], high, z[t][e], z[t][e + 1]);
                    multiply_tf32(y[t], low, z[t][e], z[t][e + 1]);
                }
            }
        } else {
            const uint32_t first[4] = {x[0][0], x[1][0], x[0][1], x[1][1]};
            const uint32_t second[4] = {x[0][2], x[1][2], x[0][3], x[1][3]};
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint4 z = *reinterpret_cast<const uint4*>(from + t * 8 * kVectorBytes);
                multiply_bf16(y[t], first, z.x, z.y);
                multiply_bf16(y[t], second, z.z, z.w);
            }
        }
    }
}

// ---------------------------------------------------------------- what a block has for all of its rows

// The record of a head. Rows are counted from row `first` of the ring, and lie `*_stride` elements apart.
struct RecordOfHead {
    char* keys;      // raw
    float *updates,  // of the block's rows of the state
        *norms, *decays;
    uint32_t keys_stride, updates_stride, norms_stride, decays_stride;
    int first, rows;

    __device__ RecordOfHead(const RecurrentRecord& r, const RecurrentEntry& entry, const BlockPlace& block)
        : keys(r.keys + r.key_offset(entry.source, 0, block.key_head) * 2),
          updates(r.updates + r.update_offset(entry.source, 0, block.head) + block.first_value),
          norms(r.norms + r.norm_offset(entry.source, 0, block.key_head)),
          decays(r.decays + r.decay_offset(entry.source, 0, block.head)),
          keys_stride(static_cast<uint32_t>(r.num_key_heads) * kWidth),
          updates_stride(static_cast<uint32_t>(r.num_value_heads) * kWidth),
          norms_stride(static_cast<uint32_t>(r.num_key_heads)),
          decays_stride(static_cast<uint32_t>(r.num_value_heads)),
          first(entry.first),
          rows(static_cast<int>(r.rows)) {}

    __device__ uint32_t place(int row) const {
        const int at = first + row;
        return static_cast<uint32_t>(at < rows ? at : at - rows);
    }
    __device__ char* key(int row) const { return keys + uint64_t{place(row)} * (keys_stride * 2); }
    __device__ float* update(int row) const { return updates + uint64_t{place(row)} * updates_stride; }
    __device__ float* norm(int row) const { return norms + uint64_t{place(row)} * norms_stride; }
    __device__ float* decay(int row) const { return decays + uint64_t{place(row)} * decays_stride; }
};

// Starts the copies of the `count` rows that the plan names. The warps take rows in turn. `is_aligned`:
// whether all rows begin at multiples of 16 bytes.
__device__ void copy_recorded(const RecordOfHead& record, const ChunkPlaces& places, int count,
                              int num_values, bool is_aligned) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    char* const keys = shared_at<char>(places.keys);
    char* const updates = shared_at<char>(places.updates);
#pragma unroll 1
    for (int i = warp; i < count; i += warps) {
        if (is_aligned) {
            if (lane * 8 < kWidth)
                copy_async<16>(keys + i * kVectorBytes + lane * 16, record.key(i) + lane * 16);
            if (lane * 4 < num_values)
                copy_async<16>(updates + (i * num_values + lane * 4) * 4, record.update(i) + lane * 4);
        } else {
            copy_row(keys + i * kVectorBytes, record.key(i), kWidth * 2);
            copy_row(updates + i * num_values * 4, record.update(i), num_values * 4);
        }
    }
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        copy_async<4>(shared_at<float>(places.norms) + i, record.norm(i));
        copy_async<4>(shared_at<float>(places.decays) + i, record.decay(i));
    }
}

// Starts the copies of the window's vectors. Each warp copies one kind.
__device__ void copy_window(const VerifyArguments& c, const ChunkPlaces& places, const BlockPlace& block,
                            int64_t first_token, int num_tokens, bool is_aligned) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int kind = warp % 4;
    if (kind == 3 && !c.has_norm()) return;
    const HeadsView& view = kind == 0 ? c.k : kind == 1 ? c.q : kind == 2 ? c.v : c.gate;
    const bool of_keys = kind < 2;
    const int bytes = (of_keys ? kWidth : block.num_values) * 2;
    const int place = of_keys     ? places.vectors + kind * kVectorBytes
                      : kind == 2 ? places.values
                                  : places.gates;
    const int shared_stride = of_keys ? 2 * kVectorBytes : bytes;
    const char* const from = view.data + (view.offset(first_token, of_keys ? block.key_head : block.head) +
                                          (of_keys ? 0 : block.first_value)) *
                                             2;
    const int64_t stride = view.token_stride * 2;
    if (is_aligned) {  // two tokens at a time
        const int byte = lane % 16 * 16;
        for (int token = warp / 4 * 2 + lane / 16; token < num_tokens; token += warps / 2)
            if (byte < bytes)
                copy_async<16>(shared_at<char>(place) + token * shared_stride + byte,
                               from + token * stride + byte);
    } else {
        for (int token = warp / 4; token < num_tokens; token += warps / 4)
            copy_row(shared_at<char>(place) + token * shared_stride, from + token * stride, bytes);
    }
}

// The window of a block.
struct ChunkWindow {
    const VerifyArguments& call;
    const RecordOfHead& record;
    int recorded, num_tokens;  // rows of the record before the window
    bool records_keys;         // the block records the keys of the window
    bool is_aligned;
};

// Computes the factors that normalize the window's keys, which are recorded, and its queries: every
// `warps`-th vector from number `first` on.
__device__ void find_norms(const ChunkPlaces& places, const ChunkWindow& w, int first, int warps) {
    const int lane = threadIdx.x % kWarp;
    for (int i = first; i < 2 * w.num_tokens; i += warps) {
        const int token = i / 2;
        const uint2 bits =
            *reinterpret_cast<const uint2*>(shared_at<char>(places.vectors) + i * kVectorBytes + lane * 8);
        const float x[4] = {low_of(bits.x), high_of(bits.x), low_of(bits.y), high_of(bits.y)};
        float factor = 1.0f;
        if (w.call.use_qk_l2norm) {
            float sum = __fmul_rn(x[0], x[0]);
#pragma unroll
            for (int e = 1; e < 4; ++e) sum = __fmaf_rn(x[e], x[e], sum);
            factor = rsqrt_approx(__fadd_rn(sum_of_warp(sum), 1e-6f));
        }
        if (i % 2 == 1) {
            if (lane == 0) shared_at<float>(places.query_norms)[token] = __fmul_rn(factor, w.call.scale);
            continue;
        }
        if (lane == 0) shared_at<float>(places.norms)[w.recorded + token] = factor;
        if (!w.records_keys) continue;
        char* const key = w.record.key(w.recorded + token) + lane * 8;
        if (w.is_aligned) {
            *reinterpret_cast<uint2*>(key) = bits;
        } else {
            uint16_t* const elements = reinterpret_cast<uint16_t*>(key);
            elements[0] = static_cast<uint16_t>(bits.x), elements[1] = static_cast<uint16_t>(bits.x >> 16);
            elements[2] = static_cast<uint16_t>(bits.y), elements[3] = static_cast<uint16_t>(bits.y >> 16);
        }
        if (lane == 0) *w.record.norm(w.recorded + token) = factor;
    }
}

// Computes the coefficients of the rows after the base, for each token of the window, and the factors of the
// state. `folded` rows are before the base. A token of the next chunk reads no row of this one. Some warps
// multiply while the others find the norms.
template <int kTokens>
__device__ void find_coefficients(const ChunkPlaces& places, const ChunkRows& rows, const ChunkWindow& window,
                                  int folded) {
    constexpr int kTiles = kTokens / 4;
    const LaneOfTile at;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int num_tokens = window.num_tokens, before = rows.recorded - folded, count = before + num_tokens;
    const int multiplying = (count + kRowsOfTile - 1) / kRowsOfTile;  // warps
    const float *decays = rows.decays() + folded, *norms = rows.norms() + folded;
    const float* query_norms = shared_at<float>(places.query_norms);
    const bool has_total = warp == warps - 1 && lane < num_tokens;
    float total = 1.0f;
    if (has_total)
#pragma unroll 4
        for (int i = (before + lane) / kC * kC; i <= before + lane; ++i) total = __fmul_rn(total, decays[i]);
    if (warp >= multiplying) find_norms(places, window, warp - multiplying, warps - multiplying);

    // Products of 16 keys with the keys and queries of the window
    const int row[2] = {warp * kRowsOfTile + at.row, warp * kRowsOfTile + at.row + 8};
    const char* const keys[2] = {rows.key(folded + min(row[0], count - 1)),
                                 rows.key(folded + min(row[1], count - 1))};
    float dots[kTiles][4] = {};
    if (warp < multiplying)
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            const int offset = s * 64 + at.column * 16;
            const uint4 x = *reinterpret_cast<const uint4*>(keys[0] + offset),
                        y = *reinterpret_cast<const uint4*>(keys[1] + offset);
            const uint32_t first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint4 z = *reinterpret_cast<const uint4*>(shared_at<char>(places.vectors) +
                                                                (t * 8 + at.row) * kVectorBytes + offset);
                multiply_bf16(dots[t], first, z.x, z.y);
                multiply_bf16(dots[t], second, z.z, z.w);
            }
        }

    // How the rows decay until the token
    float decay[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) decay[t][0] = decay[t][1] = 1.0f;
    if (warp < multiplying)
#pragma unroll 4
        for (int i = warp * kRowsOfTile + 1; i < count; ++i) {
            const float d = decays[i];
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (i > row[r] && i <= before + t * 4 + at.column)
                        decay[t][r] = __fmul_rn(decay[t][r], d);
        }
    __syncthreads();
    if (has_total)
        shared_at<float2>(places.totals)[lane] =
            make_float2(__fmul_rn(total, norms[before + lane]), __fmul_rn(total, query_norms[lane]));
    float2* const coefficients = shared_at<float2>(places.coefficients);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = t * 4 + at.column;
            if (token >= num_tokens || row[r] >= count) continue;
            const float factor = __fmul_rn(norms[row[r]], decay[t][r]);
            coefficients[row[r] * kTokens + token] =
                make_float2(__fmul_rn(__fmul_rn(dots[t][2 * r], factor), norms[before + token]),
                            __fmul_rn(__fmul_rn(dots[t][2 * r + 1], factor), query_norms[token]));
        }
}

// ---------------------------------------------------------------- gated_delta_verify

struct ChunkJob {
    VerifyArguments call;
    ChunkPlaces shared;
    BlockPlaces blocks;
    bool is_aligned;           // whether the states of slots and of `all_states` are aligned
    bool has_aligned_vectors;  // whether all vectors of the window, of the record and of the output are
    const char* report_as;
};

// Grid: x = Q * HV * (dv / rows of a block), see `BlockPlaces`. Block: x = 32 * warps, 128 or 256. A block
// runs all tokens of one request on some rows of one head's state. A warp takes 16 rows at a time.
// `kTokens`: 4 or 8, at least the tokens of a window. `kStoresAll`: whether there is `all_states`. Then a
// state is folded for each token, which is slow.
// Three blocks fit a multiprocessor with 80 registers per thread. With a float32 state these would spill.
template <class State, int kTokens, bool kStoresAll>
__global__ void __launch_bounds__(kThreads, kStoresAll              ? 1
                                            : Tile<State>::kIsFloat ? 2
                                                                    : 3)
    chunk_verify_kernel(const __grid_constant__ ChunkJob job) {
    using T = Tile<State>;
    constexpr int kTiles = kTokens / 4;
    const VerifyArguments& c = job.call;
    RecurrentRecord r = c.record;
    r.is_ring = true;  // a constant
    const BlockPlace block = job.blocks[blockIdx.x];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    wait_for_earlier_kernels();

    // ---- The request: its tokens and its entry of the plan

    const int64_t first_token = c.query_start_loc[block.request],
                  end_token = c.query_start_loc[block.request + 1];
    const RecurrentEntry entry = c.plan[block.request];
    if (blockIdx.x == 0 && threadIdx.x == 0) *c.layer_window = *c.window_id;
    Found found = problem_of_request(c, block.request, first_token, end_token, entry);
    if (!found) found = problem_of_chunk(entry, block.request, kC);
    if (found) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return;
    }
    const int num_tokens = static_cast<int>(end_token - first_token);
    if (num_tokens == 0) return;
    if (!r.has_window(entry)) return zero_outputs<Input>(c.out, block, first_token, end_token);

    // ---- Copies to shared memory: the window, the rows of the record, the first rows of the state

    const bool has_gates = warp == warps - 1 && lane < num_tokens;
    const int64_t token_of_gates = first_token + (has_gates ? lane : 0);
    const LoadedFloat a(c.a, token_of_gates, block.head), b(c.b, token_of_gates, block.head),
        log_rate(c.A_log, block.head), bias(c.dt_bias, block.head);
    const RecordOfHead record(r, entry, block);
    const bool has_aligned_vectors = job.has_aligned_vectors;
    copy_window(c, job.shared, block, first_token, num_tokens, has_aligned_vectors);
    copy_recorded(record, job.shared, entry.rows, block.num_values, has_aligned_vectors);
    close_group_of_copies();
    char* const state =
        c.states.data + c.states.row_offset(entry.source, block.head, block.first_value) * sizeof(State);
    int first = warp * kRowsOfTile;  // row of the warp, counted from the block's first
    T::fetch(state + first * T::kRowBytes, job.is_aligned, job.shared.states);
    close_group_of_copies();

    // ---- Decays, betas, norms and coefficients

    if (c.has_norm())
        for (int i = threadIdx.x; i < block.num_values; i += blockDim.x)
            shared_at<float>(job.shared.weights)[i] = LoadedFloat(c.norm_weight, i).value();
    if (has_gates) {
        shared_at<float>(job.shared.betas)[lane] = beta_of(c, b.value());
        const float decay = decay_of(c, a.value(), bias.value(), log_rate.value());
        shared_at<float>(job.shared.decays)[entry.rows + lane] = decay;
        if (block.leads_head) *record.decay(entry.rows + lane) = decay;
    }
    wait_for_copies<1>();  // all except the state
    __syncthreads();
    const ChunkRows rows{job.shared, entry.rows, block.num_values};
    const bool stores = entry.stores();
    const int folded = stores ? kC : 0, before = entry.rows - folded;
    find_coefficients<kTokens>(
        job.shared, rows,
        ChunkWindow{c, record, entry.rows, num_tokens, block.leads_key_head, has_aligned_vectors}, folded);
    __syncthreads();

    // ---- The state, some rows at a time

    const LaneOfTile at;
    const float2* const coefficients = shared_at<float2>(job.shared.coefficients);
    const float* const betas = shared_at<float>(job.shared.betas);
    Input* const out =
        reinterpret_cast<Input*>(c.out.data) + c.out.offset(first_token, block.head) + block.first_value;
    // Chunks that the window's tokens are in. A window that stores has one: R + W is at most 32.
    const int parts = before + num_tokens > kC ? 2 : 1;
    static_assert(kMostRecordRows <= 2 * kC);
    for (; first < block.num_values; first += warps * kRowsOfTile) {
        const int value = first + 2 * at.row;  // the first of the lane's two rows
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            const int begin = part == 0 ? 0 : kC - before, end = part + 1 < parts ? kC - before : num_tokens;

            // The base: the stored state, or that at the end of a chunk, which the next window stores. The
            // state is read again for it, so that it takes no registers until then.
            T tile;
            tile.read(job.shared.states);
            if (part > 0 || stores) {
                fold(&tile, rows, 0, kC, value);
                if (part == 0) tile.store(state + first * T::kRowBytes, job.is_aligned, job.shared.states);
            }

            // The state's product with each token's key, and with its query
            float y[kTiles][4], known[kTiles][2], asked[kTiles][2], v[kTiles][2];  // v: then the updates
            multiply(y, tile, shared_at<char>(job.shared.vectors));
            if (!kStoresAll && part + 1 == parts) {
                const int next = first + warps * kRowsOfTile;
                if (next < block.num_values)
                    T::fetch(state + next * T::kRowBytes, job.is_aligned, job.shared.states);
                close_group_of_copies();
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int token = t * 4 + at.column;
                const float2 total = shared_at<float2>(job.shared.totals)[token];
                const uint32_t two = *reinterpret_cast<const uint32_t*>(shared_at<Input>(job.shared.values) +
                                                                        token * block.num_values + value);
                v[t][0] = low_of(two), v[t][1] = high_of(two);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    known[t][i] = __fmul_rn(y[t][2 * i], total.x);
                    asked[t][i] = __fmul_rn(y[t][2 * i + 1], total.y);
                }
            }

            // Add the products of the rows before the window. Rows are counted from the first base
#pragma unroll 4
            for (int i = part * kC; i < before; ++i) {
                const float2 u = *rows.updates(folded + i, value);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const float2 of = coefficients[i * kTokens + t * 4 + at.column];
                    known[t][0] = __fmaf_rn(of.x, u.x, known[t][0]);
                    known[t][1] = __fmaf_rn(of.x, u.y, known[t][1]);
                    asked[t][0] = __fmaf_rn(of.y, u.x, asked[t][0]);
                    asked[t][1] = __fmaf_rn(of.y, u.y, asked[t][1]);
                }
            }

            // The tokens, one after the other. A lane keeps the updates of the tokens of its column
#pragma unroll
            for (int j = 0; j < kTokens; ++j) {
                if (j < begin || j >= end) continue;
                const float beta = betas[j];
                float2 u = make_float2(__fmul_rn(__fadd_rn(v[j / 4][0], -known[j / 4][0]), beta),
                                       __fmul_rn(__fadd_rn(v[j / 4][1], -known[j / 4][1]), beta));
                if (at.column == j % 4) v[j / 4][0] = u.x, v[j / 4][1] = u.y;
                u.x = __shfl_sync(kAllLanes, u.x, j % 4, 4);
                u.y = __shfl_sync(kAllLanes, u.y, j % 4, 4);
#pragma unroll
                for (int t = j / 4; t < kTiles; ++t) {
                    const int token = t * 4 + at.column;
                    const float2 of = coefficients[(before + j) * kTokens + token];
                    if (token > j) {
                        known[t][0] = __fmaf_rn(of.x, u.x, known[t][0]);
                        known[t][1] = __fmaf_rn(of.x, u.y, known[t][1]);
                    }
                    if (token >= j) {
                        asked[t][0] = __fmaf_rn(of.y, u.x, asked[t][0]);
                        asked[t][1] = __fmaf_rn(of.y, u.y, asked[t][1]);
                    }
                }
            }

            // Updates and outputs
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int token = t * 4 + at.column;
                if (token < begin || token >= end) continue;
                *rows.updates(entry.rows + token, value) = make_float2(v[t][0], v[t][1]);
                float* const updates = record.update(entry.rows + token) + value;
                Input* const to =
                    c.has_norm() ? shared_at<Input>(job.shared.outputs) + token * block.num_values + value
                                 : out + token * c.out.token_stride + value;
                if (has_aligned_vectors) {
                    *reinterpret_cast<float2*>(updates) = make_float2(v[t][0], v[t][1]);
                    *reinterpret_cast<uint32_t*>(to) = bf16_pair(asked[t][0], asked[t][1]);
                } else {
                    updates[0] = v[t][0], updates[1] = v[t][1];
                    set(to, asked[t][0]);
                    set(to + 1, asked[t][1]);
                }
            }
            __syncwarp();  // for folds, which read the updates of the window
            if constexpr (kStoresAll) {
#pragma unroll 1
                for (int j = begin; j < end; ++j) {
                    T after = tile;
                    fold(&after, rows, folded + part * kC, before + j + 1 - part * kC, value);
                    const int64_t place =
                        (first_token + j) * c.all_states_stride +
                        (block.head * c.states.value_width + block.first_value + first) * kWidth;
                    after.store(c.all_states + place * static_cast<int64_t>(sizeof(State)), job.is_aligned,
                                job.shared.states);
                }
                tile.put(job.shared.states);  // the next part reads it
                const int next = first + warps * kRowsOfTile;
                if (part + 1 == parts && next < block.num_values)
                    T::fetch(state + next * T::kRowBytes, job.is_aligned, job.shared.states);
                close_group_of_copies();
            }
        }
    }

    // ---- Norm and gate of the outputs

    if (!c.has_norm()) return;
    __syncthreads();
    norm_outputs<Input>(job, Window{block, r, entry.source, 0, first_token, num_tokens, true});
}

// Whether the window's vectors, the rows of the record and the output begin at multiples of 16 bytes.
bool has_aligned_vectors(const VerifyArguments& c) {
    const auto is_aligned = [](const void* data, int64_t bytes) {
        return reinterpret_cast<uintptr_t>(data) % 16 == 0 && bytes % 16 == 0;
    };
    const auto has_aligned_rows = [&](const HeadsView& v) {
        return is_aligned(v.data, v.token_stride * 2) && is_aligned(v.data, v.head_stride * 2);
    };
    const RecurrentRecord& r = c.record;
    return has_aligned_rows(c.q) && has_aligned_rows(c.k) && has_aligned_rows(c.v) &&
           has_aligned_rows(c.out) && (!c.has_norm() || has_aligned_rows(c.gate)) &&
           is_aligned(r.keys, r.keys_stride * 2) && is_aligned(r.updates, r.updates_stride * 4);
}

template <class State>
void start_verify(const VerifyArguments& c, const Launch& launch) {
    const int64_t heads = c.num_requests * c.states.num_value_heads;
    const bool has_norm = c.has_norm();
    const bool is_short = c.record.window_rows <= 4 && c.all_states == nullptr;
    // As in the exact form: with the norm a block has all rows of a head, and few blocks have more warps.
    const bool has_few_blocks = heads <= kEnoughBlocks;
    const int64_t values = !has_norm && has_few_blocks ? kWidth / 2 : kWidth;
    const int64_t warps = has_norm && has_few_blocks ? 8 : 4;
    const ChunkJob job{
        c,
        ChunkPlaces(is_short ? 4 : 8, c.record.pending_rows, values, has_norm, warps * Tile<State>::kBytes),
        BlockPlaces(c.record, values),
        is_aligned(c.states, c.states.data, c.states.slot_stride) &&
            is_aligned(c.states, c.all_states, c.all_states_stride),
        has_aligned_vectors(c),
        report_as(c.op)};
    const auto kernel = c.all_states != nullptr ? chunk_verify_kernel<State, 8, true>
                        : is_short              ? chunk_verify_kernel<State, 4, false>
                                                : chunk_verify_kernel<State, 8, false>;
    const LaunchShape shape = shape_for_heads(c.op, heads, kWidth / values, warps * kWarp, job.shared.bytes);
    allow_shared_memory(c.op, kernel, shape, launch);
    launch.start(kernel, shape, job);
}

// ---------------------------------------------------------------- gated_delta_fold

// Grid: x = L * E * HV * (dv / rows of a block), see `BlockPlaces`; layer and entry together take the place
// of its request. Block: x = 32 * (rows of a block / 16). A block folds some rows of one head's state: a
// whole chunk as a window does, and then the rows after it.
template <class State>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_fold_kernel(const __grid_constant__ FoldJob<ChunkPlaces> job) {
    using T = Tile<State>;

    // ---- Load

    FoldTask task;
    if (!find_task(job, &task)) return;
    const RecurrentEntry& entry = task.entry;
    const BlockPlace& block = task.block;
    task.record.is_ring = true;  // a constant
    copy_recorded(RecordOfHead(task.record, entry, block), job.shared, entry.rows, block.num_values, false);
    const int first = threadIdx.x / kWarp * kRowsOfTile;
    const auto state_of = [&](int32_t slot) {
        return task.layer->states +
               job.states.row_offset(slot, block.head, block.first_value + first) * sizeof(State);
    };
    T::fetch(state_of(entry.source), job.is_aligned, job.shared.states);
    close_group_of_copies();
    T tile;
    tile.read(job.shared.states);
    __syncthreads();

    // ---- Fold and store

    const ChunkRows rows{job.shared, entry.rows, block.num_values};
#pragma unroll 1
    for (int begin = 0; begin < entry.rows; begin += kC)
        fold(&tile, rows, begin, min(kC, entry.rows - begin), first + 2 * LaneOfTile().row);
    tile.store(state_of(entry.target), job.is_aligned, job.shared.states);
}

template <class State>
void start_fold(const FoldArguments& f, const Launch& launch) {
    const int64_t heads_of_layer = f.plan.length * f.states.num_value_heads;
    const int64_t values =
        values_of_block(f.record, heads_of_layer * static_cast<int64_t>(f.layers.size()), kWidth);
    const int64_t warps = values / kRowsOfTile;
    FoldJob<ChunkPlaces> job{f.states,
                             f.record,
                             f.plan,
                             f.window_id,
                             ChunkPlaces(0, f.record.rows, values, false, warps * Tile<State>::kBytes),
                             BlockPlaces(f.record, values),
                             FastDivisor(f.plan.length),
                             all_are_aligned(f),
                             report_as(f.op),
                             {}};
    const auto shape_of = [&](int64_t layers) {
        return shape_for_heads(f.op, heads_of_layer * layers, kWidth / values, warps * kWarp,
                               job.shared.bytes);
    };
    start_folds(f, &job, chunk_fold_kernel<State>, shape_of, launch);
}

}  // namespace

void run_chunk(const VerifyArguments& c, const Tensor& like) {
    const Launch launch(like);
    with_state_type(c.states, [&](auto state) { start_verify<typename decltype(state)::type>(c, launch); });
    check_launch(launch);
}

void run_chunk(const FoldArguments& f, const Tensor& like) {
    const Launch launch(like);
    with_state_type(f.states, [&](auto state) { start_fold<typename decltype(state)::type>(f, launch); });
    check_launch(launch);
}

}  // namespace nwor
