"""Attachment to vLLM's Model Runner V2, the default on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from nwor_ops.transaction.window import Layout, Window
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.support.refusals import NEW_TOKENS
from nwor_ops.vllm.transaction.runners.base import RunnerAttachment, named_layers, runner_hooks
from nwor_ops.vllm.transaction.session import Step

_MODULE = "vllm.v1.worker.gpu.model_runner"
_WARM_UP = "vllm.v1.worker.gpu.warmup"
WARM_UPS = (
    Hook(_WARM_UP, "warmup_kernels", "model_runner, worker_execute_model, worker_sample_tokens"),
    Hook(
        _WARM_UP,
        "run_mixed_prefill_decode_warmup",
        "model_runner, worker_execute_model, worker_sample_tokens, num_tokens, mixed_step_context, req_id_prefix",
    ),
)


class V2(RunnerAttachment):
    """Attach to Model Runner V2. See the module docstring."""

    module = _MODULE
    hooks = (
        *runner_hooks(
            _MODULE,
            prepare_attn="input_batch",
            sample="hidden_states, input_batch, grammar_output",
            execute_model="scheduler_output, intermediate_tensors, dummy_run, skip_attn_for_dummy_run, is_profile, "
            "context_len, valid_dummy_state_slots, randomize_inputs",
        ),
        *WARM_UPS,
    )
    patched = (*RunnerAttachment.patched, "prepare_attn", "sample")
    _batch: Any = None  # the last prepared batch

    def slot_mapping(self, group: str) -> Tensor:
        return self.runner.block_tables.slot_mappings[int(group)]

    def block_table(self, group: str) -> Tensor:
        return self.runner.block_tables.input_block_tables[int(group)]

    @property
    def drafter_borrows(self) -> bool:
        # These drafters build new metadata for their batches when they draft. The first pass of the others runs over
        # the target's batch.
        config = self.runner.speculative_config
        own = config.use_ngram() or config.uses_draft_model() or config.use_dflash() or config.use_dspark()
        return not own

    def layout(self, slot_mappings: dict[str, Tensor], block_tables: dict[str, Tensor]) -> Layout:
        # vLLM counts logits, and its counts start with a zero.
        return Layout(slot_mappings, block_tables, num_bonus_tokens=1, leading_zero=True, request_states=True)

    def table_rows(self, group: str) -> Iterable[tuple[int, list[int]]]:
        batch, tables, number = self._batch, self.runner.block_tables, int(group)
        starts = batch.query_start_loc[: batch.num_reqs + 1].cpu()
        computed = batch.seq_lens[: batch.num_reqs].cpu() - starts.diff()
        requests = batch.idx_mapping_np[: batch.num_reqs].tolist()
        rows = tables.block_tables[number].gpu[requests].tolist()
        lengths = tables.num_blocks.np[number, requests].tolist()
        for tokens, row, length in zip(computed.tolist(), rows, lengths, strict=True):
            yield tokens, row[:length]

    def drafter_layers(self) -> set[str]:
        if (count := self.runner.model_state.num_new_sampled_tokens_per_step) != 1:
            raise NEW_TOKENS.because(count=count)
        return named_layers(self.runner, self.runner.speculator)

    def _counts(self, input_batch: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Return, on the host, where each request's tokens start and how many drafts it has.

        With adaptive verification the host knows only the total number of drafts, and the device knows the number per
        request. This function synchronizes in that case.
        """
        if self.runner.adaptive_verification is None:
            drafts = input_batch.num_draft_tokens_per_req
            return input_batch.query_start_loc_np, [0] * input_batch.num_reqs if drafts is None else drafts
        logits = input_batch.cu_num_logits.tolist()
        drafts = [end - start - 1 for start, end in itertools.pairwise(logits)]
        return input_batch.query_start_loc.tolist(), drafts

    def _step(self, input_batch: Any) -> Step:
        return Step(
            Window(
                query_start_loc=input_batch.query_start_loc,
                cu_num_draft_tokens=input_batch.cu_num_logits,
                num_draft_tokens=input_batch.num_draft_tokens,
                seq_lens=input_batch.seq_lens,
                request_states=input_batch.idx_mapping,
            ),
            on_host=functools.partial(self._counts, input_batch),
            new_states=self._new_states(input_batch) if self.entering else (),
        )

    def _new_states(self, input_batch: Any) -> list[int]:
        """Return the states of the requests that are new to the runner. A request keeps its state as long as the runner
        knows it, even outside the batch."""
        rows = zip(input_batch.req_ids, input_batch.idx_mapping_np.tolist(), strict=True)
        return [state for name, state in rows if name in self.entering]

    def prepare_attn(self, prepare: Callable[..., Any], input_batch: Any) -> Any:
        prepared = prepare(input_batch)
        self._batch = input_batch
        if input_batch.num_draft_tokens > 0:
            self.session.begin(self._step, input_batch)
        else:
            self.session.skip()
        return prepared

    def sample(self, sample: Callable[..., Any], hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        self.session.forwarded("before sampling")
        output = sample(hidden_states, input_batch, grammar_output)
        if input_batch.num_draft_tokens > 0:
            # Commit before the results are sent to the host. After the host has them, the scheduler may reuse blocks,
            # and connectors may store their contents.
            _, num_sampled, num_rejected = output
            self.session.commit(lambda manager: manager.commit_rejected(num_rejected), num_sampled=num_sampled.tolist)
        return output
