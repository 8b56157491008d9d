"""CUDA graphs for a draft model: which engines may have them, and how its speculator gets into vLLM.

vLLM's V2 runner makes its speculator by ``init_speculator``, a name in the runner's module. There it is wrapped:
where the configuration asks for draft graphs, the speculator of :mod:`nwor_ops.vllm.drafter.speculator` takes the
place of ``StandaloneARSpeculator``, of which it is a subclass. Nothing else of vLLM's is touched.

This module imports nothing of vLLM's at the top; ``draft_model`` and ``draft_metadata``, which subclass and call it,
are imported when the first speculator is made.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from nwor_ops import library
from nwor_ops.config import NworConfig
from nwor_ops.vllm.support import Hook, Unsupported, check_vllm, wrap_once

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
SUPPORTED_VERSIONS = ("0.33",)
BACK_ENDS = ("FLASH_ATTN", "TRITON_ATTN")
CACHE_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")

_GPU = "vllm.v1.worker.gpu."
_SPECULATOR = _GPU + "spec_decode.speculator"
_STANDALONE = _GPU + "spec_decode.standalone_ar.speculator"
_PASS_PARAMETERS = ("num_reqs", "skip_attn", "num_tokens_across_dp")
# What of vLLM's the speculator overrides and builds on.
HOOKS = (
    Hook(RUNNER_MODULE, "init_speculator", ("vllm_config", "device", "req_states")),
    Hook(_STANDALONE, "StandaloneARSpeculator.init_cudagraph_manager", ("cudagraph_mode",)),
    Hook(_STANDALONE, "StandaloneARSpeculator.capture", ()),
    Hook(
        _STANDALONE,
        "StandaloneARSpeculator.set_attn",
        ("model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups"),
    ),
    Hook(
        _STANDALONE,
        "StandaloneARSpeculator.propose",
        (
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
    Hook(
        _STANDALONE,
        "StandaloneARSpeculator._prefill",
        ("input_batch", "num_rejected", "last_sampled", *_PASS_PARAMETERS),
    ),
    Hook(_STANDALONE, "StandaloneARSpeculator._multi_step_decode", ("input_batch", "num_rejected", *_PASS_PARAMETERS)),
    Hook(
        _STANDALONE,
        "StandaloneARSpeculator._run_model",
        ("input_ids", "positions", "attn_metadata", "slot_mappings", "num_tokens_across_dp"),
    ),
    Hook(
        _SPECULATOR,
        "DraftModelSpeculator._build_attn_metadata",
        (
            "num_reqs",
            "batch_desc",
            "query_start_loc_np",
            "seq_lens_cpu_upper_bound",
            "step",
            "causal",
            "dcp_local_seq_lens",
            "slot_mappings",
        ),
    ),
    Hook(
        _GPU + "block_table",
        "BlockTables.compute_slot_mappings",
        ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"),
    ),
    Hook("vllm.v1.worker.utils", "AttentionGroup.update_draft_decode_metadata", ("attn_metadata",)),
    Hook("vllm.v1.worker.utils", "AttentionGroup.map_to_kernel_block_table", ("block_table", "ubatch_idx")),
    Hook("vllm.compilation.cudagraph_pool", "capture_pool", ("pool", "vllm_config")),
    Hook("vllm.distributed.parallel_state", "graph_capture", ("device",)),
)


@dataclass(frozen=True)
class DraftGraphReport:
    """What one engine's draft graphs have done so far.

    Attributes:
        captured: request counts that have a graph, by pass (``"first_pass"``, ``"decode"``).
        capture_seconds: how long capturing took.
        capture_bytes: GPU memory that it took.
        replays: graph launches, by pass.
        eager: passes that ran vLLM's own code instead, by reason. Warm-up and profiling included.
    """

    captured: dict[str, list[int]] = field(default_factory=dict)
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    replays: dict[str, int] = field(default_factory=dict)
    eager: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_speculators: weakref.WeakSet[Any] = weakref.WeakSet()


def draft_graph_reports() -> list[DraftGraphReport]:
    """What the draft graphs of this process's engines have done; nothing for engines in other processes."""
    return [speculator.report() for speculator in _speculators]


# ---------------------------------------------------------------- what is refused


def check_draft_graphs(vllm_config: Any, device_type: str) -> None:
    """Raises :class:`Unsupported` for an engine whose drafter cannot, or was never seen to, run from graphs.

    Back ends and the graphs of the target are known later: :func:`check_attention`, :func:`check_graph_mode`.
    """
    parallel, speculation, model = (
        vllm_config.parallel_config,
        vllm_config.speculative_config,
        vllm_config.model_config,
    )
    # A method with another speculator has graphs of its own, or needs none.
    if speculation.method != "draft_model":
        raise Unsupported(f"speculation by {speculation.method}: draft graphs are for method draft_model")

    def more_than_one(name: str) -> bool:
        return getattr(parallel, name, 1) > 1

    offload = getattr(vllm_config, "offload_config", None)
    refusals = {
        f"device {device_type}: CUDA graphs need CUDA": device_type != "cuda",
        "decode context parallelism: attention metadata is planned on the host there": (
            more_than_one("decode_context_parallel_size")
        ),
        "prefill context parallelism: its batches are cut up on the host": (
            more_than_one("prefill_context_parallel_size")
        ),
        "data parallelism: ranks would have to agree on a graph first": more_than_one("data_parallel_size"),
        "pipeline parallelism: it has not been tried": more_than_one("pipeline_parallel_size"),
        "dual batch overlap: it has not been tried": getattr(parallel, "use_ubatching", False),
        "expert load balancing: it has not been tried": getattr(parallel, "enable_eplb", False),
        "a multimodal model: its drafts have not been tried": (
            model.is_multimodal_model or speculation.draft_model_config.is_multimodal_model
        ),
        "an encoder-decoder model: it has not been tried": getattr(model, "is_encoder_decoder", False),
        "LoRA: it has not been tried": vllm_config.lora_config is not None,
        "dynamic speculative decoding: a graph has the number of drafts it was captured with": (
            speculation.num_speculative_tokens_per_batch_size is not None
        ),
        "adaptive verification: it has not been tried": getattr(speculation, "enable_adaptive_verification", False),
        "watermarking: it samples from contexts that are prepared on the host": (
            getattr(vllm_config, "watermark_config", None) is not None
        ),
        "KV connectors: a connector moves a layer's keys in Python, which graphs do not run": (
            vllm_config.kv_transfer_config is not None
        ),
        "weight offloading: it has not been tried": offload is not None and _offloads(offload),
    }
    found = [sentence for sentence, applies in refusals.items() if applies]
    if found:
        raise Unsupported("; ".join(found))


def _offloads(offload: Any) -> bool:
    return offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0


def check_version(hooks: Iterable[Hook] = HOOKS) -> None:
    """Raises :class:`Unsupported` unless this vLLM is the one that the speculator was written for."""
    import vllm

    if not vllm.__version__.startswith(tuple(f"{version}." for version in SUPPORTED_VERSIONS)):
        raise Unsupported(
            f"vLLM {vllm.__version__} is not supported for draft graphs; supported is {', '.join(SUPPORTED_VERSIONS)}"
        )
    check_vllm(hooks)


def check_library() -> None:
    """Raises :class:`Unsupported` where the ops that go into the graphs have no CUDA kernels."""
    problem = next(compiled.problem for compiled in library.loaded_libraries() if compiled.kind == "cuda")
    if problem:
        raise Unsupported(problem)


def check_attention(attn_groups: Iterable[Iterable[Any]]) -> None:
    """Raises :class:`Unsupported` for attention groups of the drafter whose metadata a graph cannot keep up to date."""
    problems = set()
    for group in (group for groups in attn_groups for group in groups):
        backend, spec = group.backend.get_name(), type(group.kv_cache_spec).__name__
        if backend not in BACK_ENDS:
            problems.add(f"attention back end {backend}: only {' and '.join(BACK_ENDS)} are known")
        elif spec not in CACHE_SPECS:
            problems.add(f"a cache of kind {spec}: only {' and '.join(CACHE_SPECS)} are known")
        elif not group.supports_draft_decode_metadata_update:
            problems.add(f"attention back end {backend}: it cannot update its metadata on the device here")
    if problems:
        raise Unsupported("; ".join(sorted(problems)))


def check_graph_mode(cudagraph_mode: Any) -> None:
    """Raises :class:`Unsupported` unless the target's decode batches run from FULL graphs: the drafter follows."""
    if cudagraph_mode.decode_mode().name != "FULL":
        raise Unsupported(
            f"cudagraph_mode {cudagraph_mode.name}: draft graphs follow the target, whose decode batches must run from "
            "FULL graphs (no enforce_eager; cudagraph_mode FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE)"
        )


def refuse(config: NworConfig, error: Unsupported, logger: Any) -> None:
    """Stop with the reason, or, where that was asked for, say it and go on with vLLM's own drafter."""
    if config.strict:
        raise RuntimeError(
            f"nwor: {error} (draft graphs were asked for; VLLM_NWOR_ON_UNSUPPORTED=vanilla or "
            '{"nwor": {"on_unsupported": "vanilla"}} runs such an engine without them)'
        ) from error
    logger.warning("nwor: draft graphs: not active: %s", error)


# ---------------------------------------------------------------- getting in


def wrap_runner_module(module: ModuleType, logger: Any) -> None:
    """Make the V2 runner's module ask for our speculator where its engine's configuration does."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
            speculator = _own_speculator(vllm_config, device, req_states, logger)
            return speculator if speculator is not None else original(vllm_config, device, req_states)

        return init_speculator

    if module.__name__ == RUNNER_MODULE:
        wrap_once(module, "init_speculator", wrapper)


def _own_speculator(vllm_config: Any, device: Any, req_states: Any, logger: Any) -> Any:
    """Ours, or None where it is not wanted or refused with a warning."""
    config = NworConfig.load(vllm_config.additional_config)
    if not config.draft_graphs:
        return None
    try:
        check_version()
        check_draft_graphs(vllm_config, device.type)
        check_library()
    except Unsupported as error:
        refuse(config, error, logger)
        return None
    from nwor_ops.vllm.drafter.speculator import GraphedDraftModelSpeculator

    speculator = GraphedDraftModelSpeculator(
        vllm_config,
        device,
        req_states.last_sampled_tokens,
        functools.partial(refuse, config, logger=logger),
        logger,
    )
    _speculators.add(speculator)
    return speculator


def check_runner(runner: Any, module: str, logger: Any) -> None:
    """Refuse draft graphs in a runner that has no place for them. Called once its cache is bound."""
    config = NworConfig.load(runner.vllm_config.additional_config)
    if not config.draft_graphs or runner.speculative_config is None:
        return
    if module != RUNNER_MODULE:
        refuse(config, Unsupported("model runner V1: draft graphs are for model runner V2 of vLLM 0.33"), logger)
