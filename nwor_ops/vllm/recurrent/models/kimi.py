"""vLLM's KDA layer of Kimi Linear with one state per request. It has a decay for each channel of a key.

vLLM merges the convolutions of q, k and v into one, with one state. vLLM's code runs the norm after the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as vllm_layer
from vllm.models.kimi_k3.nvidia.ops.third_party import kda

from nwor_ops.vllm.recurrent.layer import OneStateLayer, put_in_place


class OneStateKimiDeltaNet(OneStateLayer, vllm_layer.KimiGatedDeltaNetAttention):
    """Replace vLLM's layer. See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`.

    vLLM computes all windows with one function, which :func:`install` patches. vLLM's layer imports it when it runs.
    """

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
    """Verify the windows of a batch.

    All tensors have a batch dimension of one: ``[1, T, ...]``. vLLM passes ``out`` if the batch has only windows.
    """
    out = torch.empty_like(v) if out is None else out
    layer.verify(q[0], k[0], v[0], raw_g[0], raw_beta[0], out[0])
    return out
