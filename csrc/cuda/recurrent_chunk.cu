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
// parts of tf32 (22 bits of the mantissa). An update is split into three parts of bfloat16 (24 bits). Two are
// enough for a bfloat16 state.
//
// The bits of a token depend only on S and on the chunk's rows up to it. Each column of a product is
// separate. All other sums and products begin at the chunk's first row. `fold` adds the rows of a chunk to S.
// Verify and fold call it in the same way, so both compute the same bits of a state.
//
// The kernel is limited by the instructions and waits of a block, not by its bytes. A warp reads a state from
// shared memory piece by piece, which takes few registers. Unaligned rows have a separate kernel. All
// ordinary loads come before the copies to shared memory, because a load waits for all copies that its
// multiprocessor has started earlier. A load of a spilled register waits too. (docs/internals/tried.md)
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

constexpr int kWidth = 128;      // of keys and of values
constexpr int kC = kChunkRows;   // rows of a chunk
constexpr int kRowsOfTile = 16;  // rows of a state that a warp has at a time
constexpr int kMostRowsAfterBase = kC - 1 + kMostChunkWindow;
// Strides of rows in shared memory. They are padded against bank conflicts.
constexpr int kKeyBytes = kWidth * 2 + 16;  // keys of the record
template <class State>
constexpr int kVectorBytes = kWidth * 2 + (sizeof(State) == 4 ? 32 : 64);  // keys and queries of the window
// Of updates, in elements.
NWOR_HOST_DEVICE constexpr int update_stride(int num_values) {
    return num_values + 4;
}
static_assert(kC == 16, "the depth of a tensor-core product");

// Offsets in the shared memory of a block, in bytes.
struct ChunkPlaces {
    int keys = 0, vectors = 0;                // raw keys of the record; the raw key and query of each token
    int values = 0, updates = 0;              // [tokens, values], [rows, values + padding]
    int decays = 0, norms = 0;                // [rows + tokens]: of the record, then of the window
    int query_norms = 0, betas = 0;           // [tokens]
    int totals = 0, coefficients = 0;         // [tokens], [rows, tokens]: for a token's key and for its query
    int weights = 0, gates = 0, outputs = 0;  // of the norm
    int states = 0;
    int bytes = 0, vector_bytes = 0;  // in all, and `kVectorBytes`

    constexpr ChunkPlaces(int64_t tokens, int64_t rows, int num_values, bool has_norm, int64_t state_bytes,
                          bool stores_all, int vector_bytes)
        : vector_bytes(vector_bytes) {
        int64_t end = 0;
        const auto take = [&end](int64_t bytes) {
            const int64_t begin = end;
            end += ceil_div(bytes, 16) * 16;
            return static_cast<int>(begin);
        };
        keys = take(rows * kKeyBytes);
        vectors = take(2 * tokens * vector_bytes);
        values = take(tokens * num_values * 2);
        updates = take((stores_all ? rows + tokens : rows) * update_stride(num_values) * 4);
        decays = take((rows + tokens) * 4);
        norms = take((rows + tokens) * 4);
        query_norms = take(tokens * 4);
        betas = take(tokens * 4);
        totals = take(tokens * 8);
        coefficients = take(kMostRowsAfterBase * tokens * 8);
        weights = take(has_norm ? num_values * 4 : 0);
        gates = take(has_norm ? tokens * num_values * 2 : 0);
        outputs = values;  // each thread writes where it has read; later it reads and ignores its output
        states = take(state_bytes);
        bytes = static_cast<int>(end);
    }
};

// The largest window fits GPUs of compute capability 8.6, 8.9 and 12.0. Its block has eight rows of tiles.
static_assert(ChunkPlaces(kMostChunkWindow, kMostRowsAfterBase, kWidth, true, 8 * kRowsOfTile * kWidth * 4,
                          true, kVectorBytes<float>)
                  .bytes <= 99 << 10);

// The rows in shared memory: those of the record that the plan names, then those of the window.
struct ChunkRows {
    const ChunkPlaces& places;
    int recorded, num_values;

    __device__ const char* key(int row) const {
        return row < recorded ? shared_at<char>(places.keys) + row * kKeyBytes
                              : shared_at<char>(places.vectors) + 2 * (row - recorded) * places.vector_bytes;
    }
    __device__ const float* decays() const { return shared_at<float>(places.decays); }
    __device__ const float* norms() const { return shared_at<float>(places.norms); }
    // Returns the updates of two adjacent rows of the state.
    __device__ float2* updates(int row, int value) const {
        return reinterpret_cast<float2*>(shared_at<float>(places.updates) + row * update_stride(num_values) +
                                         value);
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

// 16 rows of a state in the shared memory of a warp. A lane has rows 2 * row and 2 * row + 1, and of each
// the chunks of 16 bytes column, column + 4, ... In the products these are rows `row` and `row + 8`. Each
// thread reads back what it copied itself, so it waits for no other one. `place` is that of the lane's first
// chunk; `state` is the address of the first row.
template <class State>
struct Tile {
    static constexpr bool kIsFloat = sizeof(State) == 4;
    static constexpr int kChunk = 16 / sizeof(State);
    static constexpr int kChunks = kWidth / (4 * kChunk);
    static constexpr int kRowBytes = kWidth * sizeof(State);
    static constexpr int kBytes = kRowsOfTile * kRowBytes;
    using Element = typename RawOf<sizeof(State)>::type;
    using Keys = typename std::conditional<kIsFloat, uint2, uint4>::type;  // a chunk's columns of a raw key

    static __device__ int place(const ChunkPlaces& places) {
        return places.states + static_cast<int>(threadIdx.x) / kWarp * kBytes +
               static_cast<int>(threadIdx.x) % kWarp * 16;
    }
    static __device__ uint4& chunk(int place, int r, int s) {
        return *shared_at<uint4>(place + (r * kChunks + s) * kWarp * 16);
    }
    // Offset in bytes in memory of chunk i in the order of `chunk`, from the first row.
    static __device__ int offset(int i) {
        const LaneOfTile at;
        return (2 * at.row + i / kChunks) * kRowBytes + i % kChunks * 64 + at.column * 16;
    }

    // Copies rows to shared memory, asynchronously if they are aligned.
    template <bool kIsAligned>
    static __device__ void fetch(const char* state, int place) {
#pragma unroll kIsAligned ? 2 * kChunks : 1
        for (int i = 0; i < 2 * kChunks; ++i)
            if constexpr (kIsAligned)
                copy_async<16>(&chunk(place, 0, i), state + offset(i));
            else
                copy_elements(&chunk(place, 0, i), state + offset(i));
    }
    // Stores the rows.
    template <bool kIsAligned>
    static __device__ void store(char* state, int place) {
#pragma unroll kIsAligned ? 2 * kChunks : 1
        for (int i = 0; i < 2 * kChunks; ++i)
            if constexpr (kIsAligned)
                __stcs(reinterpret_cast<uint4*>(state + offset(i)), chunk(place, 0, i));
            else
                copy_elements(state + offset(i), &chunk(place, 0, i));
    }
    // The two adjacent columns `2 * p` and `2 * p + 1` of a chunk, in float32. `set_pair` rounds them.
    static __device__ float2 pair(const uint4& chunk, int p) {
        const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        if constexpr (kIsFloat)
            return make_float2(__uint_as_float(words[2 * p]), __uint_as_float(words[2 * p + 1]));
        else
            return make_float2(low_of(words[p]), high_of(words[p]));
    }
    static __device__ void set_pair(uint4& chunk, int p, float low, float high) {
        if constexpr (kIsFloat) {
            (p == 0 ? chunk.x : chunk.z) = __float_as_uint(low);
            (p == 0 ? chunk.y : chunk.w) = __float_as_uint(high);
        } else {
            (p == 0 ? chunk.x : p == 1 ? chunk.y : p == 2 ? chunk.z : chunk.w) = bf16_pair(low, high);
        }
    }

  private:
    static __device__ void copy_elements(void* to, const void* from) {
#pragma unroll 1
        for (int e = 0; e < kChunk; ++e) static_cast<Element*>(to)[e] = static_cast<const Element*>(from)[e];
    }
};

// Adds `count` rows, at most a chunk, from row `first` on, to a tile and rounds: the decayed state, and the
// updates times the keys as one product. `value` is the first of the lane's two rows of the state, counted
// from the block's first.
template <class State>
__device__ void fold(int tile, const ChunkRows& rows, int first, int count, int value) {
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

    // The left side: updates of the lane's rows of the state, in parts
    constexpr int kParts = T::kIsFloat ? 3 : 2;
    uint32_t parts[kParts][4];
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
        for (int part = 0; part < kParts; ++part)
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
        uint4 one = T::chunk(tile, 0, s), two = T::chunk(tile, 1, s);
        typename T::Keys four[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            four[k] = *reinterpret_cast<const typename T::Keys*>(keys[k] + s * 4 * T::kChunk * 2);
#pragma unroll
        for (int p = 0; p < T::kChunk / 2; ++p) {
            const auto word = [&](int k) { return reinterpret_cast<const uint32_t*>(&four[k])[p]; };
            const uint32_t b0 = __byte_perm(word(0), word(1), column),
                           b1 = __byte_perm(word(2), word(3), column);
            const float2 x = T::pair(one, p), y = T::pair(two, p);
            float sums[4] = {__fmul_rn(x.x, total), __fmul_rn(x.y, total), __fmul_rn(y.x, total),
                             __fmul_rn(y.y, total)};
#pragma unroll
            for (int part = kParts - 1; part >= 0; --part) multiply_bf16(sums, parts[part], b0, b1);
            T::set_pair(one, p, sums[0], sums[1]);
            T::set_pair(two, p, sums[2], sums[3]);
        }
        T::chunk(tile, 0, s) = one;
        T::chunk(tile, 1, s) = two;
    }
}

// Multiplies the rows with the raw keys and queries of the window. Of token 4 * t + column a lane gets
// {key, query} of its first row, and then of its second row.
template <class State, int kTiles>
__device__ void multiply(float (&y)[kTiles][4], int tile, const char* vectors) {
    using T = Tile<State>;
    const LaneOfTile at;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) y[t][0] = y[t][1] = y[t][2] = y[t][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < T::kChunks; ++s) {
        const uint4 one = T::chunk(tile, 0, s), two = T::chunk(tile, 1, s);
        const uint32_t x[2][4] = {{one.x, one.y, one.z, one.w}, {two.x, two.y, two.z, two.w}};
        const char* from = vectors + at.row * kVectorBytes<State> + (s * 4 + at.column) * T::kChunk * 2;
        if constexpr (T::kIsFloat) {
            uint32_t z[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint2 four = *reinterpret_cast<const uint2*>(from + t * 8 * kVectorBytes<State>);
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
                const uint4 z = *reinterpret_cast<const uint4*>(from + t * 8 * kVectorBytes<State>);
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

// Starts the copies of the `count` rows that the plan names. The warps take rows in turn.
template <bool kIsAligned>
__device__ void copy_recorded(const RecordOfHead& record, const ChunkPlaces& places, int count,
                              int num_values) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    char* const keys = shared_at<char>(places.keys);
    char* const updates = shared_at<char>(places.updates);
    const int update_bytes = update_stride(num_values) * 4;
#pragma unroll 1
    for (int i = warp; i < count; i += warps) {
        if constexpr (kIsAligned) {
            if (lane * 8 < kWidth)
                copy_async<16>(keys + i * kKeyBytes + lane * 16, record.key(i) + lane * 16);
            if (lane * 4 < num_values)
                copy_async<16>(updates + i * update_bytes + lane * 16, record.update(i) + lane * 4);
        } else {
            copy_row(keys + i * kKeyBytes, record.key(i), kWidth * 2);
            copy_row(updates + i * update_bytes, record.update(i), num_values * 4);
        }
    }
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        copy_async<4>(shared_at<float>(places.norms) + i, record.norm(i));
        copy_async<4>(shared_at<float>(places.decays) + i, record.decay(i));
    }
}

// The window's vectors of one kind: keys, queries, values or gates. Strides are in bytes.
struct WindowVectors {
    const char* data;
    int64_t token_stride, head_stride;
    int place, shared_stride;
    bool of_keys;
};

// Starts the copies of the window's vectors. Each warp copies one kind.
template <bool kIsAligned>
__device__ void copy_window(const WindowVectors (&kinds)[4], const BlockPlace& block, int64_t first_token,
                            int num_tokens) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const WindowVectors& v = kinds[warp % 4];
    if (v.data == nullptr) return;  // without gates
    const int bytes = (v.of_keys ? kWidth : block.num_values) * 2;
    char* const to = shared_at<char>(v.place);
    const char* const from = v.data + first_token * v.token_stride +
                             (v.of_keys ? block.key_head : block.head) * v.head_stride +
                             (v.of_keys ? 0 : block.first_value * 2);
    if constexpr (kIsAligned) {  // two tokens at a time
        const int byte = lane % 16 * 16;
        for (int token = warp / 4 * 2 + lane / 16; token < num_tokens; token += warps / 2)
            if (byte < bytes)
                copy_async<16>(to + token * v.shared_stride + byte, from + token * v.token_stride + byte);
    } else {
        for (int token = warp / 4; token < num_tokens; token += warps / 4)
            copy_row(to + token * v.shared_stride, from + token * v.token_stride, bytes);
    }
}

// The window of a block.
struct ChunkWindow {
    const VerifyArguments& call;
    const RecordOfHead& record;
    int recorded, num_tokens;  // rows of the record before the window
    bool records_keys;         // the block records the keys of the window
};

// Computes the factors that normalize the window's keys, which are recorded, and its queries. A warp takes
// four vectors at a time: groups `first`, `first + warps`, ...
template <bool kIsAligned>
__device__ void find_norms(const ChunkPlaces& places, const ChunkWindow& w, int first, int warps) {
    const int lane = threadIdx.x % kWarp;
    for (int begin = first * 4; begin < 2 * w.num_tokens; begin += warps * 4) {  // eight lanes take a vector
        const int i = min(begin + lane / 8, 2 * w.num_tokens - 1), token = i / 2;
        const char* const raw = shared_at<char>(places.vectors) + i * places.vector_bytes;
        uint4 bits[2];
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            bits[n] = *reinterpret_cast<const uint4*>(raw + n * 128 + lane % 8 * 16);
            const uint32_t words[4] = {bits[n].x, bits[n].y, bits[n].z, bits[n].w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sum = __fmaf_rn(low_of(words[e]), low_of(words[e]), sum);
                sum = __fmaf_rn(high_of(words[e]), high_of(words[e]), sum);
            }
        }
#pragma unroll
        for (int n = 4; n > 0; n /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, n));
        const float factor = w.call.use_qk_l2norm ? rsqrt_approx(__fadd_rn(sum, 1e-6f)) : 1.0f;
        if (i < begin + lane / 8) continue;
        if (i % 2 == 1) {
            if (lane % 8 == 0) shared_at<float>(places.query_norms)[token] = __fmul_rn(factor, w.call.scale);
            continue;
        }
        if (lane % 8 == 0) shared_at<float>(places.norms)[w.recorded + token] = factor;
        if (!w.records_keys) continue;
        char* const key = w.record.key(w.recorded + token);
        if constexpr (kIsAligned) {
#pragma unroll
            for (int n = 0; n < 2; ++n) *reinterpret_cast<uint4*>(key + n * 128 + lane % 8 * 16) = bits[n];
        } else {
            for (int e = lane % 8; e < kWidth; e += 8)
                reinterpret_cast<uint16_t*>(key)[e] = reinterpret_cast<const uint16_t*>(raw)[e];
        }
        if (lane % 8 == 0) *w.record.norm(w.recorded + token) = factor;
    }
}

// Computes the coefficients of the rows after the base, for each token of the window, and the factors of the
// state. `folded` rows are before the base. A token of the next chunk reads no row of this one. Some warps
// multiply while the others find the norms.
template <int kTokens, bool kIsAligned>
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
    if (warp >= multiplying) find_norms<kIsAligned>(places, window, warp - multiplying, warps - multiplying);

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
                const uint4 z = *reinterpret_cast<const uint4*>(
                    shared_at<char>(places.vectors) + (t * 8 + at.row) * places.vector_bytes + offset);
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
            if (row[r] < kC &&
                before + token >= kC) {  // an earlier chunk's row adds -0 * 0, which changes no sum
                coefficients[row[r] * kTokens + token] = make_float2(-0.0f, -0.0f);
                continue;
            }
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
    WindowVectors kinds[4];
    const char* report_as;
};

// Grid: x = Q * HV * (dv / rows of a block), see `BlockPlaces`. Block: x = 32 * warps, 128 or 256. A block
// runs all tokens of one request on some rows of one head's state. A warp takes 16 rows at a time.
// `kTokens`: 4 or 8, at least the tokens of a window. `kStoresAll`: whether there is `all_states`. Then a
// state is folded for each token, which is slow. `kIsAligned`: whether states, vectors and records are at
// multiples of 16 bytes. Five blocks of 128 threads fit a multiprocessor with 96 registers per thread.
template <class State, int kTokens, bool kIsAligned, bool kStoresAll>
__global__ void __launch_bounds__(kStoresAll ? kThreads : kThreads * 5 / 4, kStoresAll ? 1 : 2)
    chunk_verify_kernel(const __grid_constant__ ChunkJob job) {
    static_assert(!kStoresAll || !kIsAligned);
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
    const bool has_weight = c.has_norm() && threadIdx.x < block.num_values;
    LoadedFloat a(c.a), b(c.b), log_rate(c.A_log), bias(c.dt_bias), weight(c.norm_weight);
    if (has_gates) {
        a.load(first_token + lane, block.head), b.load(first_token + lane, block.head);
        log_rate.load(block.head), bias.load(block.head);
    }
    if (has_weight) weight.load(threadIdx.x);
    const RecordOfHead record(r, entry, block);
    copy_window<kIsAligned>(job.kinds, block, first_token, num_tokens);
    copy_recorded<kIsAligned>(record, job.shared, entry.rows, block.num_values);
    close_group_of_copies();
    char* const state =
        c.states.data + c.states.row_offset(entry.source, block.head, block.first_value) * sizeof(State);
    int first = warp * kRowsOfTile;  // row of the warp, counted from the block's first
    const int tile = T::place(job.shared);
    T::template fetch<kIsAligned>(state + first * T::kRowBytes, tile);
    close_group_of_copies();

    // ---- Decays, betas, norms and coefficients

    if (has_weight) shared_at<float>(job.shared.weights)[threadIdx.x] = weight.value();
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
    find_coefficients<kTokens, kIsAligned>(
        job.shared, rows, ChunkWindow{c, record, entry.rows, num_tokens, block.leads_key_head}, folded);
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

            // The base: the stored state, or that at the end of a chunk, which the next window stores
            if (part == 0) wait_for_copies<0>();
            if (part > 0 || stores) {
                fold<State>(tile, rows, 0, kC, value);
                if (part == 0) T::template store<kIsAligned>(state + first * T::kRowBytes, tile);
            }

            // The state's product with each token's key, and with its query
            float y[kTiles][4], known[kTiles][2], asked[kTiles][2], v[kTiles][2];  // v: then the updates
            multiply<State>(y, tile, shared_at<char>(job.shared.vectors));
            const int next = first + warps * kRowsOfTile;
            const bool fetches = part + 1 == parts && next < block.num_values;
            if (!kStoresAll && fetches) T::template fetch<kIsAligned>(state + next * T::kRowBytes, tile);
            close_group_of_copies();
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
            const float2* of_row = coefficients + part * kC * kTokens + at.column;
            const float* u_of_row = &rows.updates(folded + part * kC, value)->x;
#pragma unroll 4
            for (int i = part * kC; i < before; ++i) {
                const float2 u = *reinterpret_cast<const float2*>(u_of_row);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    const float2 of = of_row[t * 4];
                    known[t][0] = __fmaf_rn(of.x, u.x, known[t][0]);
                    known[t][1] = __fmaf_rn(of.x, u.y, known[t][1]);
                    asked[t][0] = __fmaf_rn(of.y, u.x, asked[t][0]);
                    asked[t][1] = __fmaf_rn(of.y, u.y, asked[t][1]);
                }
                of_row += kTokens;
                u_of_row += update_stride(block.num_values);
            }

            // The tokens, one after the other. A lane keeps the updates of the tokens of its column. All are
            // computed, since a branch is slower: those from `end` on influence only later ones, and those
            // before `begin`, which are in the base, get an update of 0
#pragma unroll
            for (int j = 0; j < kTokens; ++j) {
                const float beta = betas[j];
                float2 u = make_float2(__fmul_rn(__fadd_rn(v[j / 4][0], -known[j / 4][0]), beta),
                                       __fmul_rn(__fadd_rn(v[j / 4][1], -known[j / 4][1]), beta));
                if (j < begin) u = make_float2(0.0f, 0.0f);
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
                if (kStoresAll || part + 1 < parts)
                    *rows.updates(entry.rows + token, value) = make_float2(v[t][0], v[t][1]);
                float* const updates = record.update(entry.rows + token) + value;
                Input* const to = out + token * c.out.token_stride + value;
                if (c.has_norm())
                    *reinterpret_cast<uint32_t*>(shared_at<Input>(job.shared.outputs) +
                                                 token * block.num_values + value) =
                        bf16_pair(asked[t][0], asked[t][1]);
                if constexpr (kIsAligned) {
                    *reinterpret_cast<float2*>(updates) = make_float2(v[t][0], v[t][1]);
                    if (!c.has_norm()) *reinterpret_cast<uint32_t*>(to) = bf16_pair(asked[t][0], asked[t][1]);
                } else {
                    updates[0] = v[t][0], updates[1] = v[t][1];
                    if (!c.has_norm()) set(to, asked[t][0]), set(to + 1, asked[t][1]);
                }
            }
            __syncwarp();  // for folds, which read the updates of the window
            if constexpr (kStoresAll) {
#pragma unroll 1
                for (int j = begin; j < end; ++j) {
                    const int after = tile + warps * T::kBytes;
#pragma unroll 1
                    for (int i = 0; i < 2 * T::kChunks; ++i) T::chunk(after, 0, i) = T::chunk(tile, 0, i);
                    fold<State>(after, rows, folded + part * kC, before + j + 1 - part * kC, value);
                    const int64_t place =
                        (first_token + j) * c.all_states_stride +
                        (block.head * c.states.value_width + block.first_value + first) * kWidth;
                    T::template store<kIsAligned>(c.all_states + place * static_cast<int64_t>(sizeof(State)),
                                                  after);
                }
                if (fetches) T::template fetch<kIsAligned>(state + next * T::kRowBytes, tile);
            }
        }
    }

    // ---- Norm and gate of the outputs

    if (!c.has_norm()) return;
    __syncthreads();
    BlockPlace all = block;
    all.num_values = kWidth;  // with the norm a block has all rows
    norm_outputs<Input>(job, Window{all, r, entry.source, 0, first_token, num_tokens, true});
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
    const bool has_norm = c.has_norm(), stores_all = c.all_states != nullptr;
    const bool is_short = c.record.window_rows <= 4 && !stores_all;
    // As in the exact form: with the norm a block has all rows of a head, and few blocks have more warps.
    const bool has_few_blocks = heads <= kEnoughBlocks;
    const int64_t values = !has_norm && has_few_blocks ? kWidth / 2 : kWidth;
    const int64_t warps = has_norm && has_few_blocks && !stores_all ? 8 : 4;
    const ChunkPlaces shared(is_short ? 4 : 8, c.record.pending_rows, values, has_norm,
                             (stores_all ? 2 : 1) * warps * Tile<State>::kBytes, stores_all,
                             kVectorBytes<State>);
    const auto vectors = [](const HeadsView& v, int place, int64_t shared_stride, bool of_keys) {
        return WindowVectors{
            v.data, v.token_stride * 2, v.head_stride * 2, place, static_cast<int>(shared_stride), of_keys};
    };
    const int query = shared.vectors + kVectorBytes<State>;
    const ChunkJob job{
        c,
        shared,
        BlockPlaces(c.record, values),
        {vectors(c.k, shared.vectors, 2 * kVectorBytes<State>, true),
         vectors(c.q, query, 2 * kVectorBytes<State>, true), vectors(c.v, shared.values, values * 2, false),
         vectors(c.gate, shared.gates, values * 2, false)},
        report_as(c.op)};
    const bool are_aligned =
        is_aligned(c.states, c.states.data, c.states.slot_stride) && has_aligned_vectors(c);
    const auto kernel = stores_all    ? chunk_verify_kernel<State, 8, false, true>
                        : is_short    ? are_aligned ? chunk_verify_kernel<State, 4, true, false>
                                                    : chunk_verify_kernel<State, 4, false, false>
                        : are_aligned ? chunk_verify_kernel<State, 8, true, false>
                                      : chunk_verify_kernel<State, 8, false, false>;
    const LaunchShape shape = shape_for_heads(c.op, heads, kWidth / values, warps * kWarp, job.shared.bytes);
    allow_shared_memory(c.op, kernel, shape, launch);
    launch.start(kernel, shape, job);
}

// ---------------------------------------------------------------- gated_delta_fold

// Grid: x = L * parts * HV * (dv / rows of a block), as of `fold_kernel`. Block: x = 32 * (rows of a block /
// 16). A block folds some rows of one head's state for each of its entries: a whole chunk as a window does,
// and then the rows after it.
template <class State, bool kIsAligned>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_fold_kernel(const __grid_constant__ FoldJob<ChunkPlaces> job) {
    using T = Tile<State>;

    for_each_fold(job, [&](FoldTask* task) {
        const RecurrentEntry& entry = task->entry;
        const BlockPlace& block = task->block;
        task->record.is_ring = true;  // a constant
        copy_recorded<false>(RecordOfHead(task->record, entry, block), job.shared, entry.rows,
                             block.num_values);
        const int first = threadIdx.x / kWarp * kRowsOfTile;
        const auto state_of = [&](int32_t slot) {
            return task->layer->states +
                   job.states.row_offset(slot, block.head, block.first_value + first) * sizeof(State);
        };
        const int tile = T::place(job.shared);
        T::template fetch<kIsAligned>(state_of(entry.source), tile);
        close_group_of_copies();
        wait_for_copies<0>();
        __syncthreads();
        const ChunkRows rows{job.shared, entry.rows, block.num_values};
#pragma unroll 1
        for (int begin = 0; begin < entry.rows; begin += kC)
            fold<State>(tile, rows, begin, min(kC, entry.rows - begin), first + 2 * LaneOfTile().row);
        T::template store<kIsAligned>(state_of(entry.target), tile);
    });
}

template <class State>
void start_fold(const FoldArguments& f, const Launch& launch) {
    const int64_t values = values_of_fold(f, kWidth);
    const int64_t warps = values / kRowsOfTile;
    const ChunkPlaces shared(0, f.record.rows, values, false, warps * Tile<State>::kBytes, false,
                             kVectorBytes<State>);
    const bool is_aligned = all_are_aligned(f);
    start_folds(f, shared, is_aligned,
                is_aligned ? chunk_fold_kernel<State, true> : chunk_fold_kernel<State, false>, values,
                warps * kWarp, launch);
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
