// Family recurrent on the CPU: one recurrent state per request. Semantics: nwor_ops/ops/recurrent.py.
//
// The compiler forms no fused multiply-adds (setup.py). So reapplying a row is bit-identical to the step that
// recorded it, on every processor.
//
// A row is what a record holds of one token: key, norm, decay and update. A state row is one of the dv rows
// of a state. A row of a plan is an entry.
#include "../recurrent.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "../common/dispatch.h"
#include "device.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- plans

struct SlotsOfEntry {
    int64_t source, target;  // target 0: none
};

// Finds a slot that one entry writes and another entry reads or writes. The entries of a plan run in any
// order.
template <class SlotsOf>
Found slot_conflict_of(Problem problem, int64_t count, const SlotsOf& slots_of) {
    std::unordered_map<int64_t, int64_t> entry_of_target;
    for (int64_t i = 0; i < count; ++i) {
        const SlotsOfEntry slots = slots_of(i);
        if (slots.target == 0) continue;
        const auto [at, fresh] = entry_of_target.emplace(slots.target, i);
        if (!fresh) return {problem, i, slots.target, at->second};
    }
    for (int64_t i = 0; i < count; ++i) {
        const SlotsOfEntry slots = slots_of(i);
        if (slots.target == 0 || slots.source == slots.target) continue;
        const auto at = entry_of_target.find(slots.source);
        if (at != entry_of_target.end()) return {problem, at->second, slots.source, i};
    }
    return {};
}

template <class Step, class StepOf>
std::vector<Step> steps_of(const char* op, int64_t count, const StepOf& step_of) {
    std::vector<Step> steps;
    steps.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        steps.push_back(step_of(i));
        if (steps.back().found) complain(op, steps.back().found);
    }
    return steps;
}

template <class Step>
void store_plan(const RecurrentPlan& plan, const std::vector<Step>& steps) {
    const int64_t count = static_cast<int64_t>(steps.size());
    for (int64_t i = 0; i < plan.length; ++i)
        plan.set(i, i < count ? steps[static_cast<size_t>(i)].entry : RecurrentEntry{});
}

void run(const RecurrentWindowArguments& a, const Cpu&) {
    const auto steps =
        steps_of<RecurrentWindowStep>(a.op, a.num_requests, [&](int64_t q) { return window_step_of(a, q); });
    const Found conflict = slot_conflict_of(kStateSlotsTwice, a.num_requests, [&](int64_t q) {
        const int32_t slot = steps[static_cast<size_t>(q)].slot;
        return SlotsOfEntry{slot, slot};
    });
    if (conflict) complain(a.op, conflict);
    store_plan(a.plan, steps);
    for (const RecurrentWindowStep& step : steps)
        if (step.sets_cursor) a.cursors.set(step.slot, step.cursor);
    grow(*a.window_id, 1);
}

template <class Arguments>
void plan_folds(const Arguments& a, Problem twice) {
    const auto steps =
        steps_of<RecurrentFoldStep>(a.op, a.num_entries, [&](int64_t i) { return fold_step_of(a, i); });
    const Found conflict = slot_conflict_of(twice, a.num_entries, [&](int64_t i) {
        const RecurrentFoldStep& step = steps[static_cast<size_t>(i)];
        return SlotsOfEntry{step.source, step.target};
    });
    if (conflict) complain(a.op, conflict);
    store_plan(a.plan, steps);
    for (const RecurrentFoldStep& step : steps) {
        if (step.entry.any())
            set_target(a, step.entry);
        else if (step.target > 0)
            a.cursors.clear(step.target);
        if (step.cleared_source > 0) a.cursors.clear(step.cleared_source);
    }
}

void run(const RecurrentFoldPlanArguments& a, const Cpu&) {
    plan_folds(a, kFoldTargetTwice);
}

void run(const RecurrentBlockFoldArguments& a, const Cpu&) {
    plan_folds(a, kBlockTwice);
}

void check_slot_conflicts(const char* op, const RecurrentPlan& plan, int64_t count,
                          const RecurrentRecord& record) {
    const Found conflict = slot_conflict_of(kPlanSlotTwice, count, [&](int64_t i) {
        const RecurrentEntry entry = plan[i];
        return record.has_window(entry) ? SlotsOfEntry{entry.source, entry.recorded()} : SlotsOfEntry{};
    });
    if (conflict) complain(op, conflict);
}

// ---------------------------------------------------------------- a state row: dk numbers in float32

// A sum whose order is the same on every processor. The compiler can vectorize it.
class Sum {
  public:
    static constexpr int64_t kLanes = 16;  // divides every width

    float& operator[](int64_t lane) { return lanes_[lane]; }
    float total() {
        for (int64_t half = kLanes / 2; half > 0; half /= 2)
            for (int64_t i = 0; i < half; ++i) lanes_[i] += lanes_[i + half];
        return lanes_[0];
    }

  private:
    float lanes_[kLanes] = {};
};

float sum_of_squares(const float* x, int64_t width) {
    Sum sum;
    for (int64_t i = 0; i < width; i += Sum::kLanes)
        for (int64_t lane = 0; lane < Sum::kLanes; ++lane) sum[lane] += x[i + lane] * x[i + lane];
    return sum.total();
}

float dot(const float* x, const float* y, int64_t width) {
    Sum sum;
    for (int64_t i = 0; i < width; i += Sum::kLanes)
        for (int64_t lane = 0; lane < Sum::kLanes; ++lane) sum[lane] += x[i + lane] * y[i + lane];
    return sum.total();
}

// The decay of a channel. Without a decay per channel, there is one for all.
template <bool kPerChannel>
inline float decay_of(const float* decay, int64_t channel) {
    return decay[kPerChannel ? channel : 0];
}

// Reapplies a row. The result is bit-identical to `decay_and_dot_key` followed by `update_and_dot_query`.
template <bool kPerChannel>
void reapply(float* __restrict h,            // [dk]
             const float* __restrict decay,  // [1] or [dk]
             float u,                        //
             const float* __restrict key,    // [dk]
             int64_t width) {
    for (int64_t i = 0; i < width; ++i) h[i] = h[i] * decay_of<kPerChannel>(decay, i) + u * key[i];
}

// Applies the decay, and returns the dot product of the state row and the key.
template <bool kPerChannel>
float decay_and_dot_key(float* __restrict h,            // [dk]
                        const float* __restrict decay,  // [1] or [dk]
                        const float* __restrict key,    // [dk]
                        int64_t width) {
    Sum sum;
    for (int64_t i = 0; i < width; i += Sum::kLanes)
        for (int64_t lane = 0; lane < Sum::kLanes; ++lane) {
            h[i + lane] *= decay_of<kPerChannel>(decay, i + lane);
            sum[lane] += h[i + lane] * key[i + lane];
        }
    return sum.total();
}

// Adds the update, and returns the dot product of the state row and the query: the output.
float update_and_dot_query(float* __restrict h,            // [dk]
                           float u,                        //
                           const float* __restrict key,    // [dk]
                           const float* __restrict query,  // [dk]
                           int64_t width) {
    Sum sum;
    for (int64_t i = 0; i < width; i += Sum::kLanes)
        for (int64_t lane = 0; lane < Sum::kLanes; ++lane) {
            h[i + lane] = h[i + lane] + u * key[i + lane];
            sum[lane] += h[i + lane] * query[i + lane];
        }
    return sum.total();
}

template <class From>
void load(float* to, const From* from, int64_t width) {
    for (int64_t i = 0; i < width; ++i) to[i] = static_cast<float>(from[i]);
}

template <class To>
void store(To* to, const float* from, int64_t width) {
    for (int64_t i = 0; i < width; ++i) to[i] = static_cast<To>(from[i]);
}

template <class F>
void with_state_type(const RecurrentStates& states, const F& f) {
    if (states.is_bfloat16) return f(Tag<BFloat16>{});
    f(Tag<float>{});
}

template <class F>
void with_input_type(ScalarType dtype, const F& f) {
    if (dtype == ScalarType::Float) return f(Tag<float>{});
    if (dtype == ScalarType::Half) return f(Tag<Half>{});
    f(Tag<BFloat16>{});
}

template <class F>
void with_channels(bool per_channel, const F& f) {
    if (per_channel) return f(std::true_type{});
    f(std::false_type{});
}

// ---------------------------------------------------------------- the accepted rows of a record

// The rows that one head of a request reapplies.
struct ReappliedRows {
    int64_t rows = 0, key_width;
    std::vector<float> keys;            // [rows, dk], normalized
    std::vector<const float*> decays;   // [rows] of [1 or dk]
    std::vector<const float*> updates;  // [rows] of [dv]

    template <class Input>
    void read(const RecurrentRecord& record, const RecurrentEntry& entry, int64_t value_head) {
        const int64_t key_head = value_head / (record.num_value_heads / record.num_key_heads);
        rows = entry.rows;
        key_width = record.key_width;
        keys.resize(static_cast<size_t>(rows * key_width));
        decays.clear();
        updates.clear();
        for (int64_t j = 0; j < rows; ++j) {
            const int64_t row = record.row_of(entry.first, j);
            float* key = keys.data() + j * key_width;
            load(key,
                 reinterpret_cast<const Input*>(record.keys) + record.key_offset(entry.source, row, key_head),
                 key_width);
            // 1 / |key|, or 1 if keys are not normalized
            const float norm = record.norms[record.norm_offset(entry.source, row, key_head)];
            for (int64_t i = 0; i < key_width; ++i) key[i] *= norm;
            decays.push_back(record.decays + record.decay_offset(entry.source, row, value_head));
            updates.push_back(record.updates + record.update_offset(entry.source,
                                                                    record.update_row(entry.first, j),
                                                                    value_head));
        }
    }

    // Applies the rows from `begin` to `end` to state row `value`.
    template <bool kPerChannel>
    void onto(float* h, int64_t value, int64_t begin, int64_t end) const {
        for (int64_t j = begin; j < end; ++j)
            reapply<kPerChannel>(h, decays[static_cast<size_t>(j)], updates[static_cast<size_t>(j)][value],
                                 keys.data() + j * key_width, key_width);
    }
};

// Reads a state row, reapplies the rows and stores it. `h` then holds the state row as it was stored. If the
// entry stores nothing, `h` holds the state row in float32.
template <class State, bool kPerChannel>
void fold_state_row(const RecurrentStates& states, const RecurrentEntry& entry,
                    const ReappliedRows& reapplied, int64_t value_head, int64_t value,
                    float* h) {  // [dk]
    const int64_t width = states.key_width;
    State* data = reinterpret_cast<State*>(states.data);
    load(h, data + states.row_offset(entry.source, value_head, value), width);
    if (reapplied.rows == 0 && entry.source == entry.target) return;
    reapplied.onto<kPerChannel>(h, value, 0, reapplied.rows);
    if (!entry.stores()) return;
    State* target = data + states.row_offset(entry.target, value_head, value);
    store(target, h, width);
    load(h, target, width);
}

// Rounds a state row to the dtype of the states, as a store and a load do.
template <class State>
void round_state_row(float* h, int64_t width) {
    for (int64_t i = 0; i < width; ++i) h[i] = static_cast<float>(static_cast<State>(h[i]));
}

// Reads a state row, reapplies `chunk` rows, rounds it, and reapplies the other rows: all in one way,
// whichever call folds a chunk.
template <class State>
void fold_state_row_in_chunks(const RecurrentStates& states, const RecurrentEntry& entry,
                              const ReappliedRows& reapplied, int64_t chunk, int64_t value_head,
                              int64_t value,
                              float* h) {  // [dk]
    const State* data = reinterpret_cast<const State*>(states.data);
    load(h, data + states.row_offset(entry.source, value_head, value), states.key_width);
    const int64_t whole = std::min(reapplied.rows, chunk);
    reapplied.onto<false>(h, value, 0, whole);
    if (whole == chunk) round_state_row<State>(h, states.key_width);
    reapplied.onto<false>(h, value, whole, reapplied.rows);
}

// ---------------------------------------------------------------- gated_delta_verify

float sigmoid(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

float decay_from(const VerifyArguments& c, float A_log, float x) {
    const float rate = std::exp(A_log);
    if (c.decay_form == DecayForm::kBounded)
        return std::exp(c.gate_lower_bound / (1.0f + std::exp(-(rate * x))));
    const float scaled = c.softplus_beta * x;
    const float softplus =
        scaled <= c.softplus_threshold ? (1.0f / c.softplus_beta) * std::log(1.0f + std::exp(scaled)) : x;
    return std::exp(-rate * softplus);
}

// One head of a request's window.
template <class Input>
class WindowHead {
  public:
    WindowHead(const VerifyArguments& c, int64_t request, int64_t value_head)
        : c_(c),
          entry_(c.plan[request]),
          begin_(c.query_start_loc[request]),
          tokens_(c.query_start_loc[request + 1] - begin_),
          value_head_(value_head),
          key_head_(value_head / (c.record.num_value_heads / c.record.num_key_heads)),
          width_(c.states.key_width),
          decay_width_(c.record.per_channel ? width_ : 1) {}

    void run() {
        if (!c_.record.has_window(entry_)) return zero_outputs();
        if (tokens_ == 0) return;
        reapplied_.template read<Input>(c_.record, entry_, value_head_);
        read_inputs();
        with_state_type(c_.states, [&](auto state) {
            if (c_.chunk > 0) return run_chunk<typename decltype(state)::type>();
            with_channels(c_.record.per_channel, [&](auto per_channel) {
                run_exact<typename decltype(state)::type, decltype(per_channel)::value>();
            });
        });
        record();
        write_outputs();
    }

  private:
    Input* out(int64_t t) const {
        return reinterpret_cast<Input*>(c_.out.data) + c_.out.offset(begin_ + t, value_head_);
    }

    void zero_outputs() const {
        for (int64_t t = 0; t < tokens_; ++t)
            std::fill_n(out(t), c_.states.value_width, static_cast<Input>(0.0f));
    }

    // Reads a token's query or key and normalizes it. Returns the factor: 1 / |vector|, or 1 without
    // normalization.
    float read_vector(std::vector<float>& to, const HeadsView& from, int64_t t) const {
        float* vector = to.data() + t * width_;
        load(vector, reinterpret_cast<const Input*>(from.data) + from.offset(begin_ + t, key_head_), width_);
        const float norm = c_.use_qk_l2norm ? 1.0f / std::sqrt(sum_of_squares(vector, width_) + 1e-6f) : 1.0f;
        for (int64_t i = 0; i < width_; ++i) vector[i] *= norm;
        return norm;
    }

    float decay(int64_t token, int64_t channel) const {
        const float a = c_.a.at(token, value_head_, channel);
        if (c_.decay_form == DecayForm::kGiven) return std::exp(a);
        return decay_from(c_, c_.A_log.at(value_head_), a + c_.dt_bias.at(value_head_, channel));
    }

    float beta(int64_t token) const {
        const float b = c_.b.at(token, value_head_);
        return c_.decay_form == DecayForm::kGiven ? b : c_.beta_factor * sigmoid(b);
    }

    void read_inputs() {
        const size_t count = static_cast<size_t>(tokens_), wide = count * static_cast<size_t>(width_);
        queries_.resize(wide);
        keys_.resize(wide);
        decays_.resize(count * static_cast<size_t>(decay_width_));
        norms_.resize(count);
        betas_.resize(count);
        values_.resize(count * static_cast<size_t>(c_.states.value_width));
        outputs_.resize(values_.size());
        for (int64_t t = 0; t < tokens_; ++t) {
            const int64_t token = begin_ + t;
            read_vector(queries_, c_.q, t);
            for (int64_t i = 0; i < width_; ++i) queries_[static_cast<size_t>(t * width_ + i)] *= c_.scale;
            norms_[static_cast<size_t>(t)] = read_vector(keys_, c_.k, t);
            betas_[static_cast<size_t>(t)] = beta(token);
            for (int64_t i = 0; i < decay_width_; ++i)
                decays_[static_cast<size_t>(t * decay_width_ + i)] = decay(token, i);
            load(values_.data() + t * c_.states.value_width,
                 reinterpret_cast<const Input*>(c_.v.data) + c_.v.offset(token, value_head_),
                 c_.states.value_width);
        }
    }

    // The exact form: each output from its token's own state. Overwrites `values_` with the updates.
    template <class State, bool kPerChannel>
    void run_exact() {
        std::vector<float> state_row(static_cast<size_t>(width_));
        float* h = state_row.data();
        for (int64_t value = 0; value < c_.states.value_width; ++value) {
            fold_state_row<State, kPerChannel>(c_.states, entry_, reapplied_, value_head_, value, h);
            for (int64_t t = 0; t < tokens_; ++t) {
                const float* key = keys_.data() + t * width_;
                const size_t at = static_cast<size_t>(t * c_.states.value_width + value);
                const float predicted =
                    decay_and_dot_key<kPerChannel>(h, decays_.data() + t * decay_width_, key, width_);
                values_[at] = (values_[at] - predicted) * betas_[static_cast<size_t>(t)];
                outputs_[at] =
                    update_and_dot_query(h, values_[at], key, queries_.data() + t * width_, width_);
                if (c_.all_states == nullptr) continue;
                State* all = reinterpret_cast<State*>(c_.all_states) + (begin_ + t) * c_.all_states_stride;
                store(all + (value_head_ * c_.states.value_width + value) * width_, h, width_);
            }
        }
    }

    // The chunk form: outputs from the state at the base of a token's chunk, and from the rows since. Row i
    // of the chunk gives a token its update times `weight(i)`: the product of keys (or of key and query),
    // decayed from row i to the token. All sums run from the chunk's first row on, so the bits of a token
    // depend only on the base and these rows.
    template <class State>
    void run_chunk() {
        const int64_t width = width_, values = c_.states.value_width, chunk = c_.chunk;
        const int64_t folded = entry_.stores() ? chunk : 0, before = reapplied_.rows - folded;
        const auto key = [&](int64_t row) {  // rows after the first base: pending ones, then the window
            return row < before ? reapplied_.keys.data() + (folded + row) * width
                                : keys_.data() + (row - before) * width;
        };
        const auto decay_at = [&](int64_t row) {
            return row < before ? *reapplied_.decays[static_cast<size_t>(folded + row)]
                                : decays_[static_cast<size_t>(row - before)];
        };
        const auto update = [&](int64_t row, int64_t value) {
            return row < before ? reapplied_.updates[static_cast<size_t>(folded + row)][value]
                                : values_[static_cast<size_t>((row - before) * values + value)];
        };

        // Weights of the rows of its chunk, for each token
        struct Token {
            int64_t first, at;                // the chunk's first row, and the token's own
            float decay;                      // of the base
            std::vector<float> known, asked;  // [at - first], [at - first + 1]
        };
        std::vector<Token> tokens;
        for (int64_t t = 0; t < tokens_; ++t) {
            const int64_t at = before + t, first = at / chunk * chunk;
            Token token{first, at, 1.0f, {}, {}};
            for (int64_t row = first; row <= at; ++row) token.decay *= decay_at(row);
            for (int64_t row = first; row <= at; ++row) {
                float decay = 1.0f;
                for (int64_t later = row + 1; later <= at; ++later) decay *= decay_at(later);
                if (row < at) token.known.push_back(decay * dot(key(row), key(at), width));
                token.asked.push_back(decay * dot(key(row), queries_.data() + t * width, width));
            }
            tokens.push_back(std::move(token));
        }

        // State row by state row
        std::vector<float> base(static_cast<size_t>(width)), state(base);
        State* data = reinterpret_cast<State*>(c_.states.data);
        const bool follows = c_.all_states != nullptr || before + tokens_ > chunk;
        for (int64_t value = 0; value < values; ++value) {
            State* stored = data + c_.states.row_offset(entry_.source, value_head_, value);
            load(base.data(), stored, width);
            if (folded > 0) {
                reapplied_.onto<false>(base.data(), value, 0, folded);
                store(stored, base.data(), width);
                load(base.data(), stored, width);
            }
            if (follows) {
                state = base;
                reapplied_.onto<false>(state.data(), value, folded, reapplied_.rows);
            }
            for (int64_t t = 0; t < tokens_; ++t) {
                const Token& token = tokens[static_cast<size_t>(t)];
                if (t > 0 && token.at == token.first) {  // a chunk ended: the next window stores these bits
                    round_state_row<State>(state.data(), width);
                    base = state;
                }
                float known = token.decay * dot(base.data(), key(token.at), width);
                float asked = token.decay * dot(base.data(), queries_.data() + t * width, width);
                for (int64_t row = token.first; row < token.at; ++row) {
                    const size_t i = static_cast<size_t>(row - token.first);
                    known += token.known[i] * update(row, value);
                    asked += token.asked[i] * update(row, value);
                }
                const size_t place = static_cast<size_t>(t * values + value);
                values_[place] = (values_[place] - known) * betas_[static_cast<size_t>(t)];
                outputs_[place] = asked + token.asked.back() * values_[place];
                if (!follows) continue;
                reapply<false>(state.data(), decays_.data() + t, values_[place], key(token.at), width);
                if (c_.all_states == nullptr) continue;
                State* all = reinterpret_cast<State*>(c_.all_states) + (begin_ + t) * c_.all_states_stride;
                store(all + (value_head_ * values + value) * width, state.data(), width);
            }
        }
    }

    void record() const {
        const RecurrentRecord& r = c_.record;
        const int64_t slot = entry_.recorded(), value_width = c_.states.value_width;
        const int32_t first = r.first_of_window(entry_);
        const bool leads_group = value_head_ % (r.num_value_heads / r.num_key_heads) == 0;
        for (int64_t t = 0; t < tokens_; ++t) {
            const int64_t row = r.row_of(first, t);
            std::copy_n(decays_.data() + t * decay_width_, decay_width_,
                        r.decays + r.decay_offset(slot, row, value_head_));
            std::copy_n(values_.data() + t * value_width, value_width,
                        r.updates + r.update_offset(slot, r.update_row(first, t), value_head_));
            if (!leads_group) continue;
            std::copy_n(reinterpret_cast<const Input*>(c_.k.data) + c_.k.offset(begin_ + t, key_head_),
                        width_, reinterpret_cast<Input*>(r.keys) + r.key_offset(slot, row, key_head_));
            r.norms[r.norm_offset(slot, row, key_head_)] = norms_[static_cast<size_t>(t)];
        }
    }

    void write_outputs() {
        for (int64_t t = 0; t < tokens_; ++t) {
            const float* output = outputs_.data() + t * c_.states.value_width;
            store(out(t), output, c_.states.value_width);
            if (c_.has_norm()) normalise(t);
        }
    }

    // Normalizes the output as it was stored, which is rounded.
    void normalise(int64_t t) {
        const int64_t width = c_.states.value_width;
        float* output = outputs_.data() + t * width;
        load(output, out(t), width);
        const float mean = sum_of_squares(output, width) / static_cast<float>(width);
        const float factor = 1.0f / std::sqrt(mean + c_.norm_eps);
        const Input* gate =
            reinterpret_cast<const Input*>(c_.gate.data) + c_.gate.offset(begin_ + t, value_head_);
        for (int64_t i = 0; i < width; ++i) {
            const float x = static_cast<float>(gate[i]);
            const float open = c_.gate_activation == GateActivation::kSilu ? x * sigmoid(x) : sigmoid(x);
            output[i] = output[i] * factor * c_.norm_weight.at(i) * open;
        }
        store(out(t), output, width);
    }

    const VerifyArguments& c_;
    const RecurrentEntry entry_;
    const int64_t begin_, tokens_, value_head_, key_head_, width_, decay_width_;
    ReappliedRows reapplied_;
    // queries_ and keys_ [tokens, dk], decays_ [tokens, 1 or dk], norms_ and betas_ [tokens], values_ and
    // outputs_ [tokens, dv].
    std::vector<float> queries_, keys_, decays_, norms_, betas_, values_, outputs_;
};

void run(const VerifyArguments& c, const Cpu&) {
    check_each(c.op, c.num_requests, [&](int64_t q) {
        const Found found =
            problem_of_request(c, q, c.query_start_loc[q], c.query_start_loc[q + 1], c.plan[q]);
        return found || c.chunk == 0 ? found : problem_of_chunk(c.plan[q], q, c.chunk);
    });
    check_slot_conflicts(c.op, c.plan, c.num_requests, c.record);
    const int64_t heads = c.states.num_value_heads;
    with_input_type(c.dtype, [&](auto tag) {
        parallel_for(0, c.num_requests * heads, 1, [&](int64_t begin, int64_t end) {
            for (int64_t part = begin; part < end; ++part)
                WindowHead<typename decltype(tag)::type>(c, part / heads, part % heads).run();
        });
    });
    *c.layer_window = *c.window_id;
}

// ---------------------------------------------------------------- gated_delta_fold

// One head of an entry of the plan, in one layer.
template <class State, class Input, bool kPerChannel>
void fold_head(const RecurrentStates& states, const RecurrentRecord& record, const RecurrentEntry& entry,
               int64_t chunk, int64_t value_head) {
    ReappliedRows reapplied;
    reapplied.read<Input>(record, entry, value_head);
    std::vector<float> state_row(static_cast<size_t>(states.key_width));
    for (int64_t value = 0; value < states.value_width; ++value) {
        if (chunk == 0) {
            fold_state_row<State, kPerChannel>(states, entry, reapplied, value_head, value, state_row.data());
            continue;
        }
        fold_state_row_in_chunks<State>(states, entry, reapplied, chunk, value_head, value, state_row.data());
        store(reinterpret_cast<State*>(states.data) + states.row_offset(entry.target, value_head, value),
              state_row.data(), states.key_width);
    }
}

// The tensors of one layer, with the shapes of the first layer.
struct LayerViews {
    RecurrentStates states;
    RecurrentRecord record;

    LayerViews(const FoldArguments& f, const FoldLayer& layer) : states(f.states), record(f.record) {
        states.data = layer.states;
        record.keys = const_cast<char*>(layer.keys);
        record.norms = const_cast<float*>(layer.norms);
        record.decays = const_cast<float*>(layer.decays);
        record.updates = const_cast<float*>(layer.updates);
    }
};

void run(const FoldArguments& f, const Cpu&) {
    check_each(f.op, f.plan.length,
               [&](int64_t i) { return problem_of_plan(f.plan[i], i, f.states.num_slots, f.record); });
    check_slot_conflicts(f.op, f.plan, f.plan.length, f.record);
    if (f.plan.length == 0) return;
    const int64_t heads = f.states.num_value_heads;
    const auto fold = [&](const FoldLayer& layer, int64_t begin, int64_t end) {
        const LayerViews views(f, layer);
        with_state_type(views.states, [&](auto state) {
            with_input_type(views.record.key_dtype, [&](auto input) {
                with_channels(views.record.per_channel, [&](auto per_channel) {
                    for (int64_t part = begin; part < end; ++part) {
                        const RecurrentEntry entry = f.plan[part / heads];
                        if (entry.stores())
                            fold_head<typename decltype(state)::type, typename decltype(input)::type,
                                      decltype(per_channel)::value>(views.states, views.record, entry,
                                                                    f.chunk, part % heads);
                    }
                });
            });
        });
    };
    for (const FoldLayer& layer : f.layers) {
        if (f.window_id != nullptr && *layer.window == *f.window_id) continue;
        parallel_for(0, f.plan.length * heads, 1,
                     [&](int64_t begin, int64_t end) { fold(layer, begin, end); });
        if (f.window_id != nullptr) *layer.window = *f.window_id;
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    register_recurrent<Cpu>(m);
}

}  // namespace nwor
