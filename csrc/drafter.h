// Family drafter: its ops, each with its arguments, their check, and the work for one row or one token. The
// CPU kernels loop over these functions, and each thread of a CUDA kernel calls one, so both devices share
// one implementation.
//
// For any data, these functions read and write only inside the buffers. The `problem_of_...` functions find
// invalid data: the CPU calls them before anything is written, CUDA calls them in debug mode.
#pragma once

#include "common/op.h"
#include "drafter_passes.h"
#include "drafter_queries.h"
#include "drafter_sample.h"
#include "drafter_vocabulary.h"

namespace nwor {

template <class Device>
void register_drafter(Library& m) {
    NWOR_OP(m, prepare_prefill_inputs, check_prefill);
    NWOR_OP(m, prepare_decode_inputs, check_decode);
    NWOR_OP(m, update_draft_inputs, check_update);
    NWOR_OP(m, compute_slot_mappings, check_slot_mappings);
    NWOR_OP(m, eagle_step, check_eagle_step);
    NWOR_OP(m, prepare_inputs_padded, check_inputs_padded);
    NWOR_OP(m, prepare_next_token_padded, check_next_token_padded);
    NWOR_OP(m, gumbel_sample, check_gumbel_sample);
    NWOR_OP(m, copy_expand_inputs, check_expand);
    NWOR_OP(m, extend_queries, check_extend);
    NWOR_OP(m, dcp_local_seq_lens, check_local_seq_lens);
    NWOR_OP(m, gather_step_tokens, check_step_tokens);
    NWOR_OP(m, update_draft_vocabulary, check_vocabulary);
    NWOR_OP(m, argmax_draft_tokens, check_argmax);
    NWOR_OP(m, expand_draft_logits, check_expand_logits);
}

}  // namespace nwor
