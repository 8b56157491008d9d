"""Drafters of the V1 runner (a separate draft model, EAGLE, EAGLE-3, MTP), with their passes in CUDA graphs.

The drafter stays vLLM's object. Only its ``propose`` and the runner's ``capture_model`` are replaced on the instances.
vLLM's code prepares the first pass, and runs the passes without a graph (``docs/guides/draft-models.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, GraphKey
from nwor_ops.vllm.draft_graphs.graphs import TOO_LARGE, GraphedDrafter, LayerMetadata, LoopGraphs
from nwor_ops.vllm.draft_graphs.supported import check_attention, check_graph_mode
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.support.features import DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import DRAFTER

_NO_SLOT = -1
_RANDOM = "drafts drawn at random"
_NEAR_LIMIT = "a request close to the model's length limit"
_FEWER_DRAFTS = "a number of drafts without graphs"


class GraphedProposer(GraphedDrafter):
    """Draft with graphs in the V1 runner. Replaces ``propose`` of the drafter after the runner's cache is bound.

    Args:
        runner: vLLM's V1 ``GPUModelRunner``.
        logger: vLLM's logger.

    Raises:
        Unsupported: this drafter cannot have graphs.
    """

    def __init__(self, runner: Any, logger: Any) -> None:
        self.runner, self.drafter = runner, runner.drafter
        drafter = self.drafter
        check_drafter(drafter)
        check_attention([drafter.draft_attn_groups])
        check_graph_mode(runner.cudagraph_dispatcher.cudagraph_mode)
        self.vllm_config, self.device = drafter.vllm_config, drafter.device
        self.max_num_reqs, self.max_num_tokens = drafter.max_batch_size, drafter.max_num_tokens
        self.max_model_len = drafter.max_model_len
        self.extra_tokens = drafter.net_num_new_slots_per_request
        self._set_up(drafter.speculative_config.num_speculative_tokens, None, logger)
        # vLLM gives a draft model the block table of the first group, and any other drafter the table of its group.
        group = drafter.kv_cache_gid if isinstance(drafter, EagleProposer) else 0
        self.block_table = runner.input_batch.block_table[group].block_table.gpu
        self._allocate()
        self._pool: Any = None
        self.graphs = LoopGraphs(self.device, self.make_loop(self._capture_pool))
        self.patches = Patches(DRAFT_GRAPHS)
        self.patches.put_methods(drafter, self, ["propose"])
        self.patches.put_methods(runner, self, ["capture_model"])

    def detach(self) -> None:
        """Restore the methods of the runner and its drafter, and drop the graphs, which refer to an earlier cache."""
        if self.graphs is not None:
            self.graphs.loop.invalidate("the cache was bound anew")
        self.graphs = None
        self.patches.undo()

    def _allocate(self) -> None:
        drafter, rows = self.drafter, self.max_num_reqs

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.num_rejected, self.first_pass_lens = zeros(rows), zeros(rows)
        self.last_token_indices = zeros(rows, dtype=torch.int64)
        self.first_pass_positions = drafter.positions
        self._copied_rows: int | None = None
        self.buffers = DraftBuffers(
            input_ids=drafter.input_ids,
            positions=drafter.positions,
            query_start_loc=zeros(rows + 1),
            seq_lens=zeros(rows),
            idx_mapping=zeros(rows).fill_(-1),
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
        return capture_pool(self._pool, self.vllm_config)

    @torch.inference_mode()
    def capture_model(self, capture: Callable[[], int]) -> int:
        """Capture vLLM's graphs by its method ``capture``, then ours. Return the bytes that both took."""
        taken = capture()
        self._copied_rows = None
        return taken + self.capture_graphs()

    # ------------------------------------------------------------ the captured bodies

    def _forward(self, key: GraphKey, metadata: LayerMetadata) -> Tensor | tuple[Tensor, Tensor]:
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
            self.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=mode,
            slot_mapping=metadata.slot_mappings,
        ):
            output = self.drafter.model(**inputs)
        if not self.drafter.pass_hidden_states_to_model:
            return output
        sampled_from, carried = output if self.drafter.model_returns_tuple() else (output, output)
        return sampled_from, carried.to(self.drafter.hidden_states.dtype)

    def sample_rows(self, rows: int, hidden_states: Tensor, positions: Tensor) -> Tensor:
        return self.drafter._greedy_sample(hidden_states[:rows])

    def _groups(self) -> Iterator[tuple[Any, Tensor]]:
        for group in self.drafter.draft_attn_groups:
            yield group, self.block_table

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> LayerMetadata:
        rows, buffers, limit = key.num_reqs, self.buffers, self.max_model_len
        slots = self.drafter._get_slot_mapping(key.num_tokens)
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
            max_seq_len=limit,
            block_table_tensor=self.block_table[:rows],
            slot_mapping=next(iter(slots.values())),
            causal=True,
            seq_lens_cpu_upper_bound=torch.full((rows,), limit, dtype=torch.int32, device="cpu"),
        )
        # vLLM's drafter calls builders that plan nothing ahead (``build_for_drafting``).
        _, attention = self.drafter.build_per_group_and_layer_attn_metadata(common, draft_index=step)
        return LayerMetadata(attention, slots)

    def _write_slots(self, rows: int) -> None:
        buffers, slots = self.buffers, next(iter(self.drafter._get_slot_mapping(rows).values()))
        ops.compute_slot_mappings(
            buffers.idx_mapping[:rows],
            buffers.query_start_loc[: rows + 1],
            buffers.positions,
            [self.block_table],
            [self.drafter.block_size],
            slots.unsqueeze(0),
        )

    def expand(self, key: GraphKey) -> None:
        """Do nothing: vLLM's preparation of the first pass has written its tokens, slots, starts and lengths."""

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
        query_len = batch.max_query_len if num_tokens == rows * batch.max_query_len else 0
        why_eager = self._why_eager_first_pass(rows, query_len)
        # Both passes have graphs for the same counts, unless a first pass exceeds the limit of the compiled model.
        key = loop.graph_for(rows, query_len if why_eager is None else 1)
        padded = rows if key is None else key.num_reqs
        self._copy_inputs(rows, padded, last_token_indices, batch, num_rejected_tokens_gpu)
        if why_eager is None:
            drafter._get_slot_mapping(padded * query_len, batch.slot_mapping)
            loop.run_first_pass(rows, query_len)
        else:
            self._eager[why_eager] += 1
            self._run_first_pass(num_tokens, batch, mm_embed_inputs, padded)
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
            torch.arange(rows, dtype=torch.int32, out=buffers.idx_mapping[:rows], device=self.device)
            buffers.idx_mapping[rows:].fill_(-1)
            buffers.seq_lens[rows:].zero_()
            for tensor in (self.num_rejected, self.last_token_indices, self.first_pass_lens):
                tensor[rows:].zero_()
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

    def _run_first_pass(self, num_tokens: int, batch: CommonAttentionMetadata, mm_embed_inputs: Any, rows: int) -> None:
        """Run the first pass as vLLM does, from its piecewise graphs if one has this size, for ``rows`` padded rows."""
        drafter = self.drafter
        _, attention = drafter.build_per_group_and_layer_attn_metadata(batch)
        mode, padded_tokens, _ = drafter._determine_batch_execution_and_padding(num_tokens)
        inputs, slots = drafter.build_model_inputs_first_pass(num_tokens, padded_tokens, mm_embed_inputs)
        metadata = LayerMetadata(attention, drafter._get_slot_mapping(slots, batch.slot_mapping))
        output = self._run_model(inputs, metadata, padded_tokens, mode)
        sampled_from, carried = output if isinstance(output, tuple) else (output, None)
        self.finish(GraphKey(rows), sampled_from, carried)


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
