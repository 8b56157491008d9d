"""Every op of the library: declared, typed and documented as one function, in the file of its family.

The kernels of a family are in ``csrc/cpu/FAMILY.cpp`` and ``csrc/cuda/FAMILY.cu``. The fakes check arguments by the
tables in ``meta/FAMILY.py``.

``torch.ops.nwor.NAME`` and the function of the same name take the same arguments in the same order. The function adds
three things:

- It refuses tensors that require a gradient. The ops have no backward, and an in-place op without one would silently
  corrupt a backward pass.
- It raises ``TypeError`` for a wrong dtype or device. The dispatcher can raise only ``ValueError``.
- It raises ``TypeError`` for an option that is neither True nor False. The dispatcher takes the truth value of None and
  of numbers.

Shapes use these letters. A batch has T tokens of this step, Q requests and R log rows. A cache has G groups of layers,
B blocks, N slots per block (the block size), H KV heads and D as the head size. W is the width of a plane.

A *cache* is always the logical view ``[B, N, H, W]`` with any strides. NHD, HND, K and V packed in one row, one backing
buffer for all layers, and MLA latents (H = 1) are all such views. A *slot* is ``block * N + offset``, as in vLLM. An op
returns nothing unless its documentation says so.
"""

# ruff: noqa: I001  (`name as name` re-exports; isort would split them into one statement each)

from nwor_ops.ops.accept import (
    COUNTERS as COUNTERS,
    acceptance_mask as acceptance_mask,
    acceptance_mask_from_rejected as acceptance_mask_from_rejected,
    plan_window as plan_window,
    reject_rows as reject_rows,
    reject_rows_from_rejected as reject_rows_from_rejected,
)
from nwor_ops.ops.drafter import (
    argmax_draft_tokens as argmax_draft_tokens,
    compute_slot_mappings as compute_slot_mappings,
    copy_expand_inputs as copy_expand_inputs,
    dcp_local_seq_lens as dcp_local_seq_lens,
    eagle_step as eagle_step,
    expand_draft_logits as expand_draft_logits,
    extend_queries as extend_queries,
    gather_step_tokens as gather_step_tokens,
    gumbel_sample as gumbel_sample,
    prepare_decode_inputs as prepare_decode_inputs,
    prepare_inputs_padded as prepare_inputs_padded,
    prepare_next_token_padded as prepare_next_token_padded,
    prepare_prefill_inputs as prepare_prefill_inputs,
    update_draft_inputs as update_draft_inputs,
    update_draft_vocabulary as update_draft_vocabulary,
)
from nwor_ops.ops.recurrent import (
    gated_delta_fold as gated_delta_fold,
    gated_delta_verify as gated_delta_verify,
    plan_recurrent_block_fold as plan_recurrent_block_fold,
    plan_recurrent_fold as plan_recurrent_fold,
    plan_recurrent_window as plan_recurrent_window,
)
from nwor_ops.ops.shadow import (
    close_window as close_window,
    close_window_from_rejected as close_window_from_rejected,
    open_window as open_window,
)
from nwor_ops.ops.staging import (
    STAGE_COUNTERS as STAGE_COUNTERS,
    accept_staged as accept_staged,
    commit_staged as commit_staged,
    move_slots as move_slots,
    stage_kv as stage_kv,
)
from nwor_ops.ops.undo import (
    log_slots as log_slots,
    plane_table as plane_table,
    restore_slots as restore_slots,
    restore_slots_from_rejected as restore_slots_from_rejected,
    write_kv as write_kv,
    write_kv_logged as write_kv_logged,
)
