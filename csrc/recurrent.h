// Family recurrent: checks of the arguments, and the plan of one request. The CPU kernels loop over these
// functions, and the CUDA kernels call them in each thread, so both devices behave the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "common/op.h"
#include "common/overlap.h"
#include "common/problems.h"
#include "common/views.h"

namespace nwor {

// Maximum number of rows of a record, and of tokens of a window.
constexpr int64_t kMostRecordRows = 32;

// ---------------------------------------------------------------- plans

// A row of a plan. All zeros: padding.
struct RecurrentRow {
    int32_t source, rows, half, target;  // slot read, rows to reapply, their half, slot written

    NWOR_HOST_DEVICE bool any() const { return target > 0; }
    // The half of the record that the window writes.
    NWOR_HOST_DEVICE int32_t next_half() const { return 1 - half; }
};

struct RecurrentPlan {
    int32_t* data;  // [length, 4]
    int64_t length;

    NWOR_HOST_DEVICE RecurrentRow operator[](int64_t i) const {
        const int32_t* row = data + 4 * i;
        return {row[0], row[1], row[2], row[3]};
    }
    NWOR_HOST_DEVICE void set(int64_t i, const RecurrentRow& row) const {
        int32_t* to = data + 4 * i;
        to[0] = row.source;
        to[1] = row.rows;
        to[2] = row.half;
        to[3] = row.target;
    }
};

// The pending rows of each slot: their number, and their half of the record.
struct RecurrentCursors {
    int32_t* data;  // [length, 2]
    int64_t length;

    NWOR_HOST_DEVICE int32_t rows(int64_t slot) const { return data[2 * slot]; }
    NWOR_HOST_DEVICE int32_t half(int64_t slot) const { return data[2 * slot + 1]; }
    NWOR_HOST_DEVICE void set(int64_t slot, int32_t rows, int32_t half) const {
        data[2 * slot] = rows;
        data[2 * slot + 1] = half;
    }
};

inline RecurrentPlan recurrent_plan_view(const Argument& a, int64_t length) {
    a.dtype(ScalarType::Int);
    if (a.tensor.dim() != 2 || a.tensor.size(0) < length || a.tensor.size(1) != 4)
        a.must_be("[num_requests, 4] with at least ", length, " rows");
    a.contiguous();
    if (a.tensor.size(0) > INT32_MAX) a.must_be("of fewer than 2^31 rows");
    return {static_cast<int32_t*>(a.tensor.data_ptr()), a.tensor.size(0)};
}

inline RecurrentCursors cursors_view(const Argument& a) {
    a.dtype(ScalarType::Int);
    if (a.tensor.dim() != 2 || a.tensor.size(1) != 2) a.must_be("[num_slots, 2]");
    a.contiguous();
    return {static_cast<int32_t*>(a.tensor.data_ptr()), least(a.tensor.size(0), INT32_MAX)};
}

// ---------------------------------------------------------------- plan_recurrent_window

struct RecurrentWindowArguments {
    const char* op;
    RecurrentPlan plan;  // at least `num_requests` rows
    RecurrentCursors cursors;
    int64_t* window;
    int64_t num_requests, record_rows;
    Ids state_slots;
    const int32_t *query_start_loc, *num_accepted;
    const bool* is_window;  // null: all requests have windows
    int64_t* num_refused;   // null: refused requests are not counted
};

inline RecurrentWindowArguments check_recurrent_window(
    const char* op, const Tensor& plan, const Tensor& cursors, const Tensor& window,
    const Tensor& state_slots, const Tensor& query_start_loc, const Tensor& num_accepted, int64_t record_rows,
    const std::optional<Tensor>& is_window, const std::optional<Tensor>& num_refused) {
    const Argument to{op, "plan", plan}, cur{op, "cursors", cursors}, number{op, "window", window},
        slots{op, "state_slots", state_slots}, qsl{op, "query_start_loc", query_start_loc},
        accepted{op, "num_accepted", num_accepted};
    RecurrentWindowArguments a{};
    a.op = op;
    a.state_slots = ids_view(slots, 0, "[num_requests]");
    a.num_requests = a.state_slots.length;
    a.plan = recurrent_plan_view(to, a.num_requests);
    a.cursors = cursors_view(cur);
    number.vector(ScalarType::Long, 1, "[1]");
    a.window = static_cast<int64_t*>(window.data_ptr());
    a.query_start_loc = int32_view(qsl, a.num_requests + 1, "[num_requests + 1]").data;
    a.num_accepted = int32_view(accepted, a.num_requests, "[num_requests]").data;
    check_positive(op, "record_rows", record_rows);
    if (record_rows > kMostRecordRows)
        fail(op, "record_rows must be at most ", kMostRecordRows, ", got ", record_rows);
    a.record_rows = record_rows;
    std::vector<Argument> inputs{slots, qsl, accepted};
    if (is_window.has_value()) {
        inputs.push_back({op, "is_window", *is_window});
        a.is_window = bool_view(inputs.back(), a.num_requests, "[num_requests]").data;
    }
    std::vector<Argument> outputs{to, cur, number};
    if (num_refused.has_value()) {
        outputs.push_back({op, "num_refused", *num_refused});
        outputs.back().vector(ScalarType::Long, 1, "[1]");
        a.num_refused = static_cast<int64_t*>(num_refused->data_ptr());
    }
    check_placement(op, inputs, outputs);
    return a;
}

// The plan and the new cursor of one request. All requests are read before anything is stored.
struct RecurrentWindowStep {
    Found found;       // with a problem, the row is zero and the cursor stays
    RecurrentRow row;  // row of the plan
    bool sets_cursor;
    int32_t slot, cursor_rows, cursor_half;
};

NWOR_HOST_DEVICE inline RecurrentWindowStep window_step_of(const RecurrentWindowArguments& a, int64_t q) {
    RecurrentWindowStep step{};
    const int64_t begin = a.query_start_loc[q], end = a.query_start_loc[q + 1], slot = a.state_slots[q];
    if (begin < 0 || end < begin) {
        step.found = {kQueriesDecrease, q, end, begin};
        return step;
    }
    if (slot <= 0 || end == begin) return step;
    if (slot >= a.cursors.length) {
        step.found = {kStateSlots, q, slot, a.cursors.length};
        return step;
    }
    const int32_t pending = a.cursors.rows(slot), half = a.cursors.half(slot);
    const bool opens = a.is_window == nullptr || a.is_window[q];
    if (pending < 0 || pending > a.record_rows)
        step.found = {kCursorRows, slot, pending, a.record_rows};
    else if (half != 0 && half != 1)
        step.found = {kCursorHalf, slot, half, 1};
    else if (opens && end - begin > a.record_rows)
        step.found = {kWindowPastRecord, q, end - begin, a.record_rows};
    else if (opens && pending > 0 && (a.num_accepted[q] < 1 || a.num_accepted[q] > pending))
        step.found = {kNumAccepted, q, a.num_accepted[q], pending};
    if (step.found) return step;
    step.slot = static_cast<int32_t>(slot);
    step.sets_cursor = true;
    step.cursor_half = half;
    if (!opens) return step;
    step.row = {step.slot, pending > 0 ? a.num_accepted[q] : 0, half, step.slot};
    step.cursor_rows = static_cast<int32_t>(end - begin);
    step.cursor_half = 1 - half;
    return step;
}

// ---------------------------------------------------------------- plan_recurrent_fold

struct RecurrentFoldPlanArguments {
    const char* op;
    RecurrentPlan plan;  // at least `num_entries` rows
    RecurrentCursors cursors;
    int64_t num_entries;
    Ids source_slots, target_slots;
    const int32_t* num_rows;
    bool keep_source;
};

inline RecurrentFoldPlanArguments check_recurrent_fold_plan(const char* op, const Tensor& plan,
                                                            const Tensor& cursors, const Tensor& source_slots,
                                                            const Tensor& target_slots,
                                                            const Tensor& num_rows, bool keep_source) {
    const Argument to{op, "plan", plan}, cur{op, "cursors", cursors}, from{op, "source_slots", source_slots},
        target{op, "target_slots", target_slots}, rows{op, "num_rows", num_rows};
    RecurrentFoldPlanArguments a{};
    a.op = op;
    a.source_slots = ids_view(from, 0, "[num_entries]");
    a.num_entries = a.source_slots.length;
    a.plan = recurrent_plan_view(to, a.num_entries);
    a.cursors = cursors_view(cur);
    a.target_slots = ids_view(target, a.num_entries, "[num_entries]");
    a.num_rows = int32_view(rows, a.num_entries, "[num_entries]").data;
    a.keep_source = keep_source;
    check_placement(op, {from, target, rows}, {to, cur});
    return a;
}

// The plan of one entry, and the slots where nothing is pending afterwards (0 = none). All entries are read
// before anything is stored.
struct RecurrentFoldStep {
    Found found;  // with a problem, the row is zero and the cursors stay
    RecurrentRow row;
    int32_t cleared_target, cleared_source;
};

NWOR_HOST_DEVICE inline RecurrentFoldStep fold_step_of(const RecurrentFoldPlanArguments& a, int64_t entry) {
    RecurrentFoldStep step{};
    const int64_t source = a.source_slots[entry], target = a.target_slots[entry];
    if (source <= 0 || target <= 0) return step;
    if (source >= a.cursors.length) {
        step.found = {kFoldSourceSlots, entry, source, a.cursors.length};
        return step;
    }
    if (target >= a.cursors.length) {
        step.found = {kFoldTargetSlots, entry, target, a.cursors.length};
        return step;
    }
    const int32_t pending = a.cursors.rows(source), half = a.cursors.half(source);
    if (pending < 0 || pending > kMostRecordRows)
        step.found = {kCursorRows, source, pending, kMostRecordRows};
    else if (half != 0 && half != 1)
        step.found = {kCursorHalf, source, half, 1};
    if (step.found) return step;
    const int32_t rows = static_cast<int32_t>(most(least(a.num_rows[entry], pending), 0));
    if (rows > 0 || source != target)
        step.row = {static_cast<int32_t>(source), rows, half, static_cast<int32_t>(target)};
    step.cleared_target = static_cast<int32_t>(target);
    if (source != target && !a.keep_source) step.cleared_source = static_cast<int32_t>(source);
    return step;
}

// ---------------------------------------------------------------- states and records

// States [S, V, dv, dk] of one layer, contiguous within a slot. Here and below, strides are in elements.
struct RecurrentStates {
    char* data;
    bool is_bfloat16;  // false: float32
    int64_t slot_stride;
    int64_t num_slots, num_value_heads, value_width, key_width;

    NWOR_HOST_DEVICE int64_t row_offset(int64_t slot, int64_t value_head, int64_t value) const {
        return slot * slot_stride + (value_head * value_width + value) * key_width;
    }
};

// The record of one layer, contiguous within a slot: keys [S, 2, W, H, dk], norms [S, 2, W, H], decays
// [S, 2, W, V] or [S, 2, W, V, dk], values [S, W, V, dv].
struct RecurrentRecord {
    char* keys;
    float *norms, *decays, *values;
    ScalarType key_dtype;
    int64_t keys_stride, norms_stride, decays_stride, values_stride;
    int64_t rows, num_key_heads, num_value_heads, key_width, value_width;
    bool per_channel;

    // Each function returns the offset of the first element of a head's row.
    NWOR_HOST_DEVICE int64_t norm_offset(int64_t slot, int64_t half, int64_t row, int64_t key_head) const {
        return slot * norms_stride + (half * rows + row) * num_key_heads + key_head;
    }
    NWOR_HOST_DEVICE int64_t key_offset(int64_t slot, int64_t half, int64_t row, int64_t key_head) const {
        return slot * keys_stride + ((half * rows + row) * num_key_heads + key_head) * key_width;
    }
    NWOR_HOST_DEVICE int64_t decay_offset(int64_t slot, int64_t half, int64_t row, int64_t value_head) const {
        return slot * decays_stride +
               ((half * rows + row) * num_value_heads + value_head) * (per_channel ? key_width : 1);
    }
    NWOR_HOST_DEVICE int64_t value_offset(int64_t slot, int64_t row, int64_t value_head) const {
        return slot * values_stride + (row * num_value_heads + value_head) * value_width;
    }
};

// Checks that each slot is contiguous, and that slots do not overlap.
inline void check_contiguous_within_slot(const Argument& a) {
    const auto sizes = a.tensor.sizes(), strides = a.tensor.strides();
    int64_t expected = 1;
    for (size_t i = sizes.size() - 1; i > 0; --i) {
        if (sizes[i] != 1 && strides[i] != expected) a.must_be("contiguous within its first dimension");
        expected *= sizes[i];
    }
    if (sizes[0] > 1 && strides[0] < expected) a.must_be("of slots at least ", expected, " elements apart");
}

inline void check_shape(const Argument& a, std::initializer_list<int64_t> shape) {
    const auto sizes = a.tensor.sizes();
    if (std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) return;
    std::string text;
    for (const int64_t size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
    a.must_be(text, "]");
}

inline void check_widths(const Argument& a, int64_t value_width, int64_t key_width) {
    if (value_width != 64 && value_width != 128 && value_width != 192 && value_width != 256)
        a.must_be("of value_width 64, 128, 192 or 256");
    if (key_width != 64 && key_width != 96 && key_width != 128 && key_width != 256)
        a.must_be("of key_width 64, 96, 128 or 256");
}

inline RecurrentStates states_view(const Argument& a) {
    const Tensor& t = a.tensor;
    if (t.scalar_type() != ScalarType::Float && t.scalar_type() != ScalarType::BFloat16)
        a.must_have_dtype("torch.float32 or torch.bfloat16");
    if (t.dim() != 4) a.must_be("[num_slots, num_value_heads, value_width, key_width]");
    check_widths(a, t.size(2), t.size(3));
    if (t.size(1) < 1) a.must_be("of at least one head");
    if (t.size(0) > INT32_MAX) a.must_be("of fewer than 2^31 slots");
    check_contiguous_within_slot(a);
    return {static_cast<char*>(t.data_ptr()),
            t.scalar_type() == ScalarType::BFloat16,
            t.stride(0),
            t.size(0),
            t.size(1),
            t.size(2),
            t.size(3)};
}

// Checks a tensor with the dtype of a layer's inputs.
inline void check_inputs(const Argument& a) {
    check_floats(a);
    if (a.tensor.is_cuda() && a.tensor.scalar_type() == ScalarType::Float)
        a.must_have_dtype("torch.float16 or torch.bfloat16 on CUDA");
}

struct RecordTensors {
    Argument keys, norms, decays, values;
};

inline RecurrentRecord record_view(const RecordTensors& t, const RecurrentStates& states) {
    const int64_t slots = states.num_slots, heads = states.num_value_heads;
    RecurrentRecord r{};
    const Tensor& keys = t.keys.tensor;
    check_inputs(t.keys);
    if (keys.dim() != 5 || keys.size(0) != slots || keys.size(1) != 2 || keys.size(4) != states.key_width)
        t.keys.must_be("[", slots, ", 2, record_rows, num_key_heads, ", states.key_width, "]");
    r.rows = keys.size(2);
    r.num_key_heads = keys.size(3);
    r.num_value_heads = heads;
    r.key_width = states.key_width;
    r.value_width = states.value_width;
    if (r.rows < 1 || r.rows > kMostRecordRows) t.keys.must_be("of 1 to ", kMostRecordRows, " rows");
    if (r.num_key_heads < 1 || heads % r.num_key_heads != 0)
        t.keys.must_be("of a number of heads that divides the ", heads, " of the state");
    for (const Argument& a : {t.norms, t.decays, t.values}) a.dtype(ScalarType::Float);
    check_shape(t.norms, {slots, 2, r.rows, r.num_key_heads});
    r.per_channel = t.decays.tensor.dim() == 5;
    if (r.per_channel)
        check_shape(t.decays, {slots, 2, r.rows, heads, r.key_width});
    else
        check_shape(t.decays, {slots, 2, r.rows, heads});
    check_shape(t.values, {slots, r.rows, heads, r.value_width});
    for (const Argument& a : {t.keys, t.norms, t.decays, t.values}) check_contiguous_within_slot(a);
    r.key_dtype = keys.scalar_type();
    r.keys = static_cast<char*>(keys.data_ptr());
    r.norms = static_cast<float*>(t.norms.tensor.data_ptr());
    r.decays = static_cast<float*>(t.decays.tensor.data_ptr());
    r.values = static_cast<float*>(t.values.tensor.data_ptr());
    r.keys_stride = keys.stride(0);
    r.norms_stride = t.norms.tensor.stride(0);
    r.decays_stride = t.decays.tensor.stride(0);
    r.values_stride = t.values.tensor.stride(0);
    return r;
}

// Returns the problem of a row of a plan that does not fit the states or the record.
NWOR_HOST_DEVICE inline Found problem_of_plan(const RecurrentRow& row, int64_t i, int64_t num_slots,
                                              int64_t record_rows) {
    if (!row.any()) return {};
    if (row.target >= num_slots) return {kPlanSlots, i, row.target, num_slots};
    if (row.source < 1 || row.source >= num_slots) return {kPlanSlots, i, row.source, num_slots};
    if (row.rows < 0 || row.rows > record_rows) return {kPlanRows, i, row.rows, record_rows};
    if (row.half != 0 && row.half != 1) return {kPlanHalf, i, row.half, 1};
    return {};
}

// ---------------------------------------------------------------- gated_delta_verify

// Rows [T, heads, width], contiguous along the width. Strides are in elements.
struct HeadsView {
    char* data;
    int64_t token_stride, head_stride;

    NWOR_HOST_DEVICE int64_t offset(int64_t token, int64_t head) const {
        return token * token_stride + head * head_stride;
    }
};

// Numbers whose dtype is checked at each access. Strides are in elements.
struct Floats {
    const void* data;
    ScalarType dtype;
    int64_t strides[3];

    NWOR_HOST_DEVICE float at(int64_t i, int64_t j = 0, int64_t k = 0) const {
        const int64_t place = i * strides[0] + j * strides[1] + k * strides[2];
        if (dtype == ScalarType::Float) return static_cast<const float*>(data)[place];
        if (dtype == ScalarType::Half) return static_cast<float>(static_cast<const Half*>(data)[place]);
        return static_cast<float>(static_cast<const BFloat16*>(data)[place]);
    }
};

enum class GateActivation { kSilu, kSigmoid };

// How a decay is computed; see gated_delta_verify in nwor_ops/ops/recurrent.py.
enum class DecayForm {
    kSoftplus,
    kBounded,  // with gate_lower_bound
    kGiven     // without A_log and dt_bias: `a` holds logarithms of decays, and `b` holds betas
};

struct VerifyArguments {
    const char* op;
    RecurrentStates states;
    RecurrentRecord record;
    ScalarType dtype;  // of out, q, k, v, gate and the record's keys
    int64_t num_tokens, num_requests;
    HeadsView q, k, v, out;
    HeadsView gate;  // gate after the norm; data is null without a gate
    DecayForm decay_form;
    Floats a, b;
    Floats A_log, dt_bias;  // with kGiven any readable memory: a kernel may load from it, but uses no value
    Floats norm_weight;
    float scale, softplus_beta, softplus_threshold, gate_lower_bound, norm_eps, beta_factor;
    bool use_qk_l2norm;
    GateActivation gate_activation;
    RecurrentPlan plan;              // at least `num_requests` rows
    const int32_t* query_start_loc;  // [num_requests + 1]
    const int64_t* window;
    int64_t* layer_window;
    char* all_states;  // null, or [T, V, dv, dk] of the states' dtype
    int64_t all_states_stride;

    NWOR_HOST_DEVICE bool has_norm() const { return gate.data != nullptr; }
};

inline HeadsView heads_view(const Argument& a, ScalarType dtype, int64_t tokens, bool more, int64_t heads,
                            int64_t width) {
    const Tensor& t = a.tensor;
    a.dtype(dtype);
    const auto sizes = t.sizes();
    if (sizes.size() != 3 || (more ? sizes[0] < tokens : sizes[0] != tokens) || sizes[1] != heads ||
        sizes[2] != width)
        a.must_be("[", more ? ">= " : "", tokens, ", ", heads, ", ", width, "]");
    if (t.stride(2) != 1) a.must_be("contiguous along its last dimension");
    return {static_cast<char*>(t.data_ptr()), t.stride(0), t.stride(1)};
}

inline Floats floats_view(const Argument& a, std::initializer_list<int64_t> shape) {
    check_floats(a);
    check_shape(a, shape);
    Floats floats{a.tensor.data_ptr(), a.tensor.scalar_type(), {0, 0, 0}};
    for (int64_t i = 0; i < a.tensor.dim(); ++i) floats.strides[i] = a.tensor.stride(i);
    return floats;
}

inline GateActivation gate_activation_of(const char* op, const std::string& name) {
    if (name == "silu") return GateActivation::kSilu;
    if (name != "sigmoid") fail(op, "gate_activation must be silu or sigmoid, got ", name);
    return GateActivation::kSigmoid;
}

inline VerifyArguments check_verify(
    const char* op, const Tensor& out, const Tensor& state, const Tensor& record_keys,
    const Tensor& record_norms, const Tensor& record_decays, const Tensor& record_values,
    const Tensor& layer_window, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
    const Tensor& b, const std::optional<Tensor>& A_log, const std::optional<Tensor>& dt_bias,
    const Tensor& plan, const Tensor& window, const Tensor& query_start_loc, double scale,
    double softplus_beta, double softplus_threshold, bool use_qk_l2norm, const std::optional<Tensor>& gate,
    const std::optional<Tensor>& norm_weight, double norm_eps, const std::string& gate_activation,
    const std::optional<Tensor>& all_states, bool allow_neg_eigval,
    const std::optional<double>& gate_lower_bound) {
    const Argument to{op, "out", out}, states{op, "state", state}, keys{op, "record_keys", record_keys},
        norms{op, "record_norms", record_norms}, decays{op, "record_decays", record_decays},
        values{op, "record_values", record_values}, ran{op, "layer_window", layer_window}, qs{op, "q", q},
        ks{op, "k", k}, vs{op, "v", v}, as{op, "a", a}, bs{op, "b", b}, rows{op, "plan", plan},
        number{op, "window", window}, qsl{op, "query_start_loc", query_start_loc};
    VerifyArguments c{};
    c.op = op;
    c.states = states_view(states);
    check_inputs(to);
    c.record = record_view({keys, norms, decays, values}, c.states);
    const int64_t heads = c.states.num_value_heads, dk = c.states.key_width, dv = c.states.value_width;
    c.dtype = out.scalar_type();
    if (q.dim() != 3) qs.must_be("[num_tokens, num_key_heads, key_width]");
    c.num_tokens = q.size(0);
    c.q = heads_view(qs, c.dtype, c.num_tokens, false, c.record.num_key_heads, dk);
    c.k = heads_view(ks, c.dtype, c.num_tokens, false, c.record.num_key_heads, dk);
    c.v = heads_view(vs, c.dtype, c.num_tokens, false, heads, dv);
    c.out = heads_view(to, c.dtype, c.num_tokens, true, heads, dv);
    keys.dtype(c.dtype);
    c.a = c.record.per_channel ? floats_view(as, {c.num_tokens, heads, dk})
                               : floats_view(as, {c.num_tokens, heads});
    c.b = floats_view(bs, {c.num_tokens, heads});
    std::vector<Argument> inputs{qs, ks, vs, as, bs, rows, number, qsl};
    if (A_log.has_value() != dt_bias.has_value()) fail(op, "A_log and dt_bias must be given together");
    if (A_log.has_value()) {
        inputs.push_back({op, "A_log", *A_log});
        c.A_log = floats_view(inputs.back(), {heads});
        inputs.push_back({op, "dt_bias", *dt_bias});
        c.dt_bias = c.record.per_channel ? floats_view(inputs.back(), {heads, dk})
                                         : floats_view(inputs.back(), {heads});
    } else {
        if (gate_lower_bound.has_value()) fail(op, "gate_lower_bound must be None without A_log and dt_bias");
        if (allow_neg_eigval) fail(op, "allow_neg_eigval must be False without A_log and dt_bias");
        c.decay_form = DecayForm::kGiven;
        c.A_log = c.dt_bias = {b.data_ptr(), b.scalar_type(), {0, 0, 0}};
    }
    if (gate_lower_bound.has_value()) {
        c.decay_form = DecayForm::kBounded;
        c.gate_lower_bound = static_cast<float>(*gate_lower_bound);
        if (!(c.gate_lower_bound < 0) || std::isinf(c.gate_lower_bound))
            fail(op, "gate_lower_bound must be negative and finite in float32, got ", *gate_lower_bound);
    }
    std::vector<Argument> outputs{to, states, keys, norms, decays, values, ran};
    if (gate.has_value() != norm_weight.has_value()) fail(op, "gate and norm_weight must be given together");
    if (gate.has_value()) {
        inputs.push_back({op, "gate", *gate});
        c.gate = heads_view(inputs.back(), c.dtype, c.num_tokens, true, heads, dv);
        inputs.push_back({op, "norm_weight", *norm_weight});
        c.norm_weight = floats_view(inputs.back(), {dv});
    }
    c.gate_activation = gate_activation_of(op, gate_activation);
    if (!(softplus_beta > 0)) fail(op, "softplus_beta must be positive, got ", softplus_beta);
    c.scale = static_cast<float>(scale);
    c.softplus_beta = static_cast<float>(softplus_beta);
    c.softplus_threshold = static_cast<float>(softplus_threshold);
    c.norm_eps = static_cast<float>(norm_eps);
    c.beta_factor = allow_neg_eigval ? 2.0f : 1.0f;
    c.use_qk_l2norm = use_qk_l2norm;
    c.query_start_loc = int32_view(qsl, 1, "[num_requests + 1]").data;
    c.num_requests = query_start_loc.size(0) - 1;
    c.plan = recurrent_plan_view(rows, c.num_requests);
    number.vector(ScalarType::Long, 1, "[1]");
    ran.vector(ScalarType::Long, 1, "[1]");
    c.window = static_cast<const int64_t*>(window.data_ptr());
    c.layer_window = static_cast<int64_t*>(layer_window.data_ptr());
    if (all_states.has_value()) {
        outputs.push_back({op, "all_states", *all_states});
        const Argument& all = outputs.back();
        all.dtype(state.scalar_type());
        if (all_states->dim() != 4 || all_states->size(0) < c.num_tokens || all_states->size(1) != heads ||
            all_states->size(2) != dv || all_states->size(3) != dk)
            all.must_be("[>= ", c.num_tokens, ", ", heads, ", ", dv, ", ", dk, "]");
        check_contiguous_within_slot(all);
        c.all_states = static_cast<char*>(all_states->data_ptr());
        c.all_states_stride = all_states->stride(0);
    }
    check_placement(op, inputs, outputs);
    return c;
}

// Returns the problem of request q, whose tokens are begin to end. They lie inside the tensors only if
// there is no problem.
NWOR_HOST_DEVICE inline Found problem_of_request(const VerifyArguments& c, int64_t q, int64_t begin,
                                                 int64_t end, const RecurrentRow& row) {
    if (begin < 0 || end < begin) return {kQueriesDecrease, q, end, begin};
    if (end > c.num_tokens) return {kTokensPastQueries, q, end, c.num_tokens};
    if (const Found found = problem_of_plan(row, q, c.states.num_slots, c.record.rows)) return found;
    if (row.any() && end - begin > c.record.rows) return {kWindowPastRecord, q, end - begin, c.record.rows};
    return {};
}

// ---------------------------------------------------------------- gated_delta_fold

// Addresses of one layer's tensors. Shapes and strides are the same for all layers.
struct FoldLayer {
    char* states;
    const char* keys;
    const float *norms, *decays, *values;
    int64_t* window;  // the last window that the layer ran in, or that it was folded for
};

struct FoldArguments {
    const char* op;
    RecurrentStates states;  // of the first layer
    RecurrentRecord record;  // of the first layer
    std::vector<FoldLayer> layers;
    RecurrentPlan plan;
    const int64_t* window;  // null: fold all layers and mark none
};

inline void check_same_layout(const Argument& a, const char* list, const Tensor& first) {
    a.dtype(first.scalar_type());
    a.same_device(first);
    bool same = a.tensor.dim() == first.dim() && a.tensor.stride(0) == first.stride(0);
    for (int64_t i = 0; same && i < first.dim(); ++i) same = a.tensor.size(i) == first.size(i);
    if (!same) a.must_be("of the shape and strides of ", list, "[0], ", describe(first));
}

// The number of each layer is written, so it must not share memory with another one or with an input.
inline void check_marks(const char* op, const std::vector<Tensor>& marks,
                        std::initializer_list<Argument> inputs) {
    std::vector<Placed> placed;
    placed.reserve(marks.size());
    for (const Tensor& mark : marks) {
        placed.emplace_back("layer_windows", mark);
        for (size_t other = 0; other + 1 < placed.size(); ++other)
            must_not_overlap(op, placed.back(), placed[other]);
        for (const Argument& input : inputs)
            must_not_overlap(op, placed.back(), Placed(input.name, input.tensor));
    }
}

inline FoldArguments check_fold(const char* op, const std::vector<Tensor>& states,
                                const std::vector<Tensor>& record_keys,
                                const std::vector<Tensor>& record_norms,
                                const std::vector<Tensor>& record_decays,
                                const std::vector<Tensor>& record_values,
                                const std::vector<Tensor>& layer_windows, const Tensor& plan,
                                const std::optional<Tensor>& window) {
    struct List {
        const char* name;
        const std::vector<Tensor>& tensors;
    };
    const List lists[] = {{"states", states},
                          {"record_keys", record_keys},
                          {"record_norms", record_norms},
                          {"record_decays", record_decays},
                          {"record_values", record_values},
                          {"layer_windows", layer_windows}};
    constexpr size_t kLists = 6;
    if (states.empty()) fail(op, "states must hold at least one layer, got none");
    for (const List& list : lists)
        if (list.tensors.size() != states.size())
            fail(op, list.name, " must hold a tensor for each of the ", states.size(), " states, got ",
                 list.tensors.size());
    FoldArguments f{};
    f.op = op;
    const Tensor& first = states[0];
    const Argument rows{op, "plan", plan};
    f.plan = recurrent_plan_view(rows, 0);
    rows.same_device(first);
    if (window.has_value()) {
        const Argument number{op, "window", *window};
        number.vector(ScalarType::Long, 1, "[1]");
        number.same_device(first);
        f.window = static_cast<const int64_t*>(window->data_ptr());
    }
    std::vector<Placed> placed;  // states
    placed.reserve(states.size());
    for (size_t layer = 0; layer < states.size(); ++layer) {
        std::string names[kLists];
        for (size_t i = 0; i < kLists; ++i)
            names[i] = std::string(lists[i].name) + "[" + std::to_string(layer) + "]";
        const auto argument = [&](size_t i) {
            return Argument{op, names[i].c_str(), lists[i].tensors[layer]};
        };
        const RecurrentStates view = states_view(argument(0));
        const RecurrentRecord record =
            record_view({argument(1), argument(2), argument(3), argument(4)}, view);
        argument(5).vector(ScalarType::Long, 1, "[1]");
        if (layer == 0) {
            f.states = view;
            f.record = record;
        }
        for (size_t i = 0; i < kLists; ++i) {
            argument(i).same_device(first);
            if (i < kLists - 1) check_same_layout(argument(i), lists[i].name, lists[i].tensors[0]);
        }
        // A state must not share memory with its record, or with the state of another layer.
        placed.emplace_back("states", states[layer]);
        for (size_t other = 0; other < layer; ++other) must_not_overlap(op, placed[layer], placed[other]);
        for (size_t i = 1; i < kLists; ++i)
            must_not_overlap(op, placed[layer], Placed(lists[i].name, lists[i].tensors[layer]));
        must_not_overlap(op, placed[layer], rows);
        if (window.has_value()) must_not_overlap(op, placed[layer], Placed("window", *window));
        f.layers.push_back({view.data, record.keys, record.norms, record.decays, record.values,
                            static_cast<int64_t*>(layer_windows[layer].data_ptr())});
    }
    if (window.has_value()) check_marks(op, lists[5].tensors, {rows, {op, "window", *window}});
    return f;
}

// ---------------------------------------------------------------- the ops

template <class Device>
void register_recurrent(Library& m) {
    NWOR_OP(m, plan_recurrent_window, check_recurrent_window);
    NWOR_OP(m, plan_recurrent_fold, check_recurrent_fold_plan);
    NWOR_OP(m, gated_delta_verify, check_verify);
    NWOR_OP(m, gated_delta_fold, check_fold);
}

}  // namespace nwor
