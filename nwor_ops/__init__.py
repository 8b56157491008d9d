"""Faster speculative decoding: one recurrent state per request, draft graphs, and KV-cache writes as a transaction.

Importing the package declares ``torch.ops.nwor.*`` and loads the compiled kernels.

- :mod:`nwor_ops.ops`: the ops, one documented function each.
- :class:`DraftCommitManager`: the transaction (begin, write, then commit or cancel).
- :class:`RecurrentStates`: linear-attention layers with one state per request.
- :mod:`nwor_ops.drafter`: the drafter's loop in CUDA graphs.
- :class:`DraftVocabulary`: a small output head for drafters, whose rows follow the traffic.
- :mod:`nwor_ops.vllm`: the plugin.

Example:
    >>> import nwor_ops
    >>> nwor_ops.num_shadow_blocks(max_num_requests=8, max_drafts_per_request=3, block_size=16)
    16
"""

# ruff: noqa: I001  (`name as name` re-exports; isort would split them into one statement each)

from importlib import metadata as _metadata

from nwor_ops import library as _library
from nwor_ops import ops as ops
from nwor_ops import torch_fixes as _torch_fixes

try:
    __version__ = _metadata.version("nwor_ops")
except _metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

LIBRARIES = _library.loaded_libraries()
_torch_fixes.correct_slices()

import nwor_ops.meta as _meta  # noqa: E402, F401  (the fakes register themselves)
from nwor_ops.drafter.vocabulary import DraftVocabulary as DraftVocabulary  # noqa: E402
from nwor_ops.kv_cache import (  # noqa: E402
    LayerCache as LayerCache,
    Plane as Plane,
)
from nwor_ops.ops import (  # noqa: E402
    COUNTERS as COUNTERS,
    STAGE_COUNTERS as STAGE_COUNTERS,
    accept_staged as accept_staged,
    acceptance_mask as acceptance_mask,
    acceptance_mask_from_rejected as acceptance_mask_from_rejected,
    argmax_draft_tokens as argmax_draft_tokens,
    close_window as close_window,
    close_window_from_rejected as close_window_from_rejected,
    commit_staged as commit_staged,
    compute_slot_mappings as compute_slot_mappings,
    copy_expand_inputs as copy_expand_inputs,
    dcp_local_seq_lens as dcp_local_seq_lens,
    eagle_step as eagle_step,
    expand_draft_logits as expand_draft_logits,
    extend_queries as extend_queries,
    gather_step_tokens as gather_step_tokens,
    gated_delta_fold as gated_delta_fold,
    gated_delta_verify as gated_delta_verify,
    gumbel_sample as gumbel_sample,
    log_slots as log_slots,
    move_slots as move_slots,
    open_window as open_window,
    plan_recurrent_block_fold as plan_recurrent_block_fold,
    plan_recurrent_fold as plan_recurrent_fold,
    plan_recurrent_window as plan_recurrent_window,
    plan_window as plan_window,
    plane_table as plane_table,
    prepare_decode_inputs as prepare_decode_inputs,
    prepare_inputs_padded as prepare_inputs_padded,
    prepare_next_token_padded as prepare_next_token_padded,
    prepare_prefill_inputs as prepare_prefill_inputs,
    reject_rows as reject_rows,
    reject_rows_from_rejected as reject_rows_from_rejected,
    restore_slots as restore_slots,
    restore_slots_from_rejected as restore_slots_from_rejected,
    stage_kv as stage_kv,
    update_draft_inputs as update_draft_inputs,
    update_draft_vocabulary as update_draft_vocabulary,
    write_kv as write_kv,
    write_kv_logged as write_kv_logged,
)
from nwor_ops.recurrent import (  # noqa: E402
    RecurrentCache as RecurrentCache,
    RecurrentMemory as RecurrentMemory,
    RecurrentStates as RecurrentStates,
    RecurrentStats as RecurrentStats,
)
from nwor_ops.transaction.staging import (  # noqa: E402
    KVCacheInterceptor as KVCacheInterceptor,
    StagingBuffer as StagingBuffer,
)
from nwor_ops.transaction.counters import (  # noqa: E402
    EngineStats as EngineStats,
    InterceptorStats as InterceptorStats,
    StagingStats as StagingStats,
    Stats as Stats,
    stats as stats,
)
from nwor_ops.transaction.in_flight import InFlightManager as InFlightManager  # noqa: E402
from nwor_ops.transaction.manager import DraftCommitManager as DraftCommitManager  # noqa: E402
from nwor_ops.transaction.shadow_pages import num_shadow_blocks as num_shadow_blocks  # noqa: E402
from nwor_ops.transaction.window import (  # noqa: E402
    Layout as Layout,
    Window as Window,
)
