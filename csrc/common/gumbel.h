// The noise of gumbel_sample, bit-identical on both devices. It is an integer hash, followed by arithmetic
// that IEEE 754 defines exactly (no library logarithm, no contraction to fused multiply-adds).
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace nwor {

// ---------------------------------------------------------------- arithmetic without contraction

// Each function of this section rounds its result once, to the nearest number, as CUDA's __dadd_rn. Names end
// as those of CUDA do (`rn`: round to nearest).

#ifdef __CUDA_ARCH__
__device__ inline double add_rn(double a, double b) {
    return __dadd_rn(a, b);
}
__device__ inline double multiply_rn(double a, double b) {
    return __dmul_rn(a, b);
}
__device__ inline double divide_rn(double a, double b) {
    return __ddiv_rn(a, b);
}
__device__ inline float divide_rn(float a, float b) {
    return __fdiv_rn(a, b);
}
__device__ inline uint64_t bits_of(double x) {
    return static_cast<uint64_t>(__double_as_longlong(x));
}
__device__ inline double double_of(uint64_t bits) {
    return __longlong_as_double(static_cast<long long>(bits));
}
__device__ inline uint32_t bits_of(float x) {
    return __float_as_uint(x);
}
#else
// setup.py compiles the CPU kernels with -ffp-contract=off.
inline double add_rn(double a, double b) {
    return a + b;
}
inline double multiply_rn(double a, double b) {
    return a * b;
}
inline double divide_rn(double a, double b) {
    return a / b;
}
inline float divide_rn(float a, float b) {
    return a / b;
}
inline uint64_t bits_of(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline double double_of(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
#endif

constexpr double kNaturalLogOf2 = 0.69314718055994531;

// ln x of a normal x > 0, with a relative error of about 1e-15, also near 1. x = 2^k m with m in [sqrt(1/2),
// sqrt(2)), and ln m = 2 atanh((m - 1) / (m + 1)).
NWOR_HOST_DEVICE inline double natural_log(double x) {
    const uint64_t bits = bits_of(x);
    int64_t k = static_cast<int64_t>(bits >> 52) - 1023;
    double m = double_of((bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
    if (m > 1.4142135623730951) {
        m = multiply_rn(m, 0.5);
        ++k;
    }
    const double f = add_rn(m, -1.0);
    const double s = divide_rn(f, add_rn(f, 2.0));
    const double z = multiply_rn(s, s);
    double sum = 1.0 / 21.0;  // z^10; the omitted terms are below 2e-17
    for (int i = 19; i >= 1; i -= 2) sum = add_rn(multiply_rn(sum, z), 1.0 / i);
    return add_rn(multiply_rn(static_cast<double>(k), kNaturalLogOf2), multiply_rn(multiply_rn(2.0, s), sum));
}

// ---------------------------------------------------------------- the hash

// The output function of SplitMix64 (Steele, Lea and Flood).
NWOR_HOST_DEVICE inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// A counter-based hash of 32 bits with a key of 64 bits: two rounds of multiply and shift.
NWOR_HOST_DEVICE inline uint32_t hash32(uint32_t key, uint32_t other_key, uint32_t counter) {
    uint32_t x = counter * 0x9E3779B9u + key;
    x = x ^ (x >> 16) ^ other_key;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    return x ^ (x >> 15);
}

// Keys of the first 16 bits and of the last 32 bits of the noise.
struct NoiseKey {
    uint32_t high, high_too, low, low_too;
};

NWOR_HOST_DEVICE inline NoiseKey noise_key(int64_t seed, int64_t position, int64_t step) {
    constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
    uint64_t x = mix64(static_cast<uint64_t>(seed) + kGolden);
    x = mix64((x ^ static_cast<uint64_t>(position)) + kGolden);
    x = mix64((x ^ static_cast<uint64_t>(step)) + kGolden);
    const uint64_t y = mix64(x + kGolden);
    return {static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32), static_cast<uint32_t>(y),
            static_cast<uint32_t>(y >> 32)};
}

// The first 16 bits of the noise of tokens 2 * pair (low half) and 2 * pair + 1 (high half). For nearly every
// token they suffice to show that it cannot win, at the cost of half a hash.
NWOR_HOST_DEVICE inline uint32_t coarse_noise_of_pair(const NoiseKey& key, uint32_t pair) {
    return hash32(key.high, key.high_too, pair);
}

NWOR_HOST_DEVICE inline uint32_t coarse_noise(const NoiseKey& key, uint32_t token) {
    const uint32_t both = coarse_noise_of_pair(key, token >> 1);
    return (token & 1) != 0 ? both >> 16 : both & 0xFFFFu;
}

// ---------------------------------------------------------------- from bits to noise

// Gumbel noise G = -ln(-ln(1 - u)) for u = (48 random bits + 1/2) / 2^48. It decreases with the bits, so the
// large values, which decide, have the resolution of small u.
//
// The range follows from that of u, [2^-49, 1 - 2^-49]. At the lower end -ln(1 - u) > u, so G is below
// -ln u = 49 ln 2 = 33.96 (kMostNoise). At the upper end G is -ln(49 ln 2) = -3.53.
constexpr int kNoiseBits = 48;
constexpr double kMostNoise = (kNoiseBits + 1) * kNaturalLogOf2;

NWOR_HOST_DEVICE inline double gumbel_of_bits(uint64_t bits48) {
    const double u = multiply_rn(add_rn(static_cast<double>(bits48), 0.5), 1.0 / (uint64_t{1} << kNoiseBits));
    return -natural_log(-natural_log(add_rn(1.0, -u)));
}

// The value by which tokens are compared.
NWOR_HOST_DEVICE inline float noisy_score(const NoiseKey& key, uint32_t token, float logit,
                                          float temperature) {
    const uint64_t bits =
        static_cast<uint64_t>(coarse_noise(key, token)) << 32 | hash32(key.low, key.low_too, token);
    const double scaled = static_cast<double>(divide_rn(logit, temperature));
    return static_cast<float>(add_rn(scaled, gumbel_of_bits(bits)));
}

// A temperature below the smallest normal number counts as 0, because its reciprocal must be finite.
NWOR_HOST_DEVICE inline bool draws_noise(float temperature) {
    return temperature >= 1.17549435e-38f;
}

}  // namespace nwor
