"""No Write On Reject: the KV-cache writes of speculative decoding as a transaction.

>>> import nwor_ops                      # declares torch.ops.nwor.*, loads the kernels
>>> nwor_ops.write_kv_logged(...)        # the ops, one documented wrapper each: nwor_ops.ops
>>> manager = nwor_ops.DraftCommitManager(...)   # begin, write, commit or cancel: nwor_ops.transaction.manager
"""

from importlib.metadata import PackageNotFoundError, version

from nwor_ops import library as _library
from nwor_ops import ops as ops
from nwor_ops import torch_fixes as _torch_fixes

try:
    __version__ = version("nwor_ops")
except PackageNotFoundError:  # an unpacked tree that was never installed
    __version__ = "0.0.0"

LIBRARIES = _library.loaded_libraries()
_torch_fixes.correct_slices()

from nwor_ops import meta as _meta  # noqa: E402, F401  (the fakes register themselves)
from nwor_ops.kv_cache import LayerCache, Plane  # noqa: E402
from nwor_ops.ops import (  # noqa: E402
    COUNTERS,
    STAGE_COUNTERS,
    accept_staged,
    acceptance_mask,
    acceptance_mask_from_rejected,
    close_window,
    close_window_from_rejected,
    commit_staged,
    compute_slot_mappings,
    copy_expand_inputs,
    dcp_local_seq_lens,
    eagle_step,
    extend_queries,
    gumbel_sample,
    log_slots,
    move_slots,
    open_window,
    plan_window,
    plane_table,
    prepare_decode_inputs,
    prepare_inputs_padded,
    prepare_next_token_padded,
    prepare_prefill_inputs,
    reject_rows,
    reject_rows_from_rejected,
    restore_slots,
    restore_slots_from_rejected,
    stage_kv,
    update_draft_inputs,
    write_kv,
    write_kv_logged,
)
from nwor_ops.staging import KVCacheInterceptor, StagingBuffer  # noqa: E402
from nwor_ops.transaction.counters import EngineStats, InterceptorStats, StagingStats, Stats, stats  # noqa: E402
from nwor_ops.transaction.manager import DraftCommitManager, current_manager, set_current_manager  # noqa: E402
from nwor_ops.transaction.shadow_pages import num_shadow_blocks  # noqa: E402
from nwor_ops.transaction.window import Window  # noqa: E402

__all__ = [
    "COUNTERS",
    "LIBRARIES",
    "STAGE_COUNTERS",
    "DraftCommitManager",
    "EngineStats",
    "InterceptorStats",
    "KVCacheInterceptor",
    "LayerCache",
    "Plane",
    "StagingBuffer",
    "StagingStats",
    "Stats",
    "Window",
    "accept_staged",
    "acceptance_mask",
    "acceptance_mask_from_rejected",
    "close_window",
    "close_window_from_rejected",
    "commit_staged",
    "compute_slot_mappings",
    "copy_expand_inputs",
    "current_manager",
    "dcp_local_seq_lens",
    "eagle_step",
    "extend_queries",
    "gumbel_sample",
    "log_slots",
    "move_slots",
    "num_shadow_blocks",
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
    "set_current_manager",
    "stage_kv",
    "stats",
    "update_draft_inputs",
    "write_kv",
    "write_kv_logged",
]
