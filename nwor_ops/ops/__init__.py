"""Every op of the library: its schema and one documented wrapper, in the file of its family.

The kernels live in ``csrc/cpu/FAMILY.cpp`` and ``csrc/cuda/FAMILY.cu``, the fake implementations in ``meta/FAMILY.py``.
``torch.ops.nwor.NAME`` and the wrapper of the same name take the same arguments in the same order.
The wrapper adds two things: it refuses tensors that require a gradient (these ops have none, and
an in-place op without one would corrupt a backward pass in silence), and it raises ``TypeError``
for a wrong dtype or device where the dispatcher can only raise ``ValueError``.

Shapes use these letters: T tokens of this step, R log rows, G groups of layers, Q requests,
B blocks, N slots per block (the block size), H KV heads, D head size, W the width of a plane.

A *cache* is always the logical view ``[B, N, H, W]`` with any strides: NHD, HND, K and V packed in
one row, one backing buffer for all layers and MLA latents (H = 1) are all such views. A *slot* is
``block * N + offset``, as in vLLM. No op here has a return value unless it says so.
"""

from nwor_ops.ops.accept import (
    COUNTERS,
    acceptance_mask,
    acceptance_mask_from_rejected,
    plan_window,
    reject_rows,
    reject_rows_from_rejected,
)
from nwor_ops.ops.drafter import (
    compute_slot_mappings,
    copy_expand_inputs,
    dcp_local_seq_lens,
    eagle_step,
    extend_queries,
    gumbel_sample,
    prepare_decode_inputs,
    prepare_inputs_padded,
    prepare_next_token_padded,
    prepare_prefill_inputs,
    update_draft_inputs,
)
from nwor_ops.ops.shadow import (
    close_window,
    close_window_from_rejected,
    open_window,
)
from nwor_ops.ops.staging import (
    STAGE_COUNTERS,
    accept_staged,
    commit_staged,
    move_slots,
    stage_kv,
)
from nwor_ops.ops.undo import (
    log_slots,
    plane_table,
    restore_slots,
    restore_slots_from_rejected,
    write_kv,
    write_kv_logged,
)

__all__ = [
    "COUNTERS",
    "STAGE_COUNTERS",
    "accept_staged",
    "acceptance_mask",
    "acceptance_mask_from_rejected",
    "close_window",
    "close_window_from_rejected",
    "commit_staged",
    "compute_slot_mappings",
    "copy_expand_inputs",
    "dcp_local_seq_lens",
    "eagle_step",
    "extend_queries",
    "gumbel_sample",
    "log_slots",
    "move_slots",
    "open_window",
    "plan_window",
    "plane_table",
    "prepare_decode_inputs",
    "prepare_inputs_padded",
    "prepare_next_token_padded",
    "prepare_prefill_inputs",
    "reject_rows",
    "reject_rows_from_rejected",
    "restore_slots",
    "restore_slots_from_rejected",
    "stage_kv",
    "update_draft_inputs",
    "write_kv",
    "write_kv_logged",
]
