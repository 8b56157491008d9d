"""KDA of Bailing V3. vLLM computes decays and betas before its kernel.

vLLM applies the convolutions of q, k and v separately; their rows share one state. The norm after the recurrence is
vLLM's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models.model import SPEC_HOOK, LayerMethods, Model, kda_heads

_MODULE, _LAYER = "vllm.model_executor.models.bailing_moe_v3", "BailingMoeV3KimiDeltaAttention"


class BailingMethods(LayerMethods):
    given_gates = True

    def engine_config(self, *args: Any, **kwargs: Any) -> Any:
        """Return the engine's configuration, which vLLM's class does not take as an argument."""
        from vllm.config import get_current_vllm_config

        return get_current_vllm_config()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        vllm_layer: Any = super()
        vllm_layer.bind_kv_cache(kv_cache)
        self._state_address = self.kv_cache[1].data_ptr()

    def _forward(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's code. It passes its kernel a new view of the state, so remember which layer runs."""
        global _running
        _running = self
        vllm_layer: Any = super()
        try:
            vllm_layer._forward(*args, **kwargs)
        finally:
            _running = None

    @staticmethod
    def owner_of(state: Tensor) -> BailingMethods | None:
        """Return the layer that runs, if this is its state and it has a record."""
        layer = _running
        return layer if layer is not None and layer.recurrent and state.data_ptr() == layer._state_address else None


_running: BailingMethods | None = None

MODEL = Model(
    architectures=("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
    module=_MODULE,
    layer=_LAYER,
    methods=BailingMethods,
    recurrence=Hook(
        _MODULE,
        "fused_recurrent_kda_fwd",
        "q, k, v, g, beta, scale, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, "
        "num_accepted_tokens, use_qk_l2norm_in_kernel",
    ),
    hooks=(
        Hook(
            _MODULE,
            f"{_LAYER}.__init__",
            "config, quant_config, layer_id, prefix, model_config, cache_config, num_speculative_tokens",
        ),
        Hook(_MODULE, f"{_LAYER}.get_state_shape", ""),
        Hook(_MODULE, f"{_LAYER}.get_state_dtype", ""),
        Hook(
            _MODULE,
            f"{_LAYER}._forward",
            "q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out",
        ),
        SPEC_HOOK,
    ),
    heads=lambda config: kda_heads(config.num_attention_heads, config.head_dim),
    state_dtype_of="kda_state_dtype",
    dtype_settings=("mamba_cache_dtype",),
)
