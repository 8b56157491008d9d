"""The demo's model: a folder with a small Llama of made-up weights, written in a second, without a network.

vLLM could make up weights itself (``load_format="dummy"``), but those are so small that attention adds
nothing to the output, and an output that does not depend on the cache proves nothing about the cache.
Here the weights are random too, but scaled so that every cached row counts, and the output layer knows a
language of one rule: a token is followed by its :func:`successor`, most of the time. Text in that language
repeats itself, so a prompt lookup proposes much of it, and about half of what it proposes is accepted.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor

SEED = 20
LAYERS = 3
HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
INTERMEDIATE = 512
VOCABULARY = 64
MAX_TOKENS = 512
# What the output layer adds to the logit of a token's successor: the larger, the more drafts are accepted.
RULE = 7.0
# Standard deviation of all logits without the rule: what context decides.
LOGIT_SCALE = 2.0
# Share of one attention or MLP block in the residual stream, where the token itself has 1.
BLOCK_SCALE = 0.5

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
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
    """The token that most often follows. One cycle through the whole vocabulary."""
    return (token + 37) % VOCABULARY


def write_tiny_llama(folder: pathlib.Path, seed: int = SEED) -> pathlib.Path:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``, and return it. Same seed, same bytes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    save_file(dict(_weights(seed)), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def _weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        # Inputs of variance 1 come out with standard deviation `scale`.
        drawn = torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)
        return drawn.to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    embedding = matrix(VOCABULARY, HIDDEN, HIDDEN**0.5)
    yield "model.embed_tokens.weight", embedding
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        yield f"{prefix}.self_attn.q_proj.weight", matrix(HEADS * HEAD_SIZE, HIDDEN, 1.5)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_SIZE, HIDDEN, 1.5)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_SIZE, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_SIZE, BLOCK_SCALE)
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}.mlp.gate_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", matrix(HIDDEN, INTERMEDIATE, BLOCK_SCALE)
    yield "model.norm.weight", ones.clone()
    rule = torch.empty_like(embedding)
    rule[[successor(token) for token in range(VOCABULARY)]] = embedding * (RULE / HIDDEN)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN, LOGIT_SCALE) + rule
