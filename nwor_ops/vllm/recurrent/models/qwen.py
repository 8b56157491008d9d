"""vLLM's Gated DeltaNet layer of Qwen3-Next and Qwen3.5 with one state per request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as vllm_layer

from nwor_ops.vllm.recurrent.layer import OneStateLayer, put_in_place
from nwor_ops.vllm.recurrent.metadata import OneStateMetadata


class OneStateGatedDeltaNet(OneStateLayer, vllm_layer.QwenGatedDeltaNetAttention):
    """Replace vLLM's layer. See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`.

    A batch with only windows skips vLLM's copies of q, k, v and the output.
    """

    allow_neg_eigval = False

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
        """Run convolution and recurrence."""
        metadata = self.windows()
        if metadata is None or not metadata.is_windows_only:
            return super()._forward_core(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
        # This runs the convolution and then the method below. The empty gate means: no gate here.
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
        """Run recurrence, gate and norm, for which vLLM has one kernel. With an empty gate, run only the recurrence."""
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
            None if gate is None else self.norm.weight,
            self.layer_norm_epsilon,
            self.norm.activation,
        )


def install() -> None:
    """See :func:`~nwor_ops.vllm.recurrent.layer.put_in_place`."""
    recurrence = "fused_sigmoid_gating_delta_rule_update"
    put_in_place(OneStateGatedDeltaNet, "QwenGatedDeltaNetAttention", vllm_layer, recurrence, _verified)


def _verified(layer: OneStateLayer, *, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
    """Verify the windows of a batch that also holds prompts.

    ``q``, ``k`` and ``v`` have a batch dimension of one: ``[1, T, ...]``. ``a`` and ``b`` have none.
    """
    out = torch.empty_like(v)
    layer.verify(q[0], k[0], v[0], a, b, out[0])
    return out
