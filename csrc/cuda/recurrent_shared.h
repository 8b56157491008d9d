// Family recurrent: the shared memory of a block, and the copies of states through it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copies.h"
#include "launch.h"
#include "recurrent_rows.h"

namespace nwor {
namespace {

// Offsets in the shared memory of a block, in bytes. Vectors along the keys are float32, with each element at
// its `shared_place`. Raw vectors have the dtype and order of global memory.
struct SharedPlaces {
    int keys, queries, decays, betas;  // of the window: [T, dk], [T, dk], [T] or [T, dk], [T]
    int reapplied_keys, reapplied_norms, reapplied_decays, reapplied_updates;  // of the record
    int weights, gates, outputs;                                               // of the norm
    int values, raw_keys, raw_queries, raw_reapplied_keys;                     // raw
    int states, barriers;                                                      // of `SharedRows`
    int bytes;

    // Plans for at most `tokens` tokens and `rows` rows of a record, keys of `width` elements with padding,
    // and `num_values` rows of a state. `state_bytes` bytes of the state are here at the same time.
    SharedPlaces(int64_t tokens, int64_t rows, int64_t width, int64_t num_values, bool per_channel,
                 bool has_norm, int64_t state_bytes) {
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
        reapplied_keys = take(rows * width * 4);
        reapplied_norms = take(rows * 4);
        reapplied_decays = take(rows * decay);
        reapplied_updates = take(rows * num_values * 4);
        weights = take(has_norm ? num_values * 4 : 0);
        gates = take(has_norm ? tokens * num_values * 2 : 0);
        outputs = take(has_norm ? tokens * num_values * 2 : 0);
        values = take(tokens * num_values * 2);
        raw_keys = take(tokens * width * 2);
        raw_queries = take(tokens * width * 2);
        raw_reapplied_keys = take(rows * width * 2);
        states = take(state_bytes);
        barriers = take(state_bytes > 0 ? kThreads / kWarp * sizeof(BulkBarrier) : 0);
        bytes = static_cast<int>(end);
    }
};

extern __shared__ __align__(16) char shared_memory[];

template <class T>
__device__ T* shared_at(int place) {
    return reinterpret_cast<T*>(shared_memory + place);
}

// Starts the copy of `bytes` bytes by a warp. They are a multiple of 16, and elements have two bytes or more.
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

// Moves a warp's rows between a state and registers through the warp's part of shared memory. Only aligned
// states use it. All lanes call each method. Rows of float32 move in both directions by bulk copies, if the
// device has them; lane 0 starts the copies. For other rows each thread copies its own chunks, reads them
// back itself, and stores from registers. So it waits for no other thread. (Bulk copies did not make bfloat16
// faster.)
template <class State, int kWidth>
class SharedRows {
    using R = Rows<State, kWidth>;
    using Raw = RawRows<State, kWidth>;

  public:
    static constexpr bool kIsBulk = kHasBulkCopies && std::is_same_v<State, float>;
    static constexpr int kBytes = R::kRows * R::kChunks * kWarp * 16;  // of a warp
    static_assert(!std::is_same_v<State, float> || kBytes == R::kRowsOfWarp * R::kRowBytes,
                  "rows as they lie in memory");

    __device__ explicit SharedRows(const SharedPlaces& places) : places_(places) {}

    __device__ void init() {
        if constexpr (kIsBulk) {
            if (lane() == 0) {
                barrier()->init();
                fence_shared_from_bulk_copies();
            }
            __syncwarp();
        }
    }
    // Starts to load the rows from `first` on. Here and below, `state` is the address of the head's first
    // row.
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
    // Waits for the rows of `fetch`, and reads them.
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
    // Starts to store rows. Only for bulk copies; other rows are stored from registers.
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
    // Call it before the next `fetch`. Waits until all lanes and all stores have read these rows.
    __device__ void make_room() {
        if constexpr (kIsBulk) {
            fence_shared_from_bulk_copies();
            __syncwarp();
        }
        finish();
    }
    // Call it before the block ends. Waits until the stores have read their rows.
    __device__ void finish() {
        if constexpr (kIsBulk)
            if (lane() == 0) wait_for_bulk_reads();
    }

  private:
    // These are computed again at each use, because kept values would take registers.
    static __device__ int lane() { return threadIdx.x % kWarp; }
    __device__ BulkBarrier* barrier() const {
        return shared_at<BulkBarrier>(places_.barriers) + threadIdx.x / kWarp;
    }
    // The thread's first chunk. The first chunk of lane 0 begins the warp's rows.
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

}  // namespace

}  // namespace nwor
