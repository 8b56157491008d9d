"""Attention metadata of a draft loop, from the FlashAttention and Triton builders in vLLM.

vLLM's builders create an object per step on the host. All its tensors are views of persistent buffers, also the
scheduler metadata of FlashAttention. One object therefore serves every replay if the graph updates it on the device
before each step: the slots, and by ``update_draft_decode_metadata`` the scheduler metadata of FlashAttention 3. Plain
numbers in it are upper bounds, as in vLLM's own eager drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from nwor_ops.drafter import DraftMetadata, GraphKey


@dataclass(frozen=True)
class LayerMetadata:
    """Arguments for vLLM's forward context, by layer: metadata of the back end, and int64 slots ``[num_tokens]``."""

    attention: dict[str, Any]
    slot_mappings: dict[str, Tensor]


class VllmDraftMetadata(DraftMetadata):
    """Metadata of both passes of a ``StandaloneARSpeculator`` after ``set_attn``, in its buffers."""

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        # An upper bound for any batch: vLLM adds to it and clamps it to the model's limit.
        self._longest = torch.full(
            (speculator.max_num_reqs,), speculator.max_model_len, dtype=torch.int32, device="cpu"
        )

    def groups(self) -> Iterator[Any]:
        """Yield vLLM's attention groups that contain layers of the drafter."""
        for groups in self._speculator.attn_groups:
            yield from groups

    def prepare(self, key: GraphKey, num_reqs: int) -> None:
        """Copy this batch's block tables to the place where kernels with smaller blocks than the cache manager's read
        them."""
        for group in self.groups():
            group.map_to_kernel_block_table(self._speculator.block_tables.input_block_tables[group.kv_cache_group_id])

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> LayerMetadata:
        speculator, rows = self._speculator, key.num_reqs
        slots = self._slot_mappings(key)
        attention = speculator._build_attn_metadata(
            num_reqs=rows,
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,  # in vLLM this means that attention sees every row, padded ones too
                num_tokens=key.num_tokens,
                num_reqs=rows,
                uniform_token_count=key.query_len,
            ),
            query_start_loc_np=numpy.arange(rows + 1, dtype=numpy.int32) * key.query_len,
            seq_lens_cpu_upper_bound=self._longest,
            step=step,
            slot_mappings=slots,
        )
        return LayerMetadata(attention, build_slot_mappings_by_layer(slots, speculator.kv_cache_config))

    def update(self, key: GraphKey, metadata: LayerMetadata) -> None:
        self._slot_mappings(key)
        for group in self.groups():
            group.update_draft_decode_metadata(metadata.attention)

    def _slot_mappings(self, key: GraphKey) -> Tensor:
        """Return int64 ``[groups, key.num_tokens]``, computed from the current positions. Padded rows get no slot."""
        speculator, rows, tokens = self._speculator, key.num_reqs, key.num_tokens
        if key.query_len > 1:
            return speculator.expanded_slot_mappings[:, :tokens]  # the expansion wrote them
        # Reuse the runner's buffer, as vLLM's drafter does: the target no longer needs it.
        return speculator.block_tables.compute_slot_mappings(
            speculator.idx_mapping[:rows],
            speculator.input_buffers.query_start_loc[: rows + 1],
            speculator.input_buffers.positions[:rows],
            tokens,
        )
