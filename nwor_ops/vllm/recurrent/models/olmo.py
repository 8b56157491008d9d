"""Gated DeltaNet of OLMo hybrid. It has other head sizes than Qwen's, and may double beta.

vLLM computes decays and betas before its kernel. It merges the convolutions of q, k and v into one, with one state.
vLLM's code runs the norm after the recurrence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models.model import LAYERS, SPEC_HOOK, LayerMethods, Model, gated_delta_net_heads

_MODULE, _LAYER = LAYERS + "gdn.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"


class OlmoMethods(LayerMethods):
    given_gates = True

    def recurrence(self, *, q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
        """Verify the windows of a batch. If there are fewer key heads than value heads, vLLM has repeated q and k."""
        share = q.shape[2] // self.geometry.key_heads
        return super().recurrence(q=q[:, :, ::share], k=k[:, :, ::share], **arguments)


MODEL = Model(
    architectures=("OlmoHybridForCausalLM",),
    module=_MODULE,
    layer=_LAYER,
    methods=OlmoMethods,
    recurrence=Hook(
        _MODULE,
        "fused_recurrent_gated_delta_rule",
        "q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, "
        "num_accepted_tokens, use_qk_l2norm_in_kernel",
    ),
    hooks=(
        Hook(_MODULE, f"{_LAYER}.__init__", "config, vllm_config, prefix"),
        Hook(_MODULE, f"{_LAYER}.get_state_shape", ""),
        Hook(_MODULE, f"{_LAYER}._forward_core", "mixed_qkv, b, a, core_attn_out"),
        SPEC_HOOK,
    ),
    heads=gated_delta_net_heads,
)
