"""Decide which engines support one state per request: hooks by layer class, and the checks of a configuration."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.recurrent.cache import CHUNK_WIDTH, MOST_CHUNK_WINDOW
from nwor_ops.vllm.hooks import Hook, check_library, check_vllm
from nwor_ops.vllm.recurrent.page import RecordGeometry
from nwor_ops.vllm.support.connectors import connectors_of
from nwor_ops.vllm.support.features import CHUNK_CAPABILITIES, KEY_WIDTHS, ONE_STATE, VALUE_WIDTHS
from nwor_ops.vllm.support.refusals import (
    CHUNK_FORM,
    STATE,
    STATE_CONNECTOR,
    TAKEN_CLASS,
    Unsupported,
    check_engine,
)

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"

_LAYERS = "vllm.model_executor.layers.mamba."
_CONTEXT = "vllm.v1.worker.mamba_utils"
_BUILDER = "vllm.v1.attention.backends.gdn_attn"
_QWEN = _LAYERS + "gdn.qwen_gdn_linear_attn"
_KIMI = _LAYERS + "gdn.kimi_gdn_linear_attn"
_OLMO = _LAYERS + "gdn.olmo_gdn_linear_attn"
_GLM = "vllm.models.glm5next.common.kda"
_BAILING = "vllm.model_executor.models.bailing_moe_v3"
_PLE = "vllm.models.qwen4_exp.nvidia.ple_layer"


@dataclass(frozen=True)
class LayerKind:
    """A vLLM layer class that supports one state per request.

    Attributes:
        name: name of the vLLM class.
        ours: module of the class that replaces it.
        hooks: vLLM functions that this plugin overrides, calls or relies on for this class only.
        installer: module with the function ``install``; ``ours`` by default.
        without_record: names of other recurrent classes in such models. They already keep one state per request, so
            they need no record.
    """

    name: str
    ours: str
    hooks: tuple[Hook, ...]
    installer: str = ""
    without_record: tuple[str, ...] = ()

    def install(self) -> None:
        """Make vLLM create our class. See :func:`~nwor_ops.vllm.recurrent.layer.put_in_place`."""
        importlib.import_module(self.installer or self.ours).install()


QWEN = LayerKind(
    "QwenGatedDeltaNetAttention",
    "nwor_ops.vllm.recurrent.models.qwen",
    (
        Hook(
            _QWEN,
            "QwenGatedDeltaNetAttention.__init__",
            "config, vllm_config, prefix, gqa_interleaved_layout, reduce_results",
        ),
        Hook(_QWEN, "QwenGatedDeltaNetAttention.get_kv_cache_spec", "vllm_config"),
        Hook(_QWEN, "QwenGatedDeltaNetAttention.get_state_shape", ""),
        Hook(_QWEN, "QwenGatedDeltaNetAttention._forward_core", "mixed_qkv, b, a, core_attn_out"),
        *(
            Hook(
                _QWEN,
                f"QwenGatedDeltaNetAttention._forward_core_decode_spec{name}",
                "mixed_qkv, b, a, output_gate, core_attn_out, attn_metadata",
            )
            for name in ("_fused_norm", "_post_conv_fused_norm")
        ),
        Hook(
            _QWEN,
            "fused_sigmoid_gating_delta_rule_update",
            "A_log, a, b, dt_bias, q, k, v, beta, threshold, scale, initial_state, inplace_final_state, cu_seqlens, "
            "ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, is_kda",
        ),
    ),
)
# Qwen3.8-Flash-Next. Some of its layers also have PLE, a short convolution with its own KV-cache group.
QWEN4 = LayerKind(
    QWEN.name,
    QWEN.ours,
    (
        *QWEN.hooks,
        Hook(_PLE, "Qwen4ExpPLELayer.get_kv_cache_spec", "vllm_config"),
        Hook("vllm.v1.attention.backends.short_conv_attn", "PleShortConvAttentionMetadataBuilder.build",
             "common_prefix_len, common_attn_metadata, fast_build, num_accepted_tokens, num_decode_draft_tokens_cpu, "
             "kwargs", cuda=True),
    ),
    installer="nwor_ops.vllm.recurrent.models.qwen4",
    without_record=("Qwen4ExpPLELayer",),
)  # fmt: skip
KIMI = LayerKind(
    "KimiGatedDeltaNetAttention",
    "nwor_ops.vllm.recurrent.models.kimi",
    (
        Hook(_KIMI, "KimiGatedDeltaNetAttention.__init__", "config, vllm_config, prefix"),
        Hook(_KIMI, "KimiGatedDeltaNetAttention.get_state_shape", ""),
        Hook(_KIMI, "KimiGatedDeltaNetAttention.get_state_dtype", ""),
        Hook(_KIMI, "KimiGatedDeltaNetAttention._forward", "mixed_qkv, g1, g2, beta, core_attn_out"),
        Hook(
            "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
            "fused_recurrent_kda",
            "q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices, "
            "num_accepted_tokens, out, fuse_gate",
        ),
        Hook(_LAYERS + "abstract", "MambaBase.get_kv_cache_spec", "vllm_config"),
    ),
)
OLMO = LayerKind(
    "OlmoHybridGatedDeltaNetAttention",
    "nwor_ops.vllm.recurrent.models.olmo",
    (
        Hook(_OLMO, "OlmoHybridGatedDeltaNetAttention.__init__", "config, vllm_config, prefix"),
        Hook(_OLMO, "OlmoHybridGatedDeltaNetAttention.get_state_shape", ""),
        Hook(_OLMO, "OlmoHybridGatedDeltaNetAttention._forward_core", "mixed_qkv, b, a, core_attn_out"),
        Hook(_OLMO, "OlmoHybridGatedDeltaNetAttention.rearrange_mixed_qkv", "mixed_qkv"),
        Hook(
            _OLMO,
            "fused_recurrent_gated_delta_rule",
            "q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, "
            "num_accepted_tokens, use_qk_l2norm_in_kernel",
        ),
        Hook(
            _LAYERS + "ops.causal_conv1d",
            "causal_conv1d_update",
            "x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc, "
            "max_query_len, null_block_id, validate_data, out",
            cuda=True,
        ),
        Hook(_LAYERS + "mamba_utils", "is_conv_state_dim_first", ""),
        Hook(_LAYERS + "abstract", "MambaBase.get_kv_cache_spec", "vllm_config"),
    ),
)
# vLLM's package for this model has imports that a CPU installation may lack.
GLM = LayerKind(
    "Glm5NextLinearAttention",
    "nwor_ops.vllm.recurrent.models.glm",
    (
        Hook(_GLM, "Glm5NextLinearAttention.__init__", "config, vllm_config, prefix", cuda=True),
        Hook(_GLM, "Glm5NextLinearAttention.get_kv_cache_spec", "vllm_config", cuda=True),
        Hook(_GLM, "Glm5NextLinearAttention.get_state_shape", "", cuda=True),
        Hook(_GLM, "Glm5NextLinearAttention.get_state_dtype", "", cuda=True),
        Hook(_GLM, "Glm5NextLinearAttention._forward", "qkv_proj_states, g1, beta, core_attn_out", cuda=True),
        Hook(
            _GLM,
            "fused_recurrent_kda",
            "q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens, "
            "ssm_state_indices, num_accepted_tokens, out, sigmoid_beta, a_log, g_bias, compute_gate, lower_bound, "
            "kwargs",
            cuda=True,
        ),
    ),
)
BAILING = LayerKind(
    "BailingMoeV3KimiDeltaAttention",
    "nwor_ops.vllm.recurrent.models.bailing",
    (
        Hook(
            _BAILING,
            "BailingMoeV3KimiDeltaAttention.__init__",
            "config, quant_config, layer_id, prefix, model_config, cache_config, num_speculative_tokens",
        ),
        Hook(_BAILING, "BailingMoeV3KimiDeltaAttention.get_state_shape", ""),
        Hook(_BAILING, "BailingMoeV3KimiDeltaAttention.get_state_dtype", ""),
        Hook(
            _BAILING,
            "BailingMoeV3KimiDeltaAttention._forward",
            "q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out",
        ),
        Hook(
            _BAILING,
            "fused_recurrent_kda_fwd",
            "q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, "
            "num_accepted_tokens, use_qk_l2norm_in_kernel",
        ),
        Hook(_LAYERS + "abstract", "MambaBase.get_kv_cache_spec", "vllm_config"),
    ),
)
_KINDS = {  # all other supported architectures have Qwen's layer
    "Qwen4ExpForCausalLM": QWEN4,
    "Qwen4ExpForConditionalGeneration": QWEN4,
    "KimiLinearForCausalLM": KIMI,
    "AliceAIForCausalLM": KIMI,
    "BailingMoeV3ForCausalLM": BAILING,
    "BailingMoeV3VLForConditionalGeneration": BAILING,
    "OlmoHybridForCausalLM": OLMO,
    "Glm5NextForCausalLM": GLM,
    "Glm5NextForConditionalGeneration": GLM,
}


def kind_of(vllm_config: Any) -> LayerKind:
    """Return the layer class of an engine's model. The model must be one of ``ONE_STATE_MODELS``."""
    return _KINDS.get(vllm_config.model_config.architecture, QWEN)


# vLLM functions that this plugin overrides, calls or relies on for every layer class.
_COMMON_HOOKS = (
    Hook(_LAYERS + "abstract", "MambaBase.bind_kv_cache", "kv_cache"),
    Hook(_LAYERS + "abstract", "MambaBase.get_attn_backend", ""),
    Hook(_BUILDER, "GDNAttentionMetadataBuilder.__init__", "kv_cache_spec, layer_names, vllm_config, device"),
    Hook(
        _BUILDER,
        "GDNAttentionMetadataBuilder.build",
        "common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build",
    ),
    Hook(
        _BUILDER, "GDNAttentionMetadataBuilder.update_block_table", "metadata, blk_table, slot_mapping"
    ),
    # With prefix caching.
    Hook(
        _CONTEXT,
        "MambaSpecDecodeGPUContext.run_fused_precopy",
        "num_reqs, state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping",
    ),
    Hook(
        _CONTEXT,
        "MambaSpecDecodeGPUContext.run_fused_postprocess_align",
        "num_reqs, num_accepted_tokens_gpu, state_idx_gpu, new_num_computed_tokens_gpu, idx_mapping",
    ),
    Hook(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid",
        "MambaHybridModelState.preprocess_state",
        "input_batch, block_tables, kv_cache_config, num_computed_tokens",
    ),
    Hook(RUNNER_MODULE, "GPUModelRunner.add_requests", "scheduler_output"),
    Hook(RUNNER_MODULE, "GPUModelRunner.update_requests", "scheduler_output"),
    Hook(_LAYERS + "checkpoint", "MambaPrefillCheckpointBuilder.build", "m, request_rows"),
    Hook(
        _LAYERS + "checkpoint",
        "MambaPrefillCheckpointExporter.export",
        "checkpoint, raw_qkv, conv_state, cu_seqlens, recurrent_checkpoint, recurrent_state, recurrent_rows, "
        "token_indices",
        cuda=True,
    ),
    Hook("vllm.platforms.interface", "Platform._align_hybrid_block_size", "vllm_config, backend_cls"),
    Hook(RUNNER_MODULE, "GPUModelRunner.load_model", "load_dummy_weights, args, model, kwargs"),
)  # fmt: skip
HOOKS = (*QWEN4.hooks, *KIMI.hooks, *OLMO.hooks, *GLM.hooks, *BAILING.hooks, *_COMMON_HOOKS)

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1."
_NIXL = Hook(
    _V1 + "nixl.base_worker", "compute_nixl_compatibility_hash", "vllm_config, attn_backend_name, transfer_mode"
)
# vLLM functions that connectors.py patches, by KV connector. Only those of an engine's connectors are checked.
CONNECTOR_HOOKS = {
    "OffloadingConnector": Hook(
        _V1 + "offloading_connector", "build_offloading_config", "vllm_config, kv_cache_config"
    ),
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
    "MooncakeStoreConnector": Hook(
        _V1 + "mooncake.store.worker", "MooncakeStoreWorker.__init__", "vllm_config, kv_cache_config"
    ),
    "MooncakeConnector": Hook(
        _V1 + "mooncake.mooncake_connector", "MooncakeConnectorWorker.register_kv_caches", "kv_caches"
    ),
}


def check_one_state(geometry: Any, state_dtype: Any) -> None:
    """Check that the kernel supports states of this shape and dtype.

    Args:
        geometry: a :class:`~nwor_ops.vllm.recurrent.page.RecordGeometry`.
        state_dtype: dtype of the states, as ``torch.dtype``.
    """
    for what, width, known in (
        ("keys", geometry.key_width, KEY_WIDTHS),
        ("values", geometry.value_width, VALUE_WIDTHS),
    ):
        if width not in known:
            raise STATE.because(what=f"heads of {what} are {width} wide, not one of {known}")
    if geometry.rows > 32:
        raise STATE.because(what=f"windows have {geometry.rows} tokens, more than 32")
    if geometry.ring_rows and not geometry.chunk and not geometry.rows <= geometry.ring_rows <= 32 - geometry.rows:
        limits = f"it must be {geometry.rows} (the tokens of a window) to {32 - geometry.rows}, or 0"
        raise STATE.because(what=f"ring_rows is {geometry.ring_rows}: {limits}")
    if str(state_dtype) not in ("torch.float32", "torch.bfloat16"):
        raise STATE.because(what=f"states are {state_dtype}: set mamba_ssm_cache_dtype to float32 or bfloat16")
    if geometry.ring_rows and not geometry.chunk and str(state_dtype) != "torch.float32":
        raise STATE.because(what=f"ring_rows needs float32 states, and these are {state_dtype}")
    if str(geometry.key_dtype) not in ("torch.float16", "torch.bfloat16"):
        raise STATE.because(what=f"keys are {geometry.key_dtype}")


def check_chunk(vllm_config: Any, geometry: Any, capability: Any) -> None:
    """Check that the kernels of the chunk form support an engine. Call it only for an engine with this form.

    Args:
        vllm_config: vLLM's configuration.
        geometry: a :class:`~nwor_ops.vllm.recurrent.page.RecordGeometry`.
        capability: compute capability of the GPU, a pair of numbers. None: this machine has no GPU.
    """
    if geometry.per_channel:
        raise CHUNK_FORM.because(what="each channel of a key has a decay (KDA), and the kernel needs one per head")
    for what, width in (("keys", geometry.key_width), ("values", geometry.value_width)):
        if width != CHUNK_WIDTH:
            raise CHUNK_FORM.because(what=f"heads of {what} are {width} wide, not {CHUNK_WIDTH}")
    if geometry.rows > MOST_CHUNK_WINDOW:
        raise CHUNK_FORM.because(what=f"windows have {geometry.rows} tokens, more than {MOST_CHUNK_WINDOW}")
    if str(geometry.key_dtype) != "torch.bfloat16":
        raise CHUNK_FORM.because(what=f"the model's dtype is {geometry.key_dtype}, not torch.bfloat16")
    if capability is not None and tuple(capability) not in CHUNK_CAPABILITIES:
        raise CHUNK_FORM.because(what=f"the GPU has compute capability {'.'.join(map(str, capability))}")
    cache = vllm_config.cache_config
    sizes = {"prefix_match_unit": getattr(cache, "prefix_match_unit", None)}
    if cache.mamba_cache_mode == "align":
        sizes["blocks of recurrent states"] = getattr(cache, "mamba_block_size", None)
    for what, size in sizes.items():
        if size and size % geometry.chunk:
            raise CHUNK_FORM.because(what=f"{what}: {size} tokens, not a multiple of {geometry.chunk}")


def check_registered(registered: type | None, layer: str, ours: str) -> None:
    """Check that no other plugin replaced a layer class.

    Args:
        registered: the class that vLLM's registry holds for the layer, or None.
        layer: name of the vLLM class.
        ours: module of our class.
    """
    if registered is not None and registered.__module__ != ours:
        raise TAKEN_CLASS.because(registered=f"{registered.__module__}.{registered.__qualname__}", layer=layer)


def check_state_connectors(vllm_config: Any) -> None:
    """Check that the KV connectors of an engine read only complete recurrent states."""
    for name, connector in connectors_of(getattr(vllm_config, "kv_transfer_config", None)):
        why = connector.refused or connector.one_state
        if why:
            raise STATE_CONNECTOR.because(name=name, why=why)


def check_hooks(kind: LayerKind) -> None:
    """Check the version of vLLM and the hooks of a layer class."""
    check_vllm((*kind.hooks, *_COMMON_HOOKS), ONE_STATE)


@functools.cache
def _problem_of_vllm(kind: LayerKind) -> str | None:
    try:
        check_hooks(kind)
        check_library("cuda")
    except Unsupported as error:
        return str(error)
    return None


def _state_dtype(vllm_config: Any) -> Any:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

    cache, dtype = vllm_config.cache_config, vllm_config.model_config.dtype
    kind = kind_of(vllm_config)
    if kind in (KIMI, BAILING):  # their layers ignore mamba_ssm_cache_dtype
        return MambaStateDtypeCalculator.kda_state_dtype(dtype, cache.mamba_cache_dtype)[1]
    if kind is GLM:
        return MambaStateDtypeCalculator.kda_state_dtype(dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype)[1]
    return MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )[1]


def _capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's GPU, or None without one. It does not initialize CUDA."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return None if found is None else (found.major, found.minor)


def _registered(kind: LayerKind) -> type | None:
    """Return the class that vLLM's registry holds for the layer, or None."""
    from vllm.model_executor.custom_op import op_registry_oot

    found: type | None = op_registry_oot.get(kind.name)
    return found


def checks_of(vllm_config: Any) -> Iterator[Callable[[], None]]:
    """Yield the checks of a configuration, in order. Each raises :class:`Unsupported`, and may rely on the ones before
    it. :func:`check_hooks` and the compiled library are not among them, because they are the same for every
    configuration.
    """
    kind = kind_of(vllm_config)
    yield lambda: check_engine(vllm_config, vllm_config.device_config.device_type, ONE_STATE)
    yield lambda: check_state_connectors(vllm_config)
    yield lambda: check_one_state(RecordGeometry.of(vllm_config), _state_dtype(vllm_config))
    if NworConfig.load(vllm_config.additional_config).chunk:
        yield lambda: check_chunk(vllm_config, RecordGeometry.of(vllm_config), _capability())
    yield lambda: check_registered(_registered(kind), kind.name, kind.ours)
    yield lambda: _check_connector_hooks(vllm_config)


def _check_connector_hooks(vllm_config: Any) -> None:
    for name, _ in connectors_of(getattr(vllm_config, "kv_transfer_config", None)):
        if problem := name in CONNECTOR_HOOKS and CONNECTOR_HOOKS[name].problem():
            raise Unsupported(problem)


def problem_of(vllm_config: Any) -> str | None:
    """Return why this configuration does not support one state per request, or None if it does."""
    try:
        for check in checks_of(vllm_config):
            check()
    except Unsupported as error:
        return str(error)
    return _problem_of_vllm(kind_of(vllm_config))


def has_one_state(vllm_config: Any) -> bool:
    """Return whether this configuration asks for one state per request and supports it."""
    return bool(NworConfig.load(vllm_config.additional_config).recurrent) and problem_of(vllm_config) is None
