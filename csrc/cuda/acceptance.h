// Shared by the kernels that determine which drafts were accepted.
#pragma once

#include "../accept.h"
#include "launch.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- cumulative arrays

// Returns the first i in [0, length) with element(i) > value, else `length`. In a cumulative array this is
// the owner of element `value`; requests that own nothing are skipped. Request numbers fit 32 bits, and so do
// the steps of the search.
template <class Element>
__device__ int64_t first_above(const Element& element, int64_t length, int64_t value) {
    uint32_t low = 0, high = static_cast<uint32_t>(length);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
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

enum Outcome { kNoDraft, kWasAccepted, kWasRejected };

__device__ Outcome outcome_of_row(const AcceptArguments& a, int64_t row) {
    const int64_t q = first_above([&](int64_t i) { return a.drafts_of.until(i); }, a.num_requests, row);
    const int64_t position = q == a.num_requests ? -1 : row - a.drafts_of.before(q);
    if (position < 0) return kNoDraft;
    return position < count_accepted(a, q, position + 1) ? kWasAccepted : kWasRejected;
}

__device__ bool was_rejected(const AcceptArguments& a, int64_t row) {
    return outcome_of_row(a, row) == kWasRejected;
}

// Prefetches everything that the searches below read. Otherwise they would wait for one cache line after
// another, because the forward has evicted them.
__device__ void fetch_requests(const AcceptArguments& a) {
    const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    for (int64_t q = thread_of_block(); q < a.num_requests; q += threads) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(a.drafts_of.starts + q + 1));
        if (a.num_rejected != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(a.num_rejected + q));
    }
}

// One thread per element of an output.
struct AcceptJob {
    AcceptArguments accept;
    const char* report_as;
};

// Call it from all threads of a block.
__device__ void accept_item(const AcceptJob& job, int64_t i) {
    const AcceptArguments& a = job.accept;
    // Reports what the CPU refuses. No output depends on it.
    if (job.report_as != nullptr && i < a.num_requests)
        if (const Found found = problem_of_request(a, i)) report(job.report_as, found);
    Outcome outcome = kNoDraft;
    if (i < a.num_marks) {
        outcome = outcome_of_row(a, i);
        a.marks[i] = outcome == (a.marks_rejected ? kWasRejected : kWasAccepted);
    }
    if (i < a.num_accepted_length)
        a.num_accepted[i] = i < a.num_requests ? static_cast<int32_t>(count_accepted(a, i)) : 0;
    if (a.counters == nullptr) return;
    const int accepted = __syncthreads_count(outcome == kWasAccepted);
    const int rejected = __syncthreads_count(outcome == kWasRejected);
    if (threadIdx.x + threadIdx.y + threadIdx.z > 0) return;
    add(a.counters, kAccepted, accepted);
    add(a.counters, kRejected, rejected);
}

// Work of a block of any shape. It is block `n` of the blocks that determine outcomes.
__device__ void accept_items(const AcceptJob& job, uint32_t n) {
    accept_item(job, static_cast<int64_t>(n) * (blockDim.x * blockDim.y * blockDim.z) + thread_of_block());
}

inline int64_t items_to_accept(const AcceptArguments& a) {
    return std::max(a.num_marks, a.num_accepted_length);
}

}  // namespace

}  // namespace nwor
