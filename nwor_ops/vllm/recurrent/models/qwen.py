"""Gated DeltaNet of Qwen3-Next and Qwen3.5. A batch with only windows skips vLLM's copies of q, k, v and the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models.model import LAYERS, LayerMethods, Model, gated_delta_net_heads

MODULE, LAYER = LAYERS + "gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"


class QwenMethods(LayerMethods):
    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
        """Run convolution and recurrence."""
        metadata = self.windows()
        if metadata is None or not metadata.is_windows_only:
            vllm_layer: Any = super()
            return vllm_layer._forward_core(mixed_qkv, b, a, core_attn_out)
        # This runs the convolution and then the method below. An empty gate means: no gate here.
        no_gate = core_attn_out.new_empty(0)
        return self._forward_core_decode_spec_fused_norm(mixed_qkv, b, a, no_gate, core_attn_out, metadata)

    def _forward_core_decode_spec_post_conv_fused_norm(
        self, mixed_qkv: Tensor, b: Tensor, a: Tensor, output_gate: Tensor, core_attn_out: Tensor, attn_metadata: Any
    ) -> None:
        """Run recurrence, gate and norm, for which vLLM has one kernel. With an empty gate, run only the recurrence."""
        if not self.has_plan(attn_metadata):
            vllm_layer: Any = super()
            vllm_layer._forward_core_decode_spec_post_conv_fused_norm(
                mixed_qkv, b, a, output_gate, core_attn_out, attn_metadata
            )
            return
        tokens, keys = mixed_qkv.shape[0], self.key_dim // self.tp_size
        q, k, v = mixed_qkv.split([keys, keys, self.value_dim // self.tp_size], dim=-1)
        gate = output_gate if output_gate.numel() else None
        self.verify(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            a,
            b,
            core_attn_out[:tokens],
            gate,
            None if gate is None else self.norm.weight,
            self.layer_norm_epsilon,
            self.norm.activation,
        )

    def recurrence(self, *, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **arguments: Any) -> Tensor:
        """Verify the windows of a batch that also holds prompts. ``a`` and ``b`` have no batch dimension."""
        out = torch.empty_like(v)
        self.verify(q[0], k[0], v[0], arguments["a"], arguments["b"], out[0])
        return out


_FUSED = "mixed_qkv, b, a, output_gate, core_attn_out, attn_metadata"
RECURRENCE = Hook(
    MODULE,
    "fused_sigmoid_gating_delta_rule_update",
    "A_log, a, b, dt_bias, q, k, v, beta, threshold, scale, initial_state, inplace_final_state, cu_seqlens, "
    "ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, is_kda",
)
HOOKS = (
    Hook(MODULE, f"{LAYER}.__init__", "config, vllm_config, prefix, gqa_interleaved_layout, reduce_results"),
    Hook(MODULE, f"{LAYER}.get_kv_cache_spec", "vllm_config"),
    Hook(MODULE, f"{LAYER}.get_state_shape", ""),
    Hook(MODULE, f"{LAYER}._forward_core", "mixed_qkv, b, a, core_attn_out"),
    Hook(MODULE, f"{LAYER}._forward_core_decode_spec_fused_norm", _FUSED),
    Hook(MODULE, f"{LAYER}._forward_core_decode_spec_post_conv_fused_norm", _FUSED),
)
MODEL = Model(
    architectures=(
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
    ),
    module=MODULE,
    layer=LAYER,
    methods=QwenMethods,
    recurrence=RECURRENCE,
    hooks=HOOKS,
    heads=gated_delta_net_heads,
)
