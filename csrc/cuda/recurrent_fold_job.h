// Family recurrent: what a launch of gated_delta_fold gets, for several layers.
#pragma once

#include <algorithm>

#include "../recurrent_fold.h"
#include "launch.h"
#include "recurrent_launch.h"

namespace nwor {
namespace {

// Layers that fit in the parameters of a launch (4 KB in all). More layers take another launch.
constexpr int64_t kLayersPerLaunch = 72;

template <class Places>
struct FoldJob {
    RecurrentStates states;    // of every layer; `data` is not used
    RecurrentRecord record;    // of every layer; `data` is not used
    RecurrentPlan plan;        // [E, 4]
    const int64_t* window_id;  // [1], or null
    Places shared;             // of the shared memory
    BlockPlaces blocks;
    FastDivisor by_parts;  // the blocks that share the entries of a layer
    bool is_aligned;       // all states
    const char* report_as;
    FoldLayer layers[kLayersPerLaunch];
};

// The fold of one entry by a block.
struct FoldTask {
    BlockPlace block;
    const FoldLayer* layer;
    RecurrentRecord record;  // of the layer
    RecurrentEntry entry;
};

// Calls `fold(&task)` for each entry of this block that changes a state, and reports invalid ones. In most
// steps of an engine few entries do, so a block looks through many. All its warps find the same ones.
template <class Places, class F>
__device__ void for_each_fold(const FoldJob<Places>& job, const F& fold) {
    FoldTask task{job.blocks[blockIdx.x], nullptr, job.record, {}};
    const uint32_t number = job.by_parts.quotient(static_cast<uint32_t>(task.block.request));
    const FoldLayer& layer = job.layers[number];
    task.layer = &layer;
    task.record.keys = const_cast<char*>(layer.keys);
    task.record.norms = const_cast<float*>(layer.norms);
    task.record.decays = const_cast<float*>(layer.decays);
    task.record.updates = const_cast<float*>(layer.updates);
    const int64_t parts = job.by_parts.divisor, part = task.block.request - number * parts;
    wait_for_earlier_kernels();
    const bool has_run = job.window_id != nullptr && *layer.window == *job.window_id;
    for (int64_t first = part; first < job.plan.length; first += kWarp * parts) {
        const int64_t i = first + threadIdx.x % kWarp * parts;
        bool changes = false;
        if (i < job.plan.length) {
            const RecurrentEntry entry = job.plan[i];
            const Found found = problem_of_plan(entry, i, job.states.num_slots, job.record);
            if (found && threadIdx.x < kWarp) report(job.report_as, found);
            changes =
                !found && !has_run && entry.stores() && (entry.rows > 0 || entry.source != entry.target);
        }
        for (uint32_t left = __ballot_sync(kAllLanes, changes); left != 0; left &= left - 1) {
            task.entry = job.plan[first + (__ffs(left) - 1) * parts];
            fold(&task);
            __syncthreads();  // before the next one writes to the shared memory
        }
    }
}

// Grid: one block. Marks the layers of a launch as folded. All blocks of fold_kernel must have read the marks
// before.
template <class Places>
__global__ void __launch_bounds__(kThreads)
    mark_kernel(const __grid_constant__ FoldJob<Places> job, int64_t num_layers) {
    static_assert(sizeof job <= 4096, "kernel parameters are at most 4 KB on every architecture");
    wait_for_earlier_kernels();
    if (threadIdx.x < num_layers) *job.layers[threadIdx.x].window = *job.window_id;
}
static_assert(kLayersPerLaunch <= kThreads, "a thread marks one layer");

int64_t values_of_fold(const FoldArguments& f, int64_t most) {
    const int64_t num_layers = static_cast<int64_t>(f.layers.size());
    return values_of_block(f.record, f.plan.length * f.states.num_value_heads * num_layers, most);
}

bool all_are_aligned(const FoldArguments& f) {
    return std::all_of(f.layers.begin(), f.layers.end(), [&](const FoldLayer& layer) {
        return is_aligned(f.states, layer.states, f.states.slot_stride);
    });
}

// Starts the kernel for all layers, some at a time, and marks them. A block takes `values` rows of a state.
// The blocks share the entries so that they fill the chip.
template <class Places, class Kernel>
void start_folds(const FoldArguments& f, const Places& shared, bool is_aligned, Kernel* kernel,
                 int64_t values, int64_t threads, const Launch& launch) {
    const int64_t heads = f.states.num_value_heads, splits = f.states.value_width / values;
    const int64_t num_layers = static_cast<int64_t>(f.layers.size());
    const int64_t parts = std::min(2 * kEnoughBlocks / (num_layers * heads * splits), f.plan.length);
    FoldJob<Places> job{f.states, f.record, f.plan, f.window_id, shared, BlockPlaces(f.record, values)};
    job.by_parts = FastDivisor(parts);
    job.is_aligned = is_aligned;
    job.report_as = report_as(f.op);
    for (int64_t first = 0; first < num_layers && f.plan.length > 0; first += kLayersPerLaunch) {
        const int64_t count = std::min(kLayersPerLaunch, num_layers - first);
        std::copy_n(f.layers.begin() + first, count, job.layers);
        const LaunchShape shape =
            shape_for_heads(f.op, job.by_parts.divisor * heads * count, splits, threads, shared.bytes);
        allow_shared_memory(f.op, kernel, shape, launch);
        launch.start(kernel, shape, job);
        if (f.window_id != nullptr) launch.start(mark_kernel<Places>, {dim3(1), dim3(kThreads)}, job, count);
    }
}

}  // namespace

}  // namespace nwor
