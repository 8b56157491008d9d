// Family recurrent: arithmetic with the same bits as two Triton kernels in vLLM, and the dtypes of inputs.
//
// The reference is `fused_sigmoid_gating_delta_rule_update`, compiled for sm_90 by Triton 3.8, which vLLM
// 0.33 requires. This code uses the same approximations of exp, log, 1/x and 1/sqrt(x) and the same fused
// multiply-adds, and adds in the same order. The compiler must not fuse other products, so they use functions
// such as `__fmul_rn`. For keys 96 wide (OLMo hybrid) vLLM runs another kernel
// (`fused_recurrent_gated_delta_rule`), and the bits are those of that kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../recurrent.h"
#include "launch.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- approximations

__device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float exp_approx(float x) {
    return exp2_approx(__fmul_rn(x, 0x1.715476p+0f));  // log2(e)
}

__device__ float rsqrt_approx(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ float divide_approx(float x, float y) {
    float z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ float sigmoid(float x) {
    return divide_approx(1.0f, __fadd_rn(exp_approx(-x), 1.0f));
}

// log(x) for x >= 1 by the formula of libdevice: the exponent, and a polynomial of a mantissa in [2/3, 4/3).
__device__ float log_from_one(float x) {
    const int bits = __float_as_int(x);
    if (bits >= 0x7f800000) return x;
    const int exponent = (bits - 0x3f2aaaab) & 0xff800000;
    const float m = __fadd_rn(__int_as_float(bits - exponent), -1.0f);
    float p = __fmaf_rn(__int_as_float(0xbe055027), m, __int_as_float(0x3e1039f6));
    p = __fmaf_rn(p, m, __int_as_float(0xbdf8cdcc));
    p = __fmaf_rn(p, m, __int_as_float(0x3e0f2955));
    p = __fmaf_rn(p, m, __int_as_float(0xbe2ad8b9));
    p = __fmaf_rn(p, m, __int_as_float(0x3e4ced0b));
    p = __fmaf_rn(p, m, __int_as_float(0xbe7fff22));
    p = __fmaf_rn(p, m, __int_as_float(0x3eaaaa78));
    p = __fmaf_rn(p, m, -0.5f);
    p = __fmaf_rn(__fmul_rn(m, p), m, m);
    return __fmaf_rn(__fmul_rn(static_cast<float>(exponent), 0x1p-23f), 0x1.62e430p-1f, p);
}

__device__ float decay_of(const VerifyArguments& c, float a, float bias, float log_rate) {
    if (c.decay_form == DecayForm::kGiven) return exp_approx(a);
    const float x = __fadd_rn(a, bias);
    if (c.decay_form == DecayForm::kBounded) {
        const float open = __fadd_rn(exp_approx(-__fmul_rn(exp_approx(log_rate), x)), 1.0f);
        return exp_approx(divide_approx(c.gate_lower_bound, open));
    }
    const float scaled = __fmul_rn(c.softplus_beta, x);
    const float soft =
        __fmul_rn(divide_approx(1.0f, c.softplus_beta), log_from_one(__fadd_rn(exp_approx(scaled), 1.0f)));
    const float softplus = scaled <= c.softplus_threshold ? soft : x;
    return exp_approx(__fmul_rn(-exp_approx(log_rate), softplus));
}

__device__ float beta_of(const VerifyArguments& c, float b) {
    return c.decay_form == DecayForm::kGiven ? b : __fmul_rn(sigmoid(b), c.beta_factor);
}

// Return the dot product of neighbouring elements that a Triton program keeps in one thread. Triton 3.8 adds
// them as a balanced tree: (0 + 1) + (2 + 3). The product of the even element is fused with the addition.
template <int kCount>
__device__ float dot_neighbours(const float* x, const float* y) {
    if constexpr (kCount == 1) return __fmul_rn(x[0], y[0]);
    if constexpr (kCount == 2) return __fmaf_rn(x[0], y[0], __fmul_rn(x[1], y[1]));
    if constexpr (kCount > 2) {
        constexpr int kHalf = kCount / 2;
        static_assert(kCount == 2 * kHalf);
        return __fadd_rn(dot_neighbours<kHalf>(x, y), dot_neighbours<kHalf>(x + kHalf, y + kHalf));
    }
}

__device__ float sum_of_warp(float x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, offset));
    return x;
}

// ---------------------------------------------------------------- dtypes

__device__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ float to_float(__half x) {
    return __half2float(x);
}
__device__ void set(__nv_bfloat16* to, float x) {
    *to = __float2bfloat16_rn(x);
}
__device__ void set(__half* to, float x) {
    *to = __float2half_rn(x);
}

// Two adjacent elements.
template <class Input>
struct Pair {
    float first, second;

    __device__ explicit Pair(uint32_t bits) {
        if constexpr (std::is_same_v<Input, __nv_bfloat16>) {
            first = __uint_as_float(bits << 16);
            second = __uint_as_float(bits & 0xffff0000);
        } else {
            const float2 two = __half22float2(reinterpret_cast<const __half2&>(bits));
            first = two.x;
            second = two.y;
        }
    }
};

// A number of `Floats` that is loaded but not yet converted, so that nothing waits for the load. It is loaded
// in two halves, which are equal if the dtype has 16 bits. Loads that depend on the dtype would wait for each
// other.
struct LoadedFloat {
    const Floats& from;
    uint16_t low = 0, high = 0;

    __device__ explicit LoadedFloat(const Floats& from) : from(from) {}
    __device__ LoadedFloat(const Floats& from, int64_t i, int64_t j = 0) : from(from) { load(i, j); }
    __device__ void load(int64_t i, int64_t j = 0) {
        const bool is_float = from.dtype == ScalarType::Float;
        const char* data = static_cast<const char*>(from.data) +
                           (i * from.strides[0] + j * from.strides[1]) * (is_float ? 4 : 2);
        low = *reinterpret_cast<const uint16_t*>(data);
        high = *reinterpret_cast<const uint16_t*>(data + (is_float ? 2 : 0));
    }
    __device__ float value() const {
        if (from.dtype == ScalarType::Half) return __half2float(__ushort_as_half(low));
        return __uint_as_float(static_cast<uint32_t>(high) << 16 |
                               (from.dtype == ScalarType::Float ? low : 0));
    }
};

}  // namespace

}  // namespace nwor
