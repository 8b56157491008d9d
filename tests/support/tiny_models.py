"""The models of these tests: folders with made-up weights, in the language of :mod:`nwor_ops.testing.tiny_llama`.

In it a token is followed by its successor, most of the time, so a good part of what any drafter proposes is
accepted and a good part is not. vLLM's own dummy weights would not do: such models soon repeat themselves and
accept nearly every draft.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nwor_ops.testing.tiny_llama import BLOCK_SCALE, LOGIT_SCALE, RULE, VOCABULARY, Size, successor, write_tiny_llama

# The head sizes that vLLM's MLA kernels are made for; all else is small.
MLA = {"layers": 2, "hidden": 256, "heads": 4, "latent": 512, "rope": 64, "nope": 128, "value": 128, "mlp": 512}
# As in DeepSeek's models: vLLM has a class of its own for it.
YARN = {
    "type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
SLIDING_WINDOW = 64


def write_models(folder: pathlib.Path) -> dict[str, str]:
    """All of them; their folders by name."""
    writers: dict[str, Callable[[pathlib.Path], Any]] = {
        "llama": write_tiny_llama,
        "draft": lambda path: write_tiny_llama(path, seed=21, size=Size(layers=1)),
        "eagle": _write_eagle,
        "eagle_with_biases": lambda path: _write_eagle(path, biases=True),
        "sliding": lambda path: _write_sliding(path, ["sliding_attention"] * 3),
        "hybrid": lambda path: _write_sliding(path, ["sliding_attention", "full_attention"] * 2),
        "mla": _write_mla,
        "mla_yarn": lambda path: _write_mla(path, YARN),
    }
    for name, write in writers.items():
        write(folder / name)
        _write_tokenizer(folder / name)
    return {name: str(folder / name) for name in writers}


def _write_sliding(folder: pathlib.Path, layer_types: list[str]) -> None:
    """A Llama some of whose layers see a window only: two KV-cache groups where the kinds are mixed."""
    write_tiny_llama(folder, size=Size(layers=len(layer_types)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": layer_types, "sliding_window": SLIDING_WINDOW}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_eagle(folder: pathlib.Path, biases: bool = False) -> None:
    """An EAGLE-1 head for the tiny Llama: one layer, which hands the next token's embedding on, with some noise.
    The output layer, which is the target's, knows the rule. Some published heads carry biases that vLLM's model
    has no parameter for."""
    size = Size(layers=1)
    generator = torch.Generator().manual_seed(22)
    hidden, heads, kv_heads = size.hidden, size.heads * size.head_size, size.kv_heads * size.head_size
    noise = _matrix(generator, hidden, hidden, 0.3)
    weights = {
        "fc.weight": torch.cat((torch.eye(hidden, dtype=torch.bfloat16), noise), dim=1),
        "layers.0.self_attn.q_proj.weight": _matrix(generator, heads, hidden, 1.5),
        "layers.0.self_attn.k_proj.weight": _matrix(generator, kv_heads, hidden, 1.5),
        "layers.0.self_attn.v_proj.weight": _matrix(generator, kv_heads, hidden),
        "layers.0.self_attn.o_proj.weight": _matrix(generator, hidden, heads, BLOCK_SCALE),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "layers.0.mlp.gate_proj.weight": _matrix(generator, size.intermediate, hidden),
        "layers.0.mlp.up_proj.weight": _matrix(generator, size.intermediate, hidden),
        "layers.0.mlp.down_proj.weight": _matrix(generator, hidden, size.intermediate, BLOCK_SCALE),
    }
    if biases:
        for name in ("fc", "layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"):
            weights[f"{name}.bias"] = torch.zeros_like(weights[f"{name}.weight"][:, 0])
    _save(folder, size.config(), weights)


def _write_mla(folder: pathlib.Path, rope_scaling: dict[str, Any] | None = None) -> None:
    """DeepSeek-V2's attention in a small dense model."""
    hidden, heads = MLA["hidden"], MLA["heads"]
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": hidden,
        "intermediate_size": MLA["mlp"],
        "moe_intermediate_size": MLA["mlp"],
        "num_hidden_layers": MLA["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": MLA["latent"],
        "qk_nope_head_dim": MLA["nope"],
        "qk_rope_head_dim": MLA["rope"],
        "v_head_dim": MLA["value"],
        # No layer has experts.
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": MLA["layers"],
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    _save(folder, config, dict(_mla_weights(torch.Generator().manual_seed(23))))


def _mla_weights(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, heads = MLA["hidden"], MLA["heads"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    embedding = _matrix(generator, VOCABULARY, hidden, hidden**0.5)
    yield "model.embed_tokens.weight", embedding
    for layer in range(MLA["layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones.clone()
        yield f"{prefix}.self_attn.q_proj.weight", _matrix(generator, heads * (MLA["nope"] + MLA["rope"]), hidden, 1.5)
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", _matrix(generator, MLA["latent"] + MLA["rope"], hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", torch.ones(MLA["latent"], dtype=torch.bfloat16)
        rows = heads * (MLA["nope"] + MLA["value"])
        yield f"{prefix}.self_attn.kv_b_proj.weight", _matrix(generator, rows, MLA["latent"], 1.5)
        yield f"{prefix}.self_attn.o_proj.weight", _matrix(generator, hidden, heads * MLA["value"], BLOCK_SCALE)
        yield f"{prefix}.post_attention_layernorm.weight", ones.clone()
        yield f"{prefix}.mlp.gate_proj.weight", _matrix(generator, MLA["mlp"], hidden)
        yield f"{prefix}.mlp.up_proj.weight", _matrix(generator, MLA["mlp"], hidden)
        yield f"{prefix}.mlp.down_proj.weight", _matrix(generator, hidden, MLA["mlp"], BLOCK_SCALE)
    yield "model.norm.weight", ones.clone()
    rule = torch.empty_like(embedding)
    rule[[successor(token) for token in range(VOCABULARY)]] = embedding * (RULE / hidden)
    yield "lm_head.weight", _matrix(generator, VOCABULARY, hidden, LOGIT_SCALE) + rule


def _matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Inputs of variance 1 come out with standard deviation `scale`."""
    return (torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)).to(torch.bfloat16)


def _save(folder: pathlib.Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _write_tokenizer(folder: pathlib.Path) -> None:
    """A word per token: only the test of the server needs one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
