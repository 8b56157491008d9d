"""The usual scheme for recurrent states, to compare with: K + 1 states per request, in plain PyTorch.

An engine that cannot undo a token in a state keeps the state after each token of a window. After sampling, the state
of the last accepted token counts. :class:`EveryState` has the calls of :class:`nwor_ops.RecurrentStates`, so an engine
can run with either.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nwor_ops import RecurrentCache
from nwor_ops.transaction.protocol import State

_NORM_EPS = 1e-6  # of keys and queries, as in nwor_ops.gated_delta_verify


class EveryState:
    """The states of all linear-attention layers, one after each token of a request's last window.

    Args:
        max_num_requests: maximum number of requests in one batch, including padding.
        device: device of the states.
    """

    # A failed step has overwritten the states of the last window, so there is nothing that a cancel could restore.
    state = State.CLOSED

    def __init__(self, *, max_num_requests: int, device: torch.device | str) -> None:
        self.max_num_requests, self.device = max_num_requests, device
        self.layers: dict[str, Tensor] = {}  # float32 [S, K + 1, HV, dv, dk]

    def register_layer(self, name: str, cache: RecurrentCache) -> None:
        """Allocate K + 1 states per slot for a layer whose states have the shape of those in ``cache``."""
        slots, *shape = cache.state.shape
        self.layers[name] = torch.zeros(slots, cache.max_window, *shape, device=self.device)

    def allocate(self) -> None:
        slots = next(iter(self.layers.values())).shape[0]
        self.newest = [0] * slots  # index of the state after the last accepted token
        self.windows: list[tuple[int, int, int]] = []  # slot, first token and end of each request of the batch

    @property
    def states_per_request(self) -> int:
        return next(iter(self.layers.values())).shape[1]

    @property
    def bytes_per_request(self) -> int:
        return sum(states[0].numel() * states.element_size() for states in self.layers.values())

    def reset(self, slots: Tensor) -> None:
        """Start new requests in these slots."""
        for slot in slots.tolist():
            self.newest[slot] = 0
            for states in self.layers.values():
                states[slot].zero_()

    def begin(self, state_slots: Tensor, query_start_loc: Tensor) -> None:
        bounds = pairwise(query_start_loc.tolist())
        self.windows = [(slot, *ends) for slot, ends in zip(state_slots.tolist(), bounds, strict=False) if slot > 0]

    def verify(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *,
        gate: Tensor, norm_weight: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run a layer's tokens, one after the other. The arguments are those of
        :meth:`nwor_ops.RecurrentStates.verify`."""
        states, out = self.layers[name], torch.zeros_like(v)
        heads, size = v.shape[1] // q.shape[1], q.shape[2]
        keys = _normalized(k).repeat_interleave(heads, dim=1)[..., None]  # [T, HV, dk, 1]
        queries = _normalized(q).repeat_interleave(heads, dim=1)[..., None] * size**-0.5
        decays = torch.exp(-A_log.exp() * F.softplus(a.float() + dt_bias))[..., None, None]
        rates = b.float().sigmoid()[..., None, None]
        for slot, first, end in self.windows:
            state = states[slot, self.newest[slot]]
            for index, token in enumerate(range(first, end)):
                state = state * decays[token]
                state = state + (v[token].float()[..., None] - state @ keys[token]) * rates[token] * keys[token].mT
                states[slot, index] = state
                out[token] = (state @ queries[token]).squeeze(-1)
        normed = F.rms_norm(out.float(), norm_weight.shape, norm_weight.float(), 1e-5)
        return (normed * F.silu(gate.float())).to(v.dtype)

    def commit(self, num_kept: Tensor) -> None:
        """Keep the first tokens of each request's window: at least one."""
        for (slot, first, end), kept in zip(self.windows, num_kept.tolist(), strict=False):
            if end > first:
                self.newest[slot] = kept - 1


def _normalized(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)
