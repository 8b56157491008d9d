"""KDA of GLM-5.3-Flash: a bounded decay for each channel of a key.

vLLM merges the convolutions of q, k and v into one, with one state. vLLM's code runs the norm after the recurrence. A
CPU installation may lack what vLLM's package for this model imports.
"""

from __future__ import annotations

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models.model import LayerMethods, Model, kda_heads

_MODULE, _LAYER = "vllm.models.glm5next.common.kda", "Glm5NextLinearAttention"


class GlmMethods(LayerMethods):
    @property
    def gate_lower_bound(self) -> float:
        """The bound of the gate. vLLM's kernel has no other gate."""
        bound: float = self.kda_lower_bound
        return bound


MODEL = Model(
    architectures=("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"),
    module=_MODULE,
    layer=_LAYER,
    methods=GlmMethods,
    recurrence=Hook(
        _MODULE,
        "fused_recurrent_kda",
        "q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens, "
        "ssm_state_indices, num_accepted_tokens, out, sigmoid_beta, a_log, g_bias, compute_gate, lower_bound, kwargs",
        cuda=True,
    ),
    hooks=(
        Hook(_MODULE, f"{_LAYER}.__init__", "config, vllm_config, prefix", cuda=True),
        Hook(_MODULE, f"{_LAYER}.get_kv_cache_spec", "vllm_config", cuda=True),
        Hook(_MODULE, f"{_LAYER}.get_state_shape", "", cuda=True),
        Hook(_MODULE, f"{_LAYER}.get_state_dtype", "", cuda=True),
        Hook(_MODULE, f"{_LAYER}._forward", "qkv_proj_states, g1, beta, core_attn_out", cuda=True),
    ),
    heads=lambda config: kda_heads(config.linear_num_heads, config.linear_head_dim),
    state_dtype_of="kda_state_dtype",
)
