"""vLLM's Gated DeltaNet of OLMo hybrid with one state per request: heads of other sizes, a beta that may be doubled.

Its convolutions of q, k and v are one in vLLM, with one state. The norm behind the recurrence stays vLLM's.
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
    """See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`. A batch of windows alone goes without vLLM's kernel of
    decays and betas, and without its copies of q, k, v and the output."""

    _gates: tuple[Tensor, Tensor]  # a and b of the windows of this call

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Convolution and recurrence."""
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
            del self._gates  # a later call that lacks its own fails, and no memory is kept
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
    """The windows of a batch that holds prompts, too. Batches of one: ``[1, T, ...]``. q and k are repeated for each
    value head, where there are fewer of them; decays and betas were made of ``a`` and ``b``."""
    out = torch.empty_like(v)
    share = v.shape[2] // layer.geometry.key_heads
    layer.verify(q[0, :, ::share], k[0, :, ::share], v[0], *layer._gates, out[0])
    return out
