"""vLLM's KDA of Kimi Linear with one state per request: a decay for each channel of a key.

Its convolutions of q, k and v are one in vLLM, with one state. The norm behind the recurrence stays vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as vllm_layer
from vllm.models.kimi_k3.nvidia.ops.third_party import kda

from nwor_ops.vllm.recurrent.layer import OneStateLayer, put_in_place


class OneStateKimiDeltaNet(OneStateLayer, vllm_layer.KimiGatedDeltaNetAttention):
    """See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`. All windows come by the function that vLLM calls for
    them, which its layer imports when it runs."""

    allow_neg_eigval = False


def install() -> None:
    """See :func:`~nwor_ops.vllm.recurrent.layer.put_in_place`."""
    put_in_place(OneStateKimiDeltaNet, "KimiGatedDeltaNetAttention", kda, "fused_recurrent_kda", _verified)


def _verified(
    layer: OneStateLayer,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Batches of one: ``[1, T, ...]``. ``out`` is given where the batch has windows alone."""
    out = torch.empty_like(v) if out is None else out
    layer.verify(q[0], k[0], v[0], raw_g[0], raw_beta[0], out[0])
    return out
