// Family accept on CUDA: which tokens are drafts, and which drafts were accepted. Semantics:
// nwor_ops/ops/accept.py.
//
// One thread per element of an output, and one launch per op. A thread also needs facts about the whole
// window (is it valid, how many drafts are there). It computes them from the inputs, so no thread waits for
// another block.

#include <algorithm>

#include "acceptance.h"

namespace nwor {
namespace {

// Number of slot mappings whose addresses fit in a launch's parameters.
constexpr int kMostSlotMappings = 128;

// ---------------------------------------------------------------- plan_window

struct PlanJob {
    const int64_t* slot_mappings[kMostSlotMappings];
    PlanArguments plan;
    const char* report_as;
};

// Returns whether the requests checked by this thread make the window invalid. Every block checks all
// requests. These are a few thousand at most, which is cheaper than a second launch. Only the first block
// reports.
__device__ bool share_breaks_window(const PlanJob& job) {
    const char* report_as = blockIdx.x == 0 ? job.report_as : nullptr;
    bool broken = false;
    for (int64_t q = threadIdx.x; q < job.plan.num_requests; q += kThreads) {
        const Found found = problem_of_request(job.plan, q);
        if (found) report(report_as, found);
        broken = broken || found;
    }
    return broken;
}

__device__ int32_t log_row_of_token(const PlanArguments& p, int64_t index) {
    if (index >= p.num_tokens) return -1;
    const int64_t token = index + p.token_offset;
    const int64_t q = first_above([&](int64_t i) { return p.query_start_loc[i + 1]; }, p.num_requests, token);
    if (q == p.num_requests) return -1;
    // Counted from the end of the request, where its drafts are.
    const int64_t row = p.drafts_of.until(q) - (p.query_start_loc[q + 1] - token);
    return row >= p.drafts_of.before(q) ? static_cast<int32_t>(row) : -1;
}

__device__ int64_t request_of_row(const PlanArguments& p, int64_t row) {
    return first_above([&](int64_t i) { return p.drafts_of.until(i); }, p.num_requests, row);
}

// Grid: one block per 256 items, at least one. Items: the longest of log_rows, draft_start_loc and the log.
// Thread i writes element i of each output. The first block also counts the window.
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanJob job) {
    const PlanArguments& p = job.plan;
    wait_for_earlier_kernels();
    const bool planned = !__syncthreads_or(share_breaks_window(job));
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < p.log_rows_length) p.log_rows[i] = planned ? log_row_of_token(p, i) : -1;
    if (i < p.starts_length) p.draft_starts[i] = planned ? draft_start(p, i) : 0;
    bool here = false;
    if (i < p.num_rows)
        here = plan_row(p, job.slot_mappings, i, planned ? request_of_row(p, i) : p.num_requests) >= 0;
    const int drafted = __syncthreads_count(here);
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) add(p.counters, planned ? kWindows : kOverflowed, 1);
    add(p.counters, kDrafted, drafted);
}

void run(const PlanCall& call, const Launch& launch) {
    const PlanArguments& p = call.plan;
    if (p.num_groups > kMostSlotMappings)
        fail(p.op, "slot_mappings must hold at most ", kMostSlotMappings, " slot mappings on CUDA, got ",
             p.num_groups);
    PlanJob job{{}, p, report_as(p.op)};
    std::copy(call.slot_mappings.begin(), call.slot_mappings.end(), job.slot_mappings);
    // No early return: a window without tokens is counted too.
    const int64_t items = std::max({p.log_rows_length, p.num_rows, p.starts_length});
    launch.start(plan_kernel, shape_for_items(items), job);
    check_launch(launch);
}

// ---------------------------------------------------------------- acceptance

// Grid: one block per 256 elements of the longer output. Thread i writes element i of both.
__global__ void __launch_bounds__(kThreads) accept_kernel(const __grid_constant__ AcceptJob job) {
    wait_for_earlier_kernels();
    fetch_requests(job.accept);
    accept_items(job, blockIdx.x);
}

void run(const AcceptArguments& a, const Launch& launch) {
    const int64_t items = items_to_accept(a);
    if (items == 0) return;
    launch.start(accept_kernel, shape_for_items(items), AcceptJob{a, report_as(a.op)});
    check_launch(launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_accept<Launch>(m);
}

}  // namespace nwor
