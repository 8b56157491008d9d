// Family recurrent: the arguments of gated_delta_verify and their checks.
#pragma once

#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "recurrent_states.h"

namespace nwor {

// Rows of heads. Strides are in elements.
struct HeadsView {
    char* data;  // [T, heads, width], contiguous along the width
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
    ScalarType dtype;      // of out, q, k, v, gate and the record's keys
    int64_t num_tokens;    // T
    int64_t num_requests;  // Q
    HeadsView q, k;        // [T, H, dk]
    HeadsView v, out;      // [T, HV, dv]
    HeadsView gate;        // [T, HV, dv], applied after the norm; data is null without a gate
    DecayForm decay_form;
    Floats a;  // [T, HV] or [T, HV, dk]
    Floats b;  // [T, HV]
    // With kGiven A_log and dt_bias are any readable memory: a kernel may load from it, but uses no value.
    Floats A_log;        // [HV]
    Floats dt_bias;      // [HV] or [HV, dk]
    Floats norm_weight;  // [dv]
    float scale, softplus_beta, softplus_threshold, gate_lower_bound, norm_eps, beta_factor;
    bool use_qk_l2norm;
    uint8_t chunk;  // C; 0: each token has its own state
    GateActivation gate_activation;
    RecurrentPlan plan;              // [>= Q, 4]
    const int32_t* query_start_loc;  // [Q + 1]
    const int64_t* window_id;        // [1]
    int64_t* layer_window;           // [1]
    char* all_states;                // null, or [T, HV, dv, dk] of the states' dtype
    int64_t all_states_stride;       // between tokens

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

constexpr float kTiny = std::numeric_limits<float>::denorm_min();  // smallest positive float
// The softplus computes exp of numbers up to the threshold. From 88.8 on exp is infinite in float32, and the
// decay would be 0.
constexpr float kMostSoftplusThreshold = 88.0f;

inline VerifyArguments check_verify(
    const char* op,                            //
    const Tensor& out,                         // [>= T, HV, dv]
    const Tensor& state,                       // [S, HV, dv, dk], float32 or bfloat16
    const Tensor& record_keys,                 // [S, 2, W, H, dk] (chunk: [S, 1, R + W, H, dk]), dtype of out
    const Tensor& record_norms,                // [S, 2, W, H], float32
    const Tensor& record_decays,               // [S, 2, W, HV] or [S, 2, W, HV, dk], float32
    const Tensor& record_updates,              // [S, W, HV, dv], float32
    const Tensor& layer_window,                // [1], int64
    const Tensor& q,                           // [T, H, dk], dtype of out
    const Tensor& k,                           // [T, H, dk], dtype of out
    const Tensor& v,                           // [T, HV, dv], dtype of out
    const Tensor& a,                           // [T, HV] or [T, HV, dk]
    const Tensor& b,                           // [T, HV]
    const std::optional<Tensor>& A_log,        // [HV]
    const std::optional<Tensor>& dt_bias,      // [HV] or [HV, dk]
    const Tensor& plan,                        // [>= Q, 4], int32
    const Tensor& window_id,                   // [1], int64
    const Tensor& query_start_loc,             // [Q + 1], int32
    double scale,                              //
    double softplus_beta,                      //
    double softplus_threshold,                 //
    bool use_qk_l2norm,                        //
    const std::optional<Tensor>& gate,         // [>= T, HV, dv], dtype of out
    const std::optional<Tensor>& norm_weight,  // [dv]
    double norm_eps,                           //
    const std::string& gate_activation,        // "silu" or "sigmoid"
    const std::optional<Tensor>& all_states,   // [>= T, HV, dv, dk], dtype of state
    bool allow_neg_eigval,                     //
    const std::optional<double>& gate_lower_bound,  //
    int64_t chunk)                                  // C
{
    // Names for the messages
    const Argument to{op, "out", out}, states{op, "state", state}, keys{op, "record_keys", record_keys},
        norms{op, "record_norms", record_norms}, decays{op, "record_decays", record_decays},
        updates{op, "record_updates", record_updates}, ran{op, "layer_window", layer_window}, qs{op, "q", q},
        ks{op, "k", k}, vs{op, "v", v}, as{op, "a", a}, bs{op, "b", b}, rows{op, "plan", plan},
        number{op, "window_id", window_id}, qsl{op, "query_start_loc", query_start_loc};

    // State and record
    VerifyArguments c{};
    c.op = op;
    c.states = states_view(states);
    check_inputs(to);
    check_chunk(op, chunk);
    c.record = record_view({keys, norms, decays, updates}, c.states, chunk);
    if (chunk > 0) check_chunk_layout(states, keys, decays);
    c.chunk = static_cast<uint8_t>(chunk);
    const int64_t heads = c.states.num_value_heads, dk = c.states.key_width, dv = c.states.value_width;

    // Inputs and outputs of the tokens
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

    // Decays and betas: from weights, or given
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
        c.gate_lower_bound = float_option(op, "gate_lower_bound", *gate_lower_bound, "negative and ",
                                          std::numeric_limits<float>::lowest(), -kTiny);
    }

    // Norm and gate of the outputs
    std::vector<Argument> outputs{to, states, keys, norms, decays, updates, ran};
    if (gate.has_value() != norm_weight.has_value()) fail(op, "gate and norm_weight must be given together");
    if (gate.has_value()) {
        inputs.push_back({op, "gate", *gate});
        c.gate = heads_view(inputs.back(), c.dtype, c.num_tokens, true, heads, dv);
        inputs.push_back({op, "norm_weight", *norm_weight});
        c.norm_weight = floats_view(inputs.back(), {dv});
    }
    c.gate_activation = gate_activation_of(op, gate_activation);

    // Numbers
    c.scale = float_option(op, "scale", scale);
    c.softplus_beta = float_option(op, "softplus_beta", softplus_beta, "positive and ", kTiny);
    c.softplus_threshold = float_option(op, "softplus_threshold", softplus_threshold, "at most 88 and ",
                                        std::numeric_limits<float>::lowest(), kMostSoftplusThreshold);
    c.norm_eps = float_option(op, "norm_eps", norm_eps, "0 or more and ", 0.0f);
    c.beta_factor = allow_neg_eigval ? 2.0f : 1.0f;
    c.use_qk_l2norm = use_qk_l2norm;

    // The plan of the window
    c.query_start_loc = int32_view(qsl, 1, "[num_requests + 1]").data;
    c.num_requests = query_start_loc.size(0) - 1;
    c.plan = recurrent_plan_view(rows, c.num_requests);
    number.vector(ScalarType::Long, 1, "[1]");
    ran.vector(ScalarType::Long, 1, "[1]");
    c.window_id = static_cast<const int64_t*>(window_id.data_ptr());
    c.layer_window = static_cast<int64_t*>(layer_window.data_ptr());

    // States after each token
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

    // Devices and overlaps
    check_placement(op, inputs, outputs);
    return c;
}

// Returns the problem of request q, whose tokens are begin to end. They lie inside the tensors only if there
// is no problem.
NWOR_HOST_DEVICE inline Found problem_of_request(const VerifyArguments& c, int64_t q, int64_t begin,
                                                 int64_t end, const RecurrentEntry& entry) {
    if (begin < 0 || end < begin) return {kQueriesDecrease, q, end, begin};
    if (end > c.num_tokens) return {kTokensPastQueries, q, end, c.num_tokens};
    if (const Found found = problem_of_plan(entry, q, c.states.num_slots, c.record)) return found;
    if (c.record.has_window(entry) && end - begin > c.record.window_rows)
        return {kWindowPastRecord, q, end - begin, c.record.window_rows};
    return {};
}

// Returns the problem of an entry in the chunk form. A window stores only a whole chunk, in place.
NWOR_HOST_DEVICE inline Found problem_of_chunk(const RecurrentEntry& entry, int64_t i, int64_t chunk) {
    if (!entry.any()) return {};
    if (entry.stores() && entry.target != entry.source)
        return {kPlanChunkTarget, i, entry.target, entry.source};
    if (entry.stores() && entry.rows < chunk) return {kPlanChunkStore, i, entry.rows, chunk};
    if (!entry.stores() && entry.rows >= chunk) return {kPlanChunkRows, i, entry.rows, chunk};
    return {};
}

}  // namespace nwor
