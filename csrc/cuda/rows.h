// Shared by the kernels that move rows of a paged cache.
//
// A row of a cache, a source or a log is [H, W]. The host picks the widest access (16 bytes down to one
// element) that every pointer and stride of a call allows. It passes strides in *units*, the size of one
// access. Each thread handles its units from load to store, so no order between threads is needed. It loads
// all of them, and everything that says where they go, before the first store.
#pragma once

#include "../common/dispatch.h"
#include "../common/planes.h"
#include "launch.h"

namespace nwor {

template <>
struct RawOf<16> {
    using type = uint4;
};

namespace {

constexpr int kLayersPerThread = 4;  // planes per thread: they share slot, flag and offsets
constexpr int64_t kWidestAccess = 16;

// ---------------------------------------------------------------- addresses, in units

__device__ int64_t offset_in(const RowsView& rows, int64_t row, const Place& p) {
    return row * rows.row_stride + p.head * rows.head_stride + p.column * rows.width_stride;
}

struct Slots {
    int64_t count;
    FastDivisor by_block_size;
};

struct Pages {
    char* data;
    int64_t block_stride, slot_stride, head_stride, width_stride;
    PageOffsets offsets;
};

// One slot of a paged cache. With kTable the inner order of a page comes from a table, otherwise from
// strides.
template <bool kTable>
struct Slot {
    uint32_t block, in_block;

    __device__ Slot(uint32_t block, uint32_t in_block) : block(block), in_block(in_block) {}
    __device__ Slot(const Slots& slots, int64_t slot) {
        const uint32_t number = static_cast<uint32_t>(slot);
        block = slots.by_block_size.quotient(number);
        in_block = number - block * slots.by_block_size.divisor;
    }
    __device__ int64_t offset(const Pages& pages, const Place& p) const {
        const int64_t in_page = block * pages.block_stride + p.head * pages.head_stride;
        if (!kTable) return in_page + in_block * pages.slot_stride + p.column * pages.width_stride;
        const int64_t element = pages.offsets.table[in_block * pages.width_stride + p.column];
        return element < 0 ? element : in_page + element;  // outside any page: within() refuses it
    }
};

// Whether an element is inside the cache. Strides stay inside a tensor; a table may contain anything.
template <bool kTable>
__device__ bool within(const Pages& pages, int64_t offset, const char* report_as) {
    if (!kTable || (offset >= 0 && offset < pages.offsets.limit)) return true;
    report(report_as, {kPageOffsets, 0, offset, pages.offsets.limit});
    return false;
}

// ---------------------------------------------------------------- units on the host

// Shape of a row of a cache, in units.
struct RowShape {
    uint32_t num_heads, columns;

    RowShape() = default;
    RowShape(const char* op, const CacheView& c, int64_t elements) {
        if (c.num_heads * c.width > INT32_MAX || c.num_slots() > INT32_MAX)
            fail(op, "a cache must have fewer than 2^31 slots and fewer than 2^31 elements in each, got ",
                 c.num_slots(), " of ", c.num_heads, " * ", c.width);
        num_heads = static_cast<uint32_t>(c.num_heads);
        columns = static_cast<uint32_t>(c.width / elements);
    }
    __device__ bool has(const Place& p) const { return p.head < num_heads && p.column < columns; }
};

Slots slots_of(const CacheView& c) {
    return {c.num_slots(), FastDivisor(c.block_size)};
}

RowsView in_units(RowsView rows, int64_t elements) {
    rows.row_stride /= elements;
    rows.head_stride /= elements;
    return rows;  // several elements per unit only if the width stride is 1
}

Pages in_units(const CacheView& c, int64_t elements, const PageOffsets& offsets = {}) {
    Pages pages{
        c.data, c.block_stride / elements, c.slot_stride / elements, c.head_stride / elements, c.width_stride,
        offsets};
    if (offsets.table != nullptr) pages.width_stride = c.width;  // for the table, which replaces it
    return pages;
}

bool aligned(const void* data, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether every unit of `elements` elements of the view is contiguous and aligned. The stride of a dimension
// of size one is never used and may be anything.
bool fits(const CacheView& c, int64_t elements) {
    return c.width_stride == 1 && c.width % elements == 0 && aligned(c.data, elements * c.element_size) &&
           (c.num_blocks <= 1 || c.block_stride % elements == 0) &&
           (c.block_size <= 1 || c.slot_stride % elements == 0) &&
           (c.num_heads <= 1 || c.head_stride % elements == 0);
}

bool fits(const RowsView& r, const CacheView& shape, int64_t element_size, int64_t elements) {
    return r.width_stride == 1 && aligned(r.data, elements * element_size) && r.row_stride % elements == 0 &&
           (shape.num_heads <= 1 || r.head_stride % elements == 0);
}

template <class Fits>
int64_t elements_per_access(int64_t element_size, const Fits& fits) {
    int64_t elements = kWidestAccess / element_size;
    while (elements > 1 && !fits(elements)) elements /= 2;
    return elements;
}

// The same for every plane of a geometry.
bool planes_fit(const Planes& planes, int64_t elements) {
    const int64_t bytes = elements * planes.view.element_size;
    return fits(planes.view, elements) && std::all_of(planes.data.begin(), planes.data.end(),
                                                      [&](const char* data) { return aligned(data, bytes); });
}

// Calls `f(Tag<T>)` with an unsigned T of that many bytes, up to the widest access.
template <class F>
void with_access_type(int64_t bytes, const F& f) {
    if (bytes == kWidestAccess) return f(Tag<RawOf<kWidestAccess>::type>{});
    with_raw_type(static_cast<int32_t>(bytes), f);
}

}  // namespace

}  // namespace nwor
