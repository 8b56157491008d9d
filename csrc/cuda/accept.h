// What the kernels share that judge drafts: which of them were accepted.
#pragma once

#include "launch.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- what a kernel may meet

constexpr int kOfAcceptance = 64;  // what the problems of rows and windows stay below

enum AcceptProblem {
    kDraftsDecrease = kOfAcceptance,
    kQueriesDecrease,
    kMoreDraftsThanTokens,
    kDraftPastTokens,
    kMoreDraftsThanRows,
    kMoreDraftsThanIds,
    kMoreDraftsThanMarks,
};

[[noreturn]] void complain_of_acceptance(const ErrorRecord& e) {
    switch (e.problem) {
        case kDraftsDecrease:
            fail(e.op, "cu_num_draft_tokens must not decrease, got ", e.value, " at request ", e.index,
                 " after ", e.limit);
        case kQueriesDecrease:
            fail(e.op, "query_start_loc must start at 0 or above and not decrease, got ", e.limit, " and ",
                 e.value, " around request ", e.index);
        case kMoreDraftsThanTokens:
            fail(e.op, "cu_num_draft_tokens must give a request no more drafts than tokens, got ", e.value,
                 " drafts in the ", e.limit, " tokens of request ", e.index);
        case kDraftPastTokens:
            fail(e.op, "slot_mappings must cover every draft, got ", e.limit, " tokens where request ",
                 e.index, " ends at token ", e.value);
        case kMoreDraftsThanRows:
            fail(e.op, "row_slots must have a row for each draft, got ", e.limit, " rows for ", e.value,
                 " drafts");
        default:
            fail(e.op, "cu_num_draft_tokens must not exceed the ", e.limit, " ",
                 e.problem == kMoreDraftsThanIds ? "entries of draft_token_ids" : "num_draft_tokens",
                 ", got ", e.value);
    }
}

// ---------------------------------------------------------------- cumulative arrays

// The first i in [0, length) with element(i) > value, else `length`. In a cumulative array that is where
// element `value` belongs; requests that own nothing are passed over.
template <class Element>
__device__ int64_t first_above(const Element& element, int64_t length, int64_t value) {
    int64_t low = 0, high = length;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (element(middle) > value)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

__device__ void add(int64_t* counters, Counter counter, int64_t amount) {
    if (amount > 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(counters + counter),
                  static_cast<unsigned long long>(amount));
}

// ---------------------------------------------------------------- acceptance

__device__ int64_t id_at(const IdsView& ids, int64_t index) {
    return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[index]
                        : static_cast<const int32_t*>(ids.data)[index];
}

__device__ int64_t sampled_at(const IdsView& ids, int64_t request, int64_t column) {
    return id_at(ids, request * ids.row_stride + column * ids.column_stride);
}

// How many of the first `drafts` drafts of a request were accepted, counted up to the first that was not.
__device__ int64_t leading_matches(const AcceptArguments& a, int64_t request, int64_t first_row,
                                   int64_t drafts) {
    drafts = min(min(drafts, a.sampled.columns), a.drafts.length - first_row);
    int64_t j = 0;
    for (; j < drafts; ++j) {
        const int64_t token = sampled_at(a.sampled, request, j);
        if (token < 0 || token != id_at(a.drafts, first_row + j)) break;
        if (j + 1 < a.sampled.columns && sampled_at(a.sampled, request, j + 1) < 0) break;
    }
    return j;
}

// How many drafts of a request were accepted, looking no further than its first `most`.
__device__ int64_t count_accepted(const AcceptArguments& a, int64_t request, int64_t most) {
    const int64_t first_row = a.drafts_of.before(request);
    // The device cannot refuse a cumulative array that lies; it must not follow it past the rows either.
    const int64_t until = min(a.drafts_of.until(request), a.num_marks);
    const int64_t drafts = first_row < 0 ? 0 : max(until - first_row, int64_t{0});
    if (a.num_rejected == nullptr) return leading_matches(a, request, first_row, min(drafts, most));
    return num_accepted_of(drafts, a.num_rejected[request]);
}

enum Outcome { kNoDraft, kWasAccepted, kWasRejected };

__device__ Outcome outcome_of_row(const AcceptArguments& a, int64_t row) {
    const int64_t q = first_above([&](int64_t i) { return a.drafts_of.until(i); }, a.num_requests, row);
    if (q == a.num_requests) return kNoDraft;
    const int64_t position = row - a.drafts_of.before(q);
    return position < count_accepted(a, q, position + 1) ? kWasAccepted : kWasRejected;
}

__device__ bool was_planned(const AcceptArguments& a) {
    return a.drafts_of.before(a.num_requests) <= a.num_marks;
}

__device__ bool was_rejected(const AcceptArguments& a, int64_t row) {
    return was_planned(a) && outcome_of_row(a, row) == kWasRejected;
}

// What the CPU refuses, reported after the fact; no output depends on it.
__device__ void report_bad_drafts(const AcceptArguments& a, int64_t most_drafts, int64_t request,
                                  const char* report_as) {
    const int64_t before = a.drafts_of.before(request);
    const int64_t until = a.drafts_of.until(request);
    if (until < before) report(report_as, kDraftsDecrease, request, until, before);
    if (request == a.num_requests - 1 && until > most_drafts)
        report(report_as, a.num_rejected == nullptr ? kMoreDraftsThanIds : kMoreDraftsThanMarks, request,
               until, most_drafts);
}

// Brings what the searches below read near, all at once: they would wait for one line of it after another,
// and a forward has passed since anybody read it.
__device__ void fetch_requests(const AcceptArguments& a) {
    const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    for (int64_t q = thread_of_block(); q < a.num_requests; q += threads) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(a.drafts_of.counts + q));
        if (a.num_rejected != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(a.num_rejected + q));
    }
}

// One thread for each element of an output.
struct JudgeJob {
    AcceptArguments accept;
    int64_t most_drafts;  // what the ids (or the caller's bound) provide for
    const char* report_as;
};

// Call it from all threads of a block.
__device__ void judge(const JudgeJob& job, int64_t i) {
    const AcceptArguments& a = job.accept;
    const bool planned = was_planned(a);
    if (job.report_as != nullptr && i < a.num_requests)
        report_bad_drafts(a, job.most_drafts, i, job.report_as);
    Outcome outcome = kNoDraft;
    if (i < a.num_marks) {
        if (planned) outcome = outcome_of_row(a, i);
        a.marks[i] = outcome == (a.marks_rejected ? kWasRejected : kWasAccepted);
    }
    if (i < a.num_accepted_length)
        a.num_accepted[i] =
            planned && i < a.num_requests ? static_cast<int32_t>(count_accepted(a, i, INT32_MAX)) : 0;
    if (a.counters == nullptr) return;
    const int accepted = __syncthreads_count(outcome == kWasAccepted);
    const int rejected = __syncthreads_count(outcome == kWasRejected);
    if (threadIdx.x + threadIdx.y + threadIdx.z > 0) return;
    add(a.counters, kAccepted, accepted);
    add(a.counters, kRejected, rejected);
}

// A block of any shape, the n-th of those that judge.
__device__ void judge_items(const JudgeJob& job, uint32_t n) {
    judge(job, static_cast<int64_t>(n) * (blockDim.x * blockDim.y * blockDim.z) + thread_of_block());
}

inline int64_t items_to_judge(const AcceptArguments& a) {
    return std::max(a.num_marks, a.num_accepted_length);
}

}  // namespace

}  // namespace nwor
