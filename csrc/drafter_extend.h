// The op extend_queries: starts, lengths and slots of queries with new tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

struct ExtendArguments {
    const char* op;
    Rows rows;
    const int32_t* starts;
    const int32_t* target_seq_lens;
    Vector<const int64_t> positions;
    Vector<const bool> is_rejected;
    BlockTable table;
    Vector<int32_t> query_start_loc, seq_lens;
    Vector<int64_t> slots;
    int64_t growth, max_model_len;

    int64_t num_items() const { return std::max({query_start_loc.length, seq_lens.length, slots.length}); }
    NWOR_HOST_DEVICE int64_t out_start(int64_t row) const { return starts[row] + row * growth; }
    // Number of tokens that have a position and a flag.
    NWOR_HOST_DEVICE int64_t num_tokens() const { return least(positions.length, is_rejected.length); }
};

// ---------------------------------------------------------------- check

inline ExtendArguments check_extend(const char* op,
                                    const Tensor& target_query_start_loc,  // int32 [num_rows + 1]
                                    const Tensor& target_seq_lens,         // int32 [num_rows]
                                    const Tensor& positions,               // int64 [num_tokens]
                                    const Tensor& is_rejected,             // bool [num_tokens]
                                    const Tensor& block_table,             // int32 [num_rows, max_num_blocks]
                                    const Tensor& query_start_loc,         // int32 [num_rows + 1], written
                                    const Tensor& seq_lens,                // int32 [num_rows], written
                                    const Tensor& slot_mapping,            // int64 [capacity], written
                                    int64_t block_size, int64_t max_model_len, int64_t num_new_tokens,
                                    const std::optional<Tensor>& idx_mapping  // ids [num_rows]
) {
    const Argument tq{op, "target_query_start_loc", target_query_start_loc},
        ts{op, "target_seq_lens", target_seq_lens}, po{op, "positions", positions},
        ir{op, "is_rejected", is_rejected}, bt{op, "block_table", block_table},
        qs{op, "query_start_loc", query_start_loc}, sl{op, "seq_lens", seq_lens},
        sm{op, "slot_mapping", slot_mapping};
    check_positive(op, "block_size", block_size);
    check_positive(op, "max_model_len", max_model_len);
    check_not_negative(op, "num_new_tokens", num_new_tokens);
    ExtendArguments a{};
    a.op = op;
    a.target_seq_lens = int32_view(ts, 0, "[num_rows]").data;
    const int64_t n = target_seq_lens.size(0);
    a.rows = rows_of(op, idx_mapping, n);
    a.starts = int32_view(tq, n + 1, "[num_rows + 1]").data;
    a.positions = {int64_view(po, 0, "[num_tokens]").data, positions.size(0)};
    a.is_rejected = {bool_view(ir, 0, "[num_tokens]").data, is_rejected.size(0)};
    a.table = block_table_view(bt, n, block_size);
    if (block_table.size(0) != n) bt.must_be("of as many rows as there are queries, ", n);
    a.query_start_loc = int32_view(qs, n + 1, "[num_rows + 1]");
    a.seq_lens = int32_view(sl, n, "[num_rows]");
    a.slots = int64_view(sm, 0, "[capacity]");
    a.growth = num_new_tokens;
    a.max_model_len = max_model_len;
    std::vector<Argument> inputs{tq, ts, po, ir, bt};
    add_given(inputs, op, "idx_mapping", idx_mapping);
    check_placement(op, inputs, {qs, sl, sm});
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline bool needs_slot(const ExtendArguments& a, int64_t token) {
    return !a.is_rejected[token] && a.positions[token] < a.max_model_len;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const ExtendArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kTargetQueriesDecrease)) return f;
    const int64_t end = a.out_start(row + 1);
    if (end > a.num_tokens()) return {kTokensPastFlags, row, end, a.num_tokens()};
    if (end > a.slots.length) return {kTokensPastSlots, row, end, a.slots.length};
    for (int64_t t = a.out_start(row); t < end; ++t)
        if (needs_slot(a, t) && (a.positions[t] < 0 || a.positions[t] >= a.table.num_positions()))
            return {kPositionOutside, t, a.positions[t], a.table.num_positions()};
    return {};
}

NWOR_HOST_DEVICE inline void extend_item(const ExtendArguments& a, int64_t i, int64_t num_real) {
    a.query_start_loc.set(i, a.out_start(least(i, num_real)));
    a.seq_lens.set(i, i < num_real ? least(int64_t{a.target_seq_lens[i]} + a.growth, a.max_model_len) : 0);
    if (i >= a.slots.length) return;
    const int64_t row = row_of_token(a.starts, num_real, i, a.growth);
    const bool owned = row < num_real && i < a.num_tokens();
    a.slots[i] = owned && needs_slot(a, i) ? a.table.slot(row, a.positions[i]) : kPadSlot;
}

}  // namespace nwor
