// From run-time properties of a tensor to template parameters: one function per property.
#pragma once

#include <cstdint>

namespace nwor {

// A scalar of `kBytes` that is only ever copied.
template <int kBytes>
struct RawOf;
template <>
struct RawOf<1> {
    using type = uint8_t;
};
template <>
struct RawOf<2> {
    using type = uint16_t;
};
template <>
struct RawOf<4> {
    using type = uint32_t;
};
template <>
struct RawOf<8> {
    using type = uint64_t;
};

template <class T>
struct Tag {
    using type = T;
};

// Calls `f(Tag<raw unsigned type of that size>)`. check.h admits no other size.
template <class F>
void with_raw_type(int32_t element_size, const F& f) {
    switch (element_size) {
        case 1:
            return f(Tag<RawOf<1>::type>{});
        case 2:
            return f(Tag<RawOf<2>::type>{});
        case 4:
            return f(Tag<RawOf<4>::type>{});
        default:
            return f(Tag<RawOf<8>::type>{});
    }
}

}  // namespace nwor
