"""Speculative decoding with a draft vocabulary: the drafter computes 256 of 4,096 logits, and the text stays the same.

    python examples/draft_vocabulary.py [cpu | cuda]

The target is a toy language model that reads the last two tokens. The drafter has its embedding and its head, but reads
only the last token. Frequent tokens have larger rows in the head, so a text uses few of them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import nwor_ops

VOCABULARY, HIDDEN, ROWS, NUM_DRAFTS, LENGTH = 4096, 64, 256, 3, 400
PROMPT = [7, 11, 7, 11, 42, 7]


class Model:
    def __init__(self, device: str) -> None:
        random = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(2, VOCABULARY, HIDDEN, generator=random).to(device)
        sizes = torch.arange(1, VOCABULARY + 1) ** -0.2
        ids = torch.randperm(VOCABULARY, generator=random)
        self.head = (torch.randn(VOCABULARY, HIDDEN, generator=random) * sizes[ids, None]).to(device)

    def hidden(self, last: int) -> Tensor:
        return self.embedding[0, last][None]

    def next_token(self, before: int, last: int) -> int:
        hidden = self.hidden(last) + 0.2 * self.embedding[1, before]
        return int((hidden @ self.head.T).argmax())


def decode(model: Model) -> list[int]:
    text = list(PROMPT)
    while len(text) < LENGTH:
        text.append(model.next_token(text[-2], text[-1]))
    return text


def decode_with_drafts(model: Model, vocabulary: nwor_ops.DraftVocabulary) -> tuple[list[int], float]:
    """Return the text, and the number of tokens per step of the target."""
    device, text, steps = model.head.device, list(PROMPT), 0
    none = torch.zeros(0, dtype=torch.int64, device=device)
    vocabulary.update(none, torch.tensor(text, device=device))  # the prompt enters, but is not counted
    while len(text) < LENGTH:
        drafts: list[int] = []
        for _ in range(NUM_DRAFTS):
            drafts += vocabulary.draft(model.hidden([*text, *drafts][-1])).tolist()
        sampled: list[int] = []
        for draft in [*drafts, None]:  # a real target verifies all of them in one pass
            context = [*text, *sampled]
            sampled.append(model.next_token(context[-2], context[-1]))
            if sampled[-1] != draft:
                break
        text, steps = text + sampled, steps + 1
        vocabulary.update(torch.tensor(sampled, device=device))
    return text[:LENGTH], (len(text) - len(PROMPT)) / steps


def main(device: str = "cpu") -> None:
    if device not in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        sys.exit(f"draft_vocabulary.py: the device must be cpu, or cuda on a machine with a GPU, got {device}")
    model = Model(device)
    expected = decode(model)
    for rows in (VOCABULARY, ROWS):
        vocabulary = nwor_ops.DraftVocabulary(model.head, rows)
        text, per_step = decode_with_drafts(model, vocabulary)
        assert text == expected
        print(f"{rows} rows: the same text, {per_step:.2f} tokens per step, coverage {vocabulary.coverage():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
