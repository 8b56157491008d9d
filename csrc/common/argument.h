// One argument of an op, and the error messages about it.
#pragma once

#include <cstdint>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "numbers.h"
#include "stable.h"

namespace nwor {

// Python sees std::invalid_argument as ValueError and std::out_of_range as IndexError. The functions of
// nwor_ops/ops turn a message with "must have dtype" or "must be on device" into a TypeError.
template <class Error = std::invalid_argument, class... Parts>
[[noreturn]] inline void fail(const char* op, const Parts&... parts) {
    std::ostringstream text;
    text << op << ": ";
    (text << ... << parts);
    throw Error(text.str());
}

inline const char* dtype_name(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return "torch.float32";
        case ScalarType::Half:
            return "torch.float16";
        case ScalarType::BFloat16:
            return "torch.bfloat16";
        case ScalarType::Double:
            return "torch.float64";
        case ScalarType::Byte:
            return "torch.uint8";
        case ScalarType::Char:
            return "torch.int8";
        case ScalarType::Short:
            return "torch.int16";
        case ScalarType::Int:
            return "torch.int32";
        case ScalarType::Long:
            return "torch.int64";
        case ScalarType::Bool:
            return "torch.bool";
        case ScalarType::Float8_e4m3fn:
            return "torch.float8_e4m3fn";
        case ScalarType::Float8_e5m2:
            return "torch.float8_e5m2";
        default:
            return "another dtype";
    }
}

inline std::string device_name(const Tensor& tensor) {
    if (tensor.is_cpu()) return "cpu";
    return (tensor.is_cuda() ? "cuda:" : "device:") + std::to_string(tensor.get_device_index());
}

inline std::string describe(const Tensor& tensor) {
    std::ostringstream text;
    text << dtype_name(tensor.scalar_type()) << " [";
    for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
    text << "]";
    return text.str();
}

// An argument and the names for its error messages.
struct Argument {
    const char* op;
    const char* name;
    const Tensor& tensor;

    template <class... Parts>
    [[noreturn]] void must_be(const Parts&... expected) const {
        fail(op, name, " must be ", expected..., ", got ", describe(tensor));
    }
    template <class... Parts>
    [[noreturn]] void must_have_dtype(const Parts&... expected) const {
        fail(op, name, " must have dtype ", expected..., ", got ", describe(tensor));
    }
    void dtype(ScalarType expected) const {
        if (tensor.scalar_type() != expected) must_have_dtype(dtype_name(expected));
    }
    void same_device(const Tensor& other) const {
        const bool same = tensor.is_cpu() ? other.is_cpu()
                                          : tensor.is_cuda() && other.is_cuda() &&
                                                tensor.get_device_index() == other.get_device_index();
        if (!same)
            fail(op, name, " must be on device ", device_name(other), " like the other arguments, got ",
                 device_name(tensor));
    }
    void contiguous() const {
        if (!tensor.is_contiguous()) must_be("contiguous");
    }
    // A contiguous 1-d tensor of at least `length` elements.
    void vector(ScalarType expected, int64_t length, const char* shape) const {
        dtype(expected);
        if (tensor.dim() != 1 || tensor.size(0) < length)
            must_be(shape, " with at least ", length, " elements");
        contiguous();
    }
};

// Sizes and counts given by the host. The product of two of them fits 64 bits.
inline void check_below_2_31(const char* op, const char* name, int64_t value) {
    if (value > INT32_MAX) fail(op, name, " must be below 2^31, got ", value);
}
inline void check_positive(const char* op, const char* name, int64_t value) {
    if (value <= 0) fail(op, name, " must be positive, got ", value);
    check_below_2_31(op, name, value);
}
inline void check_not_negative(const char* op, const char* name, int64_t value) {
    if (value < 0) fail(op, name, " must not be negative, got ", value);
    check_below_2_31(op, name, value);
}

// An id that is written to an int32 tensor.
inline void check_id(const char* op, const char* name, int64_t id) {
    if (id != within_32_bits(id)) fail(op, name, " must fit 32 bits, got ", id);
}

// A float option, rounded to the float32 that kernels compute with. `range` describes the limits in the
// message.
inline float float_option(const char* op, const char* name, double value, const char* range = "",
                          float least = std::numeric_limits<float>::lowest(),
                          float most = std::numeric_limits<float>::max()) {
    const float x = static_cast<float>(value);
    if (!(x >= least && x <= most)) fail(op, name, " must be ", range, "finite in float32, got ", value);
    return x;
}

// Comments on the parameters of an op's check give the dtype and shape of each tensor. There `floats` are the
// dtypes of this function, and `ids` those of `check_ids`.
inline void check_floats(const Argument& a) {
    const ScalarType dtype = a.tensor.scalar_type();
    if (dtype != ScalarType::Float && dtype != ScalarType::Half && dtype != ScalarType::BFloat16)
        a.must_have_dtype("torch.float32, torch.float16 or torch.bfloat16");
}

inline void check_element_size(const Argument& a) {
    const size_t size = a.tensor.element_size();
    if (size != 1 && size != 2 && size != 4 && size != 8)
        a.must_have_dtype("of 1, 2, 4 or 8 bytes per element");
}

inline void check_ids(const Argument& a) {
    if (a.tensor.scalar_type() != ScalarType::Int && a.tensor.scalar_type() != ScalarType::Long)
        a.must_have_dtype("torch.int32 or torch.int64");
}

}  // namespace nwor
