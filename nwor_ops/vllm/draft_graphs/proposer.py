"""Drafters of the V1 runner (a separate draft model, EAGLE, EAGLE-3, MTP), with their passes in CUDA graphs.

The drafter stays vLLM's object. Only its ``propose`` and the runner's ``capture_model`` are replaced on the instances.
vLLM's code prepares the first pass, and runs the passes without a graph (``docs/guides/draft-models.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer

from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftMetadata, GraphKey
from nwor_ops.vllm.draft_graphs.graphs import (
    MIXED,
    TOO_LARGE,
    TOO_MANY_TOKENS,
    GraphedDrafter,
    LoopGraphs,
    Refuse,
    captured_counts,
)
from nwor_ops.vllm.draft_graphs.metadata import LayerMetadata
from nwor_ops.vllm.draft_graphs.supported import check_attention, check_graph_mode
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.support.features import DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import DRAFTER

_NO_SLOT = -1
_RANDOM = "drafts drawn at random"
_NEAR_LIMIT = "a request close to the model's length limit"
_FEWER_DRAFTS = "a number of drafts without graphs"


class ProposerMetadata(DraftMetadata):
    """Metadata of both passes, from vLLM's builders, in the memory of a :class:`GraphedProposer`.

    vLLM's drafter calls builders that plan nothing ahead (``build_for_drafting``). All tensors of a metadata object are
    therefore views of starts, lengths, block tables and slots, which have fixed addresses here. Plain numbers are upper
    bounds.
    """

    def __init__(self, proposer: GraphedProposer) -> None:
        self._proposer, self._drafter = proposer, proposer.drafter

    def prepare(self, key: GraphKey, num_reqs: int) -> None:
        """Copy this batch's block tables to the place where kernels with smaller blocks than the cache manager's read
        them."""
        for group in self._drafter.draft_attn_groups:
            group.map_to_kernel_block_table(self._proposer.block_table[: key.num_reqs])

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> LayerMetadata:
        proposer, rows, buffers = self._proposer, key.num_reqs, self._proposer.buffers
        slots = self._drafter._get_slot_mapping(key.num_tokens)
        if capturing:
            for mapping in slots.values():
                mapping.fill_(_NO_SLOT)
        common = CommonAttentionMetadata(
            query_start_loc=buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=torch.from_numpy(numpy.arange(rows + 1, dtype=numpy.int32) * key.query_len),
            seq_lens=buffers.seq_lens[:rows],
            num_reqs=rows,
            num_actual_tokens=key.num_tokens,
            max_query_len=key.query_len,
            max_seq_len=self._drafter.max_model_len,
            block_table_tensor=proposer.block_table[:rows],
            slot_mapping=next(iter(slots.values())),
            causal=True,
            seq_lens_cpu_upper_bound=torch.full((rows,), self._drafter.max_model_len, dtype=torch.int32, device="cpu"),
        )
        _, attention = self._drafter.build_per_group_and_layer_attn_metadata(common, draft_index=step)
        return LayerMetadata(attention, slots)

    def update(self, key: GraphKey, metadata: LayerMetadata) -> None:
        if key.query_len == 1:  # vLLM computed the slots of the first pass
            self._write_slots(key.num_reqs, next(iter(metadata.slot_mappings.values())))
        for group in self._drafter.draft_attn_groups:
            group.update_draft_decode_metadata(metadata.attention)

    def _write_slots(self, rows: int, slots: Tensor) -> None:
        """Write the slot of each row's position. Padded rows get no slot."""
        positions, size = self._proposer.buffers.positions[:rows], self._drafter.block_size
        blocks = self._proposer.block_table[:rows].gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        numbers = torch.add(positions % size, blocks, alpha=size)
        slots.copy_(numbers.masked_fill_(self._proposer.buffers.idx_mapping[:rows] < 0, _NO_SLOT))


class GraphedProposer(GraphedDrafter):
    """Draft with graphs in the V1 runner. Replaces ``propose`` of the drafter after the runner's cache is bound.

    Args:
        runner: vLLM's V1 ``GPUModelRunner``.
        refuse: called if graphs turn out to be impossible later. It raises, or returns to continue without graphs.
        logger: vLLM's logger.

    Raises:
        Unsupported: this drafter cannot have graphs.
    """

    def __init__(self, runner: Any, refuse: Refuse, logger: Any) -> None:
        self.runner, self.drafter = runner, runner.drafter
        drafter = self.drafter
        check_drafter(drafter)
        check_attention([drafter.draft_attn_groups])
        check_graph_mode(runner.cudagraph_dispatcher.cudagraph_mode)
        self._vllm_config, self._device = drafter.vllm_config, drafter.device
        self._set_up(self._vllm_config, refuse, logger)
        self.num_drafts: int = drafter.speculative_config.num_speculative_tokens
        # Tokens of each request in the first pass. In the target it has K + 1.
        self.query_len = self.num_drafts + 1 + drafter.net_num_new_slots_per_request
        self._most_rows: int = drafter.max_batch_size
        # vLLM gives a draft model the block table of the first group, and any other drafter the table of its group.
        group = drafter.kv_cache_gid if isinstance(drafter, EagleProposer) else 0
        self._allocate(runner.input_batch.block_table[group].block_table.gpu.shape[1])
        self._freeze_gc = runner._freeze_gc
        self._pool: Any = None
        self.graphs = LoopGraphs(self._device, self.make_loop())
        self.patches = Patches(DRAFT_GRAPHS)
        self.patches.put_methods(drafter, self, ["propose"])
        self.patches.put_methods(runner, self, ["capture_model"])

    def detach(self) -> None:
        """Restore the methods of the runner and its drafter, and drop the graphs, which refer to an earlier cache."""
        if self.graphs is not None:
            self.graphs.loop.invalidate("the cache was bound anew")
        self.graphs = None
        self.patches.undo()

    # ------------------------------------------------------------ set up

    def _allocate(self, blocks_per_request: int) -> None:
        drafter, rows = self.drafter, self._most_rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self.block_table = zeros(rows, blocks_per_request)
        self.num_rejected = zeros(rows)
        self.last_token_indices = zeros(rows, dtype=torch.int64)
        # Lengths after the first pass, rejected tokens included.
        self.first_pass_lens = zeros(rows)
        self._row_numbers = torch.arange(rows, dtype=torch.int32, device=self._device)
        self._copied_rows: int | None = None
        self.buffers = DraftBuffers(
            input_ids=drafter.input_ids,
            positions=drafter.positions,
            query_start_loc=zeros(rows + 1),
            seq_lens=zeros(rows),
            idx_mapping=torch.full_like(self._row_numbers, -1),
            draft_tokens=zeros(rows, self.num_drafts, dtype=torch.int64),
            current_draft_step=zeros(dtype=torch.int64),
            hidden_states=drafter.hidden_states if drafter.pass_hidden_states_to_model else None,
        )

    def _capture_pool(self) -> Any:
        """Return the memory pool of our graphs, which sleep mode may replace.

        It is separate, because the runner reads data of the target's pool after the drafter (logprobs of prompts).
        """
        if self._pool is None:
            self._pool = current_platform.graph_pool_handle()
        return capture_pool(self._pool, self._vllm_config)

    def make_loop(self) -> DraftLoop:
        """Create the draft loop over vLLM's buffers and ours. It holds no graphs yet."""
        return DraftLoop(
            self._forward,
            lambda key, output: self.drafter._greedy_sample(output[: key.num_reqs]),
            self.buffers,
            ProposerMetadata(self),
            self.num_drafts,
            self.drafter.max_model_len,
            first_pass=self,
            pool=self._capture_pool,
        )

    def capture_keys(self) -> dict[int, list[GraphKey]]:
        """Return the keys of both passes: the request counts of the target's graphs, for the one number of drafts."""
        counts = captured_counts(self._vllm_config, self.num_drafts + 1, self._most_rows)
        # The compiled model takes at most max_num_batched_tokens.
        most = self.drafter.max_num_tokens
        keys = [GraphKey(count, self.query_len) for count in counts if count * self.query_len <= most]
        keys += [GraphKey(count) for count in counts if self.num_drafts > 1]
        return {self.num_drafts: keys} if keys else {}

    @torch.inference_mode()
    def capture_model(self, capture: Callable[[], int]) -> int:
        """Capture vLLM's graphs by its method ``capture``, then ours. Return the bytes that both took."""
        taken = capture()
        self._copied_rows = None
        with self._freeze_gc():
            return taken + self.capture_graphs(self._vllm_config, self.num_drafts)

    # ------------------------------------------------------------ the captured bodies

    def _forward(self, key: GraphKey, metadata: LayerMetadata) -> Tensor | tuple[Tensor, Tensor]:
        """Run the model as vLLM's drafter does: compiled, and without vLLM's graphs."""
        drafter, tokens = self.drafter, key.num_tokens
        if key.query_len == 1 and drafter.use_heterogeneous_vocab:  # sampled ids are in the target's vocabulary
            ids = drafter.input_ids[:tokens]
            mapped = drafter.vocab_mapping.map_target_to_draft_ids(ids)
            # A padded row keeps its id from step to step, so it would be mapped again. Set it to 0, a valid id in both
            # vocabularies.
            ids.copy_(mapped.masked_fill_(self.buffers.idx_mapping[:tokens] < 0, 0))
        inputs, _ = drafter.build_model_inputs_first_pass(tokens, tokens, None)
        return self._run_model(inputs, metadata, tokens, CUDAGraphMode.NONE)

    def _run_model(
        self, inputs: dict[str, Any], metadata: LayerMetadata, num_tokens: int, mode: CUDAGraphMode
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output to sample from. If hidden states are carried, return a pair with those of the next step."""
        with set_forward_context(
            metadata.attention,
            self._vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=mode,
            slot_mapping=metadata.slot_mappings,
        ):
            output = self.drafter.model(**inputs)
        if not self.drafter.pass_hidden_states_to_model:
            return output
        sampled_from, carried = output if self.drafter.model_returns_tuple() else (output, output)
        return sampled_from, carried.to(self.drafter.hidden_states.dtype)

    def expand(self, key: GraphKey) -> None:
        """Do nothing: vLLM's preparation of the first pass has written its tokens, slots, starts and lengths."""

    def finish(self, key: GraphKey, output: Tensor, next_hidden: Tensor | None) -> None:
        """Sample draft 0 and write the inputs of the decode loop, whichever code ran the first pass."""
        rows, buffers = key.num_reqs, self.buffers
        last = self.last_token_indices[:rows]
        buffers.draft_tokens[:rows, 0] = self.drafter._greedy_sample(output[last])
        if self.num_drafts == 1:
            return
        buffers.positions[:rows] = buffers.positions[last]
        if next_hidden is not None:
            assert buffers.hidden_states is not None
            buffers.hidden_states[:rows] = next_hidden[last]
        self._prepare_decode(rows, self.first_pass_lens, self.drafter.max_model_len)

    # ------------------------------------------------------------ a step

    def propose(self, propose: Callable[..., Tensor], **inputs: Any) -> Tensor:
        """Draft K tokens for each request. Result and arguments are those of ``propose``, vLLM's method."""
        return self.draft(propose, inputs)

    def _draft(  # type: ignore[override]
        self,
        *,
        num_speculative_tokens: int,
        target_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        token_indices_to_sample: Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Draft with a graph for the decode loop, and for the first pass if it has one."""
        drafter, loop, rows = self.drafter, self.graphs.loop, common_attn_metadata.num_reqs
        drafter.num_speculative_tokens, drafter._last_draft_probs = num_speculative_tokens, None
        if drafter.method == "eagle3":
            target_hidden_states = drafter.model.combine_hidden_states(target_hidden_states)
        num_tokens, last_token_indices, batch = drafter.set_inputs_first_pass(
            target_token_ids=target_token_ids,
            next_token_ids=next_token_ids,
            target_positions=target_positions,
            target_hidden_states=target_hidden_states,
            token_indices_to_sample=token_indices_to_sample,
            cad=common_attn_metadata,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
        )
        why_eager = self._why_eager_first_pass(num_tokens, batch)
        # Both passes have graphs for the same counts, unless a first pass exceeds the limit of the compiled model.
        padded = loop.dispatch(rows, self.query_len if why_eager is None else 1).key.num_reqs
        self._copy_inputs(rows, padded, last_token_indices, batch, num_rejected_tokens_gpu)
        if why_eager is None:
            drafter._get_slot_mapping(padded * self.query_len, batch.slot_mapping)
            loop.run_first_pass(rows, self.query_len)
        else:
            self._eager[why_eager] += 1
            self._run_first_pass(num_tokens, batch, mm_embed_inputs, GraphKey(padded, self.query_len))
        # Return a copy, because vLLM copies the result to the host on another stream.
        return loop.run(rows, inert_tails=True).clone()

    def _why_eager(  # type: ignore[override]
        self,
        *,
        num_speculative_tokens: int,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        **inputs: Any,
    ) -> str | None:
        drafter, batch = self.drafter, common_attn_metadata
        if num_speculative_tokens != self.num_drafts:
            return _FEWER_DRAFTS
        if drafter._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy:
            return _RANDOM
        if batch.num_reqs > self.graphs.most_requests:
            return TOO_LARGE
        # Beyond the limit, vLLM's positions start again. Its runner does not let them get there.
        if batch.max_seq_len + drafter.net_num_new_slots_per_request + self.num_drafts - 1 > drafter.max_model_len:
            return _NEAR_LIMIT
        return None

    def _why_eager_first_pass(self, num_tokens: int, batch: CommonAttentionMetadata) -> str | None:
        """Return the reason why the first pass runs vLLM's code, or None. ``batch`` is the batch of that pass."""
        if batch.max_query_len != self.query_len or num_tokens != batch.num_reqs * self.query_len:
            return MIXED
        if self.graphs.loop.dispatch(batch.num_reqs, self.query_len).mode == "eager":
            return TOO_MANY_TOKENS
        return None

    def _copy_inputs(
        self,
        rows: int,
        padded: int,
        last_token_indices: Tensor,
        batch: CommonAttentionMetadata,
        num_rejected: Tensor | None,
    ) -> None:
        """Copy what is new in this batch into the buffers of the graphs. Rows [rows, padded) become inert."""
        buffers, copied_rows = self.buffers, self._copied_rows
        self._copied_rows = None  # until all rows are copied
        if rows != copied_rows:
            buffers.idx_mapping[:rows].copy_(self._row_numbers[:rows])
            buffers.idx_mapping[rows:].fill_(-1)
            buffers.seq_lens[rows:].zero_()
            for tensor in (self.block_table, self.num_rejected, self.last_token_indices, self.first_pass_lens):
                tensor[rows:].zero_()
        self.block_table[:rows].copy_(batch.block_table_tensor)
        buffers.query_start_loc[: rows + 1].copy_(batch.query_start_loc)
        if padded > rows:
            buffers.query_start_loc[rows + 1 : padded + 1].fill_(batch.num_actual_tokens)
        buffers.seq_lens[:rows].copy_(batch.seq_lens)
        self.first_pass_lens[:rows].copy_(batch.seq_lens)
        self.last_token_indices[:rows].copy_(last_token_indices)
        if num_rejected is None:
            self.num_rejected[:rows].zero_()
        else:
            self.num_rejected[:rows].copy_(num_rejected)
        self._copied_rows = rows

    def _run_first_pass(
        self, num_tokens: int, batch: CommonAttentionMetadata, mm_embed_inputs: Any, key: GraphKey
    ) -> None:
        """Run the first pass as vLLM does, from its piecewise graphs if one has this size."""
        drafter = self.drafter
        _, attention = drafter.build_per_group_and_layer_attn_metadata(batch)
        mode, padded_tokens, _ = drafter._determine_batch_execution_and_padding(num_tokens)
        inputs, slots = drafter.build_model_inputs_first_pass(num_tokens, padded_tokens, mm_embed_inputs)
        metadata = LayerMetadata(attention, drafter._get_slot_mapping(slots, batch.slot_mapping))
        output = self._run_model(inputs, metadata, padded_tokens, mode)
        sampled_from, carried = output if isinstance(output, tuple) else (output, None)
        self.finish(key, sampled_from, carried)


def check_drafter(drafter: Any) -> None:
    """Refuse a drafter of an unknown class, or with a feature that the graphs do not cover."""
    if type(drafter) not in (DraftModelProposer, EagleProposer):
        raise DRAFTER.because(what=f"the drafter is a {type(drafter).__name__}")
    features = {
        "parallel drafting has one pass": drafter.parallel_drafting,
        "its positions do not advance": drafter.constant_draft_positions,
        "it has M-RoPE": drafter.uses_mrope,
        "it takes embeddings of images": drafter.supports_mm_inputs,
        "its steps share the indices of the first": drafter._share_mtp_indices,
        "speculative_config has enforce_eager": drafter.speculative_config.enforce_eager,
        "its number of drafts is dynamic": drafter.speculative_config.num_speculative_tokens_per_batch_size,
    }
    unsupported = [feature for feature, has in features.items() if has]
    if unsupported:
        raise DRAFTER.because(what=", ".join(unsupported))
