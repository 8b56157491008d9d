// The op dcp_local_seq_lens: the tokens of each sequence that one rank holds.
#pragma once

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

struct LocalLensArguments {
    const char* op;
    int64_t num_rows;
    const int32_t* seq_lens;
    Vector<int32_t> local;
    int64_t size, rank, interleave;
};

// ---------------------------------------------------------------- check

inline LocalLensArguments check_local_seq_lens(const char* op,
                                               const Tensor& seq_lens,        // int32 [num_rows]
                                               const Tensor& local_seq_lens,  // int32 [num_rows], written
                                               int64_t dcp_size, int64_t dcp_rank, int64_t cp_interleave) {
    const Argument sl{op, "seq_lens", seq_lens}, lo{op, "local_seq_lens", local_seq_lens};
    check_positive(op, "dcp_size", dcp_size);
    check_positive(op, "cp_interleave", cp_interleave);
    if (dcp_rank < 0 || dcp_rank >= dcp_size)
        fail(op, "dcp_rank must be in [0, ", dcp_size, "), got ", dcp_rank);
    LocalLensArguments a{};
    a.op = op;
    a.seq_lens = int32_view(sl, 0, "[num_rows]").data;
    a.num_rows = seq_lens.size(0);
    a.local = int32_view(lo, a.num_rows, "[num_rows]");
    a.size = dcp_size;
    a.rank = dcp_rank;
    a.interleave = cp_interleave;
    if (seq_lens.data_ptr() == local_seq_lens.data_ptr())
        lo.same_device(seq_lens);
    else
        check_placement(op, {sl}, {lo});
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline void local_lens_row(const LocalLensArguments& a, int64_t i) {
    int64_t local = 0;
    if (i < a.num_rows) {
        const int64_t round = a.size * a.interleave, length = most(a.seq_lens[i], 0);
        const int64_t rest = most(length % round - a.rank * a.interleave, 0);
        local = length / round * a.interleave + least(rest, a.interleave);
    }
    a.local.set(i, local);
}

}  // namespace nwor
