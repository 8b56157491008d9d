"""vLLM's V1 model runner (the only one on the CPU): where its step begins and ends.

Nothing here belongs to the core: this module turns the runner's objects into a ``Step`` and wraps
methods of the runner **instance** and the writer of each target layer's ``impl`` **instance**.
Classes stay as they are, so another engine in the same process is not touched.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from nwor_ops.cache import LayerCache
from nwor_ops.config import NworConfig
from nwor_ops.vllm import cpu_pages
from nwor_ops.vllm.audit import AuditedLayer
from nwor_ops.vllm.session import Session, Step, TargetLayer
from nwor_ops.vllm.support import Unsupported, check_engine, check_group_spec, check_vllm
from nwor_ops.window import Window


def attach(runner: Any, config: NworConfig, logger: Any) -> Session | None:
    """Make a runner's verification steps transactions. Called once its KV cache is bound.

    Args:
        runner: a ``GPUModelRunner`` (V1) or a subclass.
        config: settings that want something.
        logger: vLLM's.

    Returns:
        The session, or None where there is nothing to do (no speculative decoding).

    Raises:
        Unsupported: before anything is wrapped or allocated.
    """
    if runner.speculative_config is None:
        return None
    check_vllm()
    check_engine(runner.vllm_config)
    if runner.device.type != "cpu":
        raise Unsupported(f"device {runner.device}: this version attaches to vLLM's CPU engine only")
    layers = _target_layers(runner)
    if not layers:
        raise Unsupported("no layer of the target model writes a KV cache of its own")
    groups = {layer.audited.group for layer in layers}
    limits = {
        "max_num_tokens": max(_slot_mapping(runner, group).numel() for group in groups),
        "max_num_requests": runner.max_num_reqs,
        "max_draft_tokens": runner.max_num_reqs * runner.speculative_config.num_speculative_tokens,
    }
    try:
        session = Session(config, layers, limits, logger)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise Unsupported(str(error)) from error
    _wrap_writers(runner, session, [layer.audited.name for layer in layers])
    _wrap_runner(runner, session, sorted(groups))
    return session


# ---------------------------------------------------------------- what the runner has


def _slot_mapping(runner: Any, group: str) -> Tensor:
    """The persistent slot mapping of a group, padding included."""
    return runner.input_batch.block_table[int(group)].slot_mapping.gpu


def _drafter_layers(runner: Any) -> set[str]:
    """Layers of the drafter's own model: their writes are the drafter's business."""
    if not runner.speculative_config.uses_draft_model():
        return set()
    names = set(getattr(runner.drafter, "_draft_attn_layer_names", ()))
    if not names:
        raise Unsupported("the drafter does not say which attention layers are its own")
    return names


def _target_layers(runner: Any) -> list[TargetLayer]:
    drafter_layers = _drafter_layers(runner)
    context = runner.compilation_config.static_forward_context
    layers = []
    for group_id, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            attention = context[name]
            if name in drafter_layers or getattr(attention, "kv_sharing_target_layer_name", None) is not None:
                continue  # the first writes for the drafter, the second not at all
            check_group_spec(str(group_id), group.kv_cache_spec)
            layers.append(_cpu_layer(runner, name, str(group_id), attention))
    return layers


def _cpu_layer(runner: Any, name: str, group: str, attention: Any) -> TargetLayer:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = attention.impl
    if type(impl) is not CPUAttentionBackendImpl:
        raise Unsupported(f"layer {name}: attention back end {type(impl).__name__} is not known")
    # The class's own writer, bound: what the instance attribute will be wrapped around.
    own_writer = functools.partial(CPUAttentionBackendImpl.do_kv_cache_update, impl, attention)
    isa: str = attention.isa
    writable = isa in cpu_pages.STRIDED and impl.kv_cache_dtype == "auto"

    def planes(kv_cache: Tensor) -> LayerCache:
        return cpu_pages.layer_cache(kv_cache, isa, writable)

    try:
        cpu_pages.verify_pages(own_writer, attention.kv_cache, isa, runner.model_config.dtype, writable)
    except ValueError as error:
        raise Unsupported(f"layer {name}: {error}") from error
    return TargetLayer(AuditedLayer(name, group, attention.kv_cache, planes, own_writer), fused=writable)


def _step(runner: Any, metadata: Any, groups: list[str]) -> Step:
    """One forward: metadata is vLLM's ``SpecDecodeMetadata``, on the host and on the device."""
    num_requests = len(metadata.num_draft_tokens)
    return Step(
        Window(
            query_start_loc=runner.query_start_loc.gpu,
            cu_num_draft_tokens=metadata.cu_num_draft_tokens,
            slot_mappings={group: _slot_mapping(runner, group) for group in groups},
            num_draft_tokens=sum(metadata.num_draft_tokens),
        ),
        draft_token_ids=metadata.draft_token_ids,
        query_start_loc=runner.query_start_loc.np[: num_requests + 1],
        num_draft_tokens=metadata.num_draft_tokens,
    )


# ---------------------------------------------------------------- wrapping


def _wrap_writers(runner: Any, session: Session, names: list[str]) -> None:
    context = runner.compilation_config.static_forward_context
    for name in names:
        _wrap_writer(context[name].impl, name, session)


def _wrap_writer(impl: Any, name: str, session: Session) -> None:
    def do_kv_cache_update(
        layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        session.write(name, key, value, kv_cache, slot_mapping)

    # An attribute of the instance hides the method of the class; a second attach replaces the first.
    impl.do_kv_cache_update = do_kv_cache_update


def _wrap_runner(runner: Any, session: Session, groups: list[str]) -> None:
    prepare_inputs = type(runner)._prepare_inputs.__get__(runner)
    sample = type(runner)._sample.__get__(runner)
    execute_model = type(runner).execute_model.__get__(runner)
    sample_tokens = type(runner).sample_tokens.__get__(runner)

    @functools.wraps(prepare_inputs)
    def _prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = prepare_inputs(scheduler_output, num_scheduled_tokens)
        if result[1] is not None:
            session.begin(_step(runner, result[1], groups))
        return result

    @functools.wraps(sample)
    def _sample(logits: Any, spec_decode_metadata: Any) -> Any:
        output = sample(logits, spec_decode_metadata)
        if spec_decode_metadata is not None:
            session.commit(output.sampled_token_ids)
        return output

    # The two halves of a step: whatever they raise, the drafts are undone before anybody reuses a block.
    def closing(half: Any) -> Any:
        @functools.wraps(half)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return half(*args, **kwargs)
            except BaseException:
                session.close_interrupted()
                raise

        return run

    runner._prepare_inputs = _prepare_inputs
    runner._sample = _sample
    runner.execute_model = closing(execute_model)
    runner.sample_tokens = closing(sample_tokens)


def detach(runner: Any) -> None:
    """Take every wrapper off again: the runner binds a new cache, or is refused."""
    for name in ("_prepare_inputs", "_sample", "execute_model", "sample_tokens"):
        vars(runner).pop(name, None)
    for layer in runner.compilation_config.static_forward_context.values():
        vars(getattr(layer, "impl", layer)).pop("do_kv_cache_update", None)
