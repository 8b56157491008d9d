// Family accept: argument checks, and the work for one row or one request. The CPU kernels loop over these
// functions, and the CUDA kernels call them in each thread, so both devices behave the same.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "common/op.h"
#include "common/problems.h"
#include "common/views.h"

namespace nwor {

// ---------------------------------------------------------------- counts of drafts

// Index of each request's first draft in the batch, and then the number of drafts: an index pointer, as
// plan_window writes it.
struct DraftStarts {
    const int32_t* starts;

    // Number of drafts of requests [0, request): the first log row of `request`.
    NWOR_HOST_DEVICE int64_t before(int64_t request) const { return starts[request]; }
    // Number of drafts of requests [0, request]: the log row after the request's last one.
    NWOR_HOST_DEVICE int64_t until(int64_t request) const { return starts[request + 1]; }
};

inline DraftStarts check_draft_starts(const Argument& starts, int64_t* num_requests) {
    const DraftStarts drafts_of{int32_view(starts, 1, "[num_requests + 1]").data};
    *num_requests = starts.tensor.size(0) - 1;
    if (*num_requests > INT32_MAX) starts.must_be("of fewer than 2^31 requests");
    if (starts.tensor.is_cpu() && drafts_of.before(0) != 0)
        complain(starts.op, {kDraftStartsFirst, 0, drafts_of.before(0), 0});
    return drafts_of;
}

// The engine's draft counts, which plan_window takes: cumulative drafts including each request, plus
// `num_bonus_tokens` per request.
struct CumulativeDrafts {
    const int32_t* counts;
    int64_t num_bonus_tokens;

    // Number of drafts of requests [0, request]: the log row after the request's last one.
    NWOR_HOST_DEVICE int64_t until(int64_t request) const {
        return counts[request] - num_bonus_tokens * (request + 1);
    }
    // Number of drafts of requests [0, request): the first log row of `request`.
    NWOR_HOST_DEVICE int64_t before(int64_t request) const { return request == 0 ? 0 : until(request - 1); }
};

struct CheckedDrafts {
    CumulativeDrafts drafts_of;
    Vector<int32_t> given;  // with its leading zero
    int64_t num_requests;
};

inline CheckedDrafts check_cumulative_drafts(const Argument& cu, int64_t num_bonus_tokens,
                                             bool leading_zero) {
    check_not_negative(cu.op, "num_bonus_tokens", num_bonus_tokens);
    const int64_t zeros = leading_zero ? 1 : 0;
    const Vector<int32_t> given = int32_view(cu, zeros, zeros ? "[num_requests + 1]" : "[num_requests]");
    const int64_t num_requests = given.length - zeros;
    if (num_requests > INT32_MAX) cu.must_be("of fewer than 2^31 requests");
    if (zeros && cu.tensor.is_cpu() && given[0] != 0)
        fail(cu.op, cu.name, " must begin with 0 where it has a leading_zero, got ", given[0]);
    return {{given.data + zeros, num_bonus_tokens}, given, num_requests};
}

// Order of the `counters` tensor. COUNTERS of nwor_ops has the names.
enum Counter { kWindows, kDrafted, kAccepted, kRejected, kOverflowed, kNumCounters };

inline int64_t* counters_view(const Argument& counters) {
    return int64_view(counters, kNumCounters, "[len(COUNTERS)]").data;
}

// ---------------------------------------------------------------- plan_window

struct PlanArguments {
    const char* op;
    int64_t num_requests, num_tokens, token_offset, num_rows, num_groups, log_rows_length, starts_length;
    bool whole_batch;  // not a micro-batch: every draft must be among the tokens
    const int32_t* query_start_loc;
    CumulativeDrafts drafts_of;
    int32_t* log_rows;
    int64_t* row_slots;
    int32_t* row_requests;
    int32_t* row_positions;
    int64_t* counters;
    int32_t* draft_starts;
};

struct PlanCall {
    PlanArguments plan;
    std::vector<const int64_t*> slot_mappings;
    bool leading_zero;
};

inline PlanCall check_plan(const char* op,
                           const Tensor& query_start_loc,             // int32 [num_requests + 1]
                           const Tensor& cu_num_draft_tokens,         // int32 [num_requests]
                           const std::vector<Tensor>& slot_mappings,  // each int64 [num_tokens]
                           const Tensor& log_rows,                    // int32 [num_tokens], written
                           const Tensor& row_slots,                   // int64 [groups, num_log_rows], written
                           const Tensor& row_requests,                // int32 [num_log_rows], written
                           const Tensor& row_positions,               // int32 [num_log_rows], written
                           const Tensor& counters,                    // int64 [len(COUNTERS)], written
                           const Tensor& draft_start_loc,             // int32 [num_requests + 1], written
                           const std::optional<int64_t>& token_offset, int64_t num_bonus_tokens,
                           bool leading_zero) {
    if (slot_mappings.empty()) fail(op, "slot_mappings must hold at least one slot mapping, got none");
    PlanCall call{};
    PlanArguments& p = call.plan;
    p.op = op;
    p.token_offset = token_offset.value_or(0);
    check_not_negative(op, "token_offset", p.token_offset);
    p.whole_batch = !token_offset.has_value();
    const Argument qsl{op, "query_start_loc", query_start_loc},
        cu{op, "cu_num_draft_tokens", cu_num_draft_tokens}, lr{op, "log_rows", log_rows},
        rs{op, "row_slots", row_slots}, rr{op, "row_requests", row_requests},
        rp{op, "row_positions", row_positions}, ct{op, "counters", counters},
        ds{op, "draft_start_loc", draft_start_loc};
    const CheckedDrafts drafts = check_cumulative_drafts(cu, num_bonus_tokens, leading_zero);
    p.drafts_of = drafts.drafts_of;
    p.num_requests = drafts.num_requests;
    call.leading_zero = leading_zero;
    p.query_start_loc = int32_view(qsl, p.num_requests + 1, "[num_requests + 1]").data;
    p.num_groups = static_cast<int64_t>(slot_mappings.size());
    const Placed outputs[] = {Placed(lr), Placed(rs), Placed(rr), Placed(rp), Placed(ct), Placed(ds)};
    for (size_t g = 0; g < slot_mappings.size(); ++g) {
        const std::string name = "slot_mappings[" + std::to_string(g) + "]";
        const Argument s{op, name.c_str(), slot_mappings[g]};
        call.slot_mappings.push_back(int64_view(s, 0, "[num_tokens]").data);
        if (s.tensor.size(0) != slot_mappings[0].size(0))
            s.must_be("of the length of slot_mappings[0], ", describe(slot_mappings[0]));
        s.same_device(query_start_loc);
        const Placed placed(s);
        for (const Placed& output : outputs) must_not_overlap(op, placed, output);
    }
    p.num_tokens = slot_mappings[0].size(0);
    p.log_rows = int32_view(lr, p.num_tokens, "[num_tokens]").data;
    p.log_rows_length = log_rows.size(0);
    rs.dtype(ScalarType::Long);
    if (row_slots.dim() != 2 || row_slots.size(0) != p.num_groups)
        rs.must_be("[", p.num_groups, " groups, num_log_rows]");
    rs.contiguous();
    p.num_rows = row_slots.size(1);
    p.row_slots = static_cast<int64_t*>(row_slots.data_ptr());
    p.row_requests = int32_view(rr, p.num_rows, "[num_log_rows]").data;
    p.row_positions = int32_view(rp, p.num_rows, "[num_log_rows]").data;
    for (const Argument& rows : {rr, rp})
        if (rows.tensor.size(0) != p.num_rows)
            rows.must_be("of as many rows as row_slots, ", describe(row_slots));
    p.counters = counters_view(ct);
    p.draft_starts = int32_view(ds, p.num_requests + 1, "[num_requests + 1]").data;
    p.starts_length = draft_start_loc.size(0);
    check_placement(op, {qsl, cu}, {lr, rs, rr, rp, ct, ds});
    return call;
}

template <class F>
void each_written(const PlanCall& call, const F& f) {
    const PlanArguments& p = call.plan;
    f(range_at(p.log_rows, p.log_rows_length));
    f(range_at(p.row_slots, p.num_groups * p.num_rows));
    f(range_at(p.row_requests, p.num_rows));
    f(range_at(p.row_positions, p.num_rows));
    f(range_at(p.counters, kNumCounters));
    f(range_at(p.draft_starts, p.starts_length));
}

inline void set_step(PlanCall& call, const PlanCall& checked, StepArguments& step) {
    PlanArguments& p = call.plan;
    const Argument cu{p.op, "cu_num_draft_tokens",
                      needed(p.op, "cu_num_draft_tokens", step.cu_num_draft_tokens)},
        qsl{p.op, "query_start_loc", needed(p.op, "query_start_loc", step.query_start_loc)};
    const CheckedDrafts drafts =
        check_cumulative_drafts(cu, checked.plan.drafts_of.num_bonus_tokens, checked.leading_zero);
    check_requests(p.op, drafts.num_requests, checked.plan.num_requests);
    const Vector<int32_t> starts = int32_view(qsl, drafts.num_requests + 1, "[num_requests + 1]");
    check_outside(p.op, cu.name, drafts.given, checked);
    check_outside(p.op, qsl.name, starts, checked);
    p.drafts_of = drafts.drafts_of;
    p.num_requests = drafts.num_requests;
    p.query_start_loc = starts.data;
    step.window.num_requests = p.num_requests;
    step.window.query_start_loc = starts;
}

// Returns what is invalid about request q, if anything. Differences of 32-bit values are computed in 64 bits.
NWOR_HOST_DEVICE inline Found problem_of_request(const PlanArguments& p, int64_t q) {
    const int64_t before = p.drafts_of.before(q), until = p.drafts_of.until(q);
    const int64_t begin = p.query_start_loc[q], end = p.query_start_loc[q + 1];
    const int64_t drafts = until - before;
    if (drafts < 0) return {kDraftsDecrease, q, until, before};
    if (begin < 0 || end < begin) return {kQueriesDecrease, q, end, begin};
    if (drafts > end - begin) return {kMoreDraftsThanTokens, q, drafts, end - begin};
    // A micro-batch cannot distinguish a draft of another micro-batch from a draft past the end.
    if (drafts > 0 && p.whole_batch && end > p.num_tokens) return {kDraftPastTokens, q, end, p.num_tokens};
    if (until > p.num_rows && q == p.num_requests - 1) return {kMoreDraftsThanRows, q, until, p.num_rows};
    return {};
}

// Index of the first draft of request q; after the last request, the number of drafts.
NWOR_HOST_DEVICE inline int32_t draft_start(const PlanArguments& p, int64_t q) {
    return static_cast<int32_t>(p.drafts_of.before(least(q, p.num_requests)));
}

// Fills a log row with a draft of request q, or with none if q is `num_requests`. Returns the index of the
// draft among the tokens of this call, or a negative value.
NWOR_HOST_DEVICE inline int64_t plan_row(const PlanArguments& p, const int64_t* const* slot_mappings,
                                         int64_t row, int64_t q) {
    const bool is_draft = q < p.num_requests;
    int64_t token = -1;
    if (is_draft) token = p.query_start_loc[q + 1] - (p.drafts_of.until(q) - row) - p.token_offset;
    const bool here = is_draft && token >= 0 && token < p.num_tokens;
    p.row_requests[row] = is_draft ? static_cast<int32_t>(q) : -1;
    p.row_positions[row] = is_draft ? static_cast<int32_t>(row - p.drafts_of.before(q)) : -1;
    for (int64_t g = 0; g < p.num_groups; ++g) {
        const int64_t slot = here ? slot_mappings[g][token] : -1;
        p.row_slots[g * p.num_rows + row] = slot < 0 ? -1 : slot;
    }
    return here ? token : -1;
}

// ---------------------------------------------------------------- acceptance

// Token ids of either width: drafts, which are contiguous, or sampled tokens. (One view with strides for both
// takes more registers in an accepting kernel.)
struct TokensView {
    const void* data;
    bool is_int64;
    int64_t length;                              // number of drafts
    int64_t columns, row_stride, column_stride;  // for sampled tokens

    NWOR_HOST_DEVICE int64_t operator[](int64_t i) const {
        return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
    NWOR_HOST_DEVICE int64_t at(int64_t request, int64_t column) const {
        return (*this)[request * row_stride + column * column_stride];
    }
};

struct AcceptArguments {
    const char* op;
    int64_t num_requests;
    DraftStarts drafts_of;
    // The inputs are either drafts and sampled tokens (num_rejected is null), or counts of rejected drafts.
    TokensView drafts, sampled;
    const int32_t* num_rejected;
    // Outputs. `marks` has a flag per draft: rejected (`marks_rejected`) or accepted.
    bool* marks;
    bool marks_rejected;
    int64_t num_marks;
    int32_t* num_accepted;
    int64_t num_accepted_length;
    int64_t* counters;  // null in the ops that return new tensors
};

inline AcceptArguments check_accept(const char* op, const Tensor& draft_start_loc) {
    AcceptArguments a{};
    a.op = op;
    a.drafts_of = check_draft_starts({op, "draft_start_loc", draft_start_loc}, &a.num_requests);
    return a;
}

inline void set_tokens(AcceptArguments& a, const Tensor& draft_token_ids, const Tensor& sampled_token_ids) {
    const Argument drafts{a.op, "draft_token_ids", draft_token_ids},
        sampled{a.op, "sampled_token_ids", sampled_token_ids};
    check_ids(drafts);
    if (draft_token_ids.dim() != 1) drafts.must_be("[num_draft_tokens]");
    drafts.contiguous();
    check_ids(sampled);
    if (sampled_token_ids.dim() != 2 || sampled_token_ids.size(0) < a.num_requests)
        sampled.must_be("[>= ", a.num_requests, " requests, most drafts (+ 1)]");
    a.drafts = {draft_token_ids.data_ptr(),
                draft_token_ids.scalar_type() == ScalarType::Long,
                draft_token_ids.size(0),
                0,
                0,
                0};
    a.sampled = {sampled_token_ids.data_ptr(),
                 sampled_token_ids.scalar_type() == ScalarType::Long,
                 0,
                 sampled_token_ids.size(1),
                 sampled_token_ids.stride(0),
                 sampled_token_ids.stride(1)};
}

inline void check_tokens(AcceptArguments& a, const Tensor& draft_token_ids, const Tensor& sampled_token_ids,
                         const Tensor& draft_start_loc) {
    set_tokens(a, draft_token_ids, sampled_token_ids);
    Argument{a.op, "draft_token_ids", draft_token_ids}.same_device(draft_start_loc);
    Argument{a.op, "sampled_token_ids", sampled_token_ids}.same_device(draft_start_loc);
}

inline void check_num_rejected(AcceptArguments& a, const Tensor& num_rejected,
                               const Tensor& draft_start_loc) {
    const Argument r{a.op, "num_rejected", num_rejected};
    a.num_rejected = int32_view(r, a.num_requests, "[num_requests]").data;
    r.same_device(draft_start_loc);
}

// Checks the outputs. They must not share memory with `inputs`.
inline void check_reject_outputs(AcceptArguments& a, const Tensor& row_rejected, const Tensor& num_accepted,
                                 const Tensor& counters, const std::vector<Argument>& inputs) {
    const Argument rows{a.op, "row_rejected", row_rejected}, accepted{a.op, "num_accepted", num_accepted},
        counts{a.op, "counters", counters};
    a.marks = bool_view(rows, 0, "[num_log_rows]").data;
    a.marks_rejected = true;
    a.num_marks = row_rejected.size(0);
    a.num_accepted = int32_view(accepted, a.num_requests, "[num_requests]").data;
    a.num_accepted_length = num_accepted.size(0);
    a.counters = counters_view(counts);
    check_placement(a.op, inputs, {counts, accepted, rows});
}

inline AcceptArguments check_reject_rows(
    const char* op,
    const Tensor& draft_token_ids,    // ids [num_draft_tokens]
    const Tensor& sampled_token_ids,  // ids [num_requests, most drafts (+ 1)]
    const Tensor& draft_start_loc,    // int32 [num_requests + 1]
    const Tensor& row_rejected,       // bool [num_log_rows], written
    const Tensor& num_accepted,       // int32 [num_requests], written
    const Tensor& counters            // int64 [len(COUNTERS)], written
) {
    AcceptArguments a = check_accept(op, draft_start_loc);
    check_tokens(a, draft_token_ids, sampled_token_ids, draft_start_loc);
    check_reject_outputs(a, row_rejected, num_accepted, counters,
                         {{op, "draft_start_loc", draft_start_loc},
                          {op, "draft_token_ids", draft_token_ids},
                          {op, "sampled_token_ids", sampled_token_ids}});
    return a;
}

// `others` are further inputs of an op that also moves rows. Its blocks run in any order, so they must not
// share memory with the outputs here either.
inline AcceptArguments check_reject_counts(const char* op, const Tensor& num_rejected,
                                           const Tensor& draft_start_loc, const Tensor& row_rejected,
                                           const Tensor& num_accepted, const Tensor& counters,
                                           const std::vector<Argument>& others = {}) {
    AcceptArguments a = check_accept(op, draft_start_loc);
    check_num_rejected(a, num_rejected, draft_start_loc);
    std::vector<Argument> inputs{{op, "draft_start_loc", draft_start_loc},
                                 {op, "num_rejected", num_rejected}};
    for (const Argument& other : others) inputs.push_back(other);
    check_reject_outputs(a, row_rejected, num_accepted, counters, inputs);
    return a;
}

template <class F>
void each_written(const AcceptArguments& a, const F& f) {
    f(range_at(a.marks, a.num_marks));
    f(range_at(a.num_accepted, a.num_accepted_length));
    f(range_at(a.counters, kNumCounters));
}

// `call` is the whole call that is bound.
template <class Call>
void set_step(AcceptArguments& a, const AcceptArguments& checked, const StepArguments& step,
              const Call& call) {
    const Argument rejected{a.op, "num_rejected", needed(a.op, "num_rejected", step.num_rejected)};
    check_requests(a.op, step.window.num_requests, checked.num_requests);
    a.num_requests = step.window.num_requests;
    const Vector<int32_t> counts = int32_view(rejected, a.num_requests, "[num_requests]");
    check_outside(a.op, rejected.name, counts, call);
    a.num_rejected = counts.data;
}

// For reject_rows.
inline void set_step(AcceptArguments& a, const AcceptArguments& checked, const StepArguments& step) {
    const Argument drafts{a.op, "draft_token_ids", needed(a.op, "draft_token_ids", step.draft_token_ids)},
        sampled{a.op, "sampled_token_ids", needed(a.op, "sampled_token_ids", step.sampled_token_ids)};
    check_requests(a.op, step.window.num_requests, checked.num_requests);
    a.num_requests = step.window.num_requests;
    set_tokens(a, drafts.tensor, sampled.tensor);
    for (const Argument& ids : {drafts, sampled}) check_outside(a.op, ids.name, ids.tensor, checked);
}

// Returns new tensors instead of writing to a window's buffers.
struct MaskCall {
    AcceptArguments accept;
    Tensor accepted, num_accepted;

    MaskCall(const AcceptArguments& a, const Tensor& like, int64_t num_drafts)
        : accept(a),
          accepted(new_empty(like, {num_drafts}, ScalarType::Bool)),
          num_accepted(new_empty(like, {a.num_requests}, ScalarType::Int)) {
        accept.marks = static_cast<bool*>(accepted.data_ptr());
        accept.num_marks = num_drafts;
        accept.num_accepted = static_cast<int32_t*>(num_accepted.data_ptr());
        accept.num_accepted_length = a.num_requests;
    }
};

inline MaskCall check_acceptance_mask(
    const char* op,
    const Tensor& draft_token_ids,    // ids [num_draft_tokens]
    const Tensor& sampled_token_ids,  // ids [num_requests, most drafts (+ 1)]
    const Tensor& draft_start_loc     // int32 [num_requests + 1]
) {
    AcceptArguments a = check_accept(op, draft_start_loc);
    check_tokens(a, draft_token_ids, sampled_token_ids, draft_start_loc);
    return {a, draft_start_loc, a.drafts.length};
}

inline MaskCall check_acceptance_mask_from_rejected(
    const char* op,
    const Tensor& num_rejected,     // int32 [num_requests]
    const Tensor& draft_start_loc,  // int32 [num_requests + 1]
    int64_t num_draft_tokens) {
    AcceptArguments a = check_accept(op, draft_start_loc);
    check_num_rejected(a, num_rejected, draft_start_loc);
    check_not_negative(op, "num_draft_tokens", num_draft_tokens);
    return {a, draft_start_loc, num_draft_tokens};
}

NWOR_HOST_DEVICE inline Found problem_of_request(const AcceptArguments& a, int64_t q) {
    const int64_t before = a.drafts_of.before(q), until = a.drafts_of.until(q);
    if (q == 0 && before != 0) return {kDraftStartsFirst, q, before, 0};
    if (until < before) return {kDraftStartsDecrease, q, until, before};
    if (a.num_rejected == nullptr && until - before > a.sampled.columns)
        return {kMoreDraftsThanColumns, q, until - before, a.sampled.columns};
    if (q < a.num_requests - 1) return {};
    if (a.num_rejected == nullptr && until > a.drafts.length)
        return {kMoreDraftsThanIds, q, until, a.drafts.length};
    if (until > a.num_marks)
        return {a.marks_rejected ? kMoreDraftsThanFlags : kMoreDraftsThanMarks, q, until, a.num_marks};
    return {};
}

// Number of accepted drafts of a request from its number of rejected ones.
NWOR_HOST_DEVICE inline int64_t num_accepted_of(int64_t drafts, int64_t rejected) {
    if (rejected <= 0) return drafts;
    return rejected < drafts ? drafts - rejected : 0;
}

// Number of accepted drafts among the first `drafts` of a request, up to the first one that was rejected.
NWOR_HOST_DEVICE inline int64_t leading_matches(const AcceptArguments& a, int64_t request, int64_t first_row,
                                                int64_t drafts) {
    drafts = least(least(drafts, a.sampled.columns), a.drafts.length - first_row);
    int64_t j = 0;
    for (; j < drafts; ++j) {
        const int64_t token = a.sampled.at(request, j);
        if (token < 0 || token != a.drafts[first_row + j]) break;
        if (j + 1 < a.sampled.columns && a.sampled.at(request, j + 1) < 0) break;
    }
    return j;
}

// Number of accepted drafts of a request. Looks only at its first `most_looked_at` drafts.
NWOR_HOST_DEVICE inline int64_t count_accepted(const AcceptArguments& a, int64_t request,
                                               int64_t most_looked_at = INT32_MAX) {
    const int64_t first_row = a.drafts_of.before(request);
    // A device cannot refuse an invalid index pointer, but it must not follow it past the rows.
    const int64_t until = least(a.drafts_of.until(request), a.num_marks);
    const int64_t drafts = first_row < 0 ? 0 : most(until - first_row, 0);
    if (a.num_rejected == nullptr)
        return leading_matches(a, request, first_row, least(drafts, most_looked_at));
    return num_accepted_of(drafts, a.num_rejected[request]);
}

// ---------------------------------------------------------------- the ops

template <class Device>
std::tuple<Tensor, Tensor> run(const MaskCall& call, const Device& device) {
    run(call.accept, device);
    return {call.accepted, call.num_accepted};
}

template <class Device>
void register_accept(Library& m) {
    NWOR_BINDABLE_OP(m, plan_window, check_plan);
    NWOR_OP(m, acceptance_mask, check_acceptance_mask);
    NWOR_OP(m, acceptance_mask_from_rejected, check_acceptance_mask_from_rejected);
    NWOR_BINDABLE_OP(m, reject_rows, check_reject_rows);
    m.impl("_begin_bound", TORCH_BOX(&begin_bound));
    m.impl("_begin_redirected_bound", TORCH_BOX(&begin_redirected_bound));
    m.impl("_commit_bound", TORCH_BOX(&commit_bound));
    m.impl("_commit_tokens_bound", TORCH_BOX(&commit_tokens_bound));
}

}  // namespace nwor
