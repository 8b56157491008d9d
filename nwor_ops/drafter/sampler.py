"""A ``sample_fn`` built on :func:`~nwor_ops.ops.gumbel_sample`: greedy at temperature 0, otherwise the Gumbel-max
trick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.drafter.buffers import DraftBuffers, GraphKey
from nwor_ops.validation import BoundToMemory


class DraftSampler(BoundToMemory):
    """Sample one token per row with the library's noise. Greedy and random sampling can both be captured.

    Args:
        buffers: the buffers of the loop. ``temperature``, ``seeds`` and ``logits_cache`` are registered with them.
        temperature: float32 ``[S]``, by request-state index; 0 means argmax.
        seeds: int64 ``[S]``, by request-state index.
        compute_logits: maps the result of ``model_fn``, ``[N, ...]``, to logits ``[N, V]``. None if the result is the
            logits.
        logits_cache: ``[S, K, >= V]``, or None. Receives the logits of every draft, for rejection sampling.

    Example:
        >>> buffers = DraftBuffers.allocate(max_num_reqs=1, num_drafts=2, device="cpu")
        >>> buffers.idx_mapping[0] = 0
        >>> sampler = DraftSampler(buffers, temperature=torch.zeros(1), seeds=torch.zeros(1, dtype=torch.int64))
        >>> sampler(GraphKey(1), torch.tensor([[0.0, 2.0, 1.0]])).tolist()
        [1]
    """

    def __init__(
        self,
        buffers: DraftBuffers,
        temperature: Tensor,
        seeds: Tensor,
        compute_logits: Callable[[Tensor], Tensor] | None = None,
        logits_cache: Tensor | None = None,
    ) -> None:
        validation.instance("DraftSampler: buffers", buffers, DraftBuffers, "a DraftBuffers")
        vector: Any = {"dims": 1, "device": buffers.device}
        validation.tensor("DraftSampler: temperature", temperature, torch.float32, **vector)
        validation.tensor("DraftSampler: seeds", seeds, torch.int64, **vector)
        if compute_logits is not None:
            validation.function("DraftSampler: compute_logits", compute_logits)
        self.buffers, self.temperature, self.seeds = buffers, temperature, seeds
        self.compute_logits, self.logits_cache = compute_logits, logits_cache
        rows, device = buffers.max_num_reqs, buffers.device
        self._sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        self._workspace = torch.zeros(2 * rows, dtype=torch.int64, device=device)
        cache = {} if logits_cache is None else {"logits_cache": logits_cache}
        buffers.register(temperature=temperature, seeds=seeds, **cache)

    def __call__(self, key: GraphKey, output: Tensor, positions: Tensor | None = None) -> Tensor:
        """Sample a token for each of ``key.num_reqs`` rows; 0 in padded rows.

        Args:
            key: the padded shape.
            output: ``[N, ...]``, one row per request: the argument of ``compute_logits``.
            positions: int64 ``[>= N]``: the positions that key the noise. None means those of the buffers.

        Returns:
            int64 ``[N]``: a view of one buffer, which the next call overwrites.
        """
        rows, buffers = key.num_reqs, self.buffers
        logits = output if self.compute_logits is None else self.compute_logits(output)
        # A row without logits would keep its token.
        validation.tensor("DraftSampler: logits", logits, dims=2, least=rows)
        positions = buffers.positions if positions is None else positions
        sampled = self._sampled[:rows]
        ops.gumbel_sample(
            logits[:rows], buffers.idx_mapping[:rows], self.temperature, self.seeds, positions,
            buffers.current_draft_step, sampled, self.logits_cache, self._workspace,
        )  # fmt: skip
        return sampled
