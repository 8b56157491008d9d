// Family recurrent: the kernels that plan windows and folds.
#pragma once

#include "../recurrent_plan.h"
#include "launch.h"

namespace nwor {
namespace {

// Reports a problem, and counts the request or entry that it leaves out.
__device__ void skip(const char* report_as, const Found& found, int64_t* num_skipped) {
    report(report_as, found);
    if (num_skipped != nullptr) atomicAdd(reinterpret_cast<unsigned long long*>(num_skipped), 1ull);
}

// ---------------------------------------------------------------- plan_recurrent_window

// Grid: x = rows of the plan / 256, one thread per row.
__global__ void __launch_bounds__(kThreads)
    window_plan_kernel(const __grid_constant__ RecurrentWindowArguments a, const char* report_as) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    wait_for_earlier_kernels();
    if (i == 0) ++*a.window_id;
    if (i >= a.plan.length) return;
    if (i >= a.num_requests) return a.plan.set(i, {});
    const RecurrentWindowStep step = window_step_of(a, i);
    if (step.found) skip(report_as, step.found, a.num_skipped);
    a.plan.set(i, step.entry);
    if (step.sets_cursor) a.cursors.set(step.slot, step.cursor);
}

void run(const RecurrentWindowArguments& a, const Launch& launch) {
    launch.start(window_plan_kernel, shape_for_items(a.plan.length), a, report_as(a.op));
    check_launch(launch);
}

// ---------------------------------------------------------------- plan_recurrent_fold, ..._block_fold

// Marks, as the first row of a plan of zeros, an entry that folds nothing but clears its cursor.
constexpr int32_t kClears = 1;

// Grid: one block, because all cursors must be read before the first one is written.
template <class Arguments>
__global__ void __launch_bounds__(kThreads)
    fold_plan_kernel(const __grid_constant__ Arguments a, const char* report_as) {
    wait_for_earlier_kernels();

    // ---- Read the cursors and plan
    for (int64_t i = threadIdx.x; i < a.plan.length; i += kThreads) {
        if (i >= a.num_entries) {
            a.plan.set(i, {});
            continue;
        }
        const RecurrentFoldStep step = fold_step_of(a, i);
        if (step.found) skip(report_as, step.found, a.num_skipped);
        a.plan.set(i, !step.entry.any() && step.target > 0 ? RecurrentEntry{0, 0, kClears, 0} : step.entry);
    }
    __syncthreads();

    // ---- Set the cursors
    for (int64_t i = threadIdx.x; i < a.num_entries; i += kThreads) {
        const RecurrentEntry entry = a.plan[i];
        if (entry.any()) {
            set_target(a, entry);
            if (entry.source != entry.target && !a.keep_source) a.cursors.clear(entry.source);
        } else if (entry.first == kClears) {
            a.cursors.clear(a.fold_of(i).target);
            a.plan.set(i, {});
        }
    }
}

template <class Arguments>
void plan_folds(const Arguments& a, const Launch& launch) {
    launch.start(fold_plan_kernel<Arguments>, {dim3(1), dim3(kThreads)}, a, report_as(a.op));
    check_launch(launch);
}

void run(const RecurrentFoldPlanArguments& a, const Launch& launch) {
    plan_folds(a, launch);
}

void run(const RecurrentBlockFoldArguments& a, const Launch& launch) {
    plan_folds(a, launch);
}

}  // namespace

}  // namespace nwor
