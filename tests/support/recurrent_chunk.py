"""Run the recurrence of gated delta layers in float64, one token at a time, as a reference for the chunk form."""

from __future__ import annotations

import torch
from samples_recurrent import Inputs
from torch import Tensor


def exact_run(
    initial: Tensor, inputs: Inputs, scale: float, rounds_to: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence, and return all outputs and the last state in float64.

    Args:
        initial: ``[HV, dv, dk]``, the state before the first token.
        inputs: the inputs of the op.
        scale: the factor of the queries.
        rounds_to: a dtype to which float32 states are rounded after each token. None = float64 without rounding.
    """
    dtype = torch.float64 if rounds_to is None else torch.float32
    q, k, v, a, b, A_log, bias = (tensor.to(dtype) for tensor in inputs)
    group = v.shape[1] // k.shape[1]
    q, k = (x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = q.repeat_interleave(group, 1) * scale, k.repeat_interleave(group, 1)
    decay = torch.exp(-torch.exp(A_log) * torch.nn.functional.softplus(a + bias))[..., None, None]
    beta, state, outputs = torch.sigmoid(b)[..., None], initial.to(dtype), []
    for token in range(len(q)):
        state = state * decay[token]
        update = beta[token] * (v[token] - (state @ k[token, :, :, None])[..., 0])
        state = state + update[..., None] * k[token, :, None, :]
        outputs.append((state @ q[token, :, :, None])[..., 0])
        if rounds_to is not None:
            state = state.to(rounds_to).to(dtype)
    return torch.stack(outputs).double(), state.double()


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the root of the mean square of the error, relative to that of what is expected."""
    return ((found.double() - expected).norm() / expected.norm()).item()
