"""Speculator of the V2 runner for a separate draft model (``method="draft_model"``), with its passes in CUDA graphs.

vLLM runs this drafter eagerly. ``docs/guides/draft-models.md`` describes the graphs. If the number of drafts depends on
the batch size, each number has its own: first passes over that number of verified drafts, and a loop that makes that
number. A step without drafts runs only the first pass, which fills the cache. All inputs except request indices and
rejections lie in the runner's persistent buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, GraphKey
from nwor_ops.vllm.draft_graphs.graphs import (
    DUMMY_RUN,
    MIXED,
    TOO_LARGE,
    TOO_MANY_TOKENS,
    GraphedDrafter,
    LoopGraphs,
    Refuse,
    captured_counts,
)
from nwor_ops.vllm.draft_graphs.metadata import LayerMetadata, VllmDraftMetadata
from nwor_ops.vllm.draft_graphs.supported import check_attention, check_graph_mode
from nwor_ops.vllm.support.refusals import Unsupported

_INPUTS = tuple(inspect.signature(StandaloneARSpeculator.propose).parameters)[1:]  # without self


def _padded(counts: Iterable[int], batches: Iterable[int]) -> list[int]:
    """Return the counts to which batches of these sizes are padded, largest first. Batches larger than every count are
    left out."""
    holding = ([count for count in counts if count >= requests] for requests in batches)
    return sorted({min(large) for large in holding if large}, reverse=True)


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
        refuse: called if graphs turn out to be impossible. It raises, or returns to continue without graphs.
        logger: vLLM's logger.
    """

    def __init__(
        self, vllm_config: Any, device: torch.device, last_sampled: Tensor, refuse: Refuse, logger: Any
    ) -> None:
        super().__init__(vllm_config, device)
        self._set_up(vllm_config, refuse, logger)
        self.last_sampled = last_sampled.view(-1)
        self.num_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        # Lengths that include the target's own token, which the expansion inserted. Not clamped to the model's limit.
        self._expanded_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        # vLLM writes the keys of rejected tokens too; later passes overwrite them before they are read.
        self._none, self._is_rejected, self._is_masked = torch.zeros(
            3, self.expanded_input_ids.shape[0], dtype=torch.bool, device=device
        ).unbind()
        self.drafts_by_requests = self._schedule()
        self._numbers_of_drafts = set(self.drafts_by_requests[1:])

    # ------------------------------------------------------------ set up

    def _schedule(self) -> list[int]:
        """Return the number of drafts by the number of requests in the batch. It is always K unless dynamic. Entry 0 is
        unused."""
        most = self.num_speculative_steps
        schedule = self.speculative_config.num_speculative_tokens_per_batch_size
        if schedule is None:
            return [most] * (self.max_num_reqs + 1)
        return build_dynamic_sd_schedule_lookup(schedule, self.max_num_reqs, most)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Start without graphs, because a new cache was bound. vLLM has called ``set_attn``."""
        self.graphs = None
        try:
            check_attention(self.attn_groups)
            check_graph_mode(cudagraph_mode)
        except Unsupported as error:
            self._refuse(error)
        else:
            self.graphs = DraftGraphManager(self.vllm_config, self.device, cudagraph_mode, self.make_loop)

    def make_loop(self, pool: Any = None) -> DraftLoop:
        """Create the draft loop over vLLM's buffers. It holds no graphs yet."""
        self.buffers = DraftBuffers(
            input_ids=self.input_buffers.input_ids,
            positions=self.input_buffers.positions,
            query_start_loc=self.input_buffers.query_start_loc,
            seq_lens=self.input_buffers.seq_lens,
            idx_mapping=self.idx_mapping,
            draft_tokens=self.draft_tokens,
            current_draft_step=self.current_draft_step,
        )
        return DraftLoop(
            self._forward,
            lambda key, output: self.sample_rows(key.num_reqs, output, self.input_buffers.positions[: key.num_reqs]),
            self.buffers,
            VllmDraftMetadata(self),
            self.num_speculative_steps,
            self.max_model_len,
            first_pass=self,
            pool=pool,
        )

    def capture_keys(self) -> dict[int, list[GraphKey]]:
        """Return the keys to capture, by number of drafts: first passes over that number, and loops that make that
        number.

        The request counts are those of the target's graphs. A first pass needs no more requests than a batch with that
        number of drafts may have. A loop needs only the counts to which batches of its number of drafts are padded.
        """
        schedule = self.drafts_by_requests
        batches: dict[int, list[int]] = {}
        for requests, drafts in enumerate(schedule[1:], 1):
            batches.setdefault(drafts, []).append(requests)
        counts = {drafts: captured_counts(self.vllm_config, drafts + 1, self.max_num_reqs) for drafts in batches}
        every = set().union(*counts.values())
        keys = {}
        for drafts, requests_of_them in batches.items():
            length = drafts + 2
            keys[drafts] = [
                GraphKey(count, length)
                for count in _padded(counts[drafts], range(1, requests_of_them[-1] + 1))
                # The compiled model takes at most max_num_batched_tokens.
                if count * length <= self.max_num_tokens
            ]
            if drafts > 1:
                keys[drafts] += [GraphKey(count) for count in _padded(every, requests_of_them)]
        return {drafts: group for drafts, group in sorted(keys.items(), reverse=True) if group}

    def capture(self) -> None:
        """Capture the graphs. vLLM calls this after it captured the target's."""
        self.capture_graphs(self.vllm_config, self.num_speculative_steps)

    # ------------------------------------------------------------ the captured bodies

    def _forward(self, key: GraphKey, metadata: LayerMetadata) -> Tensor:
        """Run the model as vLLM's drafter does: compiled, and without vLLM's graphs."""
        if key.query_len > 1:
            ids, positions = self.expanded_input_ids, self.expanded_positions
        else:
            ids, positions = self.input_buffers.input_ids, self.input_buffers.positions
        tokens = key.num_tokens
        return self._run_model(ids[:tokens], positions[:tokens], metadata.attention, metadata.slot_mappings, None)

    def sample_rows(self, rows: int, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Sample with vLLM's function: int64 ``[rows]``. Rows without a request get an arbitrary token."""
        return self.sample_draft(
            hidden_states[:rows],
            positions,
            self.idx_mapping[:rows],
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits,
        )

    def start_decode(self, rows: int) -> None:
        """Write the inputs of the decode loop after the first pass, whichever code ran it. Padded rows become inert."""
        if self.num_speculative_steps == 1:
            return
        positions = self.input_buffers.positions[:rows]
        torch.index_select(self.expanded_positions, 0, self.last_token_indices[:rows], out=positions)
        torch.add(self.target_input_buffers.seq_lens[:rows], 1, out=self._expanded_lens[:rows])
        self._prepare_decode(rows, self._expanded_lens, self.max_model_len)

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
        for group in sorted({group.kv_cache_group_id for groups in self.attn_groups for group in groups}):
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

    def finish(self, key: GraphKey, output: Tensor, next_hidden: Tensor | None) -> None:
        """Sample draft 0 and write the inputs of the decode loop."""
        rows, last = key.num_reqs, self.last_token_indices[: key.num_reqs]
        self.draft_tokens[:rows, 0] = self.sample_rows(rows, output[last], self.expanded_positions[last])
        self.start_decode(rows)

    # ------------------------------------------------------------ a step

    def propose(self, *args: Any, **kwargs: Any) -> Tensor:
        """Draft for each request. Arguments and result are the same as in vLLM.

        Only the first ``num_speculative_tokens`` of the K columns are valid.
        """
        return self.draft(super().propose, dict(zip(_INPUTS, args, strict=False)) | kwargs)

    def _draft(  # type: ignore[override]
        self,
        *,
        input_batch: Any,
        num_rejected: Tensor,
        last_sampled: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        num_speculative_tokens: int | None = None,
        **inputs: Any,
    ) -> Tensor:
        rows, drafts = input_batch.num_reqs, self._num_drafts(num_speculative_tokens)
        self._copy_inputs(rows, input_batch.idx_mapping, num_rejected, temperature, seeds)
        self._run_first_pass(input_batch, num_rejected, last_sampled, rows, drafts)
        return self._run_decode_loop(rows, drafts)

    def _num_drafts(self, num_speculative_tokens: int | None) -> int:
        most: int = self.num_speculative_steps
        return most if num_speculative_tokens is None else min(num_speculative_tokens, most)

    def _why_eager(  # type: ignore[override]
        self,
        *,
        input_batch: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **inputs: Any,
    ) -> str | None:
        if dummy_run or is_profile:
            return DUMMY_RUN
        if input_batch.num_reqs > self.graphs.most_requests:
            return TOO_LARGE
        drafts = self._num_drafts(num_speculative_tokens)
        if drafts > 1 and self.graphs.loop.dispatch(input_batch.num_reqs, num_drafts=drafts).mode == "eager":
            return "a number of drafts without a graph for so many requests"
        return None

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

    def _run_first_pass(
        self, input_batch: Any, num_rejected: Tensor, last_sampled: Tensor, rows: int, drafts: int
    ) -> None:
        loop, query_len = self.graphs.loop, self._uniform_length(input_batch) + 1
        why_eager = None
        if query_len - 2 not in self._numbers_of_drafts:
            why_eager = MIXED
        elif loop.dispatch(rows, query_len).mode == "eager":
            why_eager = TOO_MANY_TOKENS
        if why_eager is None:
            loop.run_first_pass(rows, query_len)
            return
        self._eager[why_eager] += 1
        self._prefill(input_batch, num_rejected, last_sampled, rows, False, None)
        if drafts > 1:
            self.start_decode(loop.dispatch(rows, num_drafts=drafts).key.num_reqs)

    def _run_decode_loop(self, rows: int, drafts: int) -> Tensor:
        """Return all K columns, of which the runner uses ``drafts``."""
        if drafts > 1:
            self.graphs.loop.run(rows, inert_tails=True, num_drafts=drafts)
        return self.draft_tokens[:rows]

    @staticmethod
    def _uniform_length(input_batch: Any) -> int:
        """Return the tokens per request if all requests have the same number and none is in its prompt; otherwise 0."""
        length: int = input_batch.num_tokens // input_batch.num_reqs
        uniform = (
            input_batch.decode_graph_eligible
            and input_batch.num_tokens == input_batch.num_reqs * length
            and int(input_batch.num_scheduled_tokens.max()) == length
        )
        return length if uniform else 0
