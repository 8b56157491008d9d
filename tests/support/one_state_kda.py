"""Shared parts of the scripts that compare layers of Kimi Linear, GLM-5.3-Flash and Bailing V3.

All of them are KDA layers: each channel of a key has a decay.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

HEADS, WIDTH = 2, 64
SIZE = HEADS * WIDTH


def run_prompts(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over the tokens of prompts, in place of an autotuned kernel.

    Args:
        q, k, v: ``[1, tokens, HEADS, WIDTH]``. This function normalizes q and k.
        decay: float32 ``[tokens, HEADS, WIDTH]``: the factor of each channel.
        beta: float32 ``[tokens, HEADS]``.
        initial_state: ``[prompts, HEADS, WIDTH, WIDTH]``.
        cu_seqlens: first token of each prompt, then the end.

    Returns:
        The output, with shape and dtype of ``v``, and the final states in float32.
    """
    out, final = torch.empty_like(v), initial_state.float().clone()
    query, key = (x[0].float() / (x[0].float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    for sequence, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for token in range(start, end):
            state = final[sequence]
            state *= decay[token][:, None]
            update = beta[token][:, None] * (v[0, token].float() - (state @ key[token][..., None])[..., 0])
            state += update[..., None] * key[token][:, None]
            out[0, token] = ((state @ query[token][..., None])[..., 0] * WIDTH**-0.5).to(out.dtype)
    return out, final


def initial_states(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """Replace ``gather_initial_states``, which needs a GPU."""
    return torch.where(has_initial_state[:, None, None, None], state[indices.long()], 0.0)
