"""Decide which engines support recurrent: the hooks of every model, and the checks of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from nwor_ops.recurrent.cache import CHUNK_WIDTH, MOST_CHUNK_WINDOW
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.hooks import Hook, check_library, check_vllm
from nwor_ops.vllm.recurrent import models
from nwor_ops.vllm.recurrent.models import model_of
from nwor_ops.vllm.recurrent.models.model import LAYERS, Model
from nwor_ops.vllm.recurrent.page import RecordGeometry
from nwor_ops.vllm.support.connectors import connectors_of
from nwor_ops.vllm.support.features import KEY_WIDTHS, RECURRENT, VALUE_WIDTHS
from nwor_ops.vllm.support.refusals import (
    CHUNK_FORM,
    STATE,
    STATE_CONNECTOR,
    TAKEN_CLASS,
    Unsupported,
    check_engine,
)

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"

_CONTEXT = "vllm.v1.worker.mamba_utils"
_BUILDER = "vllm.v1.attention.backends.gdn_attn"
LOAD_MODEL = Hook(RUNNER_MODULE, "GPUModelRunner.load_model", "load_dummy_weights, args, model, kwargs")

# vLLM functions that this plugin overrides, calls or relies on for every layer class.
_COMMON_HOOKS = (
    Hook(LAYERS + "abstract", "MambaBase.bind_kv_cache", "kv_cache"),
    Hook(LAYERS + "abstract", "MambaBase.get_attn_backend", ""),
    Hook(_BUILDER, "GDNAttentionMetadataBuilder.__init__", "kv_cache_spec, layer_names, vllm_config, device"),
    Hook(
        _BUILDER,
        "GDNAttentionMetadataBuilder.build",
        "common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build",
    ),
    Hook(_BUILDER, "GDNAttentionMetadataBuilder.update_block_table", "metadata, blk_table, slot_mapping"),
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
    Hook(LAYERS + "checkpoint", "MambaPrefillCheckpointBuilder.build", "m, request_rows"),
    Hook(
        LAYERS + "checkpoint",
        "MambaPrefillCheckpointExporter.export",
        "checkpoint, raw_qkv, conv_state, cu_seqlens, recurrent_checkpoint, recurrent_state, recurrent_rows, "
        "token_indices",
        cuda=True,
    ),
    Hook(
        "vllm.platforms.interface", "Platform._align_hybrid_block_size", "vllm_config, backend_cls",
        calls="get_mamba_specs_from_config",
    ),
    LOAD_MODEL,
)  # fmt: skip
HOOKS = (*dict.fromkeys(hook for model in models.ALL for hook in (model.recurrence, *model.hooks)), *_COMMON_HOOKS)

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


def check_geometry(geometry: Any, state_dtype: Any) -> None:
    """Check that the kernel supports states of this shape and dtype."""
    for what, width, known in (
        ("keys", geometry.key_width, KEY_WIDTHS),
        ("values", geometry.value_width, VALUE_WIDTHS),
    ):
        if width not in known:
            raise STATE.because(what=f"heads of {what} are {width} wide, not one of {known}")
    if geometry.rows > 32:
        raise STATE.because(what=f"windows have {geometry.rows} tokens, more than 32")
    if str(state_dtype) not in ("torch.float32", "torch.bfloat16"):
        raise STATE.because(what=f"states are {state_dtype}: set mamba_ssm_cache_dtype to float32 or bfloat16")
    if str(geometry.key_dtype) not in ("torch.float16", "torch.bfloat16"):
        raise STATE.because(what=f"keys are {geometry.key_dtype}")


def check_chunk(vllm_config: Any, geometry: Any) -> None:
    """Check that the kernels of the chunk form support an engine."""
    if geometry.per_channel:
        raise CHUNK_FORM.because(what="each channel of a key has a decay (KDA), and the kernel needs one per head")
    for what, width in (("keys", geometry.key_width), ("values", geometry.value_width)):
        if width != CHUNK_WIDTH:
            raise CHUNK_FORM.because(what=f"heads of {what} are {width} wide, not {CHUNK_WIDTH}")
    if geometry.rows > MOST_CHUNK_WINDOW:
        raise CHUNK_FORM.because(what=f"windows have {geometry.rows} tokens, more than {MOST_CHUNK_WINDOW}")
    if str(geometry.key_dtype) != "torch.bfloat16":
        raise CHUNK_FORM.because(what=f"the model's dtype is {geometry.key_dtype}, not torch.bfloat16")
    cache = vllm_config.cache_config
    sizes = {"prefix_match_unit": getattr(cache, "prefix_match_unit", None)}
    if cache.mamba_cache_mode == "align":
        sizes["blocks of recurrent states"] = getattr(cache, "mamba_block_size", None)
    for what, size in sizes.items():
        if size and size % geometry.chunk:
            raise CHUNK_FORM.because(what=f"{what}: {size} tokens, not a multiple of {geometry.chunk}")


def check_registered(model: Model) -> None:
    """Check that no other plugin replaced the layer class of a model. vLLM's registry holds one class for it."""
    from vllm.model_executor.custom_op import op_registry_oot

    registered: Any = op_registry_oot.get(model.layer)
    if registered is not None and registered.__module__ != model.methods.__module__:
        raise TAKEN_CLASS.because(registered=f"{registered.__module__}.{registered.__qualname__}", layer=model.layer)


def check_state_connectors(vllm_config: Any) -> None:
    """Check that the KV connectors of an engine read only complete recurrent states."""
    for name, connector in connectors_of(getattr(vllm_config, "kv_transfer_config", None)):
        why = connector.refused or connector.recurrent
        if why:
            raise STATE_CONNECTOR.because(name=name, why=why)


def check_hooks(model: Model) -> None:
    """Check the version of vLLM and the hooks of a model."""
    check_vllm((model.recurrence, *model.hooks, *_COMMON_HOOKS), RECURRENT)


@functools.cache
def _problem_of_vllm(model: Model) -> str | None:
    try:
        check_hooks(model)
        check_library("cuda")
    except Unsupported as error:
        return str(error)
    return None


def checks_of(vllm_config: Any) -> Iterator[Callable[[], None]]:
    """Yield the checks of a configuration, in order. Each raises :class:`Unsupported`, and may rely on the ones before.

    :func:`check_hooks` and the compiled library are not among them.
    """
    yield lambda: check_engine(vllm_config, vllm_config.device_config.device_type, RECURRENT)
    model = model_of(vllm_config)
    yield lambda: check_state_connectors(vllm_config)
    yield lambda: check_geometry(RecordGeometry.of(vllm_config), model.state_dtype(vllm_config))
    if settings_of(vllm_config).chunk:
        yield lambda: check_chunk(vllm_config, RecordGeometry.of(vllm_config))
    yield lambda: check_registered(model)
    yield lambda: _check_connector_hooks(vllm_config)


def _check_connector_hooks(vllm_config: Any) -> None:
    for name, _ in connectors_of(getattr(vllm_config, "kv_transfer_config", None)):
        if problem := name in CONNECTOR_HOOKS and CONNECTOR_HOOKS[name].problem():
            raise Unsupported(problem)


def problem_of(vllm_config: Any) -> Unsupported | None:
    """Return why this configuration does not support one state per request, or None if it does."""
    try:
        for check in checks_of(vllm_config):
            check()
        problem = _problem_of_vllm(model_of(vllm_config))
        return None if problem is None else Unsupported(problem)
    except Unsupported as error:
        return error


def uses_recurrent(vllm_config: Any) -> bool:
    """Return whether this configuration asks for one state per request and supports it."""
    return bool(settings_of(vllm_config).recurrent) and problem_of(vllm_config) is None
