// Family drafter on CUDA: what a drafter's loop does between two passes. Semantics: nwor_ops/ops/drafter.py.
//
// All but gumbel_sample are a thread for each element of an output, and what the thread does stands in
// drafter.h. No kernel allocates, none waits for another block, every count that a replay may change is read
// from the arguments.
#include <cuda_fp16.h>

#include "../common/dispatch.h"
#include "../common/gumbel.h"
#include "../drafter.h"
#include "launch.h"

namespace nwor {
namespace {

__device__ int64_t item_of_thread() {
    return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// Debug mode: what the CPU would have refused.
template <class Arguments>
__device__ void report_row(const Arguments& a, int64_t row, int64_t num_rows, const char* report_as) {
    if (report_as == nullptr || row >= num_rows) return;
    if (const Found found = problem_of_row(a, row)) report(report_as, found);
}

// ---------------------------------------------------------------- a thread for each element

__global__ void __launch_bounds__(kThreads)
    prefill_kernel(const __grid_constant__ PrefillArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread(), num_real = a.rows.num_real();
    report_row(a, i, a.rows.count, report_as);
    prefill_row(a, i, num_real);
    if (i < a.input_ids.length) prefill_token(a, i, num_real);
}

__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ DecodeArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    report_row(a, i, a.rows.count, report_as);
    decode_row(a, i);
}

__global__ void __launch_bounds__(kThreads)
    slots_kernel(const __grid_constant__ SlotArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t token = item_of_thread(), group = blockIdx.y;
    if (group == 0) report_row(a, token, a.rows.count, report_as);
    if (token < a.capacity) a.slots[group * a.slots_stride + token] = slot_of_token(a, group, token);
}

__global__ void __launch_bounds__(kThreads)
    eagle_kernel(const __grid_constant__ EagleArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    report_row(a, i, a.num_rows, report_as);
    eagle_row(a, i);
}

__global__ void __launch_bounds__(kThreads)
    padded_inputs_kernel(const __grid_constant__ PaddedInputsArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    report_row(a, i, a.num_rows, report_as);
    padded_inputs_row(a, i);
}

__global__ void __launch_bounds__(kThreads) next_token_kernel(const __grid_constant__ NextTokenArguments a) {
    wait_for_earlier_kernels();
    next_token_row(a, item_of_thread());
}

__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ ExpandArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread(), num_real = a.rows.num_real();
    report_row(a, i, a.rows.count, report_as);
    if (i < a.input_ids.length) expand_token(a, i, num_real);
    expand_index(a, i, num_real);
}

__global__ void __launch_bounds__(kThreads)
    extend_kernel(const __grid_constant__ ExtendArguments a, const char* report_as) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    report_row(a, i, a.rows.count, report_as);
    extend_item(a, i, a.rows.num_real());
}

__global__ void __launch_bounds__(kThreads) local_lens_kernel(const __grid_constant__ LocalLensArguments a) {
    wait_for_earlier_kernels();
    local_lens_row(a, item_of_thread());
}

template <class Arguments, class... More>
void start_items(void (*kernel)(Arguments, More...), const Arguments& a, int64_t items, const Launch& launch,
                 const More&... more) {
    if (items == 0) return;
    launch.start(kernel, shape_for_items(items), a, more...);
    check_launch(launch);
}

void run(const PrefillArguments& a, const Launch& launch) {
    start_items(prefill_kernel, a, a.num_items(), launch, report_as(a.op));
}
void run(const DecodeArguments& a, const Launch& launch) {
    start_items(decode_kernel, a, a.num_items(), launch, report_as(a.op));
}
void run(const EagleArguments& a, const Launch& launch) {
    start_items(eagle_kernel, a, a.slots.length, launch, report_as(a.op));
}
void run(const PaddedInputsArguments& a, const Launch& launch) {
    start_items(padded_inputs_kernel, a, a.num_items(), launch, report_as(a.op));
}
void run(const NextTokenArguments& a, const Launch& launch) {
    start_items(next_token_kernel, a, a.num_items(), launch);
}
void run(const ExpandArguments& a, const Launch& launch) {
    start_items(expand_kernel, a, a.num_items(), launch, report_as(a.op));
}
void run(const ExtendArguments& a, const Launch& launch) {
    start_items(extend_kernel, a, a.num_items(), launch, report_as(a.op));
}
void run(const LocalLensArguments& a, const Launch& launch) {
    start_items(local_lens_kernel, a, a.local.length, launch);
}

void run(const SlotArguments& a, const Launch& launch) {
    if (a.capacity == 0) return;
    LaunchShape shape = shape_for_items(std::max(a.capacity, a.rows.count));
    shape.grid.y = static_cast<unsigned>(a.num_groups);
    launch.start(slots_kernel, shape, a, report_as(a.op));
    check_launch(launch);
}

// ---------------------------------------------------------------- update_draft_inputs

// A thread for each access of a hidden row; the first of a row also does the rest of it.
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
    // Elements per access: more than one only where the strides along a row are 1.
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
    // A row without a hidden state has a thread too, for the rest of it.
    const LaunchShape shape = shape_for_rows(a.op, a.rows.count, 1, std::max<int64_t>(accesses, 1));
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
//
// A row is cut into chunks, a block for each, so that a few rows fill the chip. A thread loads its share of a
// chunk in 16-byte vectors, all at once. The exact score of a token (noisy_score, the same bits as on the
// CPU) costs a few hundred instructions; so a block first bounds every score by the first 16 bits of the
// noise and computes only those scores, two or three a block, that the bounds cannot tell from the best.
// Blocks meet in the workspace: an atomic maximum of (score, lowest token), and a count by which the last one
// knows that it is.

constexpr int kVectors = 4;  // loads of 16 bytes in flight in each thread

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
constexpr int kChunk = kThreads * kVectors * kPerVector<Format>;  // tokens of a block

// A thread's share of a chunk, 16 bytes at a time.
template <class Format>
struct Share {
    using Raw = typename Format::Raw;
    static constexpr int kPer = kPerVector<Format>;

    const Raw* row;
    int64_t stride, vocab_size;
    uint32_t first;  // token of its first vector
    uint32_t words[kVectors][4];

    __device__ uint32_t token(int vector, int element) const {
        return first + vector * (kThreads * kPer) + element;
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

// Floats as integers of the same order; -0 and 0 are one.
__device__ uint32_t ordered(float x) {
    const uint32_t bits = x == 0.0f ? 0 : __float_as_uint(x);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float from_ordered(uint32_t bits) {
    return __uint_as_float((bits & 0x80000000u) != 0 ? bits & 0x7FFFFFFFu : ~bits);
}

// The larger score wins, of equal ones the lower token. 0 stands for no token at all.
using Candidate = unsigned long long;

__device__ Candidate candidate(float score, uint32_t token) {
    return static_cast<Candidate>(ordered(score)) << 32 | (0xFFFFFFFFu - token);
}

__device__ int64_t token_of(Candidate c) {
    return c == 0 ? 0 : static_cast<int64_t>(0xFFFFFFFFu - static_cast<uint32_t>(c));
}

struct BlockState {
    NoiseKey key;
    uint32_t top;  // of all threads, ordered
    int tight;
    Candidate best;
};

// The largest `x` of the block. `state.top` was cleared before the last barrier.
__device__ float block_maximum(BlockState& state, float x) {
    const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFFu, ordered(x));
    if (threadIdx.x % kWarp == 0) atomicMax(&state.top, of_warp);
    __syncthreads();
    return from_ordered(state.top);
}

// ---- temperature 0

template <class Format>
__device__ void offer_argmax(BlockState& state, const Share<Format>& share) {
    float top = -INFINITY;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int e = 0; e < share.kPer; ++e) top = fmaxf(top, share.logit(v, e));  // leaves a NaN out
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

// ---- with noise

// Let c be the first 16 bits of a token's noise, so u lies between c / 2^16 and (c + 1) / 2^16, and
// coarse(c) = -ln((c + 1) / 2^16). The noise is G = -ln(E), E = -ln(1 - u), and E lies between u and u / (1 -
// u):
//   G <= -ln u <= coarse + ln 2 (= 0.6931) for c > 0, and G < 34 = coarse(0) + 22.9 for c = 0;
//   G >= coarse - ln(2 ln 2) (= 0.3267) for u <= 1/2, G >= coarse - 3.53 for any u.
// The constants below leave room for what floats round away; kRelativeError is for large scaled logits.
constexpr float kAbove = 0.71f, kAboveZero = 23.0f;
constexpr float kBelowTight = 0.33f, kBelow = 3.6f;
constexpr float kRelativeError = 1.0f / (1 << 20);
constexpr float kLn2 = 0.693147181f;

// coarse(c) of the low or the high half of `both`.
template <int kHalf>
__device__ float coarse_of_half(uint32_t both) {
    // The float 2^23 + c is the bits of c under those of 2^23.
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

// Whether the exact score can reach `limit`. A NaN in either can.
__device__ bool may_reach(float bound, uint32_t coarse, float limit) {
    return !(bound + (coarse == 0 ? kAboveZero : 0.0f) < limit);
}

template <class Format>
__device__ void offer_noisy(BlockState& state, const Share<Format>& share, float temperature) {
    const NoiseKey key = state.key;
    const float reciprocal = 1.0f / temperature;
    float tops[kVectors];
    uint32_t smallest = 0xFFFFFFFFu;  // of the coarse noise, in each half
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
    if (block_top == -INFINITY) return;  // the whole block: nothing but -inf and NaN

    // How far below its bound the score of the topmost token can be.
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

    // The tokens whose exact scores are needed, a bit each.
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

// ---- the kernel

__global__ void __launch_bounds__(kThreads) clear_kernel(int64_t* workspace, int64_t length) {
    wait_for_earlier_kernels();
    const int64_t i = item_of_thread();
    if (i < length) workspace[i] = 0;
}

// The block's candidate to the row's; the last block of a row writes the token and leaves the workspace zero.
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

template <class Format>
void start_sample(SampleArguments& a, const Launch& launch) {
    const int64_t num_chunks = ceil_div(a.vocab_size, kChunk<Format>);
    if (a.num_rows * num_chunks > INT32_MAX)
        fail(a.op, "logits must fit in one launch, got ", describe(launch.like()));
    Tensor own;  // lives until the launch is in the stream, which is all that the allocator asks for
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
    if (a.dtype == ScalarType::Float)
        start_sample<Float32Logits>(a, launch);
    else if (a.dtype == ScalarType::Half)
        start_sample<HalfLogits>(a, launch);
    else
        start_sample<BFloat16Logits>(a, launch);
    check_launch(launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_drafter<Launch>(m);
}

}  // namespace nwor
