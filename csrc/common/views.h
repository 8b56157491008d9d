// Tensors as plain pointers and strides, which a kernel can take by value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "argument.h"
#include "overlap.h"

namespace nwor {

// ---------------------------------------------------------------- rows of a paged cache

// A cache [B, N, H, W]. Strides in elements.
struct CacheView {
    char* data;
    int64_t num_blocks, block_size, num_heads, width;
    int64_t block_stride, slot_stride, head_stride, width_stride;
    int32_t element_size;

    int64_t num_slots() const { return num_blocks * block_size; }
};

// Rows [T or R, H, W] of a key, a value or a log. Strides in elements.
struct RowsView {
    char* data;
    int64_t row_stride, head_stride, width_stride;
};

// Scales: one value, one per head or one per token. The strides distinguish them.
struct ScaleView {
    const float* data;
    int64_t token_stride, head_stride;
};

// Inner order of a page that no strides can express. The table is null if strides express it.
struct PageOffsets {
    const int32_t* table;  // [N, W], element offsets within a (block, head) page
    int64_t limit;         // elements between the start of the cache and the end of its storage
};

inline CacheView cache_view(const Argument& a) {
    const Tensor& t = a.tensor;
    if (t.dim() != 4) a.must_be("[num_blocks, block_size, num_kv_heads, width]");
    return {static_cast<char*>(t.data_ptr()),
            t.size(0),
            t.size(1),
            t.size(2),
            t.size(3),
            t.stride(0),
            t.stride(1),
            t.stride(2),
            t.stride(3),
            static_cast<int32_t>(t.element_size())};
}

inline RowsView rows_view(const Tensor& t, int64_t first_dim = 0) {
    return {static_cast<char*>(t.data_ptr()), t.stride(first_dim), t.stride(first_dim + 1),
            t.stride(first_dim + 2)};
}

inline ScaleView scale_view(const Argument& a, int64_t num_tokens, int64_t num_heads) {
    const Tensor& t = a.tensor;
    a.dtype(ScalarType::Float);
    const float* data = static_cast<const float*>(t.data_ptr());
    if (t.numel() == 1 && t.dim() <= 1) return {data, 0, 0};
    if (t.dim() == 1 && t.size(0) == num_heads) return {data, 0, t.stride(0)};
    if (t.dim() == 2 && t.size(0) >= num_tokens && t.size(1) == 1) return {data, t.stride(0), 0};
    a.must_be("one element, per head [num_kv_heads] or per token [num_tokens, 1]");
}

// The window in which each log row was last written. Null if the caller does not track it.
struct RowWindows {
    const int64_t* window_id;  // [1]
    int64_t* rows;             // [R], or [L, R] for all layers
};

inline RowWindows check_row_windows(const char* op, const std::optional<Tensor>& window_id,
                                    const std::optional<Tensor>& row_windows, const Tensor& like,
                                    int64_t num_rows, int64_t num_layers = 0) {
    if (!window_id.has_value() && !row_windows.has_value()) return {nullptr, nullptr};
    if (!window_id.has_value() || !row_windows.has_value())
        fail(op, "window_id and row_windows must be given together");
    const Argument id{op, "window_id", *window_id}, rows{op, "row_windows", *row_windows};
    id.vector(ScalarType::Long, 1, "[1]");
    rows.dtype(ScalarType::Long);
    rows.contiguous();
    if (num_layers == 0 ? row_windows->dim() != 1 || row_windows->size(0) != num_rows
                        : row_windows->dim() != 2 || row_windows->size(0) != num_layers ||
                              row_windows->size(1) != num_rows)
        rows.must_be("[", num_layers == 0 ? "" : std::to_string(num_layers) + ", ", num_rows,
                     "], one number for each row of the log");
    id.same_device(like);
    rows.same_device(like);
    return {static_cast<const int64_t*>(window_id->data_ptr()),
            static_cast<int64_t*>(row_windows->data_ptr())};
}

// ---------------------------------------------------------------- vectors and ids

// Ids of either width, any stride.
struct Ids {
    const void* data;
    bool is_int64;
    int64_t stride, length;

    NWOR_HOST_DEVICE int64_t operator[](int64_t i) const {
        return is_int64 ? static_cast<const int64_t*>(data)[i * stride]
                        : static_cast<const int32_t*>(data)[i * stride];
    }
    // 0 outside the range.
    NWOR_HOST_DEVICE int64_t at(int64_t i) const { return i >= 0 && i < length ? (*this)[i] : 0; }
};

struct MutableIds {
    void* data;
    bool is_int64;
    int64_t stride, length;

    NWOR_HOST_DEVICE void set(int64_t i, int64_t value) const {
        if (is_int64)
            static_cast<int64_t*>(data)[i * stride] = value;
        else
            static_cast<int32_t*>(data)[i * stride] = static_cast<int32_t>(value);
    }
};

// Ids [rows, columns], of which a kernel writes one column.
struct MutableIdColumns {
    MutableIds first;
    int64_t stride, count;

    NWOR_HOST_DEVICE bool has(int64_t column) const { return column >= 0 && column < count; }
    NWOR_HOST_DEVICE MutableIds operator[](int64_t column) const {
        MutableIds ids = first;
        ids.data = static_cast<char*>(ids.data) + column * stride * (ids.is_int64 ? 8 : 4);
        return ids;
    }
};

template <class T>
struct Vector {
    T* data;
    int64_t length;

    NWOR_HOST_DEVICE T& operator[](int64_t i) const { return data[i]; }
    NWOR_HOST_DEVICE void set(int64_t i, int64_t value) const {
        if (i < length) data[i] = static_cast<T>(value);
    }
};

inline Ids ids_view(const Argument& a, int64_t length, const char* shape) {
    check_ids(a);
    if (a.tensor.dim() != 1 || a.tensor.size(0) < length)
        a.must_be(shape, " with at least ", length, " elements");
    return {a.tensor.data_ptr(), a.tensor.scalar_type() == ScalarType::Long, a.tensor.stride(0),
            a.tensor.size(0)};
}

inline MutableIds mutable_ids_view(const Argument& a, int64_t length, const char* shape) {
    const Ids ids = ids_view(a, length, shape);
    return {const_cast<void*>(ids.data), ids.is_int64, ids.stride, ids.length};
}

// For ids that were checked: [rows, columns], or [rows] without a column.
inline MutableIdColumns mutable_columns_view(const Tensor& ids, int64_t rows) {
    const bool columns = ids.dim() == 2;
    return {{ids.data_ptr(), ids.scalar_type() == ScalarType::Long, ids.stride(0), rows},
            columns ? ids.stride(1) : 0,
            columns ? ids.size(1) : 0};
}

// The bytes from the first to the last element.
template <class T>
Range range_of(const Vector<T>& view) {
    return range_at(view.data, view.length);
}
inline Range range_of(const Ids& view) {
    const char* begin = static_cast<const char*>(view.data);
    if (view.length == 0) return {begin, begin};
    return {begin, begin + ((view.length - 1) * view.stride + 1) * (view.is_int64 ? 8 : 4)};
}

template <class T>
Vector<T> vector_view(const Argument& a, ScalarType dtype, int64_t length, const char* shape) {
    a.vector(dtype, length, shape);
    return {static_cast<T*>(a.tensor.data_ptr()), a.tensor.size(0)};
}

inline Vector<int32_t> int32_view(const Argument& a, int64_t length, const char* shape) {
    return vector_view<int32_t>(a, ScalarType::Int, length, shape);
}
inline Vector<int64_t> int64_view(const Argument& a, int64_t length, const char* shape) {
    return vector_view<int64_t>(a, ScalarType::Long, length, shape);
}
inline Vector<bool> bool_view(const Argument& a, int64_t length, const char* shape) {
    return vector_view<bool>(a, ScalarType::Bool, length, shape);
}

// One number on the device.
inline int64_t* scalar_view(const Argument& a) {
    a.dtype(ScalarType::Long);
    if (a.tensor.dim() > 1 || a.tensor.numel() != 1) a.must_be("one element, [] or [1]");
    return static_cast<int64_t*>(a.tensor.data_ptr());
}

}  // namespace nwor
