// The op prepare_next_token_padded: the last valid sampled token of each row.
#pragma once

#include <algorithm>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

struct NextTokenArguments {
    const char* op;
    int64_t num_rows, columns;
    Ids sampled;  // column 0
    int64_t column_stride;
    const bool* discarded;
    Ids backup;
    MutableIds next_ids, valid_count;
    int64_t vocab_size;

    int64_t num_items() const { return std::max(next_ids.length, valid_count.length); }
};

// ---------------------------------------------------------------- check

inline NextTokenArguments check_next_token_padded(
    const char* op,
    const Tensor& sampled_token_ids,      // ids [num_rows, num_sampled]
    const Tensor& discarded,              // bool [num_rows]
    const Tensor& backup_next_token_ids,  // ids [num_rows]
    const Tensor& next_token_ids,         // ids [num_rows], written
    const Tensor& valid_sampled_count,    // ids [num_rows], written
    int64_t vocab_size) {
    const Argument sa{op, "sampled_token_ids", sampled_token_ids}, di{op, "discarded", discarded},
        ba{op, "backup_next_token_ids", backup_next_token_ids}, nt{op, "next_token_ids", next_token_ids},
        vc{op, "valid_sampled_count", valid_sampled_count};
    check_positive(op, "vocab_size", vocab_size);
    check_ids(sa);
    if (sampled_token_ids.dim() != 2) sa.must_be("[num_rows, num_sampled]");
    NextTokenArguments a{};
    a.op = op;
    const int64_t n = a.num_rows = sampled_token_ids.size(0);
    a.columns = sampled_token_ids.size(1);
    a.sampled = {sampled_token_ids.data_ptr(), sampled_token_ids.scalar_type() == ScalarType::Long,
                 sampled_token_ids.stride(0), n};
    a.column_stride = sampled_token_ids.stride(1);
    a.discarded = bool_view(di, n, "[num_rows]").data;
    a.backup = ids_view(ba, n, "[num_rows]");
    a.next_ids = mutable_ids_view(nt, n, "[num_rows]");
    a.valid_count = mutable_ids_view(vc, n, "[num_rows]");
    a.vocab_size = vocab_size;
    check_placement(op, {sa, di, ba}, {nt, vc});
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline void next_token_row(const NextTokenArguments& a, int64_t i) {
    int64_t next = 0, count = 0;
    if (i < a.num_rows) {
        next = a.backup[i];
        Ids row = a.sampled;
        row.stride = 1;
        const int64_t start = i * a.sampled.stride;
        for (int64_t c = 0; !a.discarded[i] && c < a.columns; ++c) {
            const int64_t id = row[start + c * a.column_stride];
            if (id < 0 || id >= a.vocab_size) continue;
            next = id;
            ++count;
        }
    }
    if (i < a.next_ids.length) a.next_ids.set(i, next);
    if (i < a.valid_count.length) a.valid_count.set(i, count);
}

}  // namespace nwor
