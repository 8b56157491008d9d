// Family recurrent: the kernel of gated_delta_fold. It reapplies pending rows and stores the states, for
// several layers.
#pragma once

#include "../recurrent_fold.h"
#include "async_copies.h"
#include "launch.h"
#include "recurrent_chunk.h"
#include "recurrent_fold_job.h"
#include "recurrent_launch.h"
#include "recurrent_reapply.h"
#include "recurrent_rows.h"
#include "recurrent_shared.h"

namespace nwor {
namespace {

// Grid: x = L * parts * HV * (dv / rows of a block), see `BlockPlaces`; layer and part of the entries
// together take the place of its request. Block: x = 32 * (rows of a block / `Rows::kRowsOfWarp`). A block
// folds some rows of one head's state for each of its entries.
template <class State, class Input, int kWidth, bool kPerChannel>
__global__ void __launch_bounds__(kThreads, 2)
    fold_kernel(const __grid_constant__ FoldJob<SharedPlaces> job) {
    using R = Rows<State, kWidth>;

    for_each_fold(job, [&](FoldTask* task) {
        // ---- Load the rows of the record and of the state

        const RecurrentEntry& entry = task->entry;
        const BlockPlace& block = task->block;
        copy_reapplied<State, kWidth, kPerChannel>(task->record, job.shared, entry, block,
                                                   threadIdx.x / kWarp);
        const LaneOfRow at;
        const int64_t source = job.states.row_offset(entry.source, block.head, 0) * sizeof(State),
                      target = job.states.row_offset(entry.target, block.head, 0) * sizeof(State);
        const int value = threadIdx.x / kWarp * R::kRowsOfWarp;
        RawRows<State, kWidth> raw;
        raw.load(task->layer->states + source, job.is_aligned, block.first_value + value, at);
        close_group_of_copies();
        __syncwarp();  // otherwise the compiler makes the loads wait for the copies
        wait_for_copies<0>();
        __syncthreads();
        scale_reapplied_keys<State, Input, kWidth>(job.shared, entry.rows);
        __syncthreads();

        // ---- Reapply and store

        R rows;
        raw.widen(&rows);
        reapply<State, kWidth, kPerChannel>(&rows, job.shared, entry.rows, block.num_values, value, at);
        raw.round(rows);
        raw.store(task->layer->states + target, job.is_aligned, block.first_value + value, at);
    });
}

void run(const FoldArguments& f, const Launch& launch) {
    if (f.chunk > 0) return run_chunk(f, launch.like());
    with_types(f.states, f.record, [&](auto state, auto input, auto width, auto per_channel) {
        using State = typename decltype(state)::type;
        constexpr int kWidth = decltype(width)::value;
        constexpr int64_t kMost = Rows<State, kWidth>::kRowsOfWarp * (kThreads / kWarp);
        const int64_t values = values_of_fold(f, kMost);
        const SharedPlaces shared(0, f.record.rows, Rows<State, kWidth>::kPadded, values,
                                  f.record.per_channel, false, 0);
        start_folds(f, shared, all_are_aligned(f),
                    fold_kernel<State, typename decltype(input)::type, kWidth, per_channel>, values,
                    values / Rows<State, kWidth>::kRowsOfWarp * kWarp, launch);
    });
    check_launch(launch);
}

}  // namespace

}  // namespace nwor
