"""The KDA layer of Bailing V3 with one state per request. vLLM computes decays and betas before its kernel.

vLLM applies the convolutions of q, k and v separately; their rows share one state. The norm after the recurrence is
vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models import bailing_moe_v3 as vllm_layer

from nwor_ops.vllm.recurrent.layer import OneStateLayer, put_in_place


class OneStateBailingDeltaNet(OneStateLayer, vllm_layer.BailingMoeV3KimiDeltaAttention):
    """See :class:`~nwor_ops.vllm.recurrent.layer.OneStateLayer`. vLLM calls one function for all windows."""

    given_gates = True
    allow_neg_eigval = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # vLLM's class does not take the engine's configuration as an argument.
        vllm_layer.BailingMoeV3KimiDeltaAttention.__init__(self, *args, **kwargs)
        self.set_up(get_current_vllm_config())

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self._state_at = self.kv_cache[1].data_ptr()

    def _forward(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's code. It passes its kernel a new view of the state, so remember which layer runs."""
        global _running
        _running = self
        try:
            super()._forward(*args, **kwargs)
        finally:
            _running = None


_running: OneStateBailingDeltaNet | None = None


def install() -> None:
    """See :func:`~nwor_ops.vllm.recurrent.layer.put_in_place`."""
    name, recurrence = "BailingMoeV3KimiDeltaAttention", "fused_recurrent_kda_fwd"
    put_in_place(OneStateBailingDeltaNet, name, vllm_layer, recurrence, _verified, _owner_of)


def _owner_of(state: Tensor) -> OneStateBailingDeltaNet | None:
    """Return the layer that runs, if this is its state and it has a record."""
    layer = _running
    return layer if layer is not None and layer.one_state and state.data_ptr() == layer._state_at else None


def _verified(layer: OneStateLayer, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Tensor:
    """Verify the windows of a batch. All tensors have a batch dimension of one: ``[1, T, ...]``."""
    out = torch.empty_like(v)
    layer.verify(q[0], k[0], v[0], g[0], beta[0], out[0])
    return out
