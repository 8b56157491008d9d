// Part of family drafter: batches with longer queries, and the tokens of a step.
#pragma once

#include <algorithm>
#include <vector>

#include "drafter_rows.h"

namespace nwor {

// ---------------------------------------------------------------- copy_expand_inputs

struct ExpandArguments {
    const char* op;
    Rows rows;
    int64_t num_target_tokens;
    Ids target_ids;
    const int64_t* target_positions;
    const int32_t* starts;
    Ids num_rejected, next_tokens;
    bool by_state;  // next_tokens is indexed by request state
    Vector<int32_t> input_ids;
    Vector<int64_t> positions;
    Vector<bool> is_rejected, is_masked;
    MutableIds new_indices;
    bool maps_hidden;
    MutableIds hidden_mapping;  // only if maps_hidden
    int64_t num_new, growth, max_position;
    int64_t padding_id, mask_id;
    bool shift;

    int64_t num_items() const {
        return std::max({input_ids.length, new_indices.length, maps_hidden ? hidden_mapping.length : 0});
    }
    NWOR_HOST_DEVICE int64_t num_tokens(int64_t row) const { return int64_t{starts[row + 1]} - starts[row]; }
    // Return the number of target tokens that are copied.
    NWOR_HOST_DEVICE int64_t num_copied(int64_t row) const {
        const int64_t tokens = num_tokens(row);
        return most(tokens - least(most(num_rejected[row], 0), tokens) - (shift ? 1 : 0), 0);
    }
    NWOR_HOST_DEVICE int64_t out_start(int64_t row) const { return starts[row] + row * growth; }
};

inline ExpandArguments check_expand(
    const char* op,
    const Tensor& target_input_ids,        // ids [num_tokens]
    const Tensor& target_positions,        // int64 [num_tokens]
    const Tensor& target_query_start_loc,  // int32 [num_rows + 1]
    const Tensor& num_rejected,            // ids [num_rows]
    const Tensor& next_token_ids,          // ids [num_rows], or [num_states] with idx_mapping
    const Tensor& input_ids,               // int32 [capacity], written
    const Tensor& positions,               // int64 [capacity], written
    const Tensor& is_rejected,             // bool [capacity], written
    const Tensor& is_masked,               // bool [capacity], written
    const Tensor& new_token_indices,       // ids [num_rows * num_new_tokens], written
    int64_t num_new_tokens, int64_t padding_token_id, int64_t mask_token_id, bool shift_input_ids,
    const std::optional<int64_t>& max_model_len,
    const std::optional<Tensor>& idx_mapping,          // ids [num_rows]
    const std::optional<Tensor>& hidden_state_mapping  // ids [num_tokens], written
) {
    const Argument ti{op, "target_input_ids", target_input_ids}, tp{op, "target_positions", target_positions},
        tq{op, "target_query_start_loc", target_query_start_loc}, nr{op, "num_rejected", num_rejected},
        nt{op, "next_token_ids", next_token_ids}, ii{op, "input_ids", input_ids},
        po{op, "positions", positions}, ir{op, "is_rejected", is_rejected}, ms{op, "is_masked", is_masked},
        ni{op, "new_token_indices", new_token_indices};
    check_positive(op, "num_new_tokens", num_new_tokens);
    check_id(op, "padding_token_id", padding_token_id);
    check_id(op, "mask_token_id", mask_token_id);
    if (max_model_len.has_value()) check_positive(op, "max_model_len", *max_model_len);
    ExpandArguments a{};
    a.op = op;
    a.num_rejected = ids_view(nr, 0, "[num_rows]");
    const int64_t n = num_rejected.size(0);
    a.rows = rows_of(op, idx_mapping, n);
    a.target_ids = ids_view(ti, 0, "[num_tokens]");
    a.target_positions = int64_view(tp, 0, "[num_tokens]").data;
    a.num_target_tokens = std::min(target_input_ids.size(0), target_positions.size(0));
    a.starts = int32_view(tq, n + 1, "[num_rows + 1]").data;
    a.by_state = idx_mapping.has_value();
    a.next_tokens = ids_view(nt, a.by_state ? 0 : n, a.by_state ? "[num_states]" : "[num_rows]");
    a.input_ids = int32_view(ii, 0, "[capacity]");
    const int64_t capacity = input_ids.size(0);
    a.positions = int64_view(po, 0, "[capacity]");
    a.is_rejected = bool_view(ir, 0, "[capacity]");
    a.is_masked = bool_view(ms, 0, "[capacity]");
    for (const Argument& out : {po, ir, ms})
        if (out.tensor.size(0) != capacity) out.must_be("as long as input_ids, ", describe(input_ids));
    a.new_indices = mutable_ids_view(ni, n * num_new_tokens, "[num_rows * num_new_tokens]");
    a.num_new = num_new_tokens;
    a.growth = num_new_tokens - (shift_input_ids ? 1 : 0);
    a.max_position = max_model_len.has_value() ? *max_model_len - 1 : INT64_MAX;
    a.padding_id = padding_token_id;
    a.mask_id = mask_token_id;
    a.shift = shift_input_ids;
    std::vector<Argument> inputs{ti, tp, tq, nr, nt}, outputs{ii, po, ir, ms, ni};
    add_given(inputs, op, "idx_mapping", idx_mapping);
    if (hidden_state_mapping.has_value()) {
        if (!shift_input_ids)
            fail(op, "hidden_state_mapping must be None without shift_input_ids, got ",
                 describe(*hidden_state_mapping));
        outputs.push_back({op, "hidden_state_mapping", *hidden_state_mapping});
        a.maps_hidden = true;
        a.hidden_mapping = mutable_ids_view(outputs.back(), 0, "[num_tokens]");
    }
    check_placement(op, inputs, outputs);
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const ExpandArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kTargetQueriesDecrease)) return f;
    const int64_t end = a.starts[row + 1], new_end = a.out_start(row + 1);
    if (end > a.num_target_tokens) return {kTokensPastTarget, row, end, a.num_target_tokens};
    if (a.maps_hidden && end > a.hidden_mapping.length)
        return {kTokensPastHidden, row, end, a.hidden_mapping.length};
    if (new_end > a.input_ids.length) return {kTokensPastIds, row, new_end, a.input_ids.length};
    if (a.by_state && a.rows.idx_mapping[row] >= a.next_tokens.length)
        return {kStateOutside, row, a.rows.idx_mapping[row], a.next_tokens.length};
    return {};
}

// Write token t of the outputs, t < capacity.
NWOR_HOST_DEVICE inline void expand_token(const ExpandArguments& a, int64_t t, int64_t num_real) {
    const int64_t row = row_of_token(a.starts, num_real, t, a.growth);
    int64_t id = a.padding_id, position = 0;
    bool rejected = true, masked = false;
    if (row < num_real && a.num_tokens(row) > 0 && a.starts[row] < a.num_target_tokens) {
        const int64_t j = t - a.out_start(row), copied = a.num_copied(row);
        position = sum_up_to(a.max_position, a.target_positions[most(a.starts[row], 0)], j);
        rejected = j >= copied + a.num_new;
        masked = j > copied && !rejected;
        if (j < copied)
            id = a.target_ids.at(a.starts[row] + j + (a.shift ? 1 : 0));
        else if (j == copied)
            id = a.next_tokens.at(a.by_state ? a.rows.idx_mapping[row] : row);
        else if (masked)
            id = a.mask_id;
    }
    a.input_ids[t] = static_cast<int32_t>(id);
    a.positions[t] = position;
    a.is_rejected[t] = rejected;
    a.is_masked[t] = masked;
}

// Write element i of the outputs that do not have the length of the expanded batch.
NWOR_HOST_DEVICE inline void expand_index(const ExpandArguments& a, int64_t i, int64_t num_real) {
    if (i < a.new_indices.length) {
        const int64_t row = i / a.num_new;
        const bool has_tokens = row < num_real && a.num_tokens(row) > 0;
        a.new_indices.set(i, has_tokens ? a.out_start(row) + a.num_copied(row) + i % a.num_new : 0);
    }
    if (a.maps_hidden && i < a.hidden_mapping.length) {
        const int64_t row = row_of_token(a.starts, num_real, i);
        a.hidden_mapping.set(i, row < num_real ? i + row * a.growth : -1);
    }
}

NWOR_HOST_DEVICE inline void write_item(const ExpandArguments& a, int64_t i) {
    const int64_t num_real = a.rows.num_real();
    if (i < a.input_ids.length) expand_token(a, i, num_real);
    expand_index(a, i, num_real);
}

// ---------------------------------------------------------------- extend_queries

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

NWOR_HOST_DEVICE inline void write_item(const ExtendArguments& a, int64_t i) {
    const int64_t num_real = a.rows.num_real();
    a.query_start_loc.set(i, a.out_start(least(i, num_real)));
    a.seq_lens.set(i, i < num_real ? least(int64_t{a.target_seq_lens[i]} + a.growth, a.max_model_len) : 0);
    if (i >= a.slots.length) return;
    const int64_t row = row_of_token(a.starts, num_real, i, a.growth);
    const bool owned = row < num_real && i < a.num_tokens();
    a.slots[i] = owned && needs_slot(a, i) ? a.table.slot(row, a.positions[i]) : kPadSlot;
}

// ---------------------------------------------------------------- prepare_inputs_padded

struct PaddedInputsArguments {
    const char* op;
    Rows rows;
    const int32_t* cu_num_drafts;
    const int32_t* valid_count;
    const int32_t* starts;
    const bool* discarded;  // null if not given
    MutableIds indices, num_rejected;

    int64_t num_items() const { return std::max(indices.length, num_rejected.length); }
};

inline PaddedInputsArguments check_inputs_padded(
    const char* op,
    const Tensor& cu_num_draft_tokens,      // int32 [num_rows]
    const Tensor& valid_sampled_count,      // int32 [num_rows]
    const Tensor& query_start_loc,          // int32 [num_rows + 1]
    const Tensor& token_indices_to_sample,  // ids [num_rows], written
    const Tensor& num_rejected,             // ids [num_rows], written
    const std::optional<Tensor>& discarded  // bool [num_rows]
) {
    const Argument cu{op, "cu_num_draft_tokens", cu_num_draft_tokens},
        vc{op, "valid_sampled_count", valid_sampled_count}, qs{op, "query_start_loc", query_start_loc},
        ti{op, "token_indices_to_sample", token_indices_to_sample}, nr{op, "num_rejected", num_rejected};
    PaddedInputsArguments a{};
    a.op = op;
    a.cu_num_drafts = int32_view(cu, 0, "[num_rows]").data;
    const int64_t n = a.rows.count = cu_num_draft_tokens.size(0);
    a.valid_count = int32_view(vc, n, "[num_rows]").data;
    a.starts = int32_view(qs, n + 1, "[num_rows + 1]").data;
    a.indices = mutable_ids_view(ti, n, "[num_rows]");
    a.num_rejected = mutable_ids_view(nr, n, "[num_rows]");
    std::vector<Argument> inputs{cu, vc, qs};
    if (discarded.has_value()) {
        inputs.push_back({op, "discarded", *discarded});
        a.discarded = bool_view(inputs.back(), n, "[num_rows]").data;
    }
    check_placement(op, inputs, {ti, nr});
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const PaddedInputsArguments& a, int64_t row) {
    const int64_t before = row == 0 ? 0 : a.cu_num_drafts[row - 1];
    if (a.cu_num_drafts[row] < before) return {kDraftsDecrease, row, a.cu_num_drafts[row], before};
    return problem_of_starts(a.starts, row, kQueriesDecrease);
}

NWOR_HOST_DEVICE inline void write_item(const PaddedInputsArguments& a, int64_t i) {
    int64_t index = 0, rejected = 0;
    if (i < a.rows.count) {
        const int64_t drafts = int64_t{a.cu_num_drafts[i]} - (i == 0 ? 0 : a.cu_num_drafts[i - 1]);
        const int64_t begin = a.starts[i], end = a.starts[i + 1];
        const bool is_discarded =
            (a.discarded != nullptr && a.discarded[i]) || (drafts > 0 && a.valid_count[i] <= 0);
        if (end > begin && !is_discarded) {
            rejected = drafts > 0 ? most(drafts + 1 - a.valid_count[i], 0) : 0;
            index = most(end - 1 - rejected, 0);
        }
    }
    if (i < a.indices.length) a.indices.set(i, index);
    if (i < a.num_rejected.length) a.num_rejected.set(i, rejected);
}

// ---------------------------------------------------------------- prepare_next_token_padded

struct NextTokenArguments {
    const char* op;
    Rows rows;
    int64_t columns;
    Ids sampled;  // column 0
    int64_t column_stride;
    const bool* discarded;
    Ids backup;
    MutableIds next_ids, valid_count;
    int64_t vocab_size;

    int64_t num_items() const { return std::max(next_ids.length, valid_count.length); }
};

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
    const int64_t n = a.rows.count = sampled_token_ids.size(0);
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

NWOR_HOST_DEVICE inline Found problem_of_row(const NextTokenArguments&, int64_t) {
    return {};
}

NWOR_HOST_DEVICE inline void write_item(const NextTokenArguments& a, int64_t i) {
    int64_t next = 0, count = 0;
    if (i < a.rows.count) {
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

// ---------------------------------------------------------------- dcp_local_seq_lens

struct LocalLensArguments {
    const char* op;
    Rows rows;
    const int32_t* seq_lens;
    Vector<int32_t> local;
    int64_t size, rank, interleave;

    int64_t num_items() const { return local.length; }
};

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
    a.rows.count = seq_lens.size(0);
    a.local = int32_view(lo, a.rows.count, "[num_rows]");
    a.size = dcp_size;
    a.rank = dcp_rank;
    a.interleave = cp_interleave;
    if (seq_lens.data_ptr() == local_seq_lens.data_ptr())
        lo.same_device(seq_lens);
    else
        check_placement(op, {sl}, {lo});
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const LocalLensArguments&, int64_t) {
    return {};
}

NWOR_HOST_DEVICE inline void write_item(const LocalLensArguments& a, int64_t i) {
    int64_t local = 0;
    if (i < a.rows.count) {
        const int64_t round = a.size * a.interleave, length = most(a.seq_lens[i], 0);
        const int64_t rest = most(length % round - a.rank * a.interleave, 0);
        local = length / round * a.interleave + least(rest, a.interleave);
    }
    a.local.set(i, local);
}

// ---------------------------------------------------------------- gather_step_tokens

struct StepTokensArguments {
    const char* op;
    Rows rows;
    Ids input_ids;
    const int32_t* starts;
    const int32_t* logit_starts;
    Ids num_sampled, last_sampled;
    MutableIdColumns sampled;
    MutableIds context;

    int64_t num_items() const { return std::max(sampled.first.length * sampled.count, context.length); }
    NWOR_HOST_DEVICE int64_t num_drafts(int64_t row) const {
        const int64_t drafts = int64_t{logit_starts[row + 1]} - logit_starts[row] - 1;
        return least(most(drafts, 0), most(int64_t{starts[row + 1]} - starts[row], 0));
    }
};

inline StepTokensArguments check_step_tokens(
    const char* op,
    const Tensor& input_ids,        // ids [num_tokens]
    const Tensor& query_start_loc,  // int32 [num_rows + 1]
    const Tensor& cu_num_logits,    // int32 [num_rows + 1]
    const Tensor& idx_mapping,      // ids [num_rows]
    const Tensor& num_sampled,      // ids [num_rows]
    const Tensor& last_sampled,     // ids [num_states]
    const Tensor& sampled_tokens,   // ids [num_rows, most sampled tokens], written
    const Tensor& context_tokens    // ids [num_tokens], written
) {
    const Argument ii{op, "input_ids", input_ids}, qs{op, "query_start_loc", query_start_loc},
        cl{op, "cu_num_logits", cu_num_logits}, im{op, "idx_mapping", idx_mapping},
        ns{op, "num_sampled", num_sampled}, ls{op, "last_sampled", last_sampled},
        st{op, "sampled_tokens", sampled_tokens}, ct{op, "context_tokens", context_tokens};
    StepTokensArguments a{};
    a.op = op;
    a.rows.idx_mapping = ids_view(im, 0, "[num_rows]");
    const int64_t n = a.rows.count = idx_mapping.size(0);
    a.input_ids = ids_view(ii, 0, "[num_tokens]");
    a.starts = int32_view(qs, n + 1, "[num_rows + 1]").data;
    a.logit_starts = int32_view(cl, n + 1, "[num_rows + 1]").data;
    a.num_sampled = ids_view(ns, n, "[num_rows]");
    a.last_sampled = ids_view(ls, 0, "[num_states]");
    check_ids(st);
    if (sampled_tokens.dim() != 2 || sampled_tokens.size(0) < n || sampled_tokens.size(1) < 1)
        st.must_be("[num_rows, most sampled tokens] with at least ", n, " rows and one column");
    a.sampled = mutable_columns_view(sampled_tokens, n);
    a.sampled.first.length = sampled_tokens.size(0);
    a.context = mutable_ids_view(ct, 0, "[num_tokens]");
    check_placement(op, {ii, qs, cl, im, ns, ls}, {st, ct});
    return a;
}

NWOR_HOST_DEVICE inline Found problem_of_row(const StepTokensArguments& a, int64_t row) {
    if (const Found f = problem_of_padding(a.rows, row)) return f;
    if (!a.rows.is_real(row)) return {};
    if (const Found f = problem_of_starts(a.starts, row, kQueriesDecrease)) return f;
    if (a.starts[row + 1] > a.input_ids.length)
        return {kTokensPastIds, row, a.starts[row + 1], a.input_ids.length};
    if (a.num_sampled[row] > 0 && a.rows.idx_mapping[row] >= a.last_sampled.length)
        return {kStateOutside, row, a.rows.idx_mapping[row], a.last_sampled.length};
    return {};
}

// Write column `column` of row `row` of the sampled tokens: accepted drafts, the target's own token, then -1.
NWOR_HOST_DEVICE inline void sampled_item(const StepTokensArguments& a, int64_t row, int64_t column) {
    int64_t id = -1;
    if (a.rows.is_real(row)) {
        const int64_t accepted = most(a.num_sampled[row], 0) - 1;
        const int64_t first_draft = a.starts[row + 1] - a.num_drafts(row);
        if (column == accepted) {
            const int64_t state = a.rows.idx_mapping[row];
            if (state < a.last_sampled.length) id = a.last_sampled[state];
        } else if (column < least(accepted, a.num_drafts(row)) && first_draft >= 0 &&
                   first_draft + column < a.input_ids.length) {
            id = a.input_ids[first_draft + column];
        }
    }
    a.sampled[column].set(row, id);
}

// Write token t of the context: the step's input, without its drafts.
NWOR_HOST_DEVICE inline void context_item(const StepTokensArguments& a, int64_t t, int64_t num_real) {
    const int64_t row = row_of_token(a.starts, num_real, t);
    const bool is_context =
        row < num_real && t < a.input_ids.length && t < a.starts[row + 1] - a.num_drafts(row);
    a.context.set(t, is_context ? a.input_ids[t] : -1);
}

NWOR_HOST_DEVICE inline void write_item(const StepTokensArguments& a, int64_t i) {
    if (i < a.sampled.first.length * a.sampled.count)
        sampled_item(a, i / a.sampled.count, i % a.sampled.count);
    if (i < a.context.length) context_item(a, i, a.rows.num_real());
}

}  // namespace nwor
