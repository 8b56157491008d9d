"""The draft vocabulary of a speculator, with vLLM's own output head and logits processor."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import interpreted
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.vllm.draft_vocabulary.plugin import SpeculatorVocabulary, vocabulary_of

VOCABULARY, HIDDEN, ROWS, STEPS = 40, 8, 10, 3


class Drafter(torch.nn.Module):
    """A drafter with a norm before its head, and a soft cap after it. With two heads, they take turns by step."""

    def __init__(self, has_bias: bool = False, maps_tokens: bool = False, num_heads: int = 1) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        super().__init__()
        self.maps_tokens = maps_tokens
        with set_current_vllm_config(VllmConfig()):
            self.heads = [ParallelLMHead(VOCABULARY, HIDDEN, bias=has_bias, disable_tp=True) for _ in range(num_heads)]
            self.logits_processor = LogitsProcessor(VOCABULARY, soft_cap=5.0, scale=2.0)
        generator = torch.Generator().manual_seed(0)
        for head in self.heads:
            head.weight.data.copy_(torch.randn(head.weight.shape, generator=generator))
            head.quant_method.process_weights_after_loading(head)

    def compute_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        logits = self.logits_processor(self.heads[spec_step_idx % len(self.heads)], hidden_states * 3)
        return torch.nn.functional.pad(logits, (0, 5)) if self.maps_tokens else logits


class Speculator:
    """The parts of vLLM's speculator that the feature touches."""

    def __init__(self, model: Drafter) -> None:
        self.model, self.hidden_size, self.dtype, self.device = model, HIDDEN, torch.float32, torch.device("cpu")
        self.num_speculative_steps, self.max_num_reqs, self.max_num_tokens = STEPS, 4, 32
        self.acceptance_estimator = None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))

    def load_model(self, target_model: Any) -> None:
        pass

    def compute_draft_logits(self, hidden_states: Tensor, spec_step_idx: int) -> Tensor:
        return self.model.compute_logits(hidden_states, spec_step_idx)

    def sample_draft(
        self, hidden_states: Tensor, positions: Any, idx_mapping: Any, temperature: Any, seeds: Any, draft_step: Any,
        draft_logits: Tensor | None, spec_step_idx: int = 0, num_steps: int = 1,
    ) -> Tensor:  # fmt: skip
        return self.compute_draft_logits(hidden_states, spec_step_idx).argmax(-1)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> str:
        return "drafts"


def _attached(model: Drafter | None = None, **settings: Any) -> tuple[Speculator, SpeculatorVocabulary]:
    speculator = Speculator(model or Drafter())
    config = NworConfig(draft_vocabulary=ROWS, **settings)
    owner = SpeculatorVocabulary(speculator, config, logging.getLogger("test"))
    speculator.nwor_draft_vocabulary = owner
    speculator.load_model(None)
    return speculator, owner


def _sample(speculator: Speculator, hidden: Tensor, draft_logits: Tensor | None, step: int) -> Tensor:
    return speculator.sample_draft(hidden, None, None, None, None, None, draft_logits, step)


def _step(speculator: Speculator, prompts: list[list[int]], sampled: list[int], **more: Any) -> None:
    """Run a step of requests that have just finished their prompts."""
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt))
    count = len(prompts)
    batch = SimpleNamespace(
        num_reqs=count,
        num_tokens=starts[-1],
        has_prefill=True,
        input_ids=torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        cu_num_logits=torch.arange(count + 1, dtype=torch.int32),
        idx_mapping=torch.arange(count),
    )
    num_sampled = torch.ones(count, dtype=torch.int32)
    result = speculator.propose(
        batch, None, None, None, None, num_sampled, num_sampled - 1, torch.tensor(sampled).view(-1, 1), **more
    )
    assert result == "drafts"


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_drafts_are_best_tokens_of_set(is_greedy: bool, num_heads: int) -> None:
    """Each step uses its head, as in multi-module MTP."""
    whole = Speculator(Drafter(num_heads=num_heads))
    speculator, owner = _attached(Drafter(num_heads=num_heads))
    _step(speculator, [[30, 31]], [39])
    tokens = owner.first.token_ids
    assert {30, 31, 39} <= set(tokens.tolist())
    assert len(owner.vocabularies) == num_heads
    assert all(torch.equal(each.token_ids, tokens) for each in owner.vocabularies.values())
    hidden = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(1))
    cache = None if is_greedy else torch.zeros(1)
    for step in range(STEPS):
        masked = torch.full((16, VOCABULARY), float("-inf"))
        masked[:, tokens] = whole.compute_draft_logits(hidden, step)[:, tokens]
        assert _sample(speculator, hidden, cache, step).tolist() == masked.argmax(-1).tolist()
        torch.testing.assert_close(speculator.compute_draft_logits(hidden, step), masked)


def test_speculators_of_vllm_draft_from_set() -> None:
    expected = [f"{kind} {loop} equal" for kind in ("greedy", "probabilistic") for loop in ("eager", "graphed")]
    assert interpreted("draft_vocabulary_speculators.py").splitlines() == expected


def test_dummy_runs_change_nothing() -> None:
    speculator, owner = _attached()
    for more in ({"dummy_run": True}, {"is_profile": True}):
        _step(speculator, [[30]], [39], **more)
    assert owner.first.token_ids.tolist() == list(range(ROWS))
    assert owner.first.counters.tolist() == [0, 0]


def test_only_sampled_tokens_are_counted() -> None:
    speculator, owner = _attached()
    _step(speculator, [[30, 31], [1]], [2, 39])
    assert owner.first.counters.tolist() == [2, 1]


def test_failed_update_keeps_drafting(caplog: pytest.LogCaptureFixture) -> None:
    speculator, owner = _attached()
    _step(speculator, [[30]], [])
    assert sum(owner.errors.counts.values()) == 1
    assert owner.first.token_ids.tolist() == list(range(ROWS))


def test_rows_follow_reloaded_head() -> None:
    speculator, owner = _attached(Drafter(num_heads=2))
    weights = [head.weight.data.mul_(2) for head in speculator.model.heads]
    vocabulary_of(SimpleNamespace(speculator=speculator)).reload()
    for vocabulary, weight in zip(owner.vocabularies.values(), weights, strict=True):
        assert vocabulary.weight.tolist() == weight[:ROWS].tolist()


def test_sleeping_engine_saves_state() -> None:
    speculator, owner = _attached()
    buffers = {tensor.data_ptr() for _, tensor in speculator.model.named_buffers()}
    assert {tensor.data_ptr() for tensor in owner.first.tensors().values()} <= buffers
    assert not any("nwor" in name for name in speculator.model.state_dict())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"has_bias": True}, "its output head has a bias"),
        ({"maps_tokens": True}, "its logits are not those of one output head"),
    ],
)
def test_unsupported_head_is_refused(model: dict[str, bool], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        _attached(Drafter(**model))
    speculator, _ = _attached(Drafter(**model), on_unsupported="vanilla")
    assert vocabulary_of(SimpleNamespace(speculator=speculator)) is None
    assert speculator.compute_draft_logits(torch.zeros(1, HIDDEN), 0).shape[1] >= VOCABULARY
