"""A state machine of random updates of a DraftVocabulary, compared with the oracle."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from state_machines import Counted

from nwor_ops import DraftVocabulary
from nwor_ops.testing import oracle

MACHINE_SETTINGS = settings(max_examples=40, stateful_step_count=50, deadline=None)


class Machine(Counted):
    """Random updates. After each, the set equals the oracle's and its three tensors agree."""

    device = "cpu"

    @initialize(rows=st.sampled_from([1, 2, 3, 31, 33, 48]), spare=st.integers(0, 40), first=st.sampled_from([0, 7]))
    def start(self, rows: int, spare: int, first: int) -> None:
        self.head = torch.arange(rows + spare, dtype=torch.float32)[:, None] + 0.5
        self.vocabulary = DraftVocabulary(self.head.to(self.device), rows, first_token=first)
        self.model = {name: tensor.clone() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.vocabulary.tensors().items()}

    def update_both(self, tokens: torch.Tensor, listed: torch.Tensor | None = None) -> None:
        self.vocabulary.update(tokens.to(self.device), None if listed is None else listed.to(self.device))
        first = self.vocabulary.first_token
        oracle.update_draft_vocabulary(tokens, self.head, prompt_tokens=listed, first_token=first, **self.model)

    @rule(data=st.data(), prompt=st.none() | st.integers(0, 99))
    def update(self, data: st.DataObject, prompt: int | None) -> None:
        token = st.integers(self.vocabulary.first_token - 2, self.vocabulary.first_token + len(self.head) + 1)
        tokens = torch.tensor(data.draw(st.lists(token, max_size=6)), dtype=torch.int32)
        dice = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        listed = None if prompt is None else torch.randint(-1, len(self.head) + 9, (prompt,), generator=dice)
        self.update_both(tokens, listed)

    @rule(token=st.integers(0, 99), length=st.integers(1, 9))
    def repeat(self, token: int, length: int) -> None:
        """A run of neighbours, as a loop in a text."""
        self.update_both(self.vocabulary.first_token + torch.arange(token, token + length))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "vocabulary"):
            return
        ours = self.tensors()
        assert all(torch.equal(tensor, self.model[name]) for name, tensor in ours.items())
        tokens = ours["token_ids"] - self.vocabulary.first_token
        assert ours["row_of_token"][tokens].tolist() == list(range(len(tokens)))
        assert int((ours["row_of_token"] >= 0).sum()) == len(tokens)
        assert torch.equal(ours["weight"], self.head[tokens])
