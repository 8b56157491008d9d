"""Prefix caching: fold pending rows when vLLM copies a state from one block to another.

In mode ``align``, a request's state is in the block of its last token in the step. vLLM copies states twice per step:

- Before a step it copies the state from the previous block, if the request moves to a new block.
- After a step that filled a block, it copies the state after the block's last token to that block. Other requests may
  then find it in the prefix cache.

With K + 1 states, such a copy takes the state of the right token. With one state, it is a fold: pending rows are
applied, and the result is stored in the target block. So a state in the prefix cache never has rows pending.

In the chunk form, a fold at any other token than the last of a chunk would change bits. So before a step the state
moves with its pending rows: vLLM's kernel copies state and record, and the rows stay pending. After a step, the folded
token is the last one of a block, and so of a chunk.

vLLM still copies the rows of the convolution: its context keeps only those. Nothing is launched if no request of a step
can be at the end of a block, as far as the host knows.
"""

from __future__ import annotations

import copy as copies
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.recurrent.page import GroupLayers
from nwor_ops.vllm.step_listener import RecurrentListener

# Fields of the vLLM context that its kernels read. Each has one entry per state.
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
    """Copy one engine's states between blocks.

    Args:
        context: vLLM's ``MambaSpecDecodeGPUContext``, after vLLM set up its metadata. **Mutated**: its states are
            reduced to those of the convolutions, and its two copy functions are patched.
        groups: the layers of each group, and its block table: int32 ``[max_requests, columns]``, with a row per
            request of the runner.
    """

    def __init__(
        self, context: Any, groups: Sequence[tuple[GroupLayers, Tensor]], drafts: int, patches: Patches
    ) -> None:
        self._groups, self._block_size, self._drafts = groups, context.block_size, drafts
        (first, table), *_ = groups
        self._cursors = first.cursors  # all groups share them
        self._tables = [table for _, table in groups]
        self._plan = torch.zeros(len(groups) * table.shape[0], 4, dtype=torch.int32, device=table.device)
        self._may_cross = True
        self.listener: RecurrentListener | None = None
        is_conv = context.state_conv_widths > 0
        self._pages = _pages_of(context, groups) if self._cursors.chunk else None
        self._no_bias: Tensor | None = None  # for copies of whole pages: zeros, one per request of the runner
        for name in PER_STATE:
            setattr(context, name, getattr(context, name)[is_conv].contiguous())
        context.num_states = int(is_conv.sum())
        patches.put_methods(context, self, ("run_fused_precopy", "run_fused_postprocess_align"))

    def preprocess_state(self, preprocess: Callable[..., Any], input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Find out before a step whether a request of its batch can be at the end of a block.

        The host knows an upper bound of each length. With asynchronous scheduling, drafts of earlier steps may have
        been rejected since.
        """
        lengths = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
        lowest = lengths - input_batch.num_scheduled_tokens - 3 * (self._drafts + 1)
        size = self._block_size
        self._may_cross = bool(((lengths + self._drafts) // size > (lowest - 1) // size).any())
        return preprocess(input_batch, *args, **kwargs)

    def run_fused_precopy(
        self,
        copy: Callable[..., None],
        num_reqs: int,
        state_idx_gpu: Tensor,
        src_col_gpu: Tensor,
        token_bias_gpu: Tensor,
        idx_mapping: Tensor,
    ) -> None:
        """Copy states from the blocks of the previous step to the blocks of this one."""
        copy(num_reqs, state_idx_gpu, src_col_gpu, token_bias_gpu, idx_mapping)
        if not self._may_cross:
            return
        if self._pages is not None:
            if self._no_bias is None:
                self._no_bias = torch.zeros_like(token_bias_gpu)
            self._pages.run_fused_precopy(num_reqs, state_idx_gpu, src_col_gpu, self._no_bias, idx_mapping)
        folds = self._plan_folds(
            idx_mapping[:num_reqs],
            src_col_gpu,
            token_bias_gpu + 1,
            target_columns=state_idx_gpu,
            moves_rows=self._pages is not None,
        )
        if self._pages is None:
            self._fold(folds)
        elif self.listener is not None:
            for group, plan in folds:
                self.listener.moved(group, plan)

    def run_fused_postprocess_align(
        self,
        copy: Callable[..., None],
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        state_idx_gpu: Tensor,
        new_num_computed_tokens_gpu: Tensor,
        idx_mapping: Tensor,
    ) -> None:
        """Copy states from the blocks of this step to the last full block, if a token of this step filled it.

        If both are the same block, its state is folded in place. vLLM then continues as if one token was accepted.
        """
        if self._may_cross:  # before vLLM changes the accepted tokens
            folds = self._plan_folds(
                idx_mapping[:num_reqs],
                state_idx_gpu,
                num_accepted_tokens_gpu,
                num_computed_tokens=new_num_computed_tokens_gpu,
                block_size=self._block_size,
            )
            self._fold(folds)
        copy(num_reqs, num_accepted_tokens_gpu, state_idx_gpu, new_num_computed_tokens_gpu, idx_mapping)

    def _plan_folds(self, *columns: Any, **options: Any) -> list[tuple[GroupLayers, Tensor]]:
        """Plan the folds of all groups with one launch of :func:`nwor_ops.plan_recurrent_block_fold`."""
        plan = self._plan[: len(self._tables) * columns[0].shape[0]]
        options["num_skipped"] = self._cursors.num_skipped
        ops.plan_recurrent_block_fold(plan, self._cursors.table, self._tables, *columns, **options)
        parts = plan.view(len(self._tables), -1, 4).unbind()
        return [(group, part) for (group, _), part in zip(self._groups, parts, strict=True)]

    def _fold(self, folds: list[tuple[GroupLayers, Tensor]]) -> None:
        for group, plan in folds:
            group.fold_planned(plan)
            if self.listener is not None:
                self.listener.folded(group, plan)


def _pages_of(context: Any, groups: Sequence[tuple[GroupLayers, Tensor]]) -> Any:
    """Return a copy of the context that copies states with their records, and no rows of convolutions."""
    # The address of a state does not tell its group, because layers of different groups share memory.
    numbers = {address: number for number, address in enumerate(context.block_table_ptrs.tolist())}
    values: dict[str, list[int]] = {name: [] for name in PER_STATE}
    for group, table in groups:
        number = numbers[_as_int64(table.data_ptr())]
        for layer in group.layers.values():
            cache = layer.recurrent_cache
            parts = (cache.state, *cache.records)
            fields = {  # a page holds the state and then the parts of the record, without gaps
                "state_base_addrs": _as_int64(cache.state.data_ptr()),
                "state_block_strides": cache.state.stride(0) * cache.state.element_size(),
                "state_elem_sizes": 1,
                "state_inner_sizes": sum(part[0].nbytes for part in parts),
                "state_group_indices": number,
            }
            for name, of_all in values.items():
                of_all.append(fields.get(name, 0))  # widths and rows are of convolutions
    pages = copies.copy(context)
    for name, of_all in values.items():
        setattr(pages, name, torch.tensor(of_all, device="cpu").to(getattr(context, name)))
    pages.num_states = len(values["state_base_addrs"])
    return pages


def _as_int64(address: int) -> int:
    return address - 2**64 if address >= 2**63 else address
