// Family recurrent: linear-attention layers verify drafts with one recurrent state per request. Semantics:
// nwor_ops/ops/recurrent.py.
//
// `recurrent_plan.h` plans a step, `recurrent_states.h` describes states and records, `recurrent_verify.h`
// and `recurrent_fold.h` check the calls that read and write them. The CPU kernels loop over the functions in
// these files, and the CUDA kernels call them in each thread, so both devices behave the same.
//
// Letters in shapes: Q requests, E entries of a fold, T tokens, S slots, W rows of a record, H key heads, HV
// value heads, dk and dv elements of a key head and a value head, L layers.
#pragma once

#include "recurrent_fold.h"
#include "recurrent_plan.h"
#include "recurrent_verify.h"

namespace nwor {

template <class Device>
void register_recurrent(Library& m) {
    NWOR_OP(m, plan_recurrent_window, check_recurrent_window);
    NWOR_OP(m, plan_recurrent_fold, check_recurrent_fold_plan);
    NWOR_OP(m, plan_recurrent_block_fold, check_recurrent_block_fold);
    NWOR_OP(m, gated_delta_verify, check_verify);
    NWOR_BINDABLE_OP(m, gated_delta_fold, check_fold);
    m.impl("_fold_bound", TORCH_BOX(&fold_bound));
}

}  // namespace nwor
