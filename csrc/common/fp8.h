// Converts float32 to an 8-bit float: round to nearest even, saturating. The bytes are those of CUDA's
// __nv_cvt_float_to_fp8(x, __NV_SATFINITE, ...). Infinity saturates, and every NaN becomes 0x7f.
#pragma once

#include <cstdint>
#include <cstring>

namespace nwor {

template <int kExponentBits, int kMantissaBits, uint8_t kLargest>
inline uint8_t float_to_fp8(float x) {
    constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint8_t sign = static_cast<uint8_t>(bits >> 24) & 0x80;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7f;

    // Below the smallest normal number the spacing is constant. Shift the significand right until one unit in
    // the last place is the smallest subnormal. `exponent` is that of the result.
    const int exponent = static_cast<int>(magnitude >> 23) - 127 + kBias;
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    int shift = 23 - kMantissaBits;
    if (exponent < 1) shift += 1 - exponent;
    if (shift > 24) return sign;  // less than half of the smallest subnormal; includes float32 subnormals
    uint32_t kept = significand >> shift;
    const uint32_t rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (kept & 1))) ++kept;
    // `kept` holds the implicit leading one of a normal number, worth one exponent step. A carry out of the
    // mantissa adds the next step by itself.
    const int64_t code = exponent < 1 ? kept : (static_cast<int64_t>(exponent - 1) << kMantissaBits) + kept;
    return sign | static_cast<uint8_t>(code > kLargest ? kLargest : code);
}

inline uint8_t float_to_e4m3(float x) {
    return float_to_fp8<4, 3, 0x7e>(x);
}
inline uint8_t float_to_e5m2(float x) {
    return float_to_fp8<5, 2, 0x7b>(x);
}

}  // namespace nwor
