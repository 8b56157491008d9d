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
    FastDivisor by_entries;  // E
    bool is_aligned;         // all states
    const char* report_as;
    FoldLayer layers[kLayersPerLaunch];
};

// The fold of one block.
struct FoldTask {
    BlockPlace block;
    const FoldLayer* layer;
    RecurrentEntry entry;
    RecurrentRecord record;  // of the layer
};

// Finds the fold of this block. Returns false if the entry is invalid (and reports it), changes nothing, or
// is already folded.
template <class Places>
__device__ bool find_task(const FoldJob<Places>& job, FoldTask* task) {
    task->block = job.blocks[blockIdx.x];
    const uint32_t number = job.by_entries.quotient(static_cast<uint32_t>(task->block.request));
    const FoldLayer& layer = job.layers[number];
    const int64_t i = task->block.request - number * job.by_entries.divisor;
    wait_for_earlier_kernels();
    task->entry = job.plan[i];
    task->layer = &layer;
    const RecurrentEntry& entry = task->entry;
    const bool has_run = job.window_id != nullptr && *layer.window == *job.window_id;
    if (const Found found = problem_of_plan(entry, i, job.states.num_slots, job.record)) {
        if (threadIdx.x == 0) report(job.report_as, found);
        return false;
    }
    if (!entry.stores() || has_run || (entry.rows == 0 && entry.source == entry.target)) return false;
    task->record = job.record;
    task->record.keys = const_cast<char*>(layer.keys);
    task->record.norms = const_cast<float*>(layer.norms);
    task->record.decays = const_cast<float*>(layer.decays);
    task->record.updates = const_cast<float*>(layer.updates);
    return true;
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

// Whether the states of all layers are aligned.
bool all_are_aligned(const FoldArguments& f) {
    return std::all_of(f.layers.begin(), f.layers.end(), [&](const FoldLayer& layer) {
        return is_aligned(f.states, layer.states, f.states.slot_stride);
    });
}

// Starts the kernel for all layers, some at a time, and marks them. `shape_of` returns the shape for a number
// of layers.
template <class Places, class Kernel, class ShapeOf>
void start_folds(const FoldArguments& f, FoldJob<Places>* job, Kernel* kernel, const ShapeOf& shape_of,
                 const Launch& launch) {
    const int64_t num_layers = static_cast<int64_t>(f.layers.size());
    for (int64_t first = 0; first < num_layers && f.plan.length > 0; first += kLayersPerLaunch) {
        const int64_t count = std::min(kLayersPerLaunch, num_layers - first);
        std::copy_n(f.layers.begin() + first, count, job->layers);
        const LaunchShape shape = shape_of(count);
        allow_shared_memory(f.op, kernel, shape, launch);
        launch.start(kernel, shape, *job);
        if (f.window_id != nullptr) launch.start(mark_kernel<Places>, {dim3(1), dim3(kThreads)}, *job, count);
    }
}

}  // namespace

}  // namespace nwor
