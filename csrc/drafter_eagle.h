// The op eagle_step: positions, lengths and slots of the next pass.
#pragma once

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

struct EagleArguments {
    const char* op;
    int64_t num_rows;
    const int64_t* positions;
    BlockTable table;
    int32_t* seq_lens;
    int64_t* new_positions;
    Vector<int64_t> slots;
    int64_t max_model_len;
};

// ---------------------------------------------------------------- check

inline EagleArguments check_eagle_step(const char* op,
                                       const Tensor& positions,      // int64 [num_rows]
                                       const Tensor& block_table,    // int32 [num_rows, max_num_blocks]
                                       const Tensor& seq_lens,       // int32 [num_rows], written
                                       const Tensor& new_positions,  // int64 [num_rows], written
                                       const Tensor& slot_mapping,   // int64 [num_rows], written
                                       int64_t block_size, int64_t max_model_len) {
    const Argument po{op, "positions", positions}, bt{op, "block_table", block_table},
        sl{op, "seq_lens", seq_lens}, np{op, "new_positions", new_positions},
        sm{op, "slot_mapping", slot_mapping};
    check_positive(op, "block_size", block_size);
    check_positive(op, "max_model_len", max_model_len);
    EagleArguments a{};
    a.op = op;
    a.positions = int64_view(po, 0, "[num_rows]").data;
    const int64_t n = a.num_rows = positions.size(0);
    a.table = block_table_view(bt, n, block_size);
    if (n > 0 && a.table.columns < 1) bt.must_be("[num_rows, max_num_blocks] with at least one column");
    a.seq_lens = int32_view(sl, n, "[num_rows]").data;
    a.new_positions = int64_view(np, n, "[num_rows]").data;
    a.slots = int64_view(sm, n, "[num_rows]");
    a.max_model_len = max_model_len;
    if (positions.data_ptr() == new_positions.data_ptr()) {
        po.same_device(block_table);
        check_placement(op, {bt}, {sl, np, sm});
    } else {
        check_placement(op, {po, bt}, {sl, np, sm});
    }
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline Found problem_of_row(const EagleArguments& a, int64_t row) {
    if (a.positions[row] < -1) return {kPositionBelow, row, a.positions[row], -1};
    return {};
}

NWOR_HOST_DEVICE inline void eagle_row(const EagleArguments& a, int64_t i) {
    if (i >= a.num_rows) {
        a.slots.set(i, kPadSlot);
        return;
    }
    const bool outside = a.positions[i] >= a.max_model_len - 1;
    const int64_t next = outside ? 0 : a.positions[i] + 1;
    int64_t slot = kPadSlot;
    if (!outside && next >= 0) {
        const int64_t column = least(next / a.table.block_size, a.table.columns - 1);
        slot = int64_t{a.table.data[i * a.table.row_stride + column]} * a.table.block_size +
               next % a.table.block_size;
    }
    const int64_t length = outside ? 1 : int64_t{a.seq_lens[i]} + 1;
    a.new_positions[i] = next;
    a.slots.set(i, slot);
    a.seq_lens[i] = static_cast<int32_t>(least(length, a.max_model_len));
}

}  // namespace nwor
