// Family recurrent on CUDA: one state per request. Semantics: nwor_ops/ops/recurrent.py.
//
// `recurrent_plan_kernels.h` plans a step. `recurrent_verify_kernels.h` reapplies, stores, runs and records
// the windows of a layer with one launch. `recurrent_fold_kernels.h` reapplies and stores, for several
// layers. With `chunk` both call the kernels of `recurrent_chunk.cu`, which have other bits.
//
// A block owns rows of one head's state of one request, from load to store. The rows are in registers: eight
// lanes share a row, and a thread has 64 elements of a few rows (`recurrent_rows.h`). A state travels through
// shared memory (`SharedRows` in `recurrent_shared.h`). After loads into registers, the first branch would
// wait for all of them. The code that prepares keys, queries, gates and record rows in the meantime has many
// branches. The kernel stores the state as soon as the accepted rows are reapplied, and then runs
// the window on the registers.
//
// In the exact form, results have the bits of the Triton kernels that `recurrent_arithmetic.h` names, as
// Triton 3.8 compiles them. `recurrent_delta_rule.h` says in which order sums are added.
#include "../recurrent.h"
#include "launch.h"
#include "recurrent_fold_kernels.h"
#include "recurrent_plan_kernels.h"
#include "recurrent_verify_kernels.h"

namespace nwor {

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_recurrent<Launch>(m);
}

}  // namespace nwor
