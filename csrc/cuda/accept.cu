// Family accept on CUDA: which tokens are drafts, which drafts were accepted. Semantics: nwor_ops/ops.py.
//
// One thread for each element of an output, one launch for each op. What a thread needs of the whole
// window (is it valid, how many drafts are there) it reads from the inputs alone, so that no thread waits
// for another block.

#include <tuple>

#include "accept.h"

namespace nwor {
namespace {

// Slot mappings whose addresses travel in a launch's parameters.
constexpr int kMostGroups = 128;

// ---------------------------------------------------------------- plan_window

struct PlanJob {
    const int64_t* slot_mappings[kMostGroups];
    const int32_t* query_start_loc;
    CumulativeDrafts drafts_of;
    int64_t num_requests, num_tokens, token_offset, num_rows, num_groups, log_rows_length;
    bool whole_batch;
    int32_t* log_rows;
    int64_t* row_slots;
    int32_t* row_requests;
    int32_t* row_positions;
    int64_t* counters;
    const char* report_as;
};

// Whether request q breaks the window. Differences of 32-bit values are taken in 64.
__device__ bool breaks_window(const PlanJob& p, int64_t q, const char* report_as) {
    const int64_t before = p.drafts_of.before(q), until = p.drafts_of.until(q);
    const int64_t begin = p.query_start_loc[q], end = p.query_start_loc[q + 1];
    const int64_t drafts = until - before;
    if (drafts < 0) return report(report_as, kDraftsDecrease, q, until, before), true;
    if (begin < 0 || end < begin) return report(report_as, kQueriesDecrease, q, end, begin), true;
    if (drafts > end - begin) return report(report_as, kMoreDraftsThanTokens, q, drafts, end - begin), true;
    // A micro-batch cannot tell, from here, a draft of another one from a draft past the end.
    if (drafts > 0 && p.whole_batch && end > p.num_tokens)
        return report(report_as, kDraftPastTokens, q, end, p.num_tokens), true;
    if (until > p.num_rows && q == p.num_requests - 1)
        return report(report_as, kMoreDraftsThanRows, q, until, p.num_rows), true;
    return false;
}

// Whether this thread's share of the requests breaks the window. Every block looks at all requests: a few
// thousand at most, and cheaper than a second launch. Only the first block reports.
__device__ bool share_breaks_window(const PlanJob& p) {
    const char* report_as = blockIdx.x == 0 ? p.report_as : nullptr;
    bool broken = false;
    for (int64_t q = threadIdx.x; q < p.num_requests; q += kThreads)
        broken = breaks_window(p, q, report_as) || broken;
    return broken;
}

__device__ int32_t log_row_of_token(const PlanJob& p, int64_t index) {
    if (index >= p.num_tokens) return -1;
    const int64_t token = index + p.token_offset;
    const int64_t q = first_above([&](int64_t i) { return p.query_start_loc[i + 1]; }, p.num_requests, token);
    if (q == p.num_requests) return -1;
    // Counted from the end of the request, where its drafts are.
    const int64_t row = p.drafts_of.until(q) - (p.query_start_loc[q + 1] - token);
    return row >= p.drafts_of.before(q) ? static_cast<int32_t>(row) : -1;
}

// Fills one log row; says whether its draft lies among this call's tokens.
__device__ bool plan_row(const PlanJob& p, int64_t row, bool planned) {
    const int64_t q = planned
                          ? first_above([&](int64_t i) { return p.drafts_of.until(i); }, p.num_requests, row)
                          : p.num_requests;
    const bool is_draft = q < p.num_requests;
    int64_t token = -1;
    if (is_draft) token = p.query_start_loc[q + 1] - (p.drafts_of.until(q) - row) - p.token_offset;
    const bool here = is_draft && token >= 0 && token < p.num_tokens;
    p.row_requests[row] = is_draft ? static_cast<int32_t>(q) : -1;
    p.row_positions[row] = is_draft ? static_cast<int32_t>(row - p.drafts_of.before(q)) : -1;
    for (int64_t g = 0; g < p.num_groups; ++g) {
        const int64_t slot = here ? p.slot_mappings[g][token] : -1;
        p.row_slots[g * p.num_rows + row] = slot < 0 ? -1 : slot;
    }
    return here;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanJob p) {
    wait_for_earlier_kernels();
    const bool planned = !__syncthreads_or(share_breaks_window(p));
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < p.log_rows_length) p.log_rows[i] = planned ? log_row_of_token(p, i) : -1;
    const int drafted = __syncthreads_count(i < p.num_rows && plan_row(p, i, planned));
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) add(p.counters, planned ? kWindows : kOverflowed, 1);
    add(p.counters, kDrafted, drafted);
}

void plan_window(const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens,
                 const std::vector<Tensor>& slot_mappings, const Tensor& log_rows, const Tensor& row_slots,
                 const Tensor& row_requests, const Tensor& row_positions, const Tensor& counters,
                 const std::optional<int64_t>& token_offset, int64_t num_bonus_tokens, bool leading_zero) {
    const PlanArguments p =
        check_plan(query_start_loc, cu_num_draft_tokens, slot_mappings, log_rows, row_slots, row_requests,
                   row_positions, counters, token_offset, {num_bonus_tokens, leading_zero});
    if (p.num_groups > kMostGroups)
        fail(p.op, "slot_mappings must hold at most ", kMostGroups, " slot mappings on CUDA, got ",
             p.num_groups);
    PlanJob job{};
    std::copy(p.slot_mappings.begin(), p.slot_mappings.end(), job.slot_mappings);
    job.query_start_loc = p.query_start_loc;
    job.drafts_of = p.drafts_of;
    job.num_requests = p.num_requests;
    job.num_tokens = p.num_tokens;
    job.token_offset = p.token_offset;
    job.whole_batch = p.whole_batch;
    job.num_rows = p.num_rows;
    job.num_groups = p.num_groups;
    job.log_rows_length = p.log_rows_length;
    job.log_rows = p.log_rows;
    job.row_slots = p.row_slots;
    job.row_requests = p.row_requests;
    job.row_positions = p.row_positions;
    job.counters = p.counters;
    job.report_as = report_as(p.op);
    // No early return: a window without tokens is counted too.
    const Launch launch(query_start_loc);
    const LaunchShape shape = shape_for_items(std::max(p.log_rows_length, p.num_rows));
    launch.start(plan_kernel, shape, job);
    check_launch(launch, complain_of_acceptance);
}

// ---------------------------------------------------------------- acceptance

__global__ void __launch_bounds__(kThreads) accept_kernel(const __grid_constant__ JudgeJob job) {
    wait_for_earlier_kernels();
    fetch_requests(job.accept);
    judge_items(job, blockIdx.x);
}

// `most_drafts` is what the ids (or the caller's bound) provide for.
void accept(const AcceptArguments& a, int64_t most_drafts, const Tensor& cu_num_draft_tokens) {
    const int64_t items = items_to_judge(a);
    if (items == 0) return;
    const Launch launch(cu_num_draft_tokens);
    const LaunchShape shape = shape_for_items(items);
    launch.start(accept_kernel, shape, JudgeJob{a, most_drafts, report_as(a.op)});
    check_launch(launch, complain_of_acceptance);
}

std::tuple<Tensor, Tensor> new_mask(AcceptArguments& a, const Tensor& cu_num_draft_tokens,
                                    int64_t num_drafts) {
    Tensor accepted = torch::stable::new_empty(cu_num_draft_tokens, {num_drafts}, ScalarType::Bool);
    Tensor num_accepted = torch::stable::new_empty(cu_num_draft_tokens, {a.num_requests}, ScalarType::Int);
    set_mask_outputs(a, accepted, num_accepted);
    accept(a, num_drafts, cu_num_draft_tokens);
    return {accepted, num_accepted};
}

std::tuple<Tensor, Tensor> acceptance_mask(const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                                           const Tensor& cu_num_draft_tokens) {
    AcceptArguments a = check_acceptance_mask(draft_token_ids, sampled_token_ids, cu_num_draft_tokens);
    return new_mask(a, cu_num_draft_tokens, a.drafts.length);
}

std::tuple<Tensor, Tensor> acceptance_mask_from_rejected(const Tensor& num_rejected,
                                                         const Tensor& cu_num_draft_tokens,
                                                         int64_t num_draft_tokens) {
    AcceptArguments a =
        check_acceptance_mask_from_rejected(num_rejected, cu_num_draft_tokens, num_draft_tokens);
    return new_mask(a, cu_num_draft_tokens, num_draft_tokens);
}

void reject_rows(const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                 const Tensor& cu_num_draft_tokens, const Tensor& row_rejected, const Tensor& num_accepted,
                 const Tensor& counters, int64_t num_bonus_tokens, bool leading_zero) {
    const AcceptArguments a =
        check_reject_rows(draft_token_ids, sampled_token_ids, cu_num_draft_tokens, row_rejected, num_accepted,
                          counters, {num_bonus_tokens, leading_zero});
    accept(a, a.drafts.length, cu_num_draft_tokens);
}

void reject_rows_from_rejected(const Tensor& num_rejected, const Tensor& cu_num_draft_tokens,
                               const Tensor& row_rejected, const Tensor& num_accepted, const Tensor& counters,
                               int64_t num_bonus_tokens, bool leading_zero) {
    const AcceptArguments a =
        check_reject_rows_from_rejected(num_rejected, cu_num_draft_tokens, row_rejected, num_accepted,
                                        counters, {num_bonus_tokens, leading_zero});
    accept(a, INT32_MAX, cu_num_draft_tokens);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    m.impl("plan_window", TORCH_BOX(&plan_window));
    m.impl("acceptance_mask", TORCH_BOX(&acceptance_mask));
    m.impl("acceptance_mask_from_rejected", TORCH_BOX(&acceptance_mask_from_rejected));
    m.impl("reject_rows", TORCH_BOX(&reject_rows));
    m.impl("reject_rows_from_rejected", TORCH_BOX(&reject_rows_from_rejected));
}

}  // namespace nwor
