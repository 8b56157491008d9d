// Shared by the kernels that determine which drafts were accepted.
#pragma once

#include "../accept.h"
#include "launch.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- cumulative arrays

// Returns the first i in [0, length) with element(i) > value, or `length` if no element is larger. If
// element(i) is the number of drafts of requests 0 to i, the result is the request of draft `value`. Requests
// without drafts are never returned. Numbers of requests fit 32 bits.
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

// Row r of the log belongs to draft r of the window. Rows after the last draft have none.
__device__ Outcome outcome_of_row(const AcceptArguments& a, int64_t row) {
    const int64_t q = first_above([&](int64_t i) { return a.drafts_of.until(i); }, a.num_requests, row);
    const int64_t position = q == a.num_requests ? -1 : row - a.drafts_of.before(q);
    if (position < 0) return kNoDraft;
    return position < count_accepted(a, q, position + 1) ? kWasAccepted : kWasRejected;
}

__device__ bool was_rejected(const AcceptArguments& a, int64_t row) {
    return outcome_of_row(a, row) == kWasRejected;
}

// Prefetches the counts of all requests, which `first_above` reads. The forward has evicted them from the
// cache. Without the prefetch each step of a search would wait for one cache line.
__device__ void fetch_requests(const AcceptArguments& a) {
    const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    for (int64_t q = thread_of_block(); q < a.num_requests; q += threads) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(a.drafts_of.starts + q + 1));
        if (a.num_rejected != nullptr) asm volatile("prefetch.global.L1 [%0];" ::"l"(a.num_rejected + q));
    }
}

// Parameters of a kernel that accepts drafts. One thread writes one element of each output.
struct AcceptJob {
    AcceptArguments accept;
    const char* report_as;
};

// Writes element i of each output. All threads of a block must call it, because it counts over the block.
__device__ void accept_item(const AcceptJob& job, int64_t i) {
    const AcceptArguments& a = job.accept;
    // The CPU raises an error for an invalid request. Here it is only reported: the outputs below stay in
    // range.
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

// The same for a whole block of any shape. `n` is its number among the blocks of the launch that accept
// drafts.
__device__ void accept_items(const AcceptJob& job, uint32_t n) {
    accept_item(job, static_cast<int64_t>(n) * (blockDim.x * blockDim.y * blockDim.z) + thread_of_block());
}

// Number of threads that the outputs need.
inline int64_t items_to_accept(const AcceptArguments& a) {
    return std::max(a.num_marks, a.num_accepted_length);
}

}  // namespace

}  // namespace nwor
