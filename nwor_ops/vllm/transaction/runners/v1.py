"""Attachment to vLLM's Model Runner V1, the only runner on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.transaction.window import Layout, Window, numbers_on
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.support.refusals import OTHER_GROUP
from nwor_ops.vllm.transaction.runners.base import RunnerAttachment, named_layers, runner_hooks
from nwor_ops.vllm.transaction.session import Session, Step

_MODULE = "vllm.v1.worker.gpu_model_runner"


class RequestStates:
    """Give each request of the batch a number that does not change while the request is in the batch.

    Rows of the batch cannot serve as numbers: vLLM sorts the batch, and rows move when requests leave.

    ``tensor`` is int64 ``[num_requests]``: the numbers in the order of the batch.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._device = device
        self._order: list[str] = []
        self._of: dict[str, int] = {}
        self._free = list(range(most))
        self.tensor = numbers_on(device, [])

    def update(self, order: list[str]) -> list[bool]:
        """Adopt the current batch, and return for each request whether it is new to the batch.

        Nothing is copied to the device if the batch did not change.
        """
        if order == self._order:
            return [False] * len(order)
        self._free += [self._of.pop(name) for name in self._of.keys() - set(order)]
        new = [name not in self._of for name in order]
        self._of |= {name: self._free.pop() for name in order if name not in self._of}
        self.tensor = numbers_on(self._device, [self._of[name] for name in order])
        self._order = order  # last: if the copy failed, the next call repeats it
        return new

    def __getitem__(self, name: str) -> int:
        return self._of[name]


class V1(RunnerAttachment):
    """Attach to Model Runner V1. See the module docstring."""

    module = _MODULE
    hooks = (
        *runner_hooks(
            _MODULE,
            _prepare_inputs="scheduler_output, num_scheduled_tokens",
            _sample="logits, spec_decode_metadata",
            execute_model="scheduler_output, intermediate_tensors",
        ),
        Hook(
            "vllm.v1.spec_decode.metadata",
            "SpecDecodeMetadata",
            "draft_token_ids, num_draft_tokens, cu_num_draft_tokens, cu_num_sampled_tokens, target_logits_indices, "
            "bonus_logits_indices, logits_indices",
        ),
    )
    patched = (*RunnerAttachment.patched, "_prepare_inputs", "_sample")
    _states: RequestStates | None = None  # only in mode "stage"

    def slot_mapping(self, group: str) -> Tensor:
        return self.runner.input_batch.block_table[int(group)].slot_mapping.gpu

    def block_table(self, group: str) -> Tensor:
        return self.runner.input_batch.block_table[int(group)].block_table.gpu

    def layout(self, slot_mappings: dict[str, Tensor], block_tables: dict[str, Tensor]) -> Layout:
        return Layout(slot_mappings, block_tables, request_states=self.session.shadow_blocks is not None)

    def table_rows(self, group: str) -> Iterable[tuple[int, list[int]]]:
        runner, table = self.runner, self.runner.input_batch.block_table[int(group)]
        requests = runner.input_batch.num_reqs
        starts = runner.query_start_loc.np[: requests + 1]
        computed = runner.seq_lens[:requests].cpu().numpy() - starts[1:] + starts[:-1]
        lengths = table.num_blocks_per_row[:requests]
        for tokens, row, length in zip(computed, table.block_table.np, lengths, strict=False):
            yield int(tokens), row[:length].tolist()

    def drafter_layers(self) -> set[str]:
        named, speculation = named_layers(self.runner, self.runner.drafter), self.runner.speculative_config
        # vLLM gives a draft model the slots of the first group. It gives other drafters the slots of the group they are
        # in.
        for number, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            elsewhere = named.intersection(group.layer_names)
            if number > 0 and elsewhere and speculation.uses_draft_model():
                raise OTHER_GROUP.because(method=speculation.method, layers=", ".join(sorted(elsewhere)), group=number)
        return named

    def patch(self, session: Session) -> None:
        super().patch(session)
        if session.shadow_blocks is not None:
            self._states = RequestStates(self.runner.max_num_reqs, self.runner.device)

    def _new_states(self, num_draft_tokens: Sequence[int]) -> list[int]:
        """Return the states of requests with drafts that are new to the batch, or have other blocks than in the window
        before."""
        states = self._states
        if states is None:
            return []
        order = self.runner.input_batch.req_ids[: len(num_draft_tokens)]
        rows = zip(order, states.update(order), num_draft_tokens, strict=True)
        return [states[name] for name, new, drafts in rows if drafts and (new or name in self.entering)]

    def _step(self, metadata: Any) -> Step:
        """Describe one forward from vLLM's ``SpecDecodeMetadata``."""
        runner, drafts = self.runner, metadata.num_draft_tokens
        new_states = self._new_states(drafts)
        return Step(
            Window(
                query_start_loc=runner.query_start_loc.gpu,
                cu_num_draft_tokens=metadata.cu_num_draft_tokens,
                num_draft_tokens=sum(drafts),
                seq_lens=runner.seq_lens,
                request_states=None if self._states is None else self._states.tensor,
            ),
            on_host=lambda: (runner.query_start_loc.np[: len(drafts) + 1], drafts),
            new_states=new_states,
        )

    def _prepare_inputs(self, prepare: Callable[..., Any], scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = prepare(scheduler_output, num_scheduled_tokens)
        if result[1] is not None:
            self.session.begin(self._step, result[1])
        else:
            self.session.skip()
        return result

    def _sample(self, sample: Callable[..., Any], logits: Any, spec_decode_metadata: Any) -> Any:
        self.session.forwarded("before sampling")
        output = sample(logits, spec_decode_metadata)
        if spec_decode_metadata is not None:
            drafted, sampled = spec_decode_metadata.draft_token_ids, output.sampled_token_ids
            self.session.commit(
                lambda manager: manager.commit(drafted, sampled),
                num_sampled=lambda: (sampled >= 0).sum(-1).tolist(),
            )
        return output
