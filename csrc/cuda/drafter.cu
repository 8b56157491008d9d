// Family drafter on CUDA: the work between two passes of a drafter's loop. Semantics:
// nwor_ops/ops/drafter.py.
//
// All kernels except gumbel_sample have one thread per output element, and each thread calls a function of
// csrc/drafter_*.h. No kernel allocates or waits for another block. Every count that may
// change between replays is read from the arguments.
#include "../common/dispatch.h"
#include "../common/gumbel.h"
#include "../drafter.h"
#include "drafter_sampling.h"
#include "drafter_vocabulary_kernels.h"
#include "launch.h"

namespace nwor {
namespace {

__device__ int64_t item_of_thread() {
    return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// In debug mode, report what the CPU kernel would refuse.
template <class Arguments>
__device__ void report_row(const Arguments& a, int64_t row, int64_t num_rows, const char* report_as) {
    if (report_as == nullptr || row >= num_rows) return;
    if (const Found found = problem_of_row(a, row)) report(report_as, found);
}

// ---------------------------------------------------------------- one thread per element

// Grid: one block per 256 items (`num_items`, the longest output). Thread i writes element i of every output
// that is long enough.
template <class Arguments>
__global__ void __launch_bounds__(kThreads)
    items_kernel(const __grid_constant__ Arguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    report_row(a, i, a.rows.count, report_as);
    write_item(a, i);
}

template <class Arguments>
void run(const Arguments& a, const Launch& launch) {
    const int64_t items = a.num_items();
    if (items == 0) return;
    launch.start(items_kernel<Arguments>, shape_for_items(items), a, report_as(a.op));
    check_launch(launch);
}

// Grid: x = the longer of [capacity] and [num_rows], y = groups. One slot per thread.
__global__ void __launch_bounds__(kThreads)
    slots_kernel(const __grid_constant__ SlotArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t token = item_of_thread(), group = blockIdx.y;
    if (group == 0) report_row(a, token, a.rows.count, report_as);
    if (token < a.capacity) a.slots[group * a.slots_stride + token] = slot_of_token(a, group, token);
}

void run(const SlotArguments& a, const Launch& launch) {
    if (a.capacity == 0) return;
    LaunchShape shape = shape_for_items(std::max(a.capacity, a.rows.count));
    shape.grid.y = static_cast<unsigned>(a.num_groups);
    launch.start(slots_kernel, shape, a, report_as(a.op));
    check_launch(launch);
}

// ---------------------------------------------------------------- update_draft_inputs

// Grid: x = rows, z = accesses of a hidden row (`shape_for_rows` with one head). One thread per access. The
// first thread of a row also updates the other tensors.
template <class Access>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ UpdateArguments a, int64_t accesses, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t row = row_of_thread();
    if (row >= a.rows.count) return;
    const Place place = place_of_thread();
    if (place.leads_row()) {
        report_row(a, row, a.rows.count, report_as);
        update_row(a, row);
    }
    if (place.column >= accesses || !moves_hidden(a, row)) return;
    // An access holds several elements only if the strides along a row are 1.
    const int64_t first = int64_t{place.column} * (static_cast<int>(sizeof(Access)) / a.element_size);
    const char* from = a.hidden + (row * a.hidden_row_stride + first * a.hidden_stride) * a.element_size;
    char* to = a.next_hidden + (row * a.next_row_stride + first * a.next_stride) * a.element_size;
    *reinterpret_cast<Access*>(to) = *reinterpret_cast<const Access*>(from);
}

bool in_16_bytes(const void* data, int64_t stride, int32_t element_size) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * element_size % 16 == 0;
}

template <class Access>
void start_update(const UpdateArguments& a, const Launch& launch) {
    const int64_t accesses = a.width * a.element_size / static_cast<int64_t>(sizeof(Access));
    const LaunchShape shape = shape_for_rows(a.op, a.rows.count, 1, accesses);
    launch.start(update_kernel<Access>, shape, a, accesses, report_as(a.op));
}

void run(UpdateArguments a, const Launch& launch) {
    if (a.rows.count == 0) return;
    if (a.width == 0) a.element_size = 1;
    const bool whole_vectors = a.hidden_stride == 1 && a.next_stride == 1 &&
                               a.width * a.element_size % 16 == 0 &&
                               in_16_bytes(a.hidden, a.hidden_row_stride, a.element_size) &&
                               in_16_bytes(a.next_hidden, a.next_row_stride, a.element_size);
    if (whole_vectors)
        start_update<uint4>(a, launch);
    else
        with_raw_type(a.element_size,
                      [&](auto raw) { start_update<typename decltype(raw)::type>(a, launch); });
    check_launch(launch);
}

// ---------------------------------------------------------------- gumbel_sample

// Grid: one block per 256 elements of the workspace.
__global__ void __launch_bounds__(kThreads) clear_kernel(int64_t* workspace, int64_t length) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    if (i < length) workspace[i] = 0;
}

// Merge the block's candidate into the row's. The last block of a row writes the token and resets the
// workspace to 0.
__device__ void finish_row(const SampleArguments& a, int64_t row, uint32_t num_chunks, Candidate best) {
    if (num_chunks > 1) {
        Candidate* row_best = reinterpret_cast<Candidate*>(a.workspace) + row;
        Candidate* row_count = row_best + a.num_rows;
        if (best != 0) atomicMax(row_best, best);
        __threadfence();
        if (atomicAdd(row_count, 1ull) != num_chunks - 1) return;
        __threadfence();
        best = atomicExch(row_best, 0ull);
        atomicExch(row_count, 0ull);
    }
    set_sampled(a, row, token_of(best));
}

// Grid: num_rows * num_chunks blocks of 256 threads; block = row * num_chunks + chunk. Each row is split into
// chunks with one block per chunk, so that a few rows use the whole GPU. The blocks of a row combine their
// results in the workspace, by an atomic maximum of (score, lowest token). An atomic count tells the last
// block that it is the last.
template <class Format, bool kAligned>
__global__ void __launch_bounds__(kThreads, 4)
    sample_kernel(const __grid_constant__ SampleArguments a, uint32_t num_chunks, bool cache_in_vectors,
                  const char* report_as) {
    using Raw = typename Format::Raw;
    wait_for_earlier_kernels();
    const uint32_t row = blockIdx.x / num_chunks, chunk = blockIdx.x % num_chunks;
    if (chunk == 0 && threadIdx.x == 0) report_row(a, row, a.num_rows, report_as);
    const int64_t state_index = a.state_of(row);
    if (state_index < 0) {
        if (chunk == 0 && threadIdx.x == 0) set_sampled(a, row, 0);
        return;
    }
    Share<Format> share;
    share.row = reinterpret_cast<const Raw*>(a.logits) + row * a.row_stride;
    share.stride = a.vocab_stride;
    share.vocab_size = a.vocab_size;
    share.first = chunk * kChunk<Format> + threadIdx.x * share.kPer;
    share.template load<kAligned>();

    __shared__ BlockState state;
    const float temperature = a.temperature[state_index];
    if (threadIdx.x == 0) {
        state.top = 0;
        state.tight = 0;
        state.best = 0;
        if (draws_noise(temperature))
            state.key = noise_key(a.seeds[state_index], a.positions[row], a.step_of(row));
    }
    __syncthreads();
    if (char* to = cache_row(a, row))
        share.store(reinterpret_cast<Raw*>(to), a.cache_vocab_stride, cache_in_vectors);
    if (draws_noise(temperature))
        offer_noisy(state, share, temperature);
    else
        offer_argmax(state, share);
    __syncthreads();
    if (threadIdx.x == 0) finish_row(a, row, num_chunks, state.best);
}

// Calls `f(FORMAT{})` for the dtype of logits.
template <class F>
void with_format(ScalarType dtype, const F& f) {
    if (dtype == ScalarType::Float) return f(Float32Logits{});
    if (dtype == ScalarType::Half) return f(HalfLogits{});
    f(BFloat16Logits{});
}

template <class Format>
void start_sample(SampleArguments& a, const Launch& launch) {
    const int64_t num_chunks = ceil_div(a.vocab_size, kChunk<Format>);
    if (a.num_rows * num_chunks > INT32_MAX)
        fail(a.op, "logits must fit in one launch, got ", describe(launch.like()));
    Tensor own;  // the allocator needs it only until the launch is in the stream
    if (a.workspace == nullptr && num_chunks > 1) {
        own = new_empty(launch.like(), {2 * a.num_rows}, ScalarType::Long);
        a.workspace = static_cast<int64_t*>(own.data_ptr());
        launch.start(clear_kernel, shape_for_items(2 * a.num_rows), a.workspace, 2 * a.num_rows);
    }
    const bool aligned = a.vocab_stride == 1 && in_16_bytes(a.logits, a.row_stride, a.element_size);
    const bool cache_in_vectors = a.cache != nullptr && a.cache_vocab_stride == 1 &&
                                  in_16_bytes(a.cache, a.cache_state_stride, a.element_size) &&
                                  in_16_bytes(a.cache, a.cache_column_stride, a.element_size);
    const LaunchShape shape{dim3(static_cast<unsigned>(a.num_rows * num_chunks)), dim3(kThreads)};
    launch.start(aligned ? sample_kernel<Format, true> : sample_kernel<Format, false>, shape, a,
                 static_cast<uint32_t>(num_chunks), cache_in_vectors, report_as(a.op));
}

void run(SampleArguments a, const Launch& launch) {
    if (a.num_rows == 0) return;
    with_format(a.dtype, [&](auto format) { start_sample<decltype(format)>(a, launch); });
    check_launch(launch);
}

// ---------------------------------------------------------------- draft vocabulary

void run(const VocabularyArguments& a, const Launch& launch) {
    constexpr int64_t kMostBlocks = 4 * kEnoughBlocks;
    if (a.num_tokens() == 0) return;
    const int64_t most = least(a.most_entries(), a.num_tokens());
    // The allocator needs it only until the launches are in the stream.
    const Tensor memory = new_empty(launch.like(), {1 + 2 * most + a.num_words()}, ScalarType::Int);
    int32_t* data = static_cast<int32_t*>(memory.data_ptr());
    const VocabularyPlan plan{data, data + 1, data + 1 + most,
                              reinterpret_cast<uint32_t*>(data + 1 + 2 * most)};
    launch.start(plan_vocabulary_kernel, {dim3(1), dim3(kPlanThreads)}, a, plan);
    const LaunchShape shape{dim3(static_cast<unsigned>(least(most, kMostBlocks))), dim3(kThreads)};
    const bool in_vectors = a.row_bytes % 16 == 0 && in_16_bytes(a.head, a.head_row_bytes, 1) &&
                            in_16_bytes(a.weight, a.weight_row_bytes, 1);
    if (in_vectors)
        launch.start(copy_vocabulary_kernel<uint4>, shape, a, plan);
    else
        with_raw_type(a.element_size, [&](auto raw) {
            launch.start(copy_vocabulary_kernel<typename decltype(raw)::type>, shape, a, plan);
        });
    check_launch(launch);
}

void run(const ArgmaxArguments& a, const Launch& launch) {
    if (a.num_rows == 0) return;
    const LaunchShape shape{dim3(static_cast<unsigned>(a.num_rows)), dim3(kArgmaxThreads)};
    const bool aligned = a.logit_stride == 1 && in_16_bytes(a.logits, a.row_stride, a.element_size);
    with_format(a.dtype, [&](auto format) {
        using Format = decltype(format);
        launch.start(aligned ? argmax_kernel<Format, true> : argmax_kernel<Format, false>, shape, a);
    });
    check_launch(launch);
}

void run(const ExpandLogitsArguments& a, const Launch& launch) {
    if (a.num_rows == 0 || a.num_columns == 0) return;
    LaunchShape shape = shape_for_items(a.num_columns);
    shape.grid.y = static_cast<unsigned>(ceil_div(a.num_rows, kRowsPerThread));
    if (shape.grid.y > kMostGridYZ) fail(a.op, "logits must have at most ", 8 * kMostGridYZ, " rows");
    with_format(a.dtype,
                [&](auto format) { launch.start(expand_logits_kernel<decltype(format)>, shape, a); });
    check_launch(launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_drafter<Launch>(m);
}

}  // namespace nwor
