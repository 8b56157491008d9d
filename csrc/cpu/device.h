// Shared by all CPU kernels: the device of an op, and problems that are raised before the first write.
#pragma once

#include <cstdint>

#include "../common/problems.h"

namespace nwor {
namespace {

// Type that selects the `run` of an op; see common/op.h.
struct Cpu {
    explicit Cpu(const Tensor&) {}
};

template <class ProblemOf>
void check_each(const char* op, int64_t count, const ProblemOf& problem_of) {
    for (int64_t i = 0; i < count; ++i)
        if (const Found found = problem_of(i)) complain(op, found);
}

// A full counter wraps around, as on CUDA.
inline void grow(int64_t& counter, int64_t by) {
    counter = static_cast<int64_t>(static_cast<uint64_t>(counter) + static_cast<uint64_t>(by));
}

}  // namespace

}  // namespace nwor
