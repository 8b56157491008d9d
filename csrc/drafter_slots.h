// The op compute_slot_mappings: the slots of all tokens in all groups.
#pragma once

#include <string>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- arguments

constexpr int64_t kMostTables = 64;  // their addresses are passed as kernel parameters

struct SlotArguments {
    const char* op;
    Rows rows;
    const int32_t* starts;
    Vector<const int64_t> positions;
    BlockTable tables[kMostTables];
    int64_t num_groups, capacity;
    int64_t* slots;
    int64_t slots_stride;
    int64_t cp_size, cp_rank, cp_interleave;
    const bool* cp_sharded;  // null: all groups
};

// ---------------------------------------------------------------- check

inline SlotArguments check_slot_mappings(
    const char* op,
    const Tensor& idx_mapping,                // ids [num_rows]
    const Tensor& query_start_loc,            // int32 [num_rows + 1]
    const Tensor& positions,                  // int64 [num_tokens]
    const std::vector<Tensor>& block_tables,  // each int32 [num_rows, max_num_blocks]
    const std::vector<int64_t>& block_sizes,
    const Tensor& slot_mappings,  // int64 [groups, capacity], written
    int64_t cp_size, int64_t cp_rank, int64_t cp_interleave,
    const std::optional<Tensor>& cp_sharded  // bool [groups]
) {
    const Argument im{op, "idx_mapping", idx_mapping}, qs{op, "query_start_loc", query_start_loc},
        po{op, "positions", positions}, sm{op, "slot_mappings", slot_mappings};
    SlotArguments a{};
    a.op = op;
    a.num_groups = static_cast<int64_t>(block_tables.size());
    if (a.num_groups < 1 || a.num_groups > kMostTables)
        fail(op, "block_tables must hold 1 to ", kMostTables, " tables, got ", a.num_groups);
    if (block_sizes.size() != block_tables.size())
        fail(op, "block_sizes must hold one size for each of the ", a.num_groups, " tables, got ",
             block_sizes.size());
    a.rows.idx_mapping = ids_view(im, 0, "[num_rows]");
    a.rows.count = idx_mapping.size(0);
    a.starts = int32_view(qs, a.rows.count + 1, "[num_rows + 1]").data;
    a.positions = {int64_view(po, 0, "[num_tokens]").data, positions.size(0)};
    sm.dtype(ScalarType::Long);
    if (slot_mappings.dim() != 2 || slot_mappings.size(0) != a.num_groups)
        sm.must_be("[", a.num_groups, " groups, capacity]");
    if (slot_mappings.size(1) > 1 && slot_mappings.stride(1) != 1) sm.must_be("of stride 1 along a row");
    a.capacity = slot_mappings.size(1);
    a.slots = static_cast<int64_t*>(slot_mappings.data_ptr());
    a.slots_stride = slot_mappings.stride(0);
    check_positive(op, "cp_size", cp_size);
    check_positive(op, "cp_interleave", cp_interleave);
    if (cp_rank < 0 || cp_rank >= cp_size) fail(op, "cp_rank must be in [0, ", cp_size, "), got ", cp_rank);
    a.cp_size = cp_size;
    a.cp_rank = cp_rank;
    a.cp_interleave = cp_interleave;
    for (size_t g = 0; g < block_tables.size(); ++g) {
        const std::string name = "block_tables[" + std::to_string(g) + "]";
        const Argument table{op, name.c_str(), block_tables[g]};
        check_not_negative(op, "block_sizes", block_sizes[g]);
        if (cp_size > 1 && !cp_sharded.has_value() && block_sizes[g] % cp_interleave != 0)
            fail(op, "block_sizes[", g, "] must be a multiple of cp_interleave (", cp_interleave,
                 ") with cp_size > 1, got ", block_sizes[g]);
        a.tables[g] = block_table_view(table, 0, block_sizes[g]);
        table.same_device(idx_mapping);
        sm.same_device(idx_mapping);
        must_not_overlap(op, Placed(sm), Placed(table));
    }
    std::vector<Argument> inputs{im, qs, po};
    if (cp_sharded.has_value()) {
        inputs.push_back({op, "cp_sharded", *cp_sharded});
        a.cp_sharded = bool_view(inputs.back(), a.num_groups, "[groups]").data;
    }
    check_placement(op, inputs, {sm});
    return a;
}

// ---------------------------------------------------------------- one row or token

NWOR_HOST_DEVICE inline bool ranks_share(const SlotArguments& a, int64_t group) {
    return a.cp_size > 1 && (a.cp_sharded == nullptr || a.cp_sharded[group]);
}

// Return whether a run of tokens of one rank crosses the end of a block. Two tokens would then get one slot.
NWOR_HOST_DEVICE inline bool blocks_split_runs(const SlotArguments& a, int64_t group) {
    return ranks_share(a, group) && a.tables[group].block_size % a.cp_interleave != 0;
}

// Return the position within this rank's share of the sequence, or -1 if another rank holds it.
NWOR_HOST_DEVICE inline int64_t local_position(const SlotArguments& a, int64_t group, int64_t position) {
    if (position < 0 || !ranks_share(a, group)) return position;
    const int64_t of_all_ranks = a.tables[group].block_size * a.cp_size;
    const int64_t offset = position % of_all_ranks;
    if (offset / a.cp_interleave % a.cp_size != a.cp_rank) return -1;
    return position / of_all_ranks * a.tables[group].block_size +
           offset / (a.cp_interleave * a.cp_size) * a.cp_interleave + offset % a.cp_interleave;
}

NWOR_HOST_DEVICE inline int64_t slot_of_token(const SlotArguments& a, int64_t group, int64_t token) {
    if (a.tables[group].block_size == 0 || blocks_split_runs(a, group)) return kPadSlot;
    const int64_t row = row_of_token(a.starts, a.rows.count, token);
    if (row == a.rows.count || token >= a.positions.length) return kPadSlot;
    const int64_t state = a.rows.idx_mapping[row];
    if (state < 0) return kPadSlot;
    return a.tables[group].slot(state, local_position(a, group, a.positions[token]));
}

NWOR_HOST_DEVICE inline Found problem_of_row(const SlotArguments& a, int64_t row) {
    if (const Found f = problem_of_starts(a.starts, row, kQueriesDecrease)) return f;
    const int64_t state = a.rows.idx_mapping[row], end = a.starts[row + 1];
    if (end > a.starts[row] && end > a.capacity) return {kTokensPastMappings, row, end, a.capacity};
    if (state < 0 || end == a.starts[row]) return {};
    if (end > a.positions.length) return {kTokensPastPositions, row, end, a.positions.length};
    for (int64_t g = 0; g < a.num_groups; ++g) {
        const BlockTable& table = a.tables[g];
        if (table.block_size == 0) continue;
        if (blocks_split_runs(a, g)) return {kBlocksSplitRuns, g, table.block_size, a.cp_interleave};
        if (state >= table.rows) return {kStateOutside, row, state, table.rows};
        for (int64_t t = a.starts[row]; t < end; ++t)
            if (a.positions[t] < 0 || local_position(a, g, a.positions[t]) >= table.num_positions())
                return {kPositionOutside, t, a.positions[t], table.num_positions()};
    }
    return {};
}

}  // namespace nwor
