"""CUDA graphs for drafters: which engines may have them, and how they are attached to vLLM.

vLLM's V2 runner creates its speculator by calling ``init_speculator``, which is patched to return ours. The V1 runner
creates its drafter itself. After its cache is bound, ``propose`` of that drafter and ``capture_model`` of the runner
are replaced. ``speculator`` and ``proposer`` import vLLM, so they are imported with the first drafter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from nwor_ops.vllm.draft_graphs.supported import refuse
from nwor_ops.vllm.environment import settings_of, vllm_logger
from nwor_ops.vllm.hooks import Hook, check_library, check_vllm
from nwor_ops.vllm.support.features import DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import Check, Unsupported, check_engine

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
V1_RUNNER_MODULE = "vllm.v1.worker.gpu_model_runner"


def _methods(module: str, owner: str, **signatures: str) -> tuple[Hook, ...]:
    """Return the hooks of some methods of a class."""
    return tuple(Hook(module, f"{owner}.{name}", signature) for name, signature in signatures.items())


_SHARED_HOOKS = (
    *_methods(
        "vllm.v1.worker.utils",
        "AttentionGroup",
        update_draft_decode_metadata="attn_metadata",
        map_to_kernel_block_table="block_table, ubatch_idx",
    ),
    Hook("vllm.compilation.cudagraph_pool", "capture_pool", "pool, vllm_config"),
    Hook("vllm.distributed.parallel_state", "graph_capture", "device"),
)
# vLLM functions that the speculator overrides or calls.
V2_HOOKS = (
    Hook(RUNNER_MODULE, "init_speculator", "vllm_config, device, req_states"),
    *_methods(
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
        "StandaloneARSpeculator",
        init_cudagraph_manager="cudagraph_mode",
        capture="",
        propose="input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, "
        "num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state, dummy_run, "
        "skip_attn_for_dummy_run, mm_inputs, is_profile, num_speculative_tokens",
        _prefill="input_batch, num_rejected, last_sampled, num_reqs, skip_attn, num_tokens_across_dp",
        _run_model="input_ids, positions, attn_metadata, slot_mappings, num_tokens_across_dp",
    ),
    *_methods(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator",
        _build_attn_metadata="num_reqs, batch_desc, query_start_loc_np, seq_lens_cpu_upper_bound, step, causal, "
        "dcp_local_seq_lens, slot_mappings",
    ),
    *_methods(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables",
        compute_slot_mappings="idx_mapping, query_start_loc, positions, num_tokens_padded, out",
    ),
    *_SHARED_HOOKS,
)
# vLLM functions that the proposer replaces or calls.
V1_HOOKS = (
    *_methods(V1_RUNNER_MODULE, "GPUModelRunner", capture_model=""),
    *_methods(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer",
        propose="num_speculative_tokens, target_token_ids, target_positions, target_hidden_states, next_token_ids, "
        "token_indices_to_sample, common_attn_metadata, sampling_metadata, mm_embed_inputs, num_rejected_tokens_gpu, "
        "slot_mappings",
        set_inputs_first_pass="target_token_ids, next_token_ids, target_positions, target_hidden_states, "
        "token_indices_to_sample, cad, num_rejected_tokens_gpu",
        build_model_inputs_first_pass="num_tokens, num_input_tokens, mm_embed_inputs",
        build_per_group_and_layer_attn_metadata="common_attn_metadata, draft_index",
        _determine_batch_execution_and_padding="num_tokens, use_cudagraphs",
        _get_slot_mapping="num_tokens, slot_mapping",
        _greedy_sample="hidden_states",
        model_returns_tuple="",
    ),
    *_SHARED_HOOKS,
)
# All hooks, for checks without an engine.
HOOKS = (*V2_HOOKS, *(hook for hook in V1_HOOKS if hook not in _SHARED_HOOKS))

_drafters: weakref.WeakSet[Any] = weakref.WeakSet()  # GraphedDrafter


def draft_graph_reports() -> list[dict[str, Any]]:
    """Return counts and costs of the draft graphs of this process's engines so far. Engines in other processes are not
    included.

    Returns:
        For each engine a dict:

        - ``captured``: request counts that have a graph, by number of drafts (several if that number is dynamic) and
          by pass (``"first_pass"``, ``"decode"``).
        - ``capture_seconds``, ``capture_bytes``: time and GPU memory of the allocator that capturing took. The driver
          keeps further memory per graph.
        - ``replays``: number of passes that ran from graphs, by pass.
        - ``eager``: number of passes that ran vLLM's code, by reason. Warm-up and profiling are included.

    Example:
        Here no engine runs.

        >>> [report["replays"] for report in nwor_ops.vllm.draft_graph_reports()]
        []
    """
    return [drafter.report() for drafter in _drafters]


def graphed_drafter(runner: Any) -> Any:
    """Return the drafter of a runner if it has captured graphs, otherwise None."""
    names = ("speculator", "drafter")  # V2, V1
    drafters = [getattr(runner, name) for name in names if getattr(runner, name, None) is not None]
    for graphed in _drafters:
        if graphed.graphs is not None and getattr(graphed, "drafter", graphed) in drafters:
            return graphed
    return None


def counts(runner: Any) -> dict[str, float]:
    """Return the counts of a runner's drafter for the metrics; empty if it has no graphs."""
    drafter = graphed_drafter(runner)
    return {} if drafter is None else drafter.counts()


# ---------------------------------------------------------------- patches


def creating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of ``init_speculator``: it creates our speculator if its engine's configuration asks for it."""

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        logger = vllm_logger()
        if not settings_of(vllm_config).draft_graphs or not _may_have_graphs(vllm_config, device, logger):
            return original(vllm_config, device, req_states)
        from nwor_ops.vllm.draft_graphs.speculator import GraphedDraftModelSpeculator

        speculator = GraphedDraftModelSpeculator(vllm_config, device, req_states.last_sampled_tokens, logger)
        _drafters.add(speculator)
        return speculator

    return init_speculator


def attach(runner: Any, module: str, logger: Any) -> None:
    """Give the drafter of a V1 runner its graphs, if its engine's configuration asks for them.

    Called each time the runner's cache is bound. The V2 runner has created its speculator long before.
    """
    config = settings_of(runner.vllm_config)
    if not config.draft_graphs:
        return
    if runner.speculative_config is None:
        logger.info("nwor: draft graphs: not active: the engine does not speculate")
        return
    if module != V1_RUNNER_MODULE or not _may_have_graphs(runner.vllm_config, runner.device, logger):
        return
    from nwor_ops.vllm.draft_graphs.proposer import GraphedProposer

    for old in [drafter for drafter in _drafters if getattr(drafter, "runner", None) is runner]:
        old.detach()
        _drafters.discard(old)
    try:
        _drafters.add(GraphedProposer(runner, logger))
    except Unsupported as error:
        refuse(config, error, logger)


def checks_of(vllm_config: Any, device_type: str) -> Iterator[Check]:
    """Yield the checks of a configuration, in order. Start-up and ``nwor-ops check`` make them."""
    yield lambda: check_vllm(V2_HOOKS if vllm_config.use_v2_model_runner else V1_HOOKS, DRAFT_GRAPHS)
    yield lambda: check_engine(vllm_config, device_type, DRAFT_GRAPHS)
    yield lambda: check_library("cuda")


def _may_have_graphs(vllm_config: Any, device: Any, logger: Any) -> bool:
    """Return whether the engine's configuration permits draft graphs; otherwise refuse them."""
    try:
        for check in checks_of(vllm_config, device.type):
            check()
    except Unsupported as error:
        refuse(settings_of(vllm_config), error, logger)
        return False
    return True
