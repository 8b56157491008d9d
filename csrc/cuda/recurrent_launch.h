// Family recurrent: how a launch over all heads of all requests is split into blocks, and how it selects the
// compiled kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <numeric>
#include <type_traits>

#include "../common/dispatch.h"
#include "../recurrent.h"
#include "launch.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- blocks

// The work of a block: rows of one head of one request.
struct BlockPlace {
    int64_t request, head, key_head;
    int first_value, num_values;  // rows of the state
    bool leads_head,
        leads_key_head;  // whether it writes the data that all blocks of a value head or a key head share
};

// Finds the place of a block from its number: blocks of a head are adjacent, then heads of a request, then
// requests.
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

// Returns the rows of a state that a block takes. They are few if there are few blocks, so that these spread
// over the chip. Below 64 rows, the work that a block does once for all of its rows costs more than this
// gains.
int64_t values_of_block(const RecurrentRecord& r, int64_t heads, int64_t most) {
    int64_t values = std::gcd(r.value_width, most);
    while (values > 64 && heads * (r.value_width / values) < 2 * kEnoughBlocks) values /= 2;
    return values;
}

LaunchShape shape_for_heads(const char* op, int64_t heads, int64_t splits, int64_t threads,
                            int shared_bytes) {
    if (heads > INT32_MAX / splits) fail(op, "the heads of all requests must fit in one launch, got ", heads);
    return {dim3(static_cast<unsigned>(heads * splits)), dim3(static_cast<unsigned>(threads)),
            static_cast<size_t>(shared_bytes)};
}

// ---------------------------------------------------------------- the compiled kernel

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

// Calls `f(Tag<State>, Tag<Input>, key width, whether there is a decay per channel)`.
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

// Returns whether every chunk of every slot is at a multiple of 16 bytes.
bool is_aligned(const RecurrentStates& s, const void* data, int64_t slot_stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && slot_stride * (s.is_bfloat16 ? 2 : 4) % 16 == 0;
}

// ---------------------------------------------------------------- shared memory

constexpr int kSharedWithoutAsking = 48 << 10;  // bytes

// Returns the shared memory that a block may have on this GPU, in bytes.
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
    // Set the maximum, because a launch of the same kernel by another thread may need more than this one.
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
}

}  // namespace

}  // namespace nwor
