// Part of family drafter: the rows of a call, block tables, and the problems of both.
#pragma once

#include "common/problems.h"
#include "common/views.h"

namespace nwor {

constexpr int64_t kPadSlot = -1;

// ---------------------------------------------------------------- rows and block tables

// The rows of a call. Real rows come first; a negative index marks the padded rows after them.
struct Rows {
    Ids idx_mapping;  // without data if every row is real
    int64_t count;

    NWOR_HOST_DEVICE bool is_real(int64_t row) const {
        return row < count && (idx_mapping.data == nullptr || idx_mapping[row] >= 0);
    }
    NWOR_HOST_DEVICE int64_t num_real() const {
        if (idx_mapping.data == nullptr) return count;
        int64_t low = 0, high = count;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (idx_mapping[middle] < 0)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }
};

// Return the row that owns `token`, or `rows` if none does. `starts` holds the first token of each row and
// the end. A row without tokens owns none.
NWOR_HOST_DEVICE inline int64_t row_of_token(const int32_t* starts, int64_t rows, int64_t token,
                                             int64_t growth = 0) {
    // In every step except the first, each row has one token and no search is needed.
    if (token < rows && growth == 0 && starts[token] <= token && token < starts[token + 1]) return token;
    int64_t low = 0, high = rows;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (starts[middle + 1] + (middle + 1) * growth > token)
            high = middle;
        else
            low = middle + 1;
    }
    return low < rows && token >= starts[low] + low * growth ? low : rows;
}

inline Rows rows_of(const char* op, const std::optional<Tensor>& idx_mapping, int64_t count) {
    if (!idx_mapping.has_value()) return {{}, count};
    return {ids_view({op, "idx_mapping", *idx_mapping}, count, "[num_rows]"), count};
}

// A block table [rows, columns] of one group of layers.
struct BlockTable {
    const int32_t* data;
    int64_t row_stride, rows, columns, block_size;

    NWOR_HOST_DEVICE int64_t slot(int64_t row, int64_t position) const {
        const int64_t column = position / block_size;
        if (position < 0 || row < 0 || row >= rows || column >= columns) return kPadSlot;
        return int64_t{data[row * row_stride + column]} * block_size + position % block_size;
    }
    NWOR_HOST_DEVICE int64_t num_positions() const { return columns * block_size; }
};

inline BlockTable block_table_view(const Argument& a, int64_t rows, int64_t block_size) {
    const Tensor& t = a.tensor;
    a.dtype(ScalarType::Int);
    if (t.dim() != 2 || t.size(0) < rows)
        a.must_be("[num_rows, max_num_blocks] with at least ", rows, " rows");
    if (t.size(1) > INT32_MAX) a.must_be("of fewer than 2^31 columns");
    if (t.size(1) > 1 && t.stride(1) != 1) a.must_be("of stride 1 along a row");
    return {static_cast<const int32_t*>(t.data_ptr()), t.stride(0), t.size(0), t.size(1), block_size};
}

// ---------------------------------------------------------------- problems of rows

NWOR_HOST_DEVICE inline Found problem_of_starts(const int32_t* starts, int64_t row, Problem problem) {
    if (starts[row] < 0 || starts[row + 1] < starts[row]) return {problem, row, starts[row + 1], starts[row]};
    return {};
}

NWOR_HOST_DEVICE inline Found problem_of_padding(const Rows& rows, int64_t row) {
    if (row > 0 && rows.is_real(row) && !rows.is_real(row - 1))
        return {kRealAfterPadded, row, rows.idx_mapping[row], 0};
    return {};
}

}  // namespace nwor
