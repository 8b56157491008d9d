// Family accept on the CPU: which tokens are drafts, and which drafts were accepted. Semantics:
// nwor_ops/ops/accept.py.
#include <algorithm>

#include "acceptance.h"

namespace nwor {
namespace {

void run(const PlanCall& call, const Cpu&) {
    const PlanArguments& p = call.plan;
    check_each(p.op, p.num_requests, [&](int64_t q) { return problem_of_request(p, q); });
    std::fill_n(p.log_rows, p.log_rows_length, -1);
    int64_t row = 0, drafted = 0;
    for (int64_t q = 0; q < p.num_requests; ++q)
        for (; row < p.drafts_of.until(q); ++row) {
            const int64_t token = plan_row(p, call.slot_mappings.data(), row, q);
            if (token < 0) continue;  // in another micro-batch
            p.log_rows[token] = static_cast<int32_t>(row);
            ++drafted;
        }
    for (; row < p.num_rows; ++row) plan_row(p, call.slot_mappings.data(), row, p.num_requests);
    for (int64_t q = 0; q < p.starts_length; ++q) p.draft_starts[q] = draft_start(p, q);
    grow(p.counters[kWindows], 1);
    grow(p.counters[kDrafted], drafted);
}

void run(const AcceptArguments& a, const Cpu&) {
    check_drafts(a);
    accept(a);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    register_accept<Cpu>(m);
}

}  // namespace nwor
