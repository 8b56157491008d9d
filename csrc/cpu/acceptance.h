// Shared by the CPU kernels that determine which drafts were accepted.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../accept.h"
#include "device.h"

namespace nwor {
namespace {

// Raises an error for the first request with invalid drafts.
inline void check_drafts(const AcceptArguments& a) {
    check_each(a.op, a.num_requests, [&](int64_t q) { return problem_of_request(a, q); });
}

// Marks each draft of the window and counts the accepted ones of each request. Counters grow if given.
inline void accept(const AcceptArguments& a) {
    std::fill_n(a.marks, a.num_marks, false);
    std::fill_n(a.num_accepted, a.num_accepted_length, 0);
    int64_t accepted_total = 0;
    for (int64_t q = 0; q < a.num_requests; ++q) {
        const int64_t first_row = a.drafts_of.before(q);
        const int64_t drafts = a.drafts_of.until(q) - first_row;
        const int64_t accepted = count_accepted(a, q);
        for (int64_t j = 0; j < drafts; ++j) a.marks[first_row + j] = (j < accepted) != a.marks_rejected;
        a.num_accepted[q] = static_cast<int32_t>(accepted);
        accepted_total += accepted;
    }
    if (a.counters == nullptr) return;
    grow(a.counters[kAccepted], accepted_total);
    grow(a.counters[kRejected], a.drafts_of.before(a.num_requests) - accepted_total);
}

// Runs `accept` into its own memory and keeps the marks. An op that accepts drafts and then moves rows needs
// them earlier: it checks the slots of the rejected rows before it writes any argument.
class Accepted {
  public:
    explicit Accepted(AcceptArguments a)
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
