// Family drafter: the kernels of a draft vocabulary. drafter.cu launches them.
//
// An update is two launches. `plan_vocabulary_kernel`, one block, decides which token takes which row. Its
// result follows from prefix sums over the list and over the rows, never from the order of threads.
// `copy_vocabulary_kernel` copies the rows of the head.
#pragma once

#include "../drafter_vocabulary.h"
#include "drafter_sampling.h"
#include "launch.h"

namespace nwor {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kPlanTokens = 8;  // of each thread at a time
constexpr int kPlanTile = kPlanThreads * kPlanTokens;
constexpr int kSharedWords = 8192;  // of the rows in use: 32 KiB

// The memory of a call. Entry k, counted from the end of the list, is a token; row j goes to the j-th token
// in the order of the list, entry `count - 1 - j`.
struct VocabularyPlan {
    int32_t* count;
    int32_t* tokens;    // [most entries]
    int32_t* rows;      // [most entries]
    uint32_t* touched;  // one bit per row: in use by a token of this list; in shared memory if it fits

    __device__ int32_t token_of(int64_t j, int64_t entries) const { return tokens[entries - 1 - j]; }
};

// ---------------------------------------------------------------- sums and bits

struct SumState {
    uint64_t warps[kPlanThreads / kWarp], total;
};

// The sum of `x` over all earlier threads of the block. `state.total` is the sum over all threads, until the
// next call.
__device__ uint64_t sum_before(uint64_t x, SumState& state) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    uint64_t sum = x;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const uint64_t other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();  // the last call's total was read
    if (lane == kWarp - 1) state.warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        const uint64_t own = state.warps[lane];
        uint64_t warps = own;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
            const uint64_t other = __shfl_up_sync(kAllLanes, warps, distance);
            if (lane >= distance) warps += other;
        }
        state.warps[lane] = warps - own;
        if (lane == kWarp - 1) state.total = warps;
    }
    __syncthreads();
    return state.warps[warp] + sum - x;
}

// Two counts below 2^31 in one sum.
__device__ uint64_t both(uint32_t low, uint32_t high) {
    return low | static_cast<uint64_t>(high) << 32;
}

// The bits of a word whose rows are `row` or later.
__device__ uint32_t rows_from(int64_t row, int64_t word) {
    const int64_t bit = row - word * 32;
    return bit <= 0 ? 0xFFFFFFFFu : bit >= 32 ? 0u : 0xFFFFFFFFu << bit;
}

// The rows of one word: those that the hand takes in its first round, and those that only a second round
// takes.
struct WordOfRows {
    uint32_t unused = 0, second = 0;

    __device__ WordOfRows() {}
    __device__ WordOfRows(const VocabularyArguments& a, const VocabularyPlan& plan, int64_t word) {
        const uint32_t valid = ~rows_from(a.num_rows, word), used = __ldcg(a.used + word);
        unused = ~used & valid;
        second = used & ~plan.touched[word] & valid;
    }
    __device__ uint64_t count(uint32_t mask = 0xFFFFFFFFu) const {
        return both(__popc(unused & mask), __popc(second & mask));
    }
};

// ---------------------------------------------------------------- plan

struct PlanState {
    SumState sum;
    unsigned sampled, missed, touched;
    uint64_t at_hand;  // rows of both kinds before the hand
    int32_t last;      // the last row that the hand takes
};

// Mark the rows of tokens that are in the set. Claim each missing token for its last place in the list: the
// claim of place i in row_of_token is -2 - i.
__device__ void touch_and_claim(const VocabularyArguments& a, const VocabularyPlan& plan, PlanState& state) {
    const int64_t num_tokens = a.num_tokens();
    unsigned sampled = 0, missed = 0, touched = 0;
    for (int64_t first = threadIdx.x; first < num_tokens; first += kPlanTile) {
        int32_t tokens[kPlanTokens], rows[kPlanTokens];
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k) {
            const int64_t i = first + k * kPlanThreads;
            tokens[k] = i < num_tokens ? static_cast<int32_t>(a.token(i)) : -1;
        }
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k)
            rows[k] = tokens[k] < 0 ? 0 : __ldcg(a.row_of_token + tokens[k]);
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k) {
            if (tokens[k] < 0) continue;
            const int64_t i = first + k * kPlanThreads;
            const bool is_in_set = a.is_row(rows[k]);
            if (a.is_sampled(i)) {
                ++sampled;
                missed += !is_in_set;
            }
            if (!is_in_set) {
                atomicMin(a.row_of_token + tokens[k], static_cast<int32_t>(-2 - i));
                continue;
            }
            const uint32_t bit = 1u << (rows[k] % 32);
            if ((atomicOr(plan.touched + rows[k] / 32, bit) & bit) != 0) continue;
            ++touched;
            atomicOr(a.used + rows[k] / 32, bit);
        }
    }
    sampled = __reduce_add_sync(kAllLanes, sampled);
    missed = __reduce_add_sync(kAllLanes, missed);
    touched = __reduce_add_sync(kAllLanes, touched);
    if (threadIdx.x % kWarp == 0 && (sampled | touched) != 0) {
        atomicAdd(&state.sampled, sampled);
        atomicAdd(&state.missed, missed);
        atomicAdd(&state.touched, touched);
    }
}

// List the tokens that enter, from the end, and take the claims of the others back. Return how many enter.
__device__ int64_t list_entries(const VocabularyArguments& a, const VocabularyPlan& plan, PlanState& state) {
    const int64_t num_tokens = a.num_tokens(), limit = least(a.most_entries(), a.num_rows - state.touched);
    int64_t listed = 0;
    for (int64_t start = 0; start < num_tokens; start += kPlanTile) {
        // Each thread has consecutive places.
        const int64_t last = num_tokens - 1 - start - threadIdx.x * kPlanTokens;
        int32_t tokens[kPlanTokens], claims[kPlanTokens];
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k)
            tokens[k] = last - k >= 0 ? static_cast<int32_t>(a.token(last - k)) : -1;
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k)
            claims[k] = tokens[k] < 0 ? INT32_MAX : __ldcg(a.row_of_token + tokens[k]);
        unsigned count = 0;
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k) count += claims[k] == -2 - (last - k);
        int64_t rank = listed + static_cast<int64_t>(sum_before(count, state.sum));
#pragma unroll
        for (int k = 0; k < kPlanTokens; ++k) {
            if (claims[k] != -2 - (last - k)) continue;
            if (rank < limit)
                plan.tokens[rank] = tokens[k];
            else
                a.row_of_token[tokens[k]] = -1;
            ++rank;
        }
        listed += static_cast<int64_t>(state.sum.total);
    }
    return least(listed, limit);
}

// Give rows of one word to entries. `rank` is the number of rows of this kind from the hand to the first of
// `mask`, before the end of the set is reached; rows before the hand come `wrap` later.
__device__ void take_rows(const VocabularyPlan& plan, PlanState& state, uint32_t mask, int64_t word,
                          int64_t hand, int64_t rank, int64_t wrap, int64_t entries) {
    for (; mask != 0; mask &= mask - 1, ++rank) {
        const int64_t row = word * 32 + __ffs(static_cast<int>(mask)) - 1,
                      j = row < hand ? rank + wrap : rank;
        if (j >= entries) {
            if (row < hand && hand < word * 32 + 32) continue;  // the hand is in this word
            return;
        }
        plan.rows[j] = static_cast<int32_t>(row);
        if (j == entries - 1) state.last = static_cast<int32_t>(row);
    }
}

// Move the hand over the rows until each entry has one, and clear the marks that it passes.
__device__ void move_hand(const VocabularyArguments& a, const VocabularyPlan& plan, PlanState& state,
                          int64_t entries) {
    const int64_t hand = a.first_hand(), num_words = a.num_words();
    const int64_t per_thread = (num_words + kPlanThreads - 1) / kPlanThreads;
    const int64_t first = threadIdx.x * per_thread, end = least(first + per_thread, num_words);
    // A set of 32,768 rows has one word per thread, which is read once.
    const WordOfRows first_word = first < end ? WordOfRows(a, plan, first) : WordOfRows();
    const auto rows_of = [&](int64_t word) { return word == first ? first_word : WordOfRows(a, plan, word); };
    uint64_t count = 0;
    for (int64_t word = first; word < end; ++word) count += rows_of(word).count();
    const uint64_t before = sum_before(count, state.sum);
    const int64_t hand_word = hand / 32;
    if (first <= hand_word && hand_word < end) {
        uint64_t at_hand = before;
        for (int64_t word = first; word < hand_word; ++word) at_hand += rows_of(word).count();
        state.at_hand = at_hand + rows_of(hand_word).count(~rows_from(hand, hand_word));
    }
    __syncthreads();
    const int64_t num_unused = static_cast<uint32_t>(state.sum.total), num_second = state.sum.total >> 32;
    uint64_t rank = before;
    for (int64_t word = first; word < end; ++word) {
        const WordOfRows rows = rows_of(word);
        const int64_t from_hand = int64_t{static_cast<uint32_t>(rank)} - static_cast<uint32_t>(state.at_hand);
        take_rows(plan, state, rows.unused, word, hand, from_hand, num_unused, entries);
        if (entries > num_unused) {
            const int64_t second =
                static_cast<int64_t>(rank >> 32) - static_cast<int64_t>(state.at_hand >> 32);
            take_rows(plan, state, rows.second, word, hand, num_unused + second, num_second, entries);
        }
        rank += rows.count();
    }
    __syncthreads();
    const int64_t next = int64_t{state.last} + 1;
    for (int64_t word = first; word < end; ++word) {
        uint32_t passed = 0xFFFFFFFFu;
        if (entries <= num_unused)
            passed = next > hand ? rows_from(hand, word) & ~rows_from(next, word)
                                 : rows_from(hand, word) | ~rows_from(next, word);
        if (const uint32_t cleared = rows_of(word).second & passed) a.used[word] &= ~cleared;
    }
    if (threadIdx.x == 0) *a.hand = next < a.num_rows ? static_cast<int32_t>(next) : 0;
    __syncthreads();
}

// Grid: one block of 1024 threads.
__global__ void __launch_bounds__(kPlanThreads)
    plan_vocabulary_kernel(const __grid_constant__ VocabularyArguments a, VocabularyPlan plan) {
    wait_for_earlier_kernels();
    __shared__ PlanState state;
    __shared__ uint32_t touched[kSharedWords];
    if (a.num_words() <= kSharedWords) plan.touched = touched;
    for (int64_t word = threadIdx.x; word < a.num_words(); word += kPlanThreads) plan.touched[word] = 0;
    if (threadIdx.x == 0) state.sampled = state.missed = state.touched = 0;
    __syncthreads();
    touch_and_claim(a, plan, state);
    __syncthreads();
    const int64_t entries = list_entries(a, plan, state);
    if (threadIdx.x == 0) {
        *plan.count = static_cast<int32_t>(entries);
        a.counters[0] += state.sampled;
        a.counters[1] += state.missed;
    }
    if (entries == 0) return;
    __syncthreads();
    move_hand(a, plan, state, entries);
    for (int64_t j = threadIdx.x; j < entries; j += kPlanThreads) {
        const int32_t row = plan.rows[j];
        atomicOr(a.used + row / 32, 1u << (row % 32));
        a.enter(row, plan.token_of(j, entries));
    }
}

// Grid: at most one block per entry; each takes every gridDim.x-th row.
template <class Access>
__global__ void __launch_bounds__(kThreads)
    copy_vocabulary_kernel(const __grid_constant__ VocabularyArguments a, const VocabularyPlan plan) {
    wait_for_earlier_kernels();
    const int64_t entries = *plan.count, accesses = a.row_bytes / static_cast<int64_t>(sizeof(Access));
    for (int64_t j = blockIdx.x; j < entries; j += gridDim.x) {
        const auto* from =
            reinterpret_cast<const Access*>(a.head + plan.token_of(j, entries) * a.head_row_bytes);
        auto* to = reinterpret_cast<Access*>(a.weight + plan.rows[j] * a.weight_row_bytes);
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < accesses; i += kThreads) to[i] = from[i];
    }
}

// ---------------------------------------------------------------- logits

constexpr int kArgmaxThreads = 1024;

// Grid: one block of 1024 threads per row. A row of at most 32,768 16-bit logits is read once; of a longer
// one, the threads that have the maximum read theirs again.
template <class Format, bool kAligned>
__global__ void __launch_bounds__(kArgmaxThreads) argmax_kernel(const __grid_constant__ ArgmaxArguments a) {
    using RowShare = Share<Format, kArgmaxThreads>;
    constexpr int64_t kTurn = kArgmaxThreads * kVectors * RowShare::kPer;
    wait_for_earlier_kernels();
    __shared__ BlockState state;
    if (threadIdx.x == 0) {
        state.top = 0;
        state.best = 0;
    }
    __syncthreads();
    RowShare share;
    share.row = reinterpret_cast<const typename Format::Raw*>(a.logits) + blockIdx.x * a.row_stride;
    share.stride = a.logit_stride;
    share.vocab_size = a.num_logits;
    const auto each = [&](bool load, auto f) {
        for (int64_t start = 0; start < a.num_logits; start += kTurn) {
            share.first = static_cast<uint32_t>(start) + threadIdx.x * share.kPer;
            if (load) share.template load<kAligned>();
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
#pragma unroll
                for (int e = 0; e < share.kPer; ++e) f(share.logit(v, e), share.token(v, e));
        }
    };
    float top = -INFINITY;
    each(true, [&](float logit, uint32_t) { top = fmaxf(top, logit); });  // ignores NaN
    const float best = block_maximum(state, top);
    if (best > -INFINITY && top == best) {
        uint32_t token = 0xFFFFFFFFu;
        each(a.num_logits > kTurn, [&](float logit, uint32_t i) {
            if (logit == best) token = min(token, static_cast<uint32_t>(a.token_ids[i]));
        });
        atomicMax(&state.best, candidate(best, token));
    }
    __syncthreads();
    if (threadIdx.x == 0) a.set(blockIdx.x, best, token_of(state.best));
}

constexpr int kRowsPerThread = 8;

// Grid: x = columns of `out`, y = rows / 8. One thread per column reads the row of its token once.
template <class Format>
__global__ void __launch_bounds__(kThreads)
    expand_logits_kernel(const __grid_constant__ ExpandLogitsArguments a) {
    using Raw = typename Format::Raw;
    wait_for_earlier_kernels();
    const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (token >= a.num_columns) return;
    const int64_t place = a.place_of(token), first = int64_t{blockIdx.y} * kRowsPerThread;
    const int64_t end = least(first + kRowsPerThread, a.num_rows);
    const Raw* logits = reinterpret_cast<const Raw*>(a.logits) + place * a.logit_stride;
    Raw* out = reinterpret_cast<Raw*>(a.out) + token * a.out_stride;
    for (int64_t row = first; row < end; ++row)
        out[row * a.out_row_stride] = place < 0 ? Format::kMinusInfinity : logits[row * a.row_stride];
}

}  // namespace

}  // namespace nwor
