// Arithmetic shared by host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define NWOR_HOST_DEVICE __host__ __device__
#else
#define NWOR_HOST_DEVICE
#endif

namespace nwor {

NWOR_HOST_DEVICE inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}
NWOR_HOST_DEVICE inline int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}
// The smaller one of a + b and `limit`, for b and limit >= 0. The sum itself may not fit 64 bits.
NWOR_HOST_DEVICE inline int64_t sum_up_to(int64_t limit, int64_t a, int64_t b) {
    return a > limit - b ? limit : a + b;
}
// The nearest number that fits 32 bits.
NWOR_HOST_DEVICE inline int64_t within_32_bits(int64_t value) {
    return least(most(value, INT32_MIN), INT32_MAX);
}
// n / d of two numbers that fit 32 bits. A 64-bit division takes a GPU four times as long.
NWOR_HOST_DEVICE inline int64_t quotient(int64_t n, int64_t d) {
    return static_cast<uint32_t>(n) / static_cast<uint32_t>(d);
}

}  // namespace nwor
