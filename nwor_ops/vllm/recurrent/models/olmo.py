"""Gated DeltaNet of OLMo hybrid. It has other head sizes than Qwen's, and may double beta.

vLLM merges the convolutions of q, k and v into one, with one state. vLLM's code runs the norm after the recurrence. A
batch with only windows skips vLLM's kernel for decays and betas, and its copies of q, k, v and the output.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models.model import LAYERS, SPEC_HOOK, LayerMethods, Model, gated_delta_net_heads

_MODULE, _LAYER = LAYERS + "gdn.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"


class OlmoMethods(LayerMethods):
    _gates: tuple[Tensor, Tensor]  # a and b of the windows of this call

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Run convolution and recurrence."""
        metadata = self.windows()
        vllm_layer: Any = super()
        if metadata is None:
            vllm_layer._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        tokens = metadata.num_actual_tokens
        if not metadata.is_windows_only:
            picked = metadata.spec_token_indx
            self._gates = a[:tokens].index_select(0, picked), b[:tokens].index_select(0, picked)
            vllm_layer._forward_core(mixed_qkv, b, a, core_attn_out)
            del self._gates  # free the memory; a later call without gates then fails
            return
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = self._convolved(mixed_qkv[:tokens], metadata).split([keys, keys, values], dim=-1)
        self.verify(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            a[:tokens],
            b[:tokens],
            core_attn_out[:tokens],
        )

    def _convolved(self, mixed_qkv: Tensor, metadata: Any) -> Tensor:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        vllm_layer: Any = importlib.import_module(_MODULE)
        rows, indices = self.kv_cache[0], metadata.spec_state_indices_tensor
        convolved: Tensor = vllm_layer.causal_conv1d_update(
            mixed_qkv,
            rows if is_conv_state_dim_first() else rows.transpose(-1, -2),
            self.conv1d.weight.squeeze(1),
            None,
            self.activation,
            conv_state_indices=indices[: metadata.num_spec_decodes, 0],
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=metadata.spec_query_start_loc,
            max_query_len=indices.size(-1),
            validate_data=False,
        )
        return convolved

    def recurrence(self, *, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **arguments: Any) -> Tensor:
        """Verify the windows of a batch that also holds prompts.

        If there are fewer key heads than value heads, vLLM has repeated q and k. It has also computed decays and betas,
        so take ``a`` and ``b`` from ``_gates``.
        """
        out = torch.empty_like(v)
        share = v.shape[2] // self.geometry.key_heads
        self.verify(q[0, :, ::share], k[0, :, ::share], v[0], *self._gates, out[0])
        return out


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
        Hook(_MODULE, f"{_LAYER}.rearrange_mixed_qkv", "mixed_qkv"),
        Hook(
            _MODULE,
            "causal_conv1d_update",
            "x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc, "
            "max_query_len, null_block_id, validate_data, out",
            cuda=True,
        ),
        Hook(LAYERS + "mamba_utils", "is_conv_state_dim_first", ""),
        SPEC_HOOK,
    ),
    heads=gated_delta_net_heads,
)
