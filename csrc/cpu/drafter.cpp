// Family drafter on the CPU: the work between two passes of a drafter's loop. Semantics:
// nwor_ops/ops/drafter.py.
#include "../drafter.h"

#include <cmath>
#include <limits>
#include <vector>

#include "../common/gumbel.h"
#include "device.h"

namespace nwor {
namespace {

// Report a problem of any row before the first write.
template <class Arguments>
void check_rows(const Arguments& a, int64_t num_rows) {
    check_each(a.op, num_rows, [&](int64_t row) { return problem_of_row(a, row); });
}

// Ops that write one element of each output per item.
template <class Arguments>
void run(const Arguments& a, const Cpu&) {
    check_rows(a, a.rows.count);
    const int64_t num_items = a.num_items();
    for (int64_t i = 0; i < num_items; ++i) write_item(a, i);
}

void copy_hidden_row(const UpdateArguments& a, int64_t row) {
    const size_t size = static_cast<size_t>(a.element_size);
    const char* from = a.hidden + row * a.hidden_row_stride * a.element_size;
    char* to = a.next_hidden + row * a.next_row_stride * a.element_size;
    if (a.hidden_stride == 1 && a.next_stride == 1) {
        std::memcpy(to, from, static_cast<size_t>(a.width) * size);
        return;
    }
    for (int64_t w = 0; w < a.width; ++w)
        std::memcpy(to + w * a.next_stride * a.element_size, from + w * a.hidden_stride * a.element_size,
                    size);
}

void run(const UpdateArguments& a, const Cpu&) {
    check_rows(a, a.rows.count);
    for (int64_t i = 0; i < a.rows.count; ++i) {
        if (a.width > 0 && moves_hidden(a, i)) copy_hidden_row(a, i);
        update_row(a, i);
    }
}

void run(const SlotArguments& a, const Cpu&) {
    check_rows(a, a.rows.count);
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t t = 0; t < a.capacity; ++t) a.slots[g * a.slots_stride + t] = slot_of_token(a, g, t);
}

// ---------------------------------------------------------------- gumbel_sample

// An upper bound of the noise, for each value of a token's coarse noise. A sum of floats rounds both in the
// same way, so a token cannot win if its logit plus bound does not exceed the best score.
const std::vector<float>& noise_bounds() {
    static const std::vector<float> bounds = [] {
        std::vector<float> table(1 << 16);
        for (uint64_t coarse = 0; coarse < table.size(); ++coarse)
            table[coarse] = std::nextafter(static_cast<float>(gumbel_of_bits(coarse << 32)), HUGE_VALF);
        return table;
    }();
    return bounds;
}

struct Best {
    float score = -std::numeric_limits<float>::infinity();
    int64_t token = 0;

    // Neither a NaN nor an equal score is better, so the lowest token wins.
    void offer(float other, int64_t other_token) {
        if (other > score) *this = {other, other_token};
    }
};

template <class T>
int64_t sample_row(const SampleArguments& a, int64_t row, int64_t state) {
    const T* logits = reinterpret_cast<const T*>(a.logits) + row * a.row_stride;
    const float temperature = a.temperature[state];
    Best best;
    if (!draws_noise(temperature)) {
        for (int64_t v = 0; v < a.vocab_size; ++v)
            best.offer(static_cast<float>(logits[v * a.vocab_stride]), v);
        return best.token;
    }
    const NoiseKey key = noise_key(a.seeds[state], a.positions[row], a.step_of(row));
    const std::vector<float>& bounds = noise_bounds();
    for (int64_t v = 0; v < a.vocab_size; ++v) {
        const float logit = static_cast<float>(logits[v * a.vocab_stride]);
        const uint32_t token = static_cast<uint32_t>(v);
        if (divide_rn(logit, temperature) + bounds[coarse_noise(key, token)] > best.score)
            best.offer(noisy_score(key, token, logit, temperature), v);
    }
    return best.token;
}

void keep_logits(const SampleArguments& a, int64_t row, char* to) {
    const char* from = a.logits + row * a.row_stride * a.element_size;
    for (int64_t v = 0; v < a.vocab_size; ++v)
        std::memcpy(to + v * a.cache_vocab_stride * a.element_size,
                    from + v * a.vocab_stride * a.element_size, static_cast<size_t>(a.element_size));
}

int64_t sample_row(const SampleArguments& a, int64_t row, int64_t state) {
    switch (a.dtype) {
        case ScalarType::Float:
            return sample_row<float>(a, row, state);
        case ScalarType::Half:
            return sample_row<Half>(a, row, state);
        default:
            return sample_row<BFloat16>(a, row, state);
    }
}

void run(const SampleArguments& a, const Cpu&) {
    check_rows(a, a.num_rows);
    for (int64_t row = 0; row < a.num_rows; ++row) {
        const int64_t state = a.state_of(row);
        if (char* to = cache_row(a, row)) keep_logits(a, row, to);
        set_sampled(a, row, state < 0 ? 0 : sample_row(a, row, state));
    }
}

// ---------------------------------------------------------------- draft vocabulary

void run(const VocabularyArguments& a, const Cpu&) {
    constexpr int32_t kListed = -2;
    std::vector<bool> touched(static_cast<size_t>(a.num_rows));
    std::vector<int64_t> missing;  // each token once, by its last place in the list, from the end
    int64_t num_touched = 0;
    const auto bit = [](int64_t row) { return uint32_t{1} << (row % 32); };
    const auto touch = [&](int64_t row) {
        num_touched += !touched[static_cast<size_t>(row)];
        touched[static_cast<size_t>(row)] = true;
        a.used[row / 32] |= bit(row);
    };
    for (int64_t i = a.num_tokens() - 1; i >= 0; --i) {
        const int64_t token = a.token(i);
        if (token < 0) continue;
        int32_t& row = a.row_of_token[token];
        if (a.is_sampled(i)) {
            grow(a.counters[0], 1);
            if (!a.is_row(row)) grow(a.counters[1], 1);
        }
        if (a.is_row(row)) {
            touch(row);
        } else if (row != kListed) {
            row = kListed;
            missing.push_back(token);
        }
    }
    const size_t limit = static_cast<size_t>(least(a.most_entries(), a.num_rows - num_touched));
    for (size_t i = limit; i < missing.size(); ++i) a.row_of_token[missing[i]] = -1;
    if (missing.size() > limit) missing.resize(limit);
    if (missing.empty()) return;
    int64_t hand = a.first_hand();
    const auto move_hand = [&] { hand = hand + 1 < a.num_rows ? hand + 1 : 0; };
    for (auto token = missing.rbegin(); token != missing.rend(); ++token, move_hand()) {
        for (; (a.used[hand / 32] & bit(hand)) != 0; move_hand())
            if (!touched[static_cast<size_t>(hand)]) a.used[hand / 32] &= ~bit(hand);
        touch(hand);
        a.enter(hand, *token);
        std::memcpy(a.weight + hand * a.weight_row_bytes, a.head + *token * a.head_row_bytes,
                    static_cast<size_t>(a.row_bytes));
    }
    *a.hand = static_cast<int32_t>(hand);
}

template <class T>
void argmax_row(const ArgmaxArguments& a, int64_t row) {
    const T* logits = reinterpret_cast<const T*>(a.logits) + row * a.row_stride;
    Best best;
    for (int64_t i = 0; i < a.num_logits; ++i) {
        const float logit = static_cast<float>(logits[i * a.logit_stride]);
        const bool is_lower = logit == best.score && a.token_ids[i] < best.token;
        if (logit > best.score || (is_lower && logit > -HUGE_VALF)) best = {logit, a.token_ids[i]};
    }
    a.set(row, best.score + 0.0f, best.token);  // 0 instead of -0
}

void run(const ArgmaxArguments& a, const Cpu&) {
    for (int64_t row = 0; row < a.num_rows; ++row) {
        if (a.dtype == ScalarType::Float)
            argmax_row<float>(a, row);
        else if (a.dtype == ScalarType::Half)
            argmax_row<Half>(a, row);
        else
            argmax_row<BFloat16>(a, row);
    }
}

template <class T>
void expand_row(const ExpandLogitsArguments& a, int64_t row, T minus_infinity) {
    const T* logits = reinterpret_cast<const T*>(a.logits) + row * a.row_stride;
    T* out = reinterpret_cast<T*>(a.out) + row * a.out_row_stride;
    for (int64_t token = 0; token < a.num_columns; ++token) {
        const int64_t place = a.place_of(token);
        out[token * a.out_stride] = place < 0 ? minus_infinity : logits[place * a.logit_stride];
    }
}

void run(const ExpandLogitsArguments& a, const Cpu&) {
    for (int64_t row = 0; row < a.num_rows; ++row) {
        if (a.dtype == ScalarType::Float)
            expand_row<uint32_t>(a, row, kMinusInfinity32);
        else
            expand_row<uint16_t>(a, row,
                                 a.dtype == ScalarType::Half ? kMinusInfinityHalf : kMinusInfinityBFloat);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    register_drafter<Cpu>(m);
}

}  // namespace nwor
