"""Requests of the demo. They have different lengths and arrive at different steps, so batches mix prompts and
drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nwor_ops.testing.tiny_llama import VOCABULARY, successor

REQUESTS = 24
MAX_RUNNING = 12
# Arrival of each request, in engine steps. More requests arrive than may run, so some must wait.
ARRIVAL_STEPS = (0, 0, 0, 2, 5, 5, 8, 9, 12, 12, 13, 20, 20, 21, 24, 26, 28, 28, 30, 31, 32, 32, 33, 34)
SHORTEST_PROMPT, LONGEST_PROMPT = 12, 96  # tokens

_TEXTS = (
    "Repeat the list twice, in the same order: apple, pear, plum, cherry, apple, pear, plum, cherry.",
    "Rewrite this function with a docstring:\ndef area(width, height):\n    return width * height\n",
    "Translate to French, keeping the names: Anna met Boris. Boris met Clara. Clara met Anna.",
    "Count from one to thirty in words: one, two, three, four,",
    "Fix the indentation:\nfor i in range(3):\nprint(i)\nfor j in range(3):\nprint(j)\n",
    "Summarise, quoting the text: the cat sat on the mat, and the dog sat on the cat that sat on the mat.",
)


@dataclass(frozen=True)
class Request:
    """One request. The prompt is text for a model with a tokenizer, otherwise token ids."""

    prompt: str | list[int]
    max_tokens: int
    arrival_step: int


def tiny_llama_requests(max_tokens: int) -> list[Request]:
    """Return prompts of recurring phrases for :mod:`nwor_ops.testing.tiny_llama`."""
    generator = random.Random(7)
    requests = []
    for index in range(REQUESTS):
        phrases = [_phrase(generator) for _ in range(5)]
        length = generator.randint(SHORTEST_PROMPT, LONGEST_PROMPT)
        prompt: list[int] = []
        while len(prompt) < length:
            prompt += generator.choice(phrases)
        requests.append(_request(index, prompt[:length], max_tokens))
    return requests


def _phrase(generator: random.Random) -> list[int]:
    tokens = [generator.randrange(VOCABULARY)]
    for _ in range(generator.randint(2, 5)):
        tokens.append(successor(tokens[-1]))
    return tokens


def text_requests(max_tokens: int) -> list[Request]:
    """Return prompts whose answers repeat parts of them."""
    return [_request(index, _TEXTS[index % len(_TEXTS)], max_tokens) for index in range(REQUESTS)]


def _request(index: int, prompt: str | list[int], max_tokens: int) -> Request:
    # A quarter to all of max_tokens, so that requests end at different steps.
    shorter = (index * 5) % 7 * max_tokens // 8
    return Request(prompt, max_tokens - shorter, ARRIVAL_STEPS[index])
