// Shared by the CPU kernels that move rows of a paged cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "../common/dispatch.h"
#include "../common/planes.h"
#include "device.h"

namespace nwor {
namespace {

// The grain size of `parallel_for`, in rows: fewer rows than this stay on one thread. Rows are small (a few
// KiB), so that a second thread would cost more than it saves.
constexpr int64_t kGrainSize = 16;

// ---------------------------------------------------------------- moving rows

// Address of a slot's first element in a view, in elements of T.
template <class T>
T* slot_data(const CacheView& cache, int64_t slot) {
    const int64_t block = slot / cache.block_size, offset = slot - block * cache.block_size;
    return reinterpret_cast<T*>(cache.data) + block * cache.block_stride + offset * cache.slot_stride;
}

template <class T>
T* row_data(const RowsView& rows, int64_t row) {
    return reinterpret_cast<T*>(rows.data) + row * rows.row_stride;
}

struct HeadsStrides {
    int64_t head, width;
};

inline HeadsStrides strides_of(const CacheView& v) {
    return {v.head_stride, v.width_stride};
}
inline HeadsStrides strides_of(const RowsView& v) {
    return {v.head_stride, v.width_stride};
}

// Copies [H, W] from one strided place to another without conversion.
template <class T>
void copy_row(T* to, HeadsStrides to_strides, const T* from, HeadsStrides from_strides, int64_t num_heads,
              int64_t width) {
    if (width == 0) return;  // a plane without values has no memory, and memcpy takes no null pointer
    const bool runs = to_strides.width == 1 && from_strides.width == 1;
    if (runs && to_strides.head == width && from_strides.head == width) {
        std::memcpy(to, from, static_cast<size_t>(num_heads * width) * sizeof(T));
        return;
    }
    for (int64_t h = 0; h < num_heads; ++h, to += to_strides.head, from += from_strides.head) {
        if (runs) {
            std::memcpy(to, from, static_cast<size_t>(width) * sizeof(T));
        } else {
            for (int64_t w = 0; w < width; ++w) to[w * to_strides.width] = from[w * from_strides.width];
        }
    }
}

// Copies `count` adjacent rows. Each access moves the same element of all of them.
template <int count, class T>
void copy_adjacent_rows(T* to, HeadsStrides to_strides, const T* from, HeadsStrides from_strides,
                        int64_t num_heads, int64_t width) {
    for (int64_t h = 0; h < num_heads; ++h, to += to_strides.head, from += from_strides.head)
        for (int64_t w = 0; w < width; ++w)
            std::memcpy(to + w * to_strides.width, from + w * from_strides.width, count * sizeof(T));
}

// Consecutive rows [count, H, W]. If slots are adjacent in memory (the keys in vLLM's CPU pages), and log
// rows are too, several rows move at once. The drafts of a request are such rows.
template <class T>
void copy_rows(T* to, int64_t to_row_stride, HeadsStrides to_strides, const T* from, int64_t from_row_stride,
               HeadsStrides from_strides, int64_t num_heads, int64_t width, int64_t count) {
    const bool adjacent = to_row_stride == 1 && from_row_stride == 1;
    while (count > 0) {
        int64_t copied = 1;
        if (adjacent && count >= 4) {
            copy_adjacent_rows<4>(to, to_strides, from, from_strides, num_heads, width);
            copied = 4;
        } else if (adjacent && count >= 2) {
            copy_adjacent_rows<2>(to, to_strides, from, from_strides, num_heads, width);
            copied = 2;
        } else {
            copy_row(to, to_strides, from, from_strides, num_heads, width);
        }
        to += copied * to_row_stride;
        from += copied * from_row_stride;
        count -= copied;
    }
}

// Copies [H, W] into or out of a page whose inner order is a table. `to_page` gives the direction.
template <bool to_page, class T>
void copy_page_row(const CacheView& cache, const PageOffsets& offsets, int64_t slot, T* row,
                   HeadsStrides row_strides) {
    const int64_t block = slot / cache.block_size;
    const int32_t* table = offsets.table + (slot - block * cache.block_size) * cache.width;
    T* page = reinterpret_cast<T*>(cache.data) + block * cache.block_stride;
    for (int64_t h = 0; h < cache.num_heads; ++h, page += cache.head_stride, row += row_strides.head)
        for (int64_t w = 0; w < cache.width; ++w) {
            if constexpr (to_page)
                page[table[w]] = row[w * row_strides.width];
            else
                row[w * row_strides.width] = page[table[w]];
        }
}

// Copies one head of a slot into or out of a separate row [W].
template <bool to_page, class T>
void copy_head(const CacheView& cache, const PageOffsets& offsets, int64_t slot, int64_t head, T* row) {
    CacheView one = cache;
    one.data += head * cache.head_stride * static_cast<int64_t>(sizeof(T));
    one.num_heads = 1;
    if (offsets.table != nullptr) return copy_page_row<to_page>(one, offsets, slot, row, {0, 1});
    T* at = slot_data<T>(one, slot);
    if constexpr (to_page)
        copy_row(at, strides_of(one), const_cast<const T*>(row), {0, 1}, 1, one.width);
    else
        copy_row(row, {0, 1}, const_cast<const T*>(at), strides_of(one), 1, one.width);
}

// ---------------------------------------------------------------- bounds, before the first write

inline Found problem_of_slot(Problem problem, int64_t index, int64_t slot, const CacheView& cache) {
    return slot < cache.num_slots() ? Found{} : Found{problem, index, slot, cache.num_slots()};
}

inline Found problem_of_token(Problem of_slot, int64_t token, int64_t slot, const int32_t* log_rows,
                              int64_t num_log_rows, const CacheView& cache) {
    if (slot < 0) return {};
    if (log_rows != nullptr && slot < cache.num_slots() && log_rows[token] >= num_log_rows)
        return {kLogRows, token, log_rows[token], num_log_rows};
    return problem_of_slot(of_slot, token, slot, cache);
}

inline void check_page_table(const char* op, const PageOffsets& offsets, const CacheView& cache) {
    if (offsets.table == nullptr || cache.num_slots() * cache.width == 0) return;
    const int64_t last_page =
        (cache.num_blocks - 1) * cache.block_stride + (cache.num_heads - 1) * cache.head_stride;
    const int64_t room = offsets.limit - last_page;  // exclusive limit of the offsets
    const int32_t* end = offsets.table + cache.block_size * cache.width;
    // Runs in every step. Checking only the sign bits takes a tenth of the time of a search for minimum and
    // maximum.
    const uint32_t largest = static_cast<uint32_t>(std::min<int64_t>(room - 1, INT32_MAX));
    uint32_t outside = 0;
    for (const int32_t* at = offsets.table; at != end; ++at)
        outside |= static_cast<uint32_t>(*at) | (largest - static_cast<uint32_t>(*at));
    if (room > 0 && outside >> 31 == 0) return;
    const auto [least, most] = std::minmax_element(offsets.table, end);
    fail<std::out_of_range>(op, "page_offsets must lie within the storage of the cache (", offsets.limit,
                            " elements), got offsets from ", *least, " to ", *most);
}

}  // namespace

}  // namespace nwor
