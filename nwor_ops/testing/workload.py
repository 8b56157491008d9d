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


@dataclass(frozen=True)
class Request:
    """One request. The prompt has token ids."""

    prompt: list[int]
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
        # A quarter to all of max_tokens, so that requests end at different steps.
        shorter = (index * 5) % 7 * max_tokens // 8
        requests.append(Request(prompt[:length], max_tokens - shorter, ARRIVAL_STEPS[index]))
    return requests


def _phrase(generator: random.Random) -> list[int]:
    tokens = [generator.randrange(VOCABULARY)]
    for _ in range(generator.randint(2, 5)):
        tokens.append(successor(tokens[-1]))
    return tokens
