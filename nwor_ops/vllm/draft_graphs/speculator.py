"""Speculator of the V2 runner for a separate draft model (``method="draft_model"``), with its passes in CUDA graphs.

vLLM runs this drafter eagerly. ``docs/guides/draft-models.md`` describes the graphs. If the number of drafts depends on
the batch size, each number has its own: first passes over that number of verified drafts, and a loop that makes that
number. A step without drafts runs only the first pass, which fills the cache. All inputs except request indices and
rejections lie in the runner's persistent buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import Tensor
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, GraphKey
from nwor_ops.vllm.draft_graphs.graphs import DUMMY_RUN, TOO_LARGE, GraphedDrafter, LayerMetadata, LoopGraphs
from nwor_ops.vllm.draft_graphs.supported import check_attention, check_graph_mode, refuse
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.support.refusals import Unsupported

_INPUTS = tuple(inspect.signature(StandaloneARSpeculator.propose).parameters)[1:]  # without self


class DraftGraphManager(LoopGraphs, CudaGraphManager):
    """The object by which vLLM manages a drafter's graphs.

    vLLM drops it after its memory profiling, which captures into a temporary pool and cache, and releases the graphs
    when elastic expert parallelism changes size. ``make_loop`` creates the loop that captures into a pool.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        cudagraph_mode: Any,
        make_loop: Callable[[Callable[[], AbstractContextManager[Any]]], DraftLoop],
    ) -> None:
        CudaGraphManager.__init__(self, vllm_config, device, cudagraph_mode, decode_query_len=1)
        pool = self.pool
        # The engine's pool or the pool of sleep mode, decided again for each capture.
        LoopGraphs.__init__(self, device, make_loop(lambda: capture_pool(pool, vllm_config)))

    def release_graphs(self) -> None:
        super().release_graphs()
        self.loop.invalidate("vLLM released its graphs")
        self.keys = {}


class GraphedDraftModelSpeculator(GraphedDrafter, StandaloneARSpeculator):
    """Draft with graphs in the V2 runner. The plugin creates it in place of its base class.

    Args:
        vllm_config: the engine's configuration.
        device: device of the drafter.
        last_sampled: int64 ``[max_num_reqs, 1]``, by request-state index. The runner's buffer, at its fixed address.
        logger: vLLM's logger.
    """

    extra_tokens = 1  # the target's own token

    def __init__(self, vllm_config: Any, device: torch.device, last_sampled: Tensor, logger: Any) -> None:
        super().__init__(vllm_config, device)
        most, schedule = self.num_speculative_steps, self.speculative_config.num_speculative_tokens_per_batch_size
        lookup = None if schedule is None else build_dynamic_sd_schedule_lookup(schedule, self.max_num_reqs, most)
        self._set_up(most, lookup, logger)
        self.last_sampled = last_sampled.view(-1)
        self.num_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.first_pass_lens = torch.zeros_like(self.num_rejected)
        self.first_pass_positions = self.expanded_positions
        # vLLM writes the keys of rejected tokens too; later passes overwrite them before they are read.
        self._none, self._is_rejected, self._is_masked = torch.zeros(
            3, self.expanded_input_ids.shape[0], dtype=torch.bool, device=device
        ).unbind()
        self.buffers = DraftBuffers(
            input_ids=self.input_buffers.input_ids,
            positions=self.input_buffers.positions,
            query_start_loc=self.input_buffers.query_start_loc,
            seq_lens=self.input_buffers.seq_lens,
            idx_mapping=self.idx_mapping,
            draft_tokens=self.draft_tokens,
            current_draft_step=self.current_draft_step,
        )

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Start without graphs, because a new cache was bound. vLLM has called ``set_attn``."""
        self.graphs = None
        try:
            check_attention(self.attn_groups)
            check_graph_mode(cudagraph_mode)
        except Unsupported as error:
            refuse(settings_of(self.vllm_config), error, self._logger)
        else:
            self.graphs = DraftGraphManager(self.vllm_config, self.device, cudagraph_mode, self.make_loop)

    def capture(self) -> None:
        """Capture the graphs. vLLM calls this after it captured the target's."""
        self.capture_graphs()

    # ------------------------------------------------------------ the captured bodies

    def _forward(self, key: GraphKey, metadata: LayerMetadata) -> Tensor:
        if key.query_len > 1:
            ids, positions = self.expanded_input_ids, self.expanded_positions
        else:
            ids, positions = self.input_buffers.input_ids, self.input_buffers.positions
        tokens = key.num_tokens
        return self._run_model(ids[:tokens], positions[:tokens], metadata.attention, metadata.slot_mappings, None)

    def sample_rows(self, rows: int, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self.sample_draft(
            hidden_states[:rows],
            positions,
            self.idx_mapping[:rows],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )

    def _groups(self) -> Iterator[tuple[Any, Tensor]]:
        for groups in self.attn_groups:
            for group in groups:
                yield group, self.block_tables.input_block_tables[group.kv_cache_group_id]

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> LayerMetadata:
        rows, tokens = key.num_reqs, key.num_tokens
        slots = self._write_slots(rows) if key.query_len == 1 else self.expanded_slot_mappings[:, :tokens]
        attention: Any = self._build_attn_metadata(
            num_reqs=rows,
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,  # in vLLM this means that attention sees every row, padded ones too
                num_tokens=tokens,
                num_reqs=rows,
                uniform_token_count=key.query_len,
            ),
            query_start_loc_np=numpy.arange(rows + 1, dtype=numpy.int32) * key.query_len,
            # An upper bound for any batch: vLLM adds to it and clamps it to the model's limit.
            seq_lens_cpu_upper_bound=torch.full((rows,), self.max_model_len, dtype=torch.int32, device="cpu"),
            step=step,
            slot_mappings=slots,
        )
        return LayerMetadata(attention, build_slot_mappings_by_layer(slots, self.kv_cache_config))

    def _write_slots(self, rows: int) -> Tensor:
        """Return int64 ``[groups, rows]``, in the runner's buffer as in vLLM's drafter: the target no longer needs
        it."""
        buffers = self.input_buffers
        return self.block_tables.compute_slot_mappings(
            self.idx_mapping[:rows], buffers.query_start_loc[: rows + 1], buffers.positions[:rows], rows
        )

    def expand(self, key: GraphKey) -> None:
        """Write the tokens of the first pass: accepted tokens, the target's own token, and rejected tokens."""
        target, rows, tokens = self.target_input_buffers, key.num_reqs, key.num_tokens
        idx_mapping, positions = self.idx_mapping[:rows], self.expanded_positions[:tokens]
        ops.copy_expand_inputs(
            target.input_ids,
            target.positions,
            target.query_start_loc,
            self.num_rejected[:rows],
            self.last_sampled,
            self.expanded_input_ids[:tokens],
            positions,
            self._is_rejected[:tokens],
            self._is_masked[:tokens],
            self.last_token_indices,
            max_model_len=self.max_model_len,
            idx_mapping=idx_mapping,
        )
        for group in sorted({group.kv_cache_group_id for group, _ in self._groups()}):
            ops.extend_queries(
                target.query_start_loc,
                target.seq_lens[:rows],
                positions,
                self._none,
                self.block_tables.input_block_tables[group][:rows],
                self.input_buffers.query_start_loc,
                self.input_buffers.seq_lens,
                self.expanded_slot_mappings[group, :tokens],
                self.block_tables.block_sizes[group],
                self.max_model_len,
                idx_mapping=idx_mapping,
            )

    def start_decode(self, rows: int, positions: Tensor, hidden_states: Tensor | None = None) -> None:
        torch.add(self.target_input_buffers.seq_lens[:rows], self.extra_tokens, out=self.first_pass_lens[:rows])
        super().start_decode(rows, positions, hidden_states)

    # ------------------------------------------------------------ a step

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draft for each request. Arguments and result are the same as in vLLM.

        Only the first ``num_speculative_tokens`` of the K columns are valid.
        """
        return self.draft(super().propose, dict(zip(_INPUTS, args, strict=False)) | kwargs)

    def _why_eager(  # type: ignore[override]
        self,
        *,
        input_batch: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int = 0,
        **inputs: Any,
    ) -> str | None:
        rows, drafts = input_batch.num_reqs, num_speculative_tokens
        if dummy_run or is_profile:
            return DUMMY_RUN
        if rows > self.graphs.most_requests:
            return TOO_LARGE
        if drafts > 1 and self.graphs.loop.graph_for(rows, num_drafts=drafts) is None:
            return "a number of drafts without a graph for so many requests"
        return None

    def _draft(  # type: ignore[override]
        self,
        *,
        input_batch: Any,
        num_rejected: Tensor,
        last_sampled: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        num_speculative_tokens: int,
        **inputs: Any,
    ) -> Tensor:
        loop, rows, drafts = self.graphs.loop, input_batch.num_reqs, num_speculative_tokens
        self._copy_inputs(rows, input_batch.idx_mapping, num_rejected, temperature, seeds)
        query_len = self._uniform_length(input_batch)
        why_eager = self._why_eager_first_pass(rows, query_len)
        if why_eager is None:
            loop.run_first_pass(rows, query_len)
        else:
            self._eager[why_eager] += 1
            self._prefill(input_batch, num_rejected, last_sampled, rows, False, None)
            if drafts > 1:
                padded = loop.graph_for(rows, num_drafts=drafts).num_reqs
                self.start_decode(padded, self.expanded_positions[self.last_token_indices[:padded]])
        if drafts > 1:
            loop.run(rows, inert_tails=True, num_drafts=drafts)
        return self.draft_tokens[:rows]

    def _copy_inputs(
        self, rows: int, idx_mapping: Tensor, num_rejected: Tensor, temperature: Tensor, seeds: Tensor
    ) -> None:
        """Copy what is new in this batch into the buffers of the graphs."""
        if self.draft_logits is not None:  # otherwise, drafting is greedy at any temperature
            self.temperature.copy_(temperature)
            self.seeds.copy_(seeds)
        self.idx_mapping[:rows].copy_(idx_mapping)
        self.idx_mapping[rows:].fill_(-1)
        self.num_rejected[:rows].copy_(num_rejected)

    def _uniform_length(self, input_batch: Any) -> int:
        """Return the tokens per request in the first pass if all requests have the same number and none is in its
        prompt; otherwise 0."""
        length: int = input_batch.num_tokens // input_batch.num_reqs
        uniform = (
            input_batch.decode_graph_eligible
            and input_batch.num_tokens == input_batch.num_reqs * length
            and int(input_batch.num_scheduled_tokens.max()) == length
        )
        return length + self.extra_tokens if uniform else 0
