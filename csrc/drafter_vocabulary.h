// The ops of a draft vocabulary, a set of rows of a head that follows the traffic: update_draft_vocabulary,
// argmax_draft_tokens and expand_draft_logits.
#pragma once

#include <vector>

#include "common/op.h"

namespace nwor {

// ---------------------------------------------------------------- update_draft_vocabulary

struct VocabularyArguments {
    const char* op;
    Ids prompt, sampled;  // the list of a call: the tokens of the prompts, then the sampled ones
    int64_t vocab_size, num_rows, first_token;
    const char* head;
    char* weight;
    int64_t head_row_bytes, weight_row_bytes, row_bytes;  // two strides, and the size of a row
    int32_t element_size;
    int64_t* token_ids;
    int32_t* row_of_token;
    uint32_t* used;  // one bit per row
    int32_t* hand;
    int64_t* counters;

    NWOR_HOST_DEVICE int64_t num_tokens() const { return prompt.length + sampled.length; }
    NWOR_HOST_DEVICE int64_t num_words() const { return (num_rows + 31) / 32; }
    // At most half of the rows change in one call.
    NWOR_HOST_DEVICE int64_t most_entries() const { return most(num_rows / 2, 1); }
    NWOR_HOST_DEVICE bool is_sampled(int64_t i) const { return i >= prompt.length; }
    // The row of the head of entry i of the list, or -1 if the head has none.
    NWOR_HOST_DEVICE int64_t token(int64_t i) const {
        return in_head(is_sampled(i) ? sampled[i - prompt.length] : prompt[i]);
    }
    NWOR_HOST_DEVICE int64_t in_head(int64_t id) const {
        return id >= first_token && id - first_token < vocab_size ? id - first_token : -1;
    }
    NWOR_HOST_DEVICE bool is_row(int32_t row) const { return row >= 0 && row < num_rows; }
    NWOR_HOST_DEVICE int64_t first_hand() const { return is_row(*hand) ? *hand : 0; }
    // Give a row to a token.
    NWOR_HOST_DEVICE void enter(int64_t row, int64_t token) const {
        const int64_t old = in_head(token_ids[row]);
        if (old >= 0) row_of_token[old] = -1;
        token_ids[row] = first_token + token;
        row_of_token[token] = static_cast<int32_t>(row);
    }
};

inline VocabularyArguments check_vocabulary(
    const char* op,
    const Tensor& sampled_tokens,                // ids [num_tokens]
    const Tensor& head,                          // [vocab_size, hidden_size]
    const Tensor& token_ids,                     // int64 [num_rows], written
    const Tensor& row_of_token,                  // int32 [vocab_size], written
    const Tensor& weight,                        // dtype of head [num_rows, hidden_size], written
    const Tensor& used,                          // int32 [num_rows / 32], rounded up, written
    const Tensor& hand,                          // int32 [1], written
    const Tensor& counters,                      // int64 [2], written
    const std::optional<Tensor>& prompt_tokens,  // ids [num_tokens]
    int64_t first_token) {
    const Argument st{op, "sampled_tokens", sampled_tokens}, he{op, "head", head},
        ti{op, "token_ids", token_ids}, rt{op, "row_of_token", row_of_token}, we{op, "weight", weight},
        us{op, "used", used}, ha{op, "hand", hand}, co{op, "counters", counters};
    VocabularyArguments a{};
    a.op = op;
    a.sampled = ids_view(st, 0, "[num_tokens]");
    check_element_size(he);
    if (head.dim() != 2) he.must_be("[vocab_size, hidden_size]");
    a.vocab_size = head.size(0);
    a.token_ids = int64_view(ti, 1, "[num_rows]").data;
    a.num_rows = token_ids.size(0);
    if (a.num_rows > a.vocab_size) ti.must_be("of at most ", a.vocab_size, " rows, the rows of head");
    check_below_2_31(op, "the rows of head", a.vocab_size);
    a.row_of_token = int32_view(rt, a.vocab_size, "[vocab_size]").data;
    we.dtype(head.scalar_type());
    if (weight.dim() != 2 || weight.size(0) != a.num_rows || weight.size(1) != head.size(1))
        we.must_be("[", a.num_rows, ", ", head.size(1), "], a row of head for each of token_ids");
    for (const Argument& rows : {he, we})
        if (rows.tensor.size(1) > 1 && rows.tensor.stride(1) != 1) rows.must_be("of contiguous rows");
    const int64_t size = a.element_size = static_cast<int32_t>(head.element_size());
    a.head = static_cast<const char*>(head.data_ptr());
    a.weight = static_cast<char*>(weight.data_ptr());
    a.head_row_bytes = head.stride(0) * size;
    a.weight_row_bytes = weight.stride(0) * size;
    a.row_bytes = head.size(1) * size;
    a.used = reinterpret_cast<uint32_t*>(int32_view(us, a.num_words(), "[num_rows / 32]").data);
    a.hand = int32_view(ha, 1, "[1]").data;
    a.counters = int64_view(co, 2, "[2]").data;
    check_not_negative(op, "first_token", first_token);
    a.first_token = first_token;
    std::vector<Argument> inputs{st, he};
    if (prompt_tokens.has_value()) {
        inputs.push_back({op, "prompt_tokens", *prompt_tokens});
        a.prompt = ids_view(inputs.back(), 0, "[num_tokens]");
    }
    check_below_2_31(op, "the number of tokens", a.num_tokens() + 2);
    check_placement(op, inputs, std::vector<Argument>{ti, rt, we, us, ha, co});
    return a;
}

// ---------------------------------------------------------------- argmax_draft_tokens

struct ArgmaxArguments {
    const char* op;
    const char* logits;
    int64_t num_rows, num_logits, row_stride, logit_stride;
    ScalarType dtype;
    int32_t element_size;
    const int64_t* token_ids;
    MutableIds tokens;
    float* values;  // null if not given

    NWOR_HOST_DEVICE void set(int64_t row, float value, int64_t token) const {
        tokens.set(row, token);
        if (values != nullptr) values[row] = value;
    }
};

inline ArgmaxArguments check_argmax(const char* op,
                                    const Tensor& logits,                // floats [num_rows, num_logits]
                                    const Tensor& token_ids,             // int64 [num_logits]
                                    const Tensor& tokens,                // ids [num_rows], written
                                    const std::optional<Tensor>& values  // float32 [num_rows], written
) {
    const Argument lo{op, "logits", logits}, ti{op, "token_ids", token_ids}, to{op, "tokens", tokens};
    ArgmaxArguments a{};
    a.op = op;
    check_floats(lo);
    if (logits.dim() != 2 || logits.size(0) > INT32_MAX || logits.size(1) > INT32_MAX)
        lo.must_be("[num_rows, num_logits] of fewer than 2^31 each");
    a.dtype = logits.scalar_type();
    a.logits = static_cast<const char*>(logits.data_ptr());
    a.num_rows = logits.size(0);
    a.num_logits = logits.size(1);
    a.row_stride = logits.stride(0);
    a.logit_stride = logits.stride(1);
    a.element_size = static_cast<int32_t>(logits.element_size());
    a.token_ids = int64_view(ti, a.num_logits, "[num_logits]").data;
    a.tokens = mutable_ids_view(to, a.num_rows, "[num_rows]");
    std::vector<Argument> outputs{to};
    if (values.has_value()) {
        outputs.push_back({op, "values", *values});
        a.values = vector_view<float>(outputs.back(), ScalarType::Float, a.num_rows, "[num_rows]").data;
    }
    check_placement(op, {lo, ti}, outputs);
    return a;
}

// ---------------------------------------------------------------- expand_draft_logits

constexpr uint32_t kMinusInfinity32 = 0xFF800000u;
constexpr uint16_t kMinusInfinityHalf = 0xFC00u, kMinusInfinityBFloat = 0xFF80u;

struct ExpandLogitsArguments {
    const char* op;
    const char* logits;
    char* out;
    int64_t num_rows, num_logits, row_stride, logit_stride;
    int64_t num_columns, out_row_stride, out_stride;
    ScalarType dtype;
    int32_t element_size;
    const int32_t* row_of_token;
    int64_t vocab_size;

    // The logit of a token within a row, or -1 if it has none.
    NWOR_HOST_DEVICE int64_t place_of(int64_t token) const {
        if (token >= vocab_size) return -1;
        const int32_t place = row_of_token[token];
        return place >= 0 && place < num_logits ? place : -1;
    }
};

inline ExpandLogitsArguments check_expand_logits(
    const char* op,
    const Tensor& logits,        // floats [num_rows, num_logits]
    const Tensor& row_of_token,  // int32 [vocab_size]
    const Tensor& out            // dtype of logits [num_rows, vocab_size], written
) {
    const Argument lo{op, "logits", logits}, rt{op, "row_of_token", row_of_token}, ou{op, "out", out};
    ExpandLogitsArguments a{};
    a.op = op;
    check_floats(lo);
    if (logits.dim() != 2) lo.must_be("[num_rows, num_logits]");
    a.row_of_token = int32_view(rt, 0, "[vocab_size]").data;
    a.vocab_size = row_of_token.size(0);
    ou.dtype(logits.scalar_type());
    if (out.dim() != 2 || out.size(0) != logits.size(0) || out.size(1) < a.vocab_size)
        ou.must_be("[", logits.size(0), ", >= ", a.vocab_size, "]");
    a.dtype = logits.scalar_type();
    a.element_size = static_cast<int32_t>(logits.element_size());
    a.logits = static_cast<const char*>(logits.data_ptr());
    a.num_rows = logits.size(0);
    a.num_logits = logits.size(1);
    a.row_stride = logits.stride(0);
    a.logit_stride = logits.stride(1);
    a.out = static_cast<char*>(out.data_ptr());
    a.num_columns = out.size(1);
    a.out_row_stride = out.stride(0);
    a.out_stride = out.stride(1);
    check_placement(op, {lo, rt}, {ou});
    return a;
}

}  // namespace nwor
