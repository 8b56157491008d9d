"""vLLM's Gated DeltaNet layer of OLMo hybrid with one state per request. It has other head sizes, and may double beta.

vLLM merges the convolutions of q, k and v into one, with one state. vLLM's code runs the norm after the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as vllm_layer
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

from nwor_ops.vllm.recurrent.layer import OneStateLayer, put_in_place


class OneStateOlmoDeltaNet(OneStateLayer, vllm_layer.OlmoHybridGatedDeltaNetAttention):
    """Replace vLLM's layer. See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`.

    A batch with only windows skips vLLM's kernel for decays and betas, and its copies of q, k, v and the output.
    """

    _gates: tuple[Tensor, Tensor]  # a and b of the windows of this call

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Run convolution and recurrence."""
        metadata = self.windows()
        if metadata is None:
            super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
            return
        tokens = metadata.num_actual_tokens
        if not metadata.is_windows_only:
            picked = metadata.spec_token_indx
            assert picked is not None
            self._gates = a[:tokens].index_select(0, picked), b[:tokens].index_select(0, picked)
            super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
            del self._gates  # free the memory; a later call without gates then fails
            return
        indices = metadata.spec_state_indices_tensor
        assert indices is not None
        rows = self.kv_cache[0]
        weight: Any = self.conv1d.weight
        mixed_qkv = causal_conv1d_update(
            mixed_qkv[:tokens],
            rows if is_conv_state_dim_first() else rows.transpose(-1, -2),
            weight.squeeze(1),
            None,
            self.activation,
            conv_state_indices=indices[: metadata.num_spec_decodes, 0],
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=metadata.spec_query_start_loc,
            max_query_len=indices.size(-1),
            validate_data=False,
        )
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = mixed_qkv.split([keys, keys, values], dim=-1)
        self.verify(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            a[:tokens],
            b[:tokens],
            core_attn_out[:tokens],
        )


def install() -> None:
    """See :func:`~nwor_ops.vllm.recurrent.layer.put_in_place`."""
    recurrence = "fused_recurrent_gated_delta_rule"
    put_in_place(OneStateOlmoDeltaNet, "OlmoHybridGatedDeltaNetAttention", vllm_layer, recurrence, _verified)


def _verified(layer: OneStateOlmoDeltaNet, *, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Verify the windows of a batch that also holds prompts.

    All tensors have a batch dimension of one: ``[1, T, ...]``. If there are fewer key heads than value heads, vLLM has
    repeated q and k. It has also computed decays and betas, so take ``a`` and ``b`` from ``_gates``.
    """
    out = torch.empty_like(v)
    share = v.shape[2] // layer.geometry.key_heads
    layer.verify(q[0, :, ::share], k[0, :, ::share], v[0], *layer._gates, out[0])
    return out
