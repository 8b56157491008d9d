"""Base class of vLLM layers with one state per request.

Each vLLM layer class has a subclass, with the methods that its file in ``models`` adds. vLLM creates the subclass
instead, through its registry of pluggable layers. An engine that did not ask for one state runs the inherited
vLLM code. vLLM's code also handles weights, projections, convolutions and prompts in every engine. A layer verifies the
windows of a step with one launch of :func:`nwor_ops.gated_delta_verify`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba import checkpoint as vllm_checkpoint
from vllm.model_executor.layers.mamba.abstract import MambaBase

from nwor_ops import ops
from nwor_ops.recurrent.cache import RecurrentCache
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.hooks import Patches, when_undone
from nwor_ops.vllm.recurrent.metadata import RecurrentBackend, RecurrentMetadata
from nwor_ops.vllm.recurrent.models.model import Model
from nwor_ops.vllm.recurrent.page import RecordGeometry
from nwor_ops.vllm.recurrent.supported import uses_recurrent
from nwor_ops.vllm.step_listener import RecurrentListener

# The state tensor that vLLM passes to its kernel has two attributes: its layer, and its cache with the records. When
# vLLM empties ``kv_cache`` to free a cache, the records are freed with the state. ``kv_cache`` itself must keep exactly
# the entries that vLLM's code unpacks.
_OWNER, _CACHE = "_nwor_layer", "_nwor_cache"
_patches = Patches("recurrent: layers")


class RecurrentLayer(PluggableLayer, MambaBase):
    """A vLLM layer with one state per request. :func:`install` creates a subclass of this class and of vLLM's class.

    Attributes:
        given_gates: whether vLLM computes the decays and betas of a window before its kernel.
        recurrent: whether this engine has one state per request. If False, vLLM's code runs.
        layer_window: int64 ``[1]``, the number of the last window that this layer verified.
        gate_lower_bound: as in :func:`nwor_ops.gated_delta_verify`. GLM's layers set it.
        all_states: ``[max_tokens, value_heads, dv, dk]``, only with an audit: the states that vLLM would have kept.
        listener: receives each checkpoint that vLLM exports, or None.
    """

    given_gates = False
    prefix: str
    A_log: torch.nn.Parameter
    dt_bias: torch.nn.Parameter
    layer_window: Tensor
    gate_lower_bound: float | None = None
    all_states: Tensor | None = None
    listener: RecurrentListener | None = None

    recurrence: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = self.engine_config(*args, **kwargs)
        self.recurrent = uses_recurrent(vllm_config)
        if self.recurrent:
            self.geometry = RecordGeometry.of(vllm_config)
            audited = settings_of(vllm_config).audit
            self._most_audited_tokens = most_window_tokens(vllm_config) if audited else 0

    def engine_config(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the engine's configuration from the arguments of vLLM's ``__init__``."""
        return vllm_config

    # ------------------------------------------------------------ the cache

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        return self.geometry.extend(spec) if self.recurrent else spec

    def get_attn_backend(self) -> Any:
        return RecurrentBackend if self.recurrent else super().get_attn_backend()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if not self.recurrent:
            return
        states = self.kv_cache
        offset = sum(state[0].numel() * state.element_size() for state in states)
        self.layer_window = torch.zeros(1, dtype=torch.int64, device=kv_cache.device)
        setattr(states[1], _OWNER, self)
        alias = states[1].view(states[1].shape)  # the tensor itself would form a reference cycle, which lives on
        setattr(states[1], _CACHE, self.geometry.bind(alias, kv_cache.squeeze(dim=(1, 2)), offset))
        if self._most_audited_tokens:
            self.all_states = torch.empty(
                self._most_audited_tokens, *states[1].shape[1:], dtype=states[1].dtype, device=kv_cache.device
            )

    @property
    def recurrent_cache(self) -> RecurrentCache:
        """The states, and views of the records, which follow vLLM's states in each page."""
        cache: RecurrentCache = getattr(self.kv_cache[1], _CACHE)
        return cache

    # ------------------------------------------------------------ a step

    def verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        gate_activation: str = "silu",
    ) -> None:
        """Verify the windows of this step. The tokens must be in the order of the plan.

        Arguments are those of :func:`nwor_ops.gated_delta_verify`; ``out`` is **mutated**.
        """
        metadata = self.windows()
        assert metadata is not None
        assert metadata.plan is not None
        assert metadata.window_id is not None
        assert metadata.spec_query_start_loc is not None
        cache, geometry = self.recurrent_cache, self.geometry
        per_channel = (geometry.value_heads, geometry.key_width)
        ops.gated_delta_verify(
            out,
            cache.state,
            *cache.records,
            self.layer_window,
            q,
            k,
            v,
            a,
            b,
            None if self.given_gates else self.A_log.view(-1),
            None if self.given_gates else self.dt_bias.view(per_channel if geometry.per_channel else -1),
            metadata.plan,
            metadata.window_id,
            metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1],
            geometry.key_width**-0.5,
            gate=gate,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            gate_activation=gate_activation,
            all_states=self.all_states,
            gate_lower_bound=self.gate_lower_bound,
            chunk=geometry.chunk,
        )

    def windows(self) -> RecurrentMetadata | None:
        """Return the metadata of this step, or None if it has no windows."""
        by_layer = get_forward_context().attn_metadata
        metadata = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None
        return metadata if isinstance(metadata, RecurrentMetadata) and metadata.num_spec_decodes > 0 else None

    def has_plan(self, metadata: Any) -> bool:
        """Return whether metadata of a step is ours."""
        return isinstance(metadata, RecurrentMetadata)


def most_window_tokens(vllm_config: Any) -> int:
    """Return the maximum number of window tokens in one step, including the padding of a CUDA graph."""
    most = vllm_config.scheduler_config.max_num_seqs * (vllm_config.num_speculative_tokens + 1)
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return int(min((size for size in sizes if size >= most), default=most))


def owner_of_state(state: Tensor) -> RecurrentLayer | None:
    """Return the layer that owns a state, if vLLM passes the tensor of ``kv_cache`` itself."""
    owner: RecurrentLayer | None = getattr(state, _OWNER, None)
    return owner


def subclass_of(model: Model) -> type:
    """Return our subclass of a model's layer class in vLLM."""
    vllm_layer = getattr(importlib.import_module(model.module), model.layer)
    attributes = {"__module__": model.methods.__module__, "__doc__": RecurrentLayer.__doc__}
    return type(f"Recurrent{model.layer}", (model.methods, RecurrentLayer, vllm_layer), attributes)


def install(model: Model) -> None:
    """Make vLLM create our layers, and pass their windows to them. Safe to call again."""
    if model.layer not in op_registry_oot:
        ours: Any = subclass_of(model)
        PluggableLayer.register_oot(ours, name=model.layer)
        when_undone(functools.partial(op_registry_oot.pop, model.layer, None))
    owner_of = getattr(model.methods, "owner_of", owner_of_state)

    def handing_over(compute: Callable[..., Any]) -> Callable[..., Any]:
        def hand_over(*args: Any, **kwargs: Any) -> Any:
            """Run vLLM's function, except for the windows of a layer with one state."""
            state = kwargs.get("initial_state")
            owner = None if state is None else owner_of(state)
            if owner is None or kwargs.get("num_accepted_tokens") is None:
                return compute(*args, **kwargs)
            return owner.recurrence(**kwargs), kwargs["initial_state"]

        return hand_over

    _patches.put_once(importlib.import_module(model.recurrence.module), model.recurrence.name, handing_over)
    for module, name in model.without_record:
        other = getattr(importlib.import_module(module), name)
        _patches.put_once(other, "get_kv_cache_spec", _without_speculative_blocks)


def _without_speculative_blocks(get: Callable[..., Any]) -> Callable[..., Any]:
    """Patch the spec of a layer that has one state in any case."""

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = get(self, vllm_config)
        return dataclasses.replace(spec, num_speculative_blocks=0) if uses_recurrent(vllm_config) else spec

    return get_kv_cache_spec


def watch_checkpoints() -> None:
    """Report each checkpoint that vLLM exports to a layer's cache to the layer's listener. Safe to call again."""

    def reporting(export: Callable[..., Any]) -> Callable[..., Any]:
        def export_and_report(exporter: Any, checkpoint: Any, **kwargs: Any) -> Any:
            result = export(exporter, checkpoint, **kwargs)
            owner = getattr(kwargs.get("recurrent_state"), _OWNER, None)
            if owner is not None and owner.listener is not None:
                owner.listener.exported(owner, checkpoint, kwargs["recurrent_checkpoint"], kwargs.get("recurrent_rows"))
            return result

        return export_and_report

    _patches.put_once(vllm_checkpoint.MambaPrefillCheckpointExporter, "export", reporting)
