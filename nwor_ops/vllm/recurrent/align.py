"""Prefix caching: vLLM keeps the state at the end of a block, and goes on in the next one.

In mode ``align`` a request's state lies in the block that its last token of a step is in. Before a step vLLM copies the
state from the block of the step before, where that is another; after one it copies the state behind the last token of a
block that is full to that block, which may then be found by others. With K + 1 states such a copy takes the state of
the right token. With one it is a fold: so many rows of the window that is pending become part of the state, and it
lands in the other block. What is found by others never has a window pending.

The rows of the convolution are vLLM's to copy, as ever: its context is left with these alone. Where no request of a
step can be at the end of a block, by what the host knows, nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.recurrent.audit import StateAudit
from nwor_ops.vllm.recurrent.engine import GroupLayers

# Of vLLM's context, by state: what its kernels read.
PER_STATE = (
    "state_base_addrs",
    "state_block_strides",
    "state_elem_sizes",
    "state_inner_sizes",
    "state_conv_widths",
    "state_group_indices",
    "state_dim_row_count",
    "state_dim_row_stride",
)


class AlignedStates:
    """Copies of one engine's states between blocks.

    Args:
        context: vLLM's ``MambaSpecDecodeGPUContext``, its metadata made.
        groups: each group's layers, and its block table, int32 ``[max_requests, columns]`` with a row per request of
            the runner's, not of the batch.
        drafts: most of a request.

    Attributes:
        audit: what looks at each fold, or None.
    """

    def __init__(self, context: Any, groups: Sequence[tuple[GroupLayers, Tensor]], drafts: int) -> None:
        self._groups, self._block_size, self._drafts = groups, context.block_size, drafts
        tables = [table for _, table in groups]
        self._plan = torch.zeros(tables[0].shape[0], 4, dtype=torch.int32, device=tables[0].device)
        self._may_cross = True
        self.audit: StateAudit | None = None
        is_conv = context.state_conv_widths > 0
        for name in PER_STATE:
            setattr(context, name, getattr(context, name)[is_conv].contiguous())
        context.num_states = int(is_conv.sum())
        for name in ("run_fused_precopy", "run_fused_postprocess_align"):
            ours: Callable[..., None] = getattr(self, name)
            setattr(context, name, _behind(getattr(context, name), ours))

    def look_at(self, input_batch: Any) -> None:
        """Before a step: can a request of this batch be at the end of a block? What the host knows of its length is an
        upper bound: with asynchronous scheduling drafts of steps in flight may have been rejected."""
        lengths = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
        lowest = lengths - input_batch.num_scheduled_tokens - 3 * (self._drafts + 1)
        size = self._block_size
        self._may_cross = bool(((lengths + self._drafts) // size > (lowest - 1) // size).any())

    def run_fused_precopy(
        self,
        copy: Callable[..., None],
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor,
    ) -> None:
        """From the block of the step before to that of this one."""
        copy(num_reqs, state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping)
        if self._may_cross:
            requests = idx_mapping[:num_reqs].long()
            source, target = src_col_gpu[requests], state_idx_gpu[requests]
            moves = (source >= 0) & (source != target)
            self._fold(requests, source, target, moves, token_bias_gpu[requests] + 1, keep_source=False)

    def run_fused_postprocess_align(
        self,
        copy: Callable[..., None],
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        state_idx_gpu: Tensor,
        new_num_computed_tokens_gpu: Tensor,
        idx_mapping: Tensor,
    ) -> None:
        """From the block of this step to the last one that is full, if a token of this step filled it. Where it is the
        same one, its state is folded in place, and vLLM goes on as if one token had been accepted."""
        requests = idx_mapping[:num_reqs].long()
        accepted = num_accepted_tokens_gpu[requests]  # before vLLM changes it
        copy(num_reqs, num_accepted_tokens_gpu, state_idx_gpu, new_num_computed_tokens_gpu, idx_mapping)
        if self._may_cross:
            computed = new_num_computed_tokens_gpu[requests].to(torch.int32)
            first = computed - accepted + 1  # tokens behind the first of the window
            full = computed // self._block_size * self._block_size
            target = full // self._block_size - 1
            rows = full - first + 1
            self._fold(requests, state_idx_gpu[requests], target, full >= first, rows, keep_source=True)

    def _fold(
        self, requests: Tensor, source: Tensor, target: Tensor, moves: Tensor, rows: Tensor, keep_source: bool
    ) -> None:
        """``source``, ``target``: columns of the block tables; ``moves``: of which requests."""
        source, target = source.clamp(min=0).long(), target.clamp(min=0).long()
        for group, table in self._groups:
            sources, targets = table[requests, source] * moves, table[requests, target] * moves
            group.fold(self._plan, sources, targets, rows, keep_source)
            if self.audit is not None:
                self.audit.folded(group, self._plan[: sources.shape[0]])


def _behind(copy: Callable[..., None], ours: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        ours(copy, *args, **kwargs)

    return run
