// Family draft on the CPU: what a drafter's loop does between two passes. Semantics: nwor_ops/ops_draft.py.
#include "../draft.h"

#include <cmath>
#include <limits>
#include <vector>

#include "../gumbel.h"

namespace nwor {
namespace {

// What is wrong with any row is said before the first write.
template <class Arguments>
void check_rows(const Arguments& a, int64_t num_rows) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const Found f = problem_of_row(a, row);
        if (f.problem != kNoProblem) complain_of_data(a.op, f);
    }
}

void prepare_prefill_inputs(const Tensor& target_input_ids, const Tensor& target_positions,
                            const Tensor& target_query_start_loc, const Tensor& target_seq_lens,
                            const Tensor& idx_mapping, const Tensor& num_sampled, const Tensor& num_rejected,
                            const Tensor& last_sampled, const Tensor& next_prefill_tokens,
                            const Tensor& input_ids, const Tensor& positions, const Tensor& query_start_loc,
                            const Tensor& seq_lens, const Tensor& last_token_indices,
                            const Tensor& current_draft_step) {
    const PrefillArguments a =
        check_prefill(target_input_ids, target_positions, target_query_start_loc, target_seq_lens,
                      idx_mapping, num_sampled, num_rejected, last_sampled, next_prefill_tokens, input_ids,
                      positions, query_start_loc, seq_lens, last_token_indices, current_draft_step);
    check_rows(a, a.rows.count);
    const int64_t num_real = a.rows.num_real();
    for (int64_t i = 0; i < a.num_items(); ++i) {
        prefill_row(a, i, num_real);
        if (i < a.input_ids.length) prefill_token(a, i, num_real);
    }
}

void prepare_decode_inputs(const Tensor& draft_tokens, const Tensor& target_seq_lens,
                           const Tensor& num_rejected, const Tensor& input_ids, const Tensor& positions,
                           const Tensor& query_start_loc, const Tensor& seq_lens, int64_t max_model_len,
                           const std::optional<Tensor>& idx_mapping,
                           const std::optional<Tensor>& sample_positions, bool advance_positions) {
    const DecodeArguments a =
        check_decode(draft_tokens, target_seq_lens, num_rejected, input_ids, positions, query_start_loc,
                     seq_lens, max_model_len, idx_mapping, sample_positions, advance_positions);
    check_rows(a, a.rows.count);
    for (int64_t i = 0; i < a.num_items(); ++i) decode_row(a, i);
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

void update_draft_inputs(const Tensor& sampled, const Tensor& current_draft_step, const Tensor& draft_tokens,
                         const Tensor& input_ids, const Tensor& positions, const Tensor& seq_lens,
                         int64_t num_speculative_steps, int64_t max_model_len,
                         const std::optional<Tensor>& idx_mapping, const std::optional<Tensor>& hidden_states,
                         const std::optional<Tensor>& next_hidden_states,
                         const std::optional<Tensor>& sample_positions, bool advance_positions) {
    const UpdateArguments a = check_update(
        sampled, current_draft_step, draft_tokens, input_ids, positions, seq_lens, num_speculative_steps,
        max_model_len, idx_mapping, hidden_states, next_hidden_states, sample_positions, advance_positions);
    check_rows(a, a.rows.count);
    for (int64_t i = 0; i < a.rows.count; ++i) {
        if (a.width > 0 && moves_hidden(a, i)) copy_hidden_row(a, i);
        update_row(a, i);
    }
}

void compute_slot_mappings(const Tensor& idx_mapping, const Tensor& query_start_loc, const Tensor& positions,
                           const std::vector<Tensor>& block_tables, const std::vector<int64_t>& block_sizes,
                           const Tensor& slot_mappings, int64_t cp_size, int64_t cp_rank,
                           int64_t cp_interleave, const std::optional<Tensor>& cp_sharded) {
    const SlotArguments a =
        check_slot_mappings(idx_mapping, query_start_loc, positions, block_tables, block_sizes, slot_mappings,
                            cp_size, cp_rank, cp_interleave, cp_sharded);
    check_rows(a, a.rows.count);
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t t = 0; t < a.capacity; ++t) a.slots[g * a.slots_stride + t] = slot_of_token(a, g, t);
}

void eagle_step(const Tensor& positions, const Tensor& block_table, const Tensor& seq_lens,
                const Tensor& new_positions, const Tensor& slot_mapping, int64_t block_size,
                int64_t max_model_len) {
    const EagleArguments a = check_eagle_step(positions, block_table, seq_lens, new_positions, slot_mapping,
                                              block_size, max_model_len);
    check_rows(a, a.num_rows);
    for (int64_t i = 0; i < a.slots.length; ++i) eagle_row(a, i);
}

void prepare_inputs_padded(const Tensor& cu_num_draft_tokens, const Tensor& valid_sampled_count,
                           const Tensor& query_start_loc, const Tensor& token_indices_to_sample,
                           const Tensor& num_rejected, const std::optional<Tensor>& discarded) {
    const PaddedInputsArguments a =
        check_inputs_padded(cu_num_draft_tokens, valid_sampled_count, query_start_loc,
                            token_indices_to_sample, num_rejected, discarded);
    check_rows(a, a.num_rows);
    for (int64_t i = 0; i < a.num_items(); ++i) padded_inputs_row(a, i);
}

void prepare_next_token_padded(const Tensor& sampled_token_ids, const Tensor& discarded,
                               const Tensor& backup_next_token_ids, const Tensor& next_token_ids,
                               const Tensor& valid_sampled_count, int64_t vocab_size) {
    const NextTokenArguments a = check_next_token_padded(sampled_token_ids, discarded, backup_next_token_ids,
                                                         next_token_ids, valid_sampled_count, vocab_size);
    for (int64_t i = 0; i < a.num_items(); ++i) next_token_row(a, i);
}

// ---------------------------------------------------------------- gumbel_sample

// For each value of a token's coarse noise, no less than the noise can be. A sum of floats rounds the same
// way for both, so a token whose logit and bound do not exceed the best score cannot beat it.
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

    // A NaN is never better, nor is an equal score: the lowest token wins.
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
        if (exact_divide(logit, temperature) + bounds[coarse_noise(key, token)] > best.score)
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
            return sample_row<torch::headeronly::Half>(a, row, state);
        default:
            return sample_row<torch::headeronly::BFloat16>(a, row, state);
    }
}

void gumbel_sample(const Tensor& logits, const Tensor& idx_mapping, const Tensor& temperature,
                   const Tensor& seeds, const Tensor& positions, const Tensor& step, const Tensor& sampled,
                   const std::optional<Tensor>& logits_cache, const std::optional<Tensor>& workspace) {
    const SampleArguments a = check_gumbel_sample(logits, idx_mapping, temperature, seeds, positions, step,
                                                  sampled, logits_cache, workspace);
    check_rows(a, a.num_rows);
    for (int64_t row = 0; row < a.num_rows; ++row) {
        const int64_t state = a.state_of(row);
        if (char* to = cache_row(a, row)) keep_logits(a, row, to);
        set_sampled(a, row, state < 0 ? 0 : sample_row(a, row, state));
    }
}

// ---------------------------------------------------------------- longer queries

void copy_expand_inputs(const Tensor& target_input_ids, const Tensor& target_positions,
                        const Tensor& target_query_start_loc, const Tensor& num_rejected,
                        const Tensor& next_token_ids, const Tensor& input_ids, const Tensor& positions,
                        const Tensor& is_rejected, const Tensor& is_masked, const Tensor& new_token_indices,
                        int64_t num_new_tokens, int64_t padding_token_id, int64_t mask_token_id,
                        bool shift_input_ids, const std::optional<int64_t>& max_model_len,
                        const std::optional<Tensor>& idx_mapping,
                        const std::optional<Tensor>& hidden_state_mapping) {
    const ExpandArguments a = check_expand(
        target_input_ids, target_positions, target_query_start_loc, num_rejected, next_token_ids, input_ids,
        positions, is_rejected, is_masked, new_token_indices, num_new_tokens, padding_token_id, mask_token_id,
        shift_input_ids, max_model_len, idx_mapping, hidden_state_mapping);
    check_rows(a, a.rows.count);
    const int64_t num_real = a.rows.num_real();
    for (int64_t i = 0; i < a.num_items(); ++i) {
        if (i < a.input_ids.length) expand_token(a, i, num_real);
        expand_index(a, i, num_real);
    }
}

void extend_queries(const Tensor& target_query_start_loc, const Tensor& target_seq_lens,
                    const Tensor& positions, const Tensor& is_rejected, const Tensor& block_table,
                    const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& slot_mapping,
                    int64_t block_size, int64_t max_model_len, int64_t num_new_tokens,
                    const std::optional<Tensor>& idx_mapping) {
    const ExtendArguments a = check_extend(target_query_start_loc, target_seq_lens, positions, is_rejected,
                                           block_table, query_start_loc, seq_lens, slot_mapping, block_size,
                                           max_model_len, num_new_tokens, idx_mapping);
    check_rows(a, a.rows.count);
    const int64_t num_real = a.rows.num_real();
    for (int64_t i = 0; i < a.num_items(); ++i) extend_item(a, i, num_real);
}

void dcp_local_seq_lens(const Tensor& seq_lens, const Tensor& local_seq_lens, int64_t dcp_size,
                        int64_t dcp_rank, int64_t cp_interleave) {
    const LocalLensArguments a =
        check_local_seq_lens(seq_lens, local_seq_lens, dcp_size, dcp_rank, cp_interleave);
    for (int64_t i = 0; i < a.local.length; ++i) local_lens_row(a, i);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    m.impl("prepare_prefill_inputs", TORCH_BOX(&prepare_prefill_inputs));
    m.impl("prepare_decode_inputs", TORCH_BOX(&prepare_decode_inputs));
    m.impl("update_draft_inputs", TORCH_BOX(&update_draft_inputs));
    m.impl("compute_slot_mappings", TORCH_BOX(&compute_slot_mappings));
    m.impl("eagle_step", TORCH_BOX(&eagle_step));
    m.impl("prepare_inputs_padded", TORCH_BOX(&prepare_inputs_padded));
    m.impl("prepare_next_token_padded", TORCH_BOX(&prepare_next_token_padded));
    m.impl("gumbel_sample", TORCH_BOX(&gumbel_sample));
    m.impl("copy_expand_inputs", TORCH_BOX(&copy_expand_inputs));
    m.impl("extend_queries", TORCH_BOX(&extend_queries));
    m.impl("dcp_local_seq_lens", TORCH_BOX(&dcp_local_seq_lens));
}

}  // namespace nwor
