// Family recurrent: the arguments of gated_delta_fold and their checks.
#pragma once

#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "recurrent_states.h"

namespace nwor {

// Addresses of one layer's tensors. Shapes and strides are the same for all layers.
struct FoldLayer {
    char* states;          // [S, HV, dv, dk]
    const char* keys;      // [S, 2, W, H, dk]
    const float* norms;    // [S, 2, W, H]
    const float* decays;   // [S, 2, W, HV] or [S, 2, W, HV, dk]
    const float* updates;  // [S, W, HV, dv]
    int64_t* window;       // [1]: the last window that the layer ran in, or that it was folded for
};

struct FoldArguments {
    const char* op;
    RecurrentStates states;         // of the first layer
    RecurrentRecord record;         // of the first layer
    std::vector<FoldLayer> layers;  // L
    RecurrentPlan plan;             // [E, 4]
    const int64_t* window_id;       // [1]; null: fold all layers and mark none
    int64_t chunk;                  // C: round the state after C rows; 0: only at the end
};

inline void check_same_layout(const Argument& a, const char* list, const Tensor& first) {
    a.dtype(first.scalar_type());
    a.same_device(first);
    bool same = a.tensor.dim() == first.dim() && a.tensor.stride(0) == first.stride(0);
    for (int64_t i = 0; same && i < first.dim(); ++i) same = a.tensor.size(i) == first.size(i);
    if (!same) a.must_be("of the shape and strides of ", list, "[0], ", describe(first));
}

inline FoldArguments check_fold(
    const char* op,                             //
    const std::vector<Tensor>& states,          // L of [S, HV, dv, dk], float32 or bfloat16
    const std::vector<Tensor>& record_keys,     // L of [S, 2, W, H, dk]
    const std::vector<Tensor>& record_norms,    // L of [S, 2, W, H], float32
    const std::vector<Tensor>& record_decays,   // L of [S, 2, W, HV] or [S, 2, W, HV, dk], float32
    const std::vector<Tensor>& record_updates,  // L of [S, W, HV, dv], float32
    const std::vector<Tensor>& layer_windows,   // L of [1], int64
    const Tensor& plan,                         // [E, 4], int32
    const std::optional<Tensor>& window_id,     // [1], int64
    int64_t chunk)                              // C
{
    // As many tensors in each list as states
    struct List {
        const char* name;
        const std::vector<Tensor>& tensors;
    };
    const List lists[] = {{"states", states},
                          {"record_keys", record_keys},
                          {"record_norms", record_norms},
                          {"record_decays", record_decays},
                          {"record_updates", record_updates},
                          {"layer_windows", layer_windows}};
    if (states.empty()) fail(op, "states must hold at least one layer, got none");
    for (const List& list : lists)
        if (list.tensors.size() != states.size())
            fail(op, list.name, " must hold a tensor for each of the ", states.size(), " states, got ",
                 list.tensors.size());

    check_chunk(op, chunk);

    // Plan and window
    FoldArguments f{};
    f.op = op;
    f.chunk = chunk;
    const Tensor& first = states[0];
    const Argument rows{op, "plan", plan};
    f.plan = recurrent_plan_view(rows, 0);
    rows.same_device(first);
    if (window_id.has_value()) {
        const Argument number{op, "window_id", *window_id};
        number.vector(ScalarType::Long, 1, "[1]");
        number.same_device(first);
        f.window_id = static_cast<const int64_t*>(window_id->data_ptr());
    }

    // Layer by layer: shapes, the layout of the first layer, overlaps
    std::vector<Placed> placed, marks;  // states and window numbers
    for (size_t layer = 0; layer < states.size(); ++layer) {
        std::string names[std::size(lists)];
        for (size_t i = 0; i < std::size(lists); ++i)
            names[i] = std::string(lists[i].name) + "[" + std::to_string(layer) + "]";
        const auto argument = [&](size_t i) {
            return Argument{op, names[i].c_str(), lists[i].tensors[layer]};
        };
        const RecurrentStates view = states_view(argument(0));
        const RecurrentRecord record =
            record_view({argument(1), argument(2), argument(3), argument(4)}, view, chunk);
        if (chunk > 0) check_chunk_layout(argument(0), argument(1), argument(3));
        argument(5).vector(ScalarType::Long, 1, "[1]");
        if (layer == 0) {
            f.states = view;
            f.record = record;
        }
        for (size_t i = 0; i < std::size(lists); ++i) {
            argument(i).same_device(first);
            if (i < std::size(lists) - 1) check_same_layout(argument(i), lists[i].name, lists[i].tensors[0]);
        }
        // A state must not share memory with its record, or with the state of another layer. The same holds
        // for a window number, if it is written.
        placed.emplace_back("states", states[layer]);
        for (size_t other = 0; other < layer; ++other) must_not_overlap(op, placed[layer], placed[other]);
        for (size_t i = 1; i < std::size(lists); ++i)
            must_not_overlap(op, placed[layer], Placed(lists[i].name, lists[i].tensors[layer]));
        must_not_overlap(op, placed[layer], rows);
        if (window_id.has_value()) {  // otherwise no layer is marked
            const Placed number("window_id", *window_id);
            must_not_overlap(op, placed[layer], number);
            marks.emplace_back("layer_windows", layer_windows[layer]);
            for (size_t other = 0; other < layer; ++other) must_not_overlap(op, marks[layer], marks[other]);
            for (const Placed& input : {Placed(rows), number}) must_not_overlap(op, marks[layer], input);
            for (size_t i = 1; i < std::size(lists) - 1; ++i)
                must_not_overlap(op, marks[layer], Placed(lists[i].name, lists[i].tensors[layer]));
        }
        f.layers.push_back({view.data, record.keys, record.norms, record.decays, record.updates,
                            static_cast<int64_t*>(layer_windows[layer].data_ptr())});
    }
    return f;
}

// The caller guarantees that the plan of a step shares no memory with states.
inline void set_step(FoldArguments& f, const FoldArguments&, const StepArguments& step) {
    f.plan = recurrent_plan_view({f.op, "plan", needed(f.op, "plan", step.plan)}, 0);
}

}  // namespace nwor
