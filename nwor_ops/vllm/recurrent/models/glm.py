"""vLLM's KDA layer of GLM-5.3-Flash with one state per request. It has a bounded decay for each channel of a key.

vLLM merges the convolutions of q, k and v into one, with one state. vLLM's code runs the norm after the recurrence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.models.glm5next.common import kda as vllm_layer

from nwor_ops.vllm.recurrent.layer import OneStateLayer, put_in_place


class OneStateGlmDeltaNet(OneStateLayer, vllm_layer.Glm5NextLinearAttention):
    """Replace vLLM's layer. See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`.

    vLLM computes all windows with one function, which :func:`install` patches.
    """

    allow_neg_eigval = False

    @property
    def gate_lower_bound(self) -> float:  # type: ignore[override]  # vLLM sets it once, under another name
        """The bound of the gate. vLLM's kernel has no other gate."""
        assert self.kda_lower_bound is not None
        return self.kda_lower_bound


def install() -> None:
    """See :func:`~nwor_ops.vllm.recurrent.layer.put_in_place`."""
    put_in_place(OneStateGlmDeltaNet, "Glm5NextLinearAttention", vllm_layer, "fused_recurrent_kda", _verified)


def _verified(
    layer: OneStateLayer,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Verify the windows of a batch.

    All tensors have a batch dimension of one: ``[1, T, ...]``. ``g`` and ``beta`` are logits. vLLM passes ``out`` if
    the batch has only windows.
    """
    out = torch.empty_like(v) if out is None else out
    layer.verify(q[0], k[0], v[0], g[0], beta[0], out[0])
    return out
