// Family recurrent: states and records of a layer, as the kernels address them.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "recurrent_plan.h"

namespace nwor {

// States of one layer. Here and below, strides are in elements.
struct RecurrentStates {
    char* data;        // [S, HV, dv, dk], contiguous within a slot
    bool is_bfloat16;  // false: float32
    int64_t slot_stride;
    int64_t num_slots, num_value_heads, value_width, key_width;  // S, HV, dv, dk

    NWOR_HOST_DEVICE int64_t row_offset(int64_t slot, int64_t value_head, int64_t value) const {
        return slot * slot_stride + (value_head * value_width + value) * key_width;
    }
};

// The record of one layer. Each tensor is contiguous within a slot. A ring has one half of R + W rows.
struct RecurrentRecord {
    char* keys;      // [S, 2, W, H, dk], or [S, 1, R + W, H, dk]; in the same way:
    float* norms;    // [S, 2, W, H]
    float* decays;   // [S, 2, W, HV], or [S, 2, W, HV, dk] if `per_channel`
    float* updates;  // [S, W, HV, dv], or [S, R + W, HV, dv]
    ScalarType key_dtype;
    int64_t keys_stride, norms_stride, decays_stride, updates_stride;      // between slots
    int64_t rows, num_key_heads, num_value_heads, key_width, value_width;  // W, H, HV, dk, dv
    int64_t window_rows, pending_rows;  // at most: tokens of a window, rows to reapply
    bool per_channel;                   // a decay per channel of a key
    bool is_ring;

    // Each function returns where row i of an entry lies: among the updates, and among all others.
    NWOR_HOST_DEVICE int64_t update_row(int32_t first, int64_t i) const {
        if (!is_ring) return i;
        return first + i < rows ? first + i : first + i - rows;
    }
    NWOR_HOST_DEVICE int64_t row_of(int32_t first, int64_t i) const {
        return is_ring ? update_row(first, i) : first * rows + i;
    }
    // Returns whether an entry has a window. With a ring, a window may leave the state unstored.
    NWOR_HOST_DEVICE bool has_window(const RecurrentEntry& entry) const {
        return is_ring ? entry.any() : entry.stores();
    }
    // Returns the place at which the window records, as `first` would give it for its rows.
    NWOR_HOST_DEVICE int32_t first_of_window(const RecurrentEntry& entry) const {
        return is_ring ? static_cast<int32_t>(update_row(entry.first, entry.rows)) : 1 - entry.first;
    }

    // Each function returns the offset of the first element of a head's row.
    NWOR_HOST_DEVICE int64_t norm_offset(int64_t slot, int64_t row, int64_t key_head) const {
        return slot * norms_stride + row * num_key_heads + key_head;
    }
    NWOR_HOST_DEVICE int64_t key_offset(int64_t slot, int64_t row, int64_t key_head) const {
        return slot * keys_stride + (row * num_key_heads + key_head) * key_width;
    }
    NWOR_HOST_DEVICE int64_t decay_offset(int64_t slot, int64_t row, int64_t value_head) const {
        return slot * decays_stride + (row * num_value_heads + value_head) * (per_channel ? key_width : 1);
    }
    NWOR_HOST_DEVICE int64_t update_offset(int64_t slot, int64_t row, int64_t value_head) const {
        return slot * updates_stride + (row * num_value_heads + value_head) * value_width;
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
    Argument keys;     // [S, 2, W, H, dk]
    Argument norms;    // [S, 2, W, H]
    Argument decays;   // [S, 2, W, HV] or [S, 2, W, HV, dk]
    Argument updates;  // [S, W, HV, dv]
};

// With chunk, records are a ring of R = chunk - 1 + W pending rows and W rows of a window.
inline RecurrentRecord record_view(const RecordTensors& t, const RecurrentStates& states, int64_t chunk) {
    const int64_t slots = states.num_slots, heads = states.num_value_heads;
    RecurrentRecord r{};
    const Tensor& keys = t.keys.tensor;
    check_inputs(t.keys);
    const int64_t parts = chunk > 0 ? 1 : 2;
    if (keys.dim() != 5 || keys.size(0) != slots || keys.size(4) != states.key_width || keys.size(1) != parts)
        t.keys.must_be("[", slots, ", ", parts, ", record_rows, num_key_heads, ", states.key_width, "]",
                       chunk > 0 ? " with chunk" : "");
    r.is_ring = chunk > 0;
    r.rows = keys.size(2);
    r.num_key_heads = keys.size(3);
    r.num_value_heads = heads;
    r.key_width = states.key_width;
    r.value_width = states.value_width;
    if (r.rows < 1 || r.rows > kMostRecordRows) t.keys.must_be("of 1 to ", kMostRecordRows, " rows");
    if (r.num_key_heads < 1 || heads % r.num_key_heads != 0)
        t.keys.must_be("of a number of heads that divides the ", heads, " of the state");
    r.window_rows = chunk > 0 ? (r.rows - chunk + 1) / 2 : r.rows;
    r.pending_rows = most_pending_rows(r.window_rows, chunk);
    if (chunk > 0 && (r.window_rows < 1 || r.pending_rows + r.window_rows != r.rows))
        t.keys.must_be("of ", chunk - 1, " rows and two for each token of a window with chunk");
    for (const Argument& a : {t.norms, t.decays, t.updates}) a.dtype(ScalarType::Float);
    check_shape(t.norms, {slots, parts, r.rows, r.num_key_heads});
    r.per_channel = t.decays.tensor.dim() == 5;
    if (r.per_channel)
        check_shape(t.decays, {slots, parts, r.rows, heads, r.key_width});
    else
        check_shape(t.decays, {slots, parts, r.rows, heads});
    check_shape(t.updates, {slots, r.rows, heads, r.value_width});
    for (const Argument& a : {t.keys, t.norms, t.decays, t.updates}) check_contiguous_within_slot(a);
    r.key_dtype = keys.scalar_type();
    r.keys = static_cast<char*>(keys.data_ptr());
    r.norms = static_cast<float*>(t.norms.tensor.data_ptr());
    r.decays = static_cast<float*>(t.decays.tensor.data_ptr());
    r.updates = static_cast<float*>(t.updates.tensor.data_ptr());
    r.keys_stride = keys.stride(0);
    r.norms_stride = t.norms.tensor.stride(0);
    r.decays_stride = t.decays.tensor.stride(0);
    r.updates_stride = t.updates.tensor.stride(0);
    return r;
}

// Checks what the chunk form has kernels for.
inline void check_chunk_layout(const Argument& states, const Argument& keys, const Argument& decays) {
    if (states.tensor.size(2) != 128 || states.tensor.size(3) != 128)
        states.must_be("of value_width 128 and key_width 128 with chunk");
    if (keys.tensor.is_cuda() && keys.tensor.scalar_type() != ScalarType::BFloat16)
        keys.must_have_dtype("torch.bfloat16 with chunk on CUDA");
    if (decays.tensor.dim() != 4) decays.must_be("of one decay per head with chunk");
}

// Returns the problem of an entry that does not fit the states or the record.
NWOR_HOST_DEVICE inline Found problem_of_plan(const RecurrentEntry& entry, int64_t i, int64_t num_slots,
                                              const RecurrentRecord& record) {
    if (!record.has_window(entry)) return {};
    if (entry.target >= num_slots) return {kPlanSlots, i, entry.target, num_slots};
    if (entry.source < 1 || entry.source >= num_slots) return {kPlanSlots, i, entry.source, num_slots};
    if (entry.rows < 0 || entry.rows > record.pending_rows)
        return {kPlanRows, i, entry.rows, record.pending_rows};
    if (!record.is_ring && entry.first != 0 && entry.first != 1) return {kPlanHalf, i, entry.first, 1};
    if (record.is_ring && (entry.first < 0 || entry.first >= record.rows))
        return {kPlanRing, i, entry.first, record.rows};
    return {};
}

}  // namespace nwor
