"""vLLM's metadata for Gated DeltaNet, extended by the plan of the window.

A request has one block, so its ``K + 1`` columns of state indices are one repeated column. The convolution reads the
first column, and their number. A plan replaces the other columns. One launch per step and group computes it, in a
buffer that CUDA graphs read.

Without drafts, every decode is a window of one token, which always stays. vLLM's builder then gets the arguments that
the runner passes with drafts. The layers therefore get the same metadata in both cases. A batch with only windows does
not need vLLM's builder.

vLLM's kernels compute the other requests of a batch (prompts) on the state itself. Their pending rows are folded first,
in all layers of the group with one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)

from nwor_ops.vllm.recurrent.block_reuse import to_device
from nwor_ops.vllm.recurrent.page import GroupLayers
from nwor_ops.vllm.step_listener import RecurrentListener


@dataclass
class RecurrentMetadata(GDNAttentionMetadata):
    """vLLM's metadata, and the plan for :func:`nwor_ops.gated_delta_verify`.

    Attributes:
        plan: int32 ``[max_requests, 4]``, the builder's buffer: one row per window of the batch, in the order of
            ``spec_query_start_loc``.
        window_id: int64 ``[1]``, the builder's buffer: the number of the window.
        batch_kept: int32 ``[num_reqs]``: tokens of the last window that stay, for each request of the batch.
        batch_ends: int32 ``[num_reqs]``: tokens of each request after the step, with its drafts.
        batch_starts: int32 ``[num_reqs + 1]``: first token of each request in the batch.
    """

    plan: Tensor | None = None
    window_id: Tensor | None = None
    batch_kept: Tensor | None = None
    batch_ends: Tensor | None = None
    batch_starts: Tensor | None = None

    @property
    def is_windows_only(self) -> bool:
        """Whether every token of the batch belongs to a window."""
        return self.num_spec_decodes > 0 and self.num_prefills == 0 and self.num_decodes == 0

    def with_plan(self, indices: Tensor | None, plan: Tensor | None, window_id: Tensor | None) -> RecurrentMetadata:
        """Return a copy with a plan and state indices. ``dataclasses.replace`` would take ten times as long."""
        made = RecurrentMetadata.__new__(RecurrentMetadata)
        made.__dict__.update(self.__dict__, spec_state_indices_tensor=indices, plan=plan, window_id=window_id)
        return made


class RecurrentBackend(GDNAttentionBackend):
    """vLLM's attention back end with our metadata builder."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return RecurrentMetadataBuilder


class RecurrentMetadataBuilder(GDNAttentionMetadataBuilder):
    """Metadata builder of one KV-cache group. Call :meth:`bind` before the first batch.

    Attributes:
        listener: receives each fold, or None.
    """

    listener: RecurrentListener | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM sets both only for its own class, not for subclasses.
        self.supports_update_block_table = True
        self.mamba_aligned_state_indices: Tensor | None = None
        self.layer_names = layer_names
        self.use_spec_decode = True  # vLLM's code for windows, also if they are of one token
        # Graphs may be padded to more requests than a batch can have.
        rows = max(vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs)
        self.plan = torch.zeros(rows, 4, dtype=torch.int32, device=device)
        # Buffers for batches with only windows. Only _kept changes, and without drafts it holds ones.
        self._kept = torch.ones(rows, dtype=torch.int32, device=device)
        self._each_token = torch.arange(rows * (self.num_spec + 1), dtype=torch.int32, device=device)
        self._all_windows = torch.ones(rows, dtype=torch.bool, device=device)
        self.window_id = torch.zeros(1, dtype=torch.int64, device=device)
        self._fold_plan = torch.zeros_like(self.plan)
        self._indices: dict[int, Tensor] = {}  # number of rows: the plan's first column, once per token of a window
        # First tokens and slots of the windows that were planned last.
        self.starts = torch.zeros(1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(0, dtype=torch.int32, device=device)
        self._batch_slots = self.slots  # slot of each request of the last batch
        self._metadata: RecurrentMetadata | None = None  # of the last batch
        self._has_planned = False
        self.steps = 0  # steps with windows, without warm-up and captures of graphs
        self._group: GroupLayers | None = None

    def bind(self, group: GroupLayers) -> None:
        """Set the layers of the group once their cache is bound."""
        self._group = group

    @property
    def group(self) -> GroupLayers:
        if self._group is None:
            raise RuntimeError("nwor: vLLM builds metadata of Gated DeltaNet layers before their cache is bound")
        return self._group

    def build(  # type: ignore[override]  # as in vLLM's builder
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> RecurrentMetadata:
        common, slots = common_attn_metadata, self._slots(common_attn_metadata.block_table_tensor)
        if self.num_spec == 0:
            num_decode_draft_tokens_cpu = torch.from_numpy(_decodes_of(common).astype(np.int32) - 1)
            num_accepted_tokens = self._kept[: common.num_reqs]
        if num_decode_draft_tokens_cpu is not None:
            starts, is_window = common.query_start_loc_cpu.numpy(), num_decode_draft_tokens_cpu.numpy() >= 0
            windows, tokens = int(is_window.sum()), int(starts[-1])
            if windows and np.diff(starts)[is_window].sum() == tokens:
                return self._planned(self._of_windows(common, windows, tokens, num_accepted_tokens), slots)
        built = super().build(
            common_prefix_len,
            common.replace(block_table_tensor=self._table(common.block_table_tensor)),
            num_accepted_tokens,
            num_decode_draft_tokens_cpu,
            fast_build=fast_build,
        )
        metadata = RecurrentMetadata(
            **vars(built),
            batch_kept=num_accepted_tokens,
            batch_ends=common.seq_lens,
            batch_starts=common.query_start_loc,
        )
        return self._planned(metadata, slots)

    def _of_windows(self, common: Any, windows: int, tokens: int, kept: Tensor | None) -> RecurrentMetadata:
        """Return the metadata of a batch with only windows, without the plan. Padded requests follow the windows.

        This avoids 16 torch operations of vLLM's builder, half of them launches. FULL graphs read the same addresses in
        every step: the runner's buffer of starts, which it pads, and a copy of ``kept``.
        """
        rows = common.num_reqs
        assert kept is not None
        if self.num_spec:
            kept = self._kept[:rows].copy_(kept)
        return RecurrentMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=windows,
            num_spec_decode_tokens=tokens,
            num_actual_tokens=common.num_actual_tokens,
            spec_query_start_loc=common.query_start_loc[: rows + 1],
            spec_sequence_masks=self._all_windows[:rows],
            spec_token_indx=self._each_token[:tokens],
            non_spec_token_indx=self._each_token[:0],
            num_accepted_tokens=kept,
            batch_kept=kept,
            batch_ends=common.seq_lens,
            batch_starts=common.query_start_loc,
        )

    def update_block_table(
        self, metadata: GDNAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> RecurrentMetadata:
        assert isinstance(metadata, RecurrentMetadata)
        slots = self._slots(blk_table)
        updated: Any = metadata
        if not metadata.is_windows_only:
            updated = super().update_block_table(metadata, self._table(blk_table), slot_mapping)
        return self._planned(updated, slots)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        steps = self.steps
        made = super().build_for_cudagraph_capture(common_attn_metadata)
        self.steps = steps
        return made

    def _slots(self, block_table: Tensor) -> Tensor:
        """Return the block with the state of each request, ``[num_reqs]``: the first one without prefix caching."""
        aligned = self.mamba_aligned_state_indices
        if aligned is None and self.vllm_config.cache_config.mamba_cache_mode == "align":
            raise RuntimeError(
                "nwor: with prefix caching, vLLM must set mamba_aligned_state_indices before it builds metadata of "
                "Gated DeltaNet layers, but it is not set: the blocks of the requests' states are unknown"
            )
        return block_table[:, 0] if aligned is None else aligned[: block_table.shape[0], 0]

    def _table(self, block_table: Tensor) -> Tensor:
        """Return the table for vLLM's builder. With prefix caching it looks up the blocks of checkpoints."""
        return block_table if self.vllm_config.cache_config.mamba_cache_mode == "align" else block_table[:, :1]

    def take_planned(self) -> bool:
        """Return whether windows were planned since the last call."""
        has_planned, self._has_planned = self._has_planned, False
        return has_planned

    def fold_first_rows(self, places: Tensor) -> None:
        """Fold the first row of windows of this step, and drop their other rows. Call it after the forward.

        Args:
            places: int64 ``[E]``, indices of the requests in the batch.
        """
        slots = self._batch_slots[places]
        self.group.fold(self._fold_plan, slots, slots, slots.new_ones(slots.shape))
        if self.listener is not None:
            self.listener.folded(self.group, self._fold_plan[: slots.shape[0]], "tail_folds")
        if self.group.cursors.chunk:
            metadata = self._metadata
            assert metadata is not None
            assert metadata.batch_ends is not None
            assert metadata.batch_starts is not None
            tokens = metadata.batch_starts.diff()[places]  # the first one is of the prompt, the others are drafts
            self._begin_chunk(slots.long(), metadata.batch_ends[places] - tokens + 1)

    def _planned(self, metadata: RecurrentMetadata, slots: Tensor) -> RecurrentMetadata:
        """Plan the windows of a batch, and replace the state indices with the plan.

        In a batch with only windows, the state indices may be those of another group. ``slots``: block of each request.
        """
        self._batch_slots, self._metadata = slots, metadata
        self._has_planned = False  # drop an earlier batch that no listener took: a graph's capture, a warm-up
        if not metadata.is_windows_only:
            self._fold(metadata, slots)
        if metadata.num_spec_decodes == 0:
            self.slots = self.slots[:0]
            return metadata.with_plan(metadata.spec_state_indices_tensor, None, None)
        starts = metadata.spec_query_start_loc
        kept = metadata.num_accepted_tokens  # tokens of the last window that stay, 1 to K + 1
        assert starts is not None
        assert kept is not None
        windows = metadata.num_spec_decodes
        if not metadata.is_windows_only:
            assert metadata.spec_state_indices_tensor is not None
            slots = metadata.spec_state_indices_tensor[:, 0]
        cursors = self.group.cursors  # raises if no cache is bound
        rows = starts.shape[0] - 1
        # A batch without padding needs no views of its first rows. Each takes the host as long as a launch.
        self.slots = slots if slots.shape[0] == windows else slots[:windows]
        self.starts = starts if rows == windows else starts[: windows + 1]
        cursors.plan_window(self.plan, self.window_id, self.slots, self.starts, kept, max_window=self.num_spec + 1)
        cursors.copy_skipped()
        self._has_planned = True
        self.steps += 1
        # The convolution uses the slots that the plan reads. They are 0 for padded rows and for skipped requests.
        indices = self._indices.get(rows)
        if indices is None:
            indices = self._indices[rows] = self.plan[:rows, :1].expand(-1, self.num_spec + 1)
        return metadata.with_plan(indices, self.plan, self.window_id)

    def _fold(self, metadata: RecurrentMetadata, slots: Tensor) -> None:
        """Fold the blocks of requests whose tokens vLLM's kernels compute in this step.

        Rows may be pending from this request, because vLLM verifies a prompt chunk of one token like a draft. Or they
        are from the previous owner of the block.
        """
        if metadata.batch_kept is None:
            return
        windows = metadata.spec_sequence_masks
        if windows is not None:
            slots = slots.masked_fill(windows, 0)
        self.group.fold(self._fold_plan, slots, slots, metadata.batch_kept)
        if self.listener is not None:
            self._notify_fold(metadata, slots, windows)
        if self.group.cursors.chunk:
            assert metadata.batch_ends is not None
            of_windows = metadata.spec_sequence_masks_cpu
            ends = metadata.batch_ends
            if of_windows is not None:  # only the prompts, because most requests of a batch have windows
                places = to_device((~of_windows).numpy().nonzero()[0], slots.device)
                slots, ends = slots[places], ends[places]
            self._begin_chunk(slots.long(), ends[: slots.shape[0]])

    def _begin_chunk(self, slots: Tensor, positions: Tensor) -> None:
        """Let the states of these blocks begin in the middle of a chunk. ``positions``: tokens in each state."""
        self.group.begin_chunk(slots, positions)
        if self.listener is not None:
            self.listener.began(self.group, slots)

    def _notify_fold(self, metadata: RecurrentMetadata, slots: Tensor, windows: Tensor | None) -> None:
        assert self.listener is not None
        self.listener.overwritten(self.group, slots)
        plan, has_state = self._fold_plan[: slots.shape[0]], metadata.has_initial_state
        if has_state is not None:
            # Do not compare what the previous owner left: layers of another group may have used the block since.
            begins = torch.zeros(slots.shape[0], dtype=torch.bool, device=slots.device)
            begins[slice(None) if windows is None else ~windows] = ~has_state
            plan = plan.masked_fill(begins[:, None], 0)
        self.listener.folded(self.group, plan, "prompt_folds")


def _decodes_of(common: Any) -> np.ndarray:
    """Return which requests of a batch decode, bool ``[num_reqs]``. Prompts and padding do not.

    As in vLLM's runner with drafts, a prompt's chunk of one token is a decode if the runner says so: FULL graphs
    compute it.
    """
    decodes: np.ndarray = np.diff(common.query_start_loc_cpu.numpy()) == 1
    if common.is_prefilling is not None:
        decodes &= ~common.is_prefilling.numpy()
    return decodes
