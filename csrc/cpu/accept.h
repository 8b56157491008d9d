// What the CPU kernels share that judge drafts: which of them were accepted.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../check.h"

namespace nwor {
namespace {

// A counter that was given full goes round, as on CUDA.
void grow(int64_t& counter, int64_t by) {
    counter = static_cast<int64_t>(static_cast<uint64_t>(counter) + static_cast<uint64_t>(by));
}

int64_t id_at(const IdsView& ids, int64_t index) {
    return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[index]
                        : static_cast<const int32_t*>(ids.data)[index];
}

int64_t sampled_at(const IdsView& ids, int64_t request, int64_t column) {
    return id_at(ids, request * ids.row_stride + column * ids.column_stride);
}

// How many of a request's drafts were accepted.
int64_t count_accepted(const AcceptArguments& a, int64_t request, int64_t first_row, int64_t drafts) {
    if (a.num_rejected != nullptr) return num_accepted_of(drafts, a.num_rejected[request]);
    int64_t j = 0;
    for (; j < drafts && j < a.sampled.columns; ++j) {
        const int64_t token = sampled_at(a.sampled, request, j);
        if (token < 0 || token != id_at(a.drafts, first_row + j)) break;
        if (j + 1 < a.sampled.columns && sampled_at(a.sampled, request, j + 1) < 0) break;
    }
    return j;
}

void check_cumulative(const AcceptArguments& a, int64_t most, const char* what) {
    for (int64_t q = 0; q < a.num_requests; ++q)
        if (a.drafts_of.until(q) < a.drafts_of.before(q))
            fail(a.op, "cu_num_draft_tokens must not decrease, got ", a.drafts_of.until(q), " at request ", q,
                 " after ", a.drafts_of.before(q));
    const int64_t total = a.drafts_of.before(a.num_requests);
    if (total > most)
        fail(a.op, "cu_num_draft_tokens must not exceed the ", most, " ", what, ", got ", total);
}

void accept(const AcceptArguments& a) {
    std::fill_n(a.marks, a.num_marks, false);
    std::fill_n(a.num_accepted, a.num_accepted_length, 0);
    const int64_t total = a.drafts_of.before(a.num_requests);
    if (total > a.num_marks) return;  // a window that was never planned; only reject_rows gets here
    int64_t accepted_total = 0;
    for (int64_t q = 0; q < a.num_requests; ++q) {
        const int64_t first_row = a.drafts_of.before(q);
        const int64_t drafts = a.drafts_of.until(q) - first_row;
        const int64_t accepted = count_accepted(a, q, first_row, drafts);
        for (int64_t j = 0; j < drafts; ++j) a.marks[first_row + j] = (j < accepted) != a.marks_rejected;
        a.num_accepted[q] = static_cast<int32_t>(accepted);
        accepted_total += accepted;
    }
    if (a.counters == nullptr) return;
    grow(a.counters[kAccepted], accepted_total);
    grow(a.counters[kRejected], total - accepted_total);
}

// The marks that `accept` would write, on the side: an op that does more than judge checks what follows from
// them before it writes anything.
class Judged {
  public:
    explicit Judged(AcceptArguments a)
        : marks_(new bool[static_cast<size_t>(a.num_marks)]),
          num_accepted_(static_cast<size_t>(a.num_accepted_length)) {
        a.marks = marks_.get();
        a.num_accepted = num_accepted_.data();
        a.counters = nullptr;
        accept(a);
    }
    const bool* marks() const { return marks_.get(); }

  private:
    std::unique_ptr<bool[]> marks_;
    std::vector<int32_t> num_accepted_;
};

}  // namespace

}  // namespace nwor
