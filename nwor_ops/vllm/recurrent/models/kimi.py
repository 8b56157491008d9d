"""KDA of Kimi Linear: a decay for each channel of a key.

vLLM merges the convolutions of q, k and v into one, with one state. vLLM's code runs the norm after the recurrence.
"""

from __future__ import annotations

from typing import Any

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models.model import (
    LAYERS,
    SPEC_HOOK,
    Heads,
    LayerMethods,
    Model,
    gated_delta_net_heads,
    kda_heads,
)

_MODULE, _LAYER = LAYERS + "gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention"


class KimiMethods(LayerMethods):
    gates = "raw_g", "raw_beta"


def _heads(config: Any) -> Heads:
    kda = getattr(config, "linear_attn_config", None)
    if kda is None:  # AliceAI names its sizes as Gated DeltaNet does
        return gated_delta_net_heads(config)._replace(per_channel=True)
    return kda_heads(kda["num_heads"], kda["head_dim"])


MODEL = Model(
    architectures=("KimiLinearForCausalLM", "AliceAIForCausalLM"),
    module=_MODULE,
    layer=_LAYER,
    methods=KimiMethods,
    recurrence=Hook(  # vLLM's layer imports it when it runs
        "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
        "fused_recurrent_kda",
        "q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices, "
        "num_accepted_tokens, out, fuse_gate",
    ),
    hooks=(
        Hook(_MODULE, f"{_LAYER}.__init__", "config, vllm_config, prefix"),
        Hook(_MODULE, f"{_LAYER}.get_state_shape", ""),
        Hook(_MODULE, f"{_LAYER}.get_state_dtype", ""),
        Hook(_MODULE, f"{_LAYER}._forward", "mixed_qkv, g1, g2, beta, core_attn_out"),
        SPEC_HOOK,
    ),
    heads=_heads,
    state_dtype_of="kda_state_dtype",
    dtype_settings=("mamba_cache_dtype",),
)
