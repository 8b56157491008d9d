"""Compare vLLM's speculator with a draft vocabulary to one whose logits are masked. Run by test_draft_vocabulary.py:

    TRITON_INTERPRET=1 python draft_vocabulary_speculators.py

The speculators, the head and the logits processor are real classes of the installed vLLM. The set follows the batches.
Weights and features are small integers, so that logits are exact and often equal.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import torch
from draft_speculators import BLOCK_SIZES, BLOCKS, Batch, Side, make_config, make_sides, use_speculators
from hashing_drafter import ROWS, VOCABULARY, K, Model, scores
from torch import Tensor

from nwor_ops.config import NworConfig

FEATURES, SET, BATCHES = 4, 24, 16


class ModelWithHead(Model):
    """The hashing drafter with an output head of vLLM."""

    def __init__(self) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        super().__init__(BLOCK_SIZES, BLOCKS)
        with set_current_vllm_config(VllmConfig()):
            self.lm_head = ParallelLMHead(VOCABULARY, FEATURES, disable_tp=True)
            self.logits_processor = LogitsProcessor(VOCABULARY)
        weights = torch.randint(-3, 4, self.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
        self.lm_head.weight.data.copy_(weights)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)
        self.mask: Tensor | None = None

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        features = scores(hidden_states[:, 0].long(), FEATURES).round()
        logits = self.logits_processor(self.lm_head, features)
        return logits if self.mask is None else logits + self.mask


def attach(side: Side) -> Any:
    from nwor_ops.vllm.draft_vocabulary.plugin import SpeculatorVocabulary

    speculator = side.speculator
    speculator.model, speculator.load_model = ModelWithHead(), lambda target_model: None
    owner = SpeculatorVocabulary(speculator, NworConfig(draft_vocabulary=SET), logging.getLogger("nwor"))
    speculator.load_model(None)
    return owner.first


def compare(probabilistic: bool, graphed: bool) -> None:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    config, rng = make_config(probabilistic), random.Random(probabilistic)
    masked, ours = make_sides(config)
    if not graphed:
        ours = Side(StandaloneARSpeculator, config)
    masked.speculator.model = reference = ModelWithHead()
    vocabulary = attach(ours)
    entered = set()
    for number in range(BATCHES):
        batch = Batch(rng, number % 4 != 3, near_end=False, verified=K, drafts=[K] * (ROWS + 1))
        drafts = batch.propose(ours)
        tokens = vocabulary.token_ids
        reference.mask = torch.full((VOCABULARY,), float("-inf")).index_fill(0, tokens, 0.0)
        assert torch.equal(batch.propose(masked), drafts), f"batch {number}: {vars(batch)}"
        assert set(drafts.flatten().tolist()) <= set(tokens.tolist())
        assert int(batch.last_sampled[batch.states[-1]]) in tokens  # at most half of the rows enter, the last first
        entered |= set(tokens.tolist())
        if probabilistic:
            states = torch.tensor(batch.states)
            assert torch.equal(*(side.speculator.draft_logits[states] for side in (masked, ours)))
    assert len(entered) > 2 * SET
    print("probabilistic" if probabilistic else "greedy", "graphed" if graphed else "eager", "equal")


def main() -> None:
    use_speculators()
    for probabilistic in (False, True):
        for graphed in (False, True):
            compare(probabilistic, graphed)


if __name__ == "__main__":
    main()
