"""vLLM's Gated DeltaNet of Qwen3-Next and Qwen3.5 with one state per request.

A subclass that vLLM makes in the place of its own, through its registry of pluggable layers. What an engine that did
not ask for it gets is vLLM's code, inherited. Weights, projections, convolution, prompts: vLLM's in any case; a window
is one launch of :func:`nwor_ops.gated_delta_verify`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as vllm_layer

from nwor_ops import ops
from nwor_ops.config import NworConfig
from nwor_ops.vllm.recurrent.metadata import OneStateBackend, OneStateMetadata
from nwor_ops.vllm.recurrent.records import RecordGeometry, Records
from nwor_ops.vllm.recurrent.supported import LAYER_CLASS, has_one_state
from nwor_ops.vllm.support import wrap_once

# On the state that vLLM hands to its kernel: whose it is.
_OWNER = "_nwor_layer"


class OneStateGatedDeltaNet(vllm_layer.QwenGatedDeltaNetAttention):
    """See the module.

    Attributes:
        one_state: whether this engine has it; all else only then.
        geometry: of the record.
        layer_window: int64 ``[1]``, the number of the last window that this layer verified.
        all_states: of an audit, ``[max_tokens, value_heads, dv, dk]``: the states that vLLM would have kept.
    """

    layer_window: Tensor
    all_states: Tensor | None = None

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.one_state = has_one_state(vllm_config)
        if self.one_state:
            self.geometry = RecordGeometry.of(vllm_config)
            audited = NworConfig.load(vllm_config.additional_config).audit
            self._most_audited_tokens = most_window_tokens(vllm_config) if audited else 0

    # ------------------------------------------------------------ the cache

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        return self.geometry.extend(spec) if self.one_state else spec

    def get_attn_backend(self) -> Any:
        return OneStateBackend if self.one_state else super().get_attn_backend()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if not self.one_state:
            return
        states = self.kv_cache
        offset = sum(state[0].numel() * state.element_size() for state in states)
        self.kv_cache = (*states, *self.geometry.bind(kv_cache.squeeze(dim=(1, 2)), offset))
        self.layer_window = torch.zeros(1, dtype=torch.int64, device=kv_cache.device)
        setattr(states[1], _OWNER, self)
        if self._most_audited_tokens:
            self.all_states = torch.empty(
                self._most_audited_tokens, *states[1].shape[1:], dtype=states[1].dtype, device=kv_cache.device
            )

    @property
    def records(self) -> Records:
        """Views of the cache, behind vLLM's states in ``kv_cache``: vLLM lets go of a cache by emptying that."""
        return Records(*self.kv_cache[2:])

    # ------------------------------------------------------------ a step

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
        """Convolution and recurrence; a batch of windows alone goes without vLLM's copies of q, k, v and the output."""
        metadata = self._windows()
        if metadata is None or not metadata.is_windows_only:
            return super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
        # The convolution, and then the method below: without a gate, as there is none here.
        return self._forward_core_decode_spec_fused_norm(
            mixed_qkv=mixed_qkv,
            b=b,
            a=a,
            output_gate=core_attn_out.new_empty(0),
            core_attn_out=core_attn_out,
            attn_metadata=metadata,
        )

    def _forward_core_decode_spec_post_conv_fused_norm(
        self,
        mixed_qkv: Tensor,
        b: Tensor,
        a: Tensor,
        output_gate: Tensor,
        core_attn_out: Tensor,
        attn_metadata: Any,
    ) -> None:
        """Recurrence, gate and norm, where vLLM has one kernel for them; with an empty gate the recurrence alone."""
        if isinstance(attn_metadata, OneStateMetadata):
            self._verify_packed(mixed_qkv, b, a, core_attn_out, output_gate if output_gate.numel() else None)
            return
        super()._forward_core_decode_spec_post_conv_fused_norm(
            mixed_qkv=mixed_qkv,
            b=b,
            a=a,
            output_gate=output_gate,
            core_attn_out=core_attn_out,
            attn_metadata=attn_metadata,
        )

    def verify(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, out: Tensor, gate: Tensor | None) -> None:
        """The windows of this step: their tokens, in the order of the plan.

        Args:
            q, k, v: ``[T, heads, width]``.
            a, b: ``[T, value_heads]``.
            out: ``[T, value_heads, dv]``; **mutated**, with gate and norm where there is a gate.
            gate: likewise, or None.
        """
        metadata = self._windows()
        assert metadata is not None
        assert metadata.plan is not None
        assert metadata.window is not None
        assert metadata.spec_query_start_loc is not None
        records = self.records
        ops.gated_delta_verify(
            out,
            self.kv_cache[1],
            records.keys,
            records.norms,
            records.decays,
            records.values,
            self.layer_window,
            q,
            k,
            v,
            a,
            b,
            self.A_log,
            self.dt_bias,
            metadata.plan,
            metadata.window,
            metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1],
            scale=self.head_k_dim**-0.5,
            gate=gate,
            norm_weight=None if gate is None else self.norm.weight,
            norm_eps=self.layer_norm_epsilon,
            gate_activation=self.norm.activation,
            all_states=self.all_states,
        )

    def _windows(self) -> OneStateMetadata | None:
        """Of this step, or None: there is no metadata, or no window."""
        by_layer = get_forward_context().attn_metadata
        found = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None
        return found if isinstance(found, OneStateMetadata) and found.num_spec_decodes > 0 else None

    def _verify_packed(
        self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, gate: Tensor | None
    ) -> None:
        tokens, keys = mixed_qkv.shape[0], self.key_dim // self.tp_size
        q, k, v = mixed_qkv.split([keys, keys, self.value_dim // self.tp_size], dim=-1)
        self.verify(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            a,
            b,
            core_attn_out[:tokens],
            gate,
        )


def most_window_tokens(vllm_config: Any) -> int:
    """Tokens of the windows of one step, at most: those of a graph that is larger than the batch included."""
    most = vllm_config.scheduler_config.max_num_seqs * (vllm_config.num_speculative_tokens + 1)
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return int(min((size for size in sizes if size >= most), default=most))


def install() -> None:
    """Have vLLM make this layer in the place of its own, where no other is registered (:func:`.supported.problem_of`
    says so), and hand the windows of mixed batches to it. Safe to call again."""
    if LAYER_CLASS not in op_registry_oot:
        PluggableLayer.register_oot(OneStateGatedDeltaNet, name=LAYER_CLASS)
    wrap_once(vllm_layer, "fused_sigmoid_gating_delta_rule_update", _handing_over)


def _handing_over(update: Any) -> Any:
    def fused_sigmoid_gating_delta_rule_update(*args: Any, **kwargs: Any) -> Any:
        """vLLM's, but for the windows of a layer with one state: in batches that hold prompts, too."""
        layer = getattr(kwargs.get("initial_state"), _OWNER, None)
        if layer is None or kwargs.get("num_accepted_tokens") is None:
            return update(*args, **kwargs)
        q, k, v = (kwargs[name].squeeze(0) for name in "qkv")
        out = torch.empty_like(v)
        layer.verify(q, k, v, kwargs["a"], kwargs["b"], out, None)
        return out.unsqueeze(0), kwargs["initial_state"]

    return fused_sigmoid_gating_delta_rule_update
