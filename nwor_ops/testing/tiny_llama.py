"""The model of the demo and its requests: a small Llama with random weights, written in seconds, without a network.

vLLM's own random weights (``load_format="dummy"``) are so small that attention adds nothing to the output. Such an
output does not depend on the cache, so it proves nothing about the cache. The random weights here are scaled so that
every cached row matters. The output layer knows one rule: a token is mostly followed by its :func:`successor`. Such
text repeats itself, so a prompt lookup proposes much of it, and about half of the proposals are accepted.
"""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEED = 20
VOCABULARY = 64
MAX_TOKENS = 512
# Added to the logit of a token's successor. A larger value means more accepted drafts.
RULE = 7.0
# Standard deviation of all logits without the rule. This part depends on the context.
LOGIT_SCALE = 2.0
# Share of one attention or MLP block in the residual stream; the token itself has 1.
BLOCK_SCALE = 0.5


@dataclass(frozen=True)
class Size:
    """Sizes of the model. The defaults are those of the demo's."""

    layers: int = 3
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    intermediate: int = 512

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": MAX_TOKENS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }


def successor(token: int) -> int:
    """Return the token that most often follows ``token``. The successors form one cycle through the vocabulary."""
    return (token + 37) % VOCABULARY


def write_tiny_llama(folder: pathlib.Path, size: Size = Size()) -> pathlib.Path:
    """Write ``config.json`` and ``model.safetensors`` to ``folder``, always the same bytes, and return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(size.config(), indent=2) + "\n")
    save_file(dict(_weights(SEED, size)), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Return a random matrix. Inputs of variance 1 give outputs with standard deviation ``scale``."""
    return (torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)).to(torch.bfloat16)


def decoder_layer(generator: torch.Generator, prefix: str, size: Size) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of one layer of a Llama by name."""
    hidden, heads, kv_heads = size.hidden, size.heads * size.head_size, size.kv_heads * size.head_size
    yield f"{prefix}.input_layernorm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield f"{prefix}.self_attn.q_proj.weight", matrix(generator, heads, hidden, 1.5)
    yield f"{prefix}.self_attn.k_proj.weight", matrix(generator, kv_heads, hidden, 1.5)
    yield f"{prefix}.self_attn.v_proj.weight", matrix(generator, kv_heads, hidden)
    yield f"{prefix}.self_attn.o_proj.weight", matrix(generator, hidden, heads, BLOCK_SCALE)
    yield f"{prefix}.post_attention_layernorm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield f"{prefix}.mlp.gate_proj.weight", matrix(generator, size.intermediate, hidden)
    yield f"{prefix}.mlp.up_proj.weight", matrix(generator, size.intermediate, hidden)
    yield f"{prefix}.mlp.down_proj.weight", matrix(generator, hidden, size.intermediate, BLOCK_SCALE)


def _weights(seed: int, size: Size) -> Iterator[tuple[str, Tensor]]:
    generator, hidden = torch.Generator().manual_seed(seed), size.hidden
    embedding = matrix(generator, VOCABULARY, hidden, hidden**0.5)
    yield "model.embed_tokens.weight", embedding
    for layer in range(size.layers):
        yield from decoder_layer(generator, f"model.layers.{layer}", size)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    rule = torch.empty_like(embedding)
    rule[[successor(token) for token in range(VOCABULARY)]] = embedding * (RULE / hidden)
    yield "lm_head.weight", matrix(generator, VOCABULARY, hidden, LOGIT_SCALE) + rule


# ---------------------------------------------------------------- requests

REQUESTS = 24
MAX_RUNNING = 12
SHORTEST_PROMPT, LONGEST_PROMPT = 12, 96  # tokens


@dataclass(frozen=True)
class Request:
    """One request. The prompt has token ids."""

    prompt: list[int]
    max_tokens: int


def tiny_llama_requests(max_tokens: int) -> list[Request]:
    """Return prompts of recurring phrases, which differ in length."""
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
        requests.append(Request(prompt[:length], max_tokens - shorter))
    return requests


def _phrase(generator: random.Random) -> list[int]:
    tokens = [generator.randrange(VOCABULARY)]
    for _ in range(generator.randint(2, 5)):
        tokens.append(successor(tokens[-1]))
    return tokens
