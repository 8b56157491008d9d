// Family accept on the CPU: which tokens are drafts, which drafts were accepted. Semantics: nwor_ops/ops.py.
#include "accept.h"

#include <algorithm>
#include <tuple>

namespace nwor {
namespace {

// ---------------------------------------------------------------- plan_window

void check_requests(const PlanArguments& p) {
    for (int64_t q = 0; q < p.num_requests; ++q) {
        const int64_t drafts = p.drafts_of.until(q) - p.drafts_of.before(q);
        const int64_t tokens = static_cast<int64_t>(p.query_start_loc[q + 1]) - p.query_start_loc[q];
        if (drafts < 0)
            fail(p.op, "cu_num_draft_tokens must not decrease, got ", p.drafts_of.until(q), " at request ", q,
                 " after ", p.drafts_of.before(q));
        if (p.query_start_loc[q] < 0 || tokens < 0)
            fail(p.op, "query_start_loc must start at 0 or above and not decrease, got ",
                 p.query_start_loc[q], " and ", p.query_start_loc[q + 1], " around request ", q);
        if (drafts > tokens)
            fail(p.op, "cu_num_draft_tokens must give a request no more drafts than tokens, got ", drafts,
                 " drafts in the ", tokens, " tokens of request ", q);
        if (drafts > 0 && p.whole_batch && p.query_start_loc[q + 1] > p.num_tokens)
            fail(p.op, "slot_mappings must cover every draft, got ", p.num_tokens, " tokens where request ",
                 q, " ends at token ", p.query_start_loc[q + 1]);
    }
    const int64_t rows = p.drafts_of.before(p.num_requests);
    if (rows > p.num_rows)
        fail(p.op, "row_slots must have a row for each draft, got ", p.num_rows, " rows for ", rows,
             " drafts");
}

void plan(const PlanArguments& p) {
    check_requests(p);
    std::fill_n(p.log_rows, p.log_rows_length, -1);
    std::fill_n(p.row_slots, p.num_groups * p.num_rows, int64_t{-1});
    std::fill_n(p.row_requests, p.num_rows, -1);
    std::fill_n(p.row_positions, p.num_rows, -1);
    int64_t drafted = 0;
    for (int64_t q = 0; q < p.num_requests; ++q) {
        const int64_t first_row = p.drafts_of.before(q);
        const int64_t drafts = p.drafts_of.until(q) - first_row;
        for (int64_t j = 0; j < drafts; ++j) {
            const int64_t row = first_row + j;
            p.row_requests[row] = static_cast<int32_t>(q);
            p.row_positions[row] = static_cast<int32_t>(j);
            const int64_t token = p.query_start_loc[q + 1] - drafts + j - p.token_offset;
            if (token < 0 || token >= p.num_tokens) continue;  // in another micro-batch
            p.log_rows[token] = static_cast<int32_t>(row);
            for (int64_t g = 0; g < p.num_groups; ++g)
                p.row_slots[g * p.num_rows + row] = std::max(p.slot_mappings[g][token], int64_t{-1});
            ++drafted;
        }
    }
    grow(p.counters[kWindows], 1);
    grow(p.counters[kDrafted], drafted);
}

void plan_window(const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens,
                 const std::vector<Tensor>& slot_mappings, const Tensor& log_rows, const Tensor& row_slots,
                 const Tensor& row_requests, const Tensor& row_positions, const Tensor& counters,
                 const std::optional<int64_t>& token_offset, int64_t num_bonus_tokens, bool leading_zero) {
    plan(check_plan(query_start_loc, cu_num_draft_tokens, slot_mappings, log_rows, row_slots, row_requests,
                    row_positions, counters, token_offset, {num_bonus_tokens, leading_zero}));
}

// ---------------------------------------------------------------- acceptance

std::tuple<Tensor, Tensor> new_mask(AcceptArguments& a, const Tensor& like, int64_t num_drafts) {
    Tensor accepted = torch::stable::new_empty(like, {num_drafts}, ScalarType::Bool);
    Tensor num_accepted = torch::stable::new_empty(like, {a.num_requests}, ScalarType::Int);
    set_mask_outputs(a, accepted, num_accepted);
    accept(a);
    return {accepted, num_accepted};
}

std::tuple<Tensor, Tensor> acceptance_mask(const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                                           const Tensor& cu_num_draft_tokens) {
    AcceptArguments a = check_acceptance_mask(draft_token_ids, sampled_token_ids, cu_num_draft_tokens);
    check_cumulative(a, a.drafts.length, "entries of draft_token_ids");
    return new_mask(a, cu_num_draft_tokens, a.drafts.length);
}

std::tuple<Tensor, Tensor> acceptance_mask_from_rejected(const Tensor& num_rejected,
                                                         const Tensor& cu_num_draft_tokens,
                                                         int64_t num_draft_tokens) {
    AcceptArguments a =
        check_acceptance_mask_from_rejected(num_rejected, cu_num_draft_tokens, num_draft_tokens);
    check_cumulative(a, num_draft_tokens, "num_draft_tokens");
    return new_mask(a, cu_num_draft_tokens, num_draft_tokens);
}

void reject_rows(const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                 const Tensor& cu_num_draft_tokens, const Tensor& row_rejected, const Tensor& num_accepted,
                 const Tensor& counters, int64_t num_bonus_tokens, bool leading_zero) {
    const AcceptArguments a =
        check_reject_rows(draft_token_ids, sampled_token_ids, cu_num_draft_tokens, row_rejected, num_accepted,
                          counters, {num_bonus_tokens, leading_zero});
    check_cumulative(a, a.drafts.length, "entries of draft_token_ids");
    accept(a);
}

void reject_rows_from_rejected(const Tensor& num_rejected, const Tensor& cu_num_draft_tokens,
                               const Tensor& row_rejected, const Tensor& num_accepted, const Tensor& counters,
                               int64_t num_bonus_tokens, bool leading_zero) {
    const AcceptArguments a =
        check_reject_rows_from_rejected(num_rejected, cu_num_draft_tokens, row_rejected, num_accepted,
                                        counters, {num_bonus_tokens, leading_zero});
    check_cumulative(a, INT32_MAX, "a 32-bit count");
    accept(a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    m.impl("plan_window", TORCH_BOX(&plan_window));
    m.impl("acceptance_mask", TORCH_BOX(&acceptance_mask));
    m.impl("acceptance_mask_from_rejected", TORCH_BOX(&acceptance_mask_from_rejected));
    m.impl("reject_rows", TORCH_BOX(&reject_rows));
    m.impl("reject_rows_from_rejected", TORCH_BOX(&reject_rows_from_rejected));
}

}  // namespace nwor
