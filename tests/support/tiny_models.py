"""The models of these tests: folders with made-up weights, in the language of :mod:`nwor_ops.testing.tiny_llama`.

In this language a token is followed by its successor, most of the time. A good part of the tokens that any drafter
proposes is therefore accepted, and a good part is not. The dummy weights of vLLM would not do: such models soon repeat
themselves and accept nearly every draft.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nwor_ops.testing import tiny_llama
from nwor_ops.testing.tiny_llama import (
    BLOCK_SCALE,
    LOGIT_SCALE,
    MAX_TOKENS,
    RULE,
    SEED,
    VOCABULARY,
    Size,
    _weights,
    decoder_layer,
    matrix,
    successor,
)

DEMO = Size()
# The head sizes that vLLM's MLA kernels are made for; all else is small.
MLA = {"layers": 2, "hidden": 256, "heads": 4, "latent": 512, "rope": 64, "nope": 128, "value": 128, "mlp": 512}
# As in DeepSeek's models: vLLM has its own class for it.
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
# Gated DeltaNet and full attention in turn, as in Qwen3-Next and Qwen3.5. vLLM's kernels for it are
# made for these head sizes. The size of a block follows from the state, so a bf16 state keeps blocks at some tokens.
GDN = {
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 128,
    "key_heads": 1,
    "value_heads": 2,
    "state": 128,
    "conv": 4,
}
# The same for two ranks.
WIDE_GDN = GDN | {"key_heads": 2, "value_heads": 4}
# KDA of Kimi Linear.
KDA = {"state": 128, "conv": 4}
# Attention and indexer of GLM-5.3-Flash. vLLM's sparse kernels are made for these head sizes, without rotated keys.
GLM = {"heads": 4, "query_rank": 256, "latent": 512, "nope": 256, "value": 256, "index_heads": 32, "index": 128,
       "pool": 16}  # fmt: skip
# Gated DeltaNet of OLMo hybrid, whose heads of attention share the model's width.
OLMO = {"layers": 4, "heads": 2, "kv_heads": 2, "key_heads": 2, "value_heads": 2, "key": 96, "value": 192, "conv": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
           "shared_expert_intermediate_size": 128}  # fmt: skip
# Qwen3.8-Flash-Next: streams of its hyper-connections, and PLE, which looks up n-grams and convolves them. The sizes of
# its tables of n-grams are the primes from 101 on; vLLM pads their sum.
QWEN4 = {"hc_count": 2, "hc_lowrank": 12, "ple_layer_ids": [2], "ple_embed_dim": 64, "ple_conv_kernel_size": 4,
         "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 101, "split_ngram_parts": 1,
         "make_ngram_vocab_size_divisible_by": 4}  # fmt: skip
NGRAM_ROWS = 101 + 103 + 107 + 109
VISION = {"hidden_size": 64, "intermediate_size": 128}
# Mamba and full attention in turn, as in Granite 4: a state of some 40 KiB, so blocks of 80 tokens.
MAMBA = {"heads": 8, "head_size": 64, "groups": 1, "state": 32, "conv": 4, "expand": 2}
# The common part of the configurations below.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
# Added to configurations of models whose checkpoint brings its configuration class.
REMOTE = {"auto_map": {"AutoConfig": "configuration.Config"}}
PLAIN_CONFIG = """from transformers import PretrainedConfig


class Config(PretrainedConfig):
    model_type = "{model_type}"
"""
MULTIMODAL_CONFIG = """from transformers import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig


class TextConfig(Qwen3_5MoeTextConfig):
    model_type = "{text_type}"


class Config(Qwen3_5MoeConfig):
    model_type = "{model_type}"
    sub_configs = Qwen3_5MoeConfig.sub_configs | {{"text_config": TextConfig}}
"""
MASK = VOCABULARY - 1  # stands where a parallel drafter is to fill a token in


@dataclass
class Model:
    """A model or an adapter.

    Attributes:
        config: contents of ``config.json``.
        weights: by name.
        files: other files of its folder, by name.
        prefix: of the names of its two files.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    files: dict[str, str] = field(default_factory=dict)
    prefix: str = ""

    def save(self, folder: pathlib.Path) -> None:
        """Write it with a tokenizer."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(self.config, indent=2) + "\n"
        for name, text in ({f"{self.prefix}config.json": config} | self.files).items():
            (folder / name).write_text(text)
        save_file(self.weights, str(folder / f"{self.prefix}model.safetensors"), metadata={"format": "pt"})
        _write_tokenizer(folder)


def write_models(folder: pathlib.Path, *names: str) -> dict[str, str]:
    """Write these models, by default all of them. Return their folders by name."""
    for name in names or MODELS:
        MODELS[name]().save(folder / name)
    return {name: str(folder / name) for name in names or MODELS}


def write_served_llama(folder: pathlib.Path, layers: int = DEMO.layers) -> str:
    """Write the tiny Llama with a tokenizer, for a server; return its folder. Each layer of a compiled model costs a
    compilation."""
    llama(size=Size(layers=layers)).save(folder)
    return str(folder)


@functools.cache
def _version() -> str:
    """Return a version of the weights, which changes with the code that writes them."""
    sources = (__file__, str(tiny_llama.__file__))
    return hashlib.sha256(b"".join(pathlib.Path(source).read_bytes() for source in sources)).hexdigest()[:12]


def tiny_folder(name: str) -> str:
    """Return the folder of a model, for all processes. The first process that needs it writes it."""
    folder = pathlib.Path(tempfile.gettempdir(), f"nwor-tests-{os.getuid()}", f"tiny-{name}-{_version()}")
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        MODELS[name]().save(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process wrote it first
            shutil.rmtree(unfinished)
            assert folder.exists()
    return str(folder)


def llama(seed: int = SEED, size: Size = DEMO) -> Model:
    return Model(size.config(), dict(_weights(seed, size)))


def _sliding(layer_types: list[str]) -> Model:
    """A Llama some of whose layers see a window only: two KV-cache groups where the kinds are mixed."""
    model = llama(size=Size(layers=len(layer_types)))
    model.config |= {"layer_types": layer_types, "sliding_window": SLIDING_WINDOW}
    return model


def eagle(biases: bool = False) -> Model:
    """An EAGLE-1 head for the tiny Llama: one layer, which hands the next token's embedding on, with some noise.
    The output layer, which is the target's, knows the rule. Some published heads carry biases that vLLM's model
    has no parameter for."""
    size = Size(layers=1)
    generator = torch.Generator().manual_seed(22)
    weights = {"fc.weight": _embedding_and_noise(generator, size.hidden)} | dict(
        decoder_layer(generator, "layers.0", size)
    )
    del weights["layers.0.input_layernorm.weight"]
    if biases:
        for name in ("fc", "layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"):
            weights[f"{name}.bias"] = torch.zeros_like(weights[f"{name}.weight"][:, 0])
    return Model(size.config(), weights)


def eagle3() -> Model:
    """An EAGLE-3 head for the tiny Llama. Only attention brings the next token's embedding to its residual stream.

    Queries and keys are the embedding itself, so each token attends to itself. Half of the embedding is handed on,
    above the old contents. The head's own output layer knows the rule.
    """
    size = Size(layers=1)
    generator = torch.Generator().manual_seed(24)
    hidden, width, half = size.hidden, size.head_size, size.kv_heads * size.head_size
    config = size.config() | {
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_residual": True,
    }
    keys = 1.3 * torch.eye(half, 2 * hidden)
    group = size.heads // size.kv_heads
    queries = keys.view(size.kv_heads, width, -1).repeat_interleave(group, dim=0).flatten(0, 1)
    out = torch.zeros(hidden, size.heads * width)
    for head in range(size.kv_heads):
        rows = torch.arange(width)
        out[head * width + rows, head * group * width + rows] = 4.0
    embedding = _target_embedding()
    rule = torch.zeros_like(embedding)
    rule[[successor(token) for token in range(VOCABULARY)], :half] = embedding[:, :half] * (2 * RULE / hidden)
    weights = {
        "fc.weight": matrix(generator, hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": _ones(hidden),
        "midlayer.hidden_norm.weight": _ones(hidden),
        "midlayer.self_attn.q_proj.weight": queries.to(torch.bfloat16),
        "midlayer.self_attn.k_proj.weight": keys.to(torch.bfloat16),
        "midlayer.self_attn.v_proj.weight": torch.eye(half, 2 * hidden, dtype=torch.bfloat16),
        "midlayer.self_attn.o_proj.weight": out.to(torch.bfloat16),
        "midlayer.post_attention_layernorm.weight": _ones(hidden),
        **_mlp(generator, "midlayer.mlp", hidden, size.intermediate),
        "norm.weight": _ones(hidden),
        "lm_head.weight": rule,
    }
    return Model(config, weights)


def _medusa(drafts: int = 3) -> Model:
    """One head per draft: the output layer of the tiny Llama, shifted by that number of tokens."""
    target = llama().weights
    embedding, head = target["model.embed_tokens.weight"].float(), target["lm_head.weight"].float()
    # The linear map from the embedding of each token to that of its successor.
    following = (torch.linalg.pinv(embedding) @ embedding[[successor(token) for token in range(VOCABULARY)]]).T
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": DEMO.hidden,
        "vocab_size": VOCABULARY,
        "num_heads": drafts,
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    weights = {}
    for number in range(drafts):
        head = head @ following
        weights[f"blocks.{number}.layers.0.weight"] = torch.zeros(DEMO.hidden, DEMO.hidden, dtype=torch.bfloat16)
        weights[f"lm_heads.{number}.weight"] = head.bfloat16()
    return Model(config, weights)


def _mimo() -> Model:
    """The tiny Llama with MiMo's biases, followed by the layer that predicts one more token (MTP)."""
    generator, hidden, layer = torch.Generator().manual_seed(25), DEMO.hidden, "model.mtp_layers.0"
    weights = llama().weights | dict(decoder_layer(generator, layer, DEMO))
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{layer}.{norm}.weight"] = _ones(hidden)
    weights[f"{layer}.input_proj.weight"] = _embedding_and_noise(generator, hidden).roll(hidden, 1)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = torch.randn(len(weights[name]), generator=generator) / 8
        weights[name.replace("weight", "bias")] = bias.bfloat16()
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    return Model(DEMO.config() | mimo, weights)


def _parallel_drafter(architecture: str, **more: Any) -> Model:
    """A DFlash or DSpark head for the tiny Llama. One layer, which sees the target's hidden
    states as keys and values, and a block of masks after the last token."""
    size = Size(layers=1)
    generator = torch.Generator().manual_seed(25)
    config = size.config() | {"architectures": [architecture], "model_type": "qwen3", **more}
    weights = {
        "fc.weight": matrix(generator, size.hidden, 3 * size.hidden),
        "hidden_norm.weight": _ones(size.hidden),
        **_attention(generator, "layers.0", size.hidden, size.heads, size.kv_heads, size.head_size, _ones),
        **_mlp(generator, "layers.0.mlp", size.hidden, size.intermediate),
        "norm.weight": _ones(size.hidden),
    }
    return Model(config, weights)


def _dspark() -> Model:
    """Its Markov head knows the rule; its confidence head makes of the hidden state what it likes."""
    model = _parallel_drafter(
        "Qwen3DSparkModel",
        target_layer_ids=[0, 1, 2],
        mask_token_id=MASK,
        markov_rank=VOCABULARY,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=False,
    )
    generator = torch.Generator().manual_seed(26)
    hidden = model.config["hidden_size"]
    bias = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.bfloat16)
    bias[[successor(token) for token in range(VOCABULARY)], range(VOCABULARY)] = 2 * RULE
    model.weights |= {
        "markov_head.markov_w1.weight": torch.eye(VOCABULARY, dtype=torch.bfloat16),
        "markov_head.markov_w2.weight": bias,
        "confidence_head.proj.weight": torch.randn(1, hidden, generator=generator) / hidden**0.5,
        "confidence_head.proj.bias": torch.ones(1),
    }
    return model


def _lora() -> Model:
    """An adapter of the tiny Llama's attention."""
    size = Size()
    wide = size.heads * size.head_size
    matrices = {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(size.layers)
        for name, shape in (("q_proj", (wide, size.hidden)), ("o_proj", (size.hidden, wide)))
    }
    return _adapter(["q_proj", "o_proj"], matrices)


def _gdn_lora() -> Model:
    """An adapter of what the Gated DeltaNet layers of the tiny Qwen3.5 hand on."""
    shape = (Size().hidden, GDN["value_heads"] * GDN["state"])
    matrices = {f"model.layers.{layer}.linear_attn.out_proj": shape for layer in range(GDN["layers"] - 1)}
    return _adapter(["out_proj"], matrices)


def _adapter(names: list[str], matrices: dict[str, tuple[int, int]]) -> Model:
    """A LoRA adapter. vLLM's kernel adds what the first matrix makes in any order: here each of its rows picks one
    number, so that every order gives the same sum.

    Args:
        names: names of the modules that it changes.
        matrices: rows and columns of each matrix that it changes.
    """
    rank = 8
    generator = torch.Generator().manual_seed(34)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": names,
    }
    weights = {}
    for name, (rows, columns) in matrices.items():
        picked = torch.randperm(columns, generator=generator)[:rank]
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.eye(columns, dtype=torch.bfloat16)[picked]
        weights[f"base_model.model.{name}.lora_B.weight"] = matrix(generator, rows, rank)
    return Model(settings, weights, prefix="adapter_")


def _mla(rope_scaling: dict[str, Any] | None = None, seed: int = 23) -> Model:
    """DeepSeek-V2's attention in a small dense model."""
    generator = torch.Generator().manual_seed(seed)
    embedding = _embedding(generator, MLA["hidden"])
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(MLA["layers"]):
        weights |= _mla_layer(generator, f"model.layers.{layer}")
    return Model(_mla_config() | {"rope_scaling": rope_scaling}, weights | _output(generator, embedding))


def _mla_mtp() -> Model:
    """DeepSeek-V3's with a layer for multi-token prediction, which hands the next token's embedding on."""
    hidden, layer = MLA["hidden"], f"model.layers.{MLA['layers']}"
    model = _mla()
    model.config |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": MLA["layers"] + 1,
    }
    generator = torch.Generator().manual_seed(27)
    model.weights |= _mla_layer(generator, layer) | {
        f"{layer}.embed_tokens.weight": model.weights["model.embed_tokens.weight"].clone(),
        f"{layer}.enorm.weight": _ones(hidden),
        f"{layer}.hnorm.weight": _ones(hidden),
        f"{layer}.eh_proj.weight": _embedding_and_noise(generator, hidden),
        f"{layer}.shared_head.norm.weight": _ones(hidden),
        f"{layer}.shared_head.head.weight": model.weights["lm_head.weight"].clone(),
    }
    return model


def _kimi(heads: int = 2) -> Model:
    """Kimi Linear without experts: three layers of KDA, and one of MLA whose keys are not rotated."""
    hidden, width, layers = MLA["hidden"], KDA["state"], 4
    kda = {"num_heads": heads, "head_dim": width, "short_conv_kernel_size": KDA["conv"],
           "kda_layers": list(range(1, layers)), "full_attn_layers": [layers]}  # fmt: skip
    left_out = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group")
    config = {name: value for name, value in _mla_config().items() if name not in left_out} | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": layers,
        "mla_use_nope": True,
        "linear_attn_config": kda,
    }
    generator = torch.Generator().manual_seed(43)
    embedding = _embedding(generator, hidden)
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(layers - 1):
        weights |= _kda_layer(generator, f"model.layers.{layer}", heads)
    weights |= _mla_layer(generator, f"model.layers.{layers - 1}")
    weights |= _output(generator, embedding)
    return Model(config, weights)


def _kda_layer(generator: torch.Generator, prefix: str, heads: int, hidden: int = MLA["hidden"]) -> dict[str, Tensor]:
    width = KDA["state"]
    size, layer = heads * width, f"{prefix}.self_attn"
    weights = {
        f"{prefix}.input_layernorm.weight": _ones(hidden),
        f"{prefix}.post_attention_layernorm.weight": _ones(hidden),
        f"{layer}.b_proj.weight": matrix(generator, heads, hidden),
        f"{layer}.A_log": torch.zeros(heads),
        f"{layer}.dt_bias": torch.ones(size),
        f"{layer}.o_norm.weight": _ones(width),
        f"{layer}.o_proj.weight": matrix(generator, hidden, size, BLOCK_SCALE),
    }
    for part in "qkv":
        convolution = torch.randn(size, 1, KDA["conv"], generator=generator) / KDA["conv"] ** 0.5
        weights[f"{layer}.{part}_proj.weight"] = matrix(generator, size, hidden, 1.5)
        weights[f"{layer}.{part}_conv1d.weight"] = convolution.to(torch.bfloat16)
    for gate in "fg":  # the gates of the decay and of the norm, each of low rank
        weights[f"{layer}.{gate}_a_proj.weight"] = matrix(generator, width, hidden)
        weights[f"{layer}.{gate}_b_proj.weight"] = matrix(generator, size, width)
    return weights | _mlp(generator, f"{prefix}.mlp", hidden, MLA["mlp"])


def _glm(heads: int = 2) -> Model:
    """GLM-5.3-Flash without experts and without mixed residual streams: three layers of KDA and one of sparse MLA."""
    hidden, layers = MLA["hidden"], 4
    config = {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "hidden_size": hidden,
        "intermediate_size": MLA["mlp"],
        "moe_intermediate_size": MLA["mlp"],
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"],  # versions of transformers rename it
        "mlp_layer_types": ["dense"] * layers,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_attention_heads": GLM["heads"],
        "num_key_value_heads": GLM["heads"],
        "q_lora_rank": GLM["query_rank"],
        "kv_lora_rank": GLM["latent"],
        "qk_nope_head_dim": GLM["nope"],
        "qk_rope_head_dim": 0,
        "v_head_dim": GLM["value"],
        "mla_use_nope": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "index_topk": 2048,
        "index_kpool": GLM["pool"],
        "index_n_heads": GLM["index_heads"],
        "index_head_dim": GLM["index"],
        "indexer_types": ["full"] * layers,
        "indexer_rope_interleave": True,
        "linear_num_heads": heads,
        "linear_head_dim": KDA["state"],
        "linear_conv_kernel_dim": KDA["conv"],
        "linear_lower_bound": -5.0,
        "mhc": False,
        **COMMON,
        "pad_token_id": 0,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    }
    generator = torch.Generator().manual_seed(47)
    embedding = _embedding(generator, hidden)
    weights = {"model.embed_tokens.weight": embedding}
    for layer in range(layers - 1):
        weights |= _kda_layer(generator, f"model.layers.{layer}", heads)
        # Most decays are near 0.9: exp(-5 * sigmoid(-4)).
        weights[f"model.layers.{layer}.self_attn.dt_bias"] = torch.full((heads * KDA["state"],), -4.0)
    weights |= _sparse_mla_layer(generator, f"model.layers.{layers - 1}") | _output(generator, embedding)
    return Model(config, weights)


def _sparse_mla_layer(generator: torch.Generator, prefix: str) -> dict[str, Tensor]:
    hidden, heads, rank, latent = MLA["hidden"], GLM["heads"], GLM["query_rank"], GLM["latent"]
    layer, indexer = f"{prefix}.self_attn", f"{prefix}.self_attn.indexer"
    return {
        f"{prefix}.input_layernorm.weight": _ones(hidden),
        f"{prefix}.post_attention_layernorm.weight": _ones(hidden),
        f"{layer}.q_a_proj.weight": matrix(generator, rank, hidden),
        f"{layer}.q_a_layernorm.weight": _ones(rank),
        f"{layer}.q_b_proj.weight": matrix(generator, heads * GLM["nope"], rank, 1.5),
        f"{layer}.kv_a_proj_with_mqa.weight": matrix(generator, latent, hidden),
        f"{layer}.kv_a_layernorm.weight": _ones(latent),
        f"{layer}.kv_b_proj.weight": matrix(generator, heads * (GLM["nope"] + GLM["value"]), latent, 1.5),
        f"{layer}.o_proj.weight": matrix(generator, hidden, heads * GLM["value"], BLOCK_SCALE),
        f"{indexer}.wq_b.weight": matrix(generator, GLM["index_heads"] * GLM["index"], rank),
        f"{indexer}.wk.weight": matrix(generator, GLM["index"], hidden),
        f"{indexer}.weights_proj.weight": matrix(generator, GLM["index_heads"], hidden),
        f"{indexer}.k_norm.weight": torch.ones(GLM["index"]),
        f"{indexer}.k_norm.bias": torch.zeros(GLM["index"]),
        f"{indexer}.index_kpool_compress_ape": torch.zeros(GLM["pool"], GLM["index"]),
        f"{indexer}.index_kpool_compress_gate": matrix(generator, GLM["index"], hidden),
        **_mlp(generator, f"{prefix}.mlp", hidden, MLA["mlp"]),
    }


def _hybrid_config(sizes: dict[str, int], key_width: int, value_width: int) -> dict[str, Any]:
    """Layers of Gated DeltaNet, and one of attention after them."""
    return {
        "hidden_size": Size().hidden,
        "intermediate_size": Size().intermediate,
        "num_hidden_layers": sizes["layers"],
        "layer_types": ["linear_attention"] * (sizes["layers"] - 1) + ["full_attention"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "linear_num_key_heads": sizes["key_heads"],
        "linear_num_value_heads": sizes["value_heads"],
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": value_width,
        "linear_conv_kernel_dim": sizes["conv"],
        **COMMON,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    }


def _olmo(sizes: dict[str, int] = OLMO, allow_neg_eigval: bool = True) -> Model:
    """OLMo hybrid: three layers of Gated DeltaNet, and one of attention, with its norms after attention and MLP."""
    size = Size()
    hidden, intermediate, width = size.hidden, size.intermediate, size.hidden // sizes["heads"]
    keys, values = sizes["key_heads"] * sizes["key"], sizes["value_heads"] * sizes["value"]
    config = {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        **_hybrid_config(sizes, sizes["key"], sizes["value"]),
        "linear_allow_neg_eigval": allow_neg_eigval,
        "pad_token_id": 0,
        "max_position_embeddings": MAX_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    generator = torch.Generator().manual_seed(44)
    embedding = _embedding(generator, hidden)
    weights = {"model.embed_tokens.weight": embedding}
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        if kind == "full_attention":
            attention = _attention(generator, prefix, hidden, sizes["heads"], sizes["kv_heads"], width, _ones)
            del attention[f"{prefix}.input_layernorm.weight"]
            weights |= attention | {
                f"{prefix}.post_attention_layernorm.weight": BLOCK_SCALE * _ones(hidden),
                f"{prefix}.post_feedforward_layernorm.weight": BLOCK_SCALE * _ones(hidden),
                f"{prefix}.self_attn.q_norm.weight": _ones(sizes["heads"] * width),
                f"{prefix}.self_attn.k_norm.weight": _ones(sizes["kv_heads"] * width),
            }
        else:
            linear = f"{prefix}.linear_attn"
            weights |= {
                f"{prefix}.input_layernorm.weight": _ones(hidden),
                f"{prefix}.post_attention_layernorm.weight": _ones(hidden),
                f"{linear}.g_proj.weight": matrix(generator, values, hidden),
                f"{linear}.a_proj.weight": matrix(generator, sizes["value_heads"], hidden),
                f"{linear}.b_proj.weight": matrix(generator, sizes["value_heads"], hidden),
                f"{linear}.A_log": torch.zeros(sizes["value_heads"]),
                f"{linear}.dt_bias": torch.ones(sizes["value_heads"]),
                f"{linear}.o_norm.weight": _ones(sizes["value"]),
                f"{linear}.o_proj.weight": matrix(generator, hidden, values, BLOCK_SCALE),
            }
            for part, rows in (("q", keys), ("k", keys), ("v", values)):
                convolution = torch.randn(rows, 1, sizes["conv"], generator=generator) / sizes["conv"] ** 0.5
                weights[f"{linear}.{part}_proj.weight"] = matrix(generator, rows, hidden, 1.5)
                weights[f"{linear}.{part}_conv1d.weight"] = convolution.to(torch.bfloat16)
        weights |= _mlp(generator, f"{prefix}.mlp", hidden, intermediate)
    weights |= _output(generator, embedding)
    return Model(config, weights)


def _mla_sizes(layers: int = MLA["layers"], heads: int = MLA["heads"]) -> dict[str, Any]:
    """The part of a configuration that DeepSeek and Bailing share. No layer has experts."""
    return {
        "hidden_size": MLA["hidden"],
        "intermediate_size": MLA["mlp"],
        "moe_intermediate_size": MLA["mlp"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": MLA["latent"],
        "qk_nope_head_dim": MLA["nope"],
        "qk_rope_head_dim": MLA["rope"],
        "v_head_dim": MLA["value"],
        "first_k_dense_replace": layers,
        "num_experts_per_tok": 1,
        **COMMON,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }


def _mla_config() -> dict[str, Any]:
    return _mla_sizes() | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
        "attention_bias": False,
    }


def _mla_layer(generator: torch.Generator, prefix: str, heads: int = MLA["heads"]) -> dict[str, Tensor]:
    hidden, latent, layer = MLA["hidden"], MLA["latent"], f"{prefix}.self_attn"
    return {
        f"{prefix}.input_layernorm.weight": _ones(hidden),
        f"{layer}.q_proj.weight": matrix(generator, heads * (MLA["nope"] + MLA["rope"]), hidden, 1.5),
        f"{layer}.kv_a_proj_with_mqa.weight": matrix(generator, latent + MLA["rope"], hidden),
        f"{layer}.kv_a_layernorm.weight": _ones(latent),
        f"{layer}.kv_b_proj.weight": matrix(generator, heads * (MLA["nope"] + MLA["value"]), latent, 1.5),
        f"{layer}.o_proj.weight": matrix(generator, hidden, heads * MLA["value"], BLOCK_SCALE),
        f"{prefix}.post_attention_layernorm.weight": _ones(hidden),
        **_mlp(generator, f"{prefix}.mlp", hidden, MLA["mlp"]),
    }


def _gdn_mtp(sizes: dict[str, int] = GDN, experts: bool = False) -> Model:
    """Qwen3.5's layers in a small model: three of Gated DeltaNet, one of attention, and one for multi-token prediction,
    each with an MLP or with experts. Its norms are 1 + weight. Longer prompts fit."""
    hidden, intermediate = Size().hidden, Size().intermediate
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **_hybrid_config(sizes, sizes["state"], sizes["state"]),
        "head_dim": sizes["head_size"],
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 2 * MAX_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attn_output_gate": True,
    }
    generator = torch.Generator().manual_seed(28)
    embedding = _embedding(generator, hidden)
    attention = hidden, sizes["heads"], sizes["kv_heads"], sizes["head_size"], _zeros
    mlp = _experts if experts else _mlp
    weights = {"model.embed_tokens.weight": embedding}
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        if kind == "full_attention":
            weights |= _attention(generator, prefix, *attention, gate=True)
        else:
            weights |= _delta_net(generator, prefix, hidden, sizes)
        weights |= mlp(generator, f"{prefix}.mlp", hidden, intermediate)
    weights |= {
        "model.norm.weight": _zeros(hidden),
        "lm_head.weight": matrix(generator, VOCABULARY, hidden, LOGIT_SCALE) + _rule(embedding),
        "mtp.fc.weight": _embedding_and_noise(generator, hidden),
        "mtp.pre_fc_norm_embedding.weight": _zeros(hidden),
        "mtp.pre_fc_norm_hidden.weight": _zeros(hidden),
        **_attention(generator, "mtp.layers.0", *attention, gate=True),
        **mlp(generator, "mtp.layers.0.mlp", hidden, intermediate),
        "mtp.norm.weight": _zeros(hidden),
    }
    return Model(config, weights)


def _interns2_mobius(banks: int = 2) -> Model:
    """InternS2 Mobius. It is Qwen3.5's text model with banks of experts that layers share in turn. Each layer has its
    own shared expert."""
    numbers = {"num_blocks": banks, "mtp_num_experts": EXPERTS["num_experts"],
               "mtp_num_experts_per_tok": EXPERTS["num_experts_per_tok"]}  # fmt: skip
    model = _multimodal("InternS2Mobius", "interns2_mobius", remote="interns2_mobius_text", text=numbers)
    layers = r"model\.language_model\.layers\."
    for name in list(model.weights):
        if found := re.match(rf"{layers}(\d+)\.mlp\.((?:gate|experts)\..*)", name):
            weight = model.weights.pop(name)
            if int(found[1]) < banks:
                model.weights[f"model.language_model.meta_mlp.{found[1]}.{found[2]}"] = weight
    return model


def _multimodal(
    architecture: str,
    model_type: str,
    vision: dict[str, Any] | None = None,
    remote: str = "",
    text: dict[str, Any] | None = None,
) -> Model:
    """Qwen3.5's text model as a part of a multimodal one. The vision part has no weights: start such an engine with
    ``language_model_only``.

    Args:
        architecture: without the common end of such names.
        vision: configuration of the vision part; Qwen's by default.
        remote: type of the text model, with experts, of a checkpoint that brings its configuration classes. Start such
            an engine with ``trust_remote_code``.
        text: settings that the text configuration gets in addition.
    """
    model = _gdn_mtp(experts=bool(remote))
    inner = model.config | ({"model_type": remote} | EXPERTS if remote else {}) | (text or {})
    del inner["architectures"]
    # A head has 16 frequencies: those of time, height and width.
    inner["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    qwen = {"depth": 1, "num_heads": 4, "out_hidden_size": inner["hidden_size"], "num_position_embeddings": 16}
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": inner,
        "vision_config": VISION | (qwen if vision is None else vision),
        **{name: VOCABULARY + number for number, name in enumerate(special)},  # no prompt has them
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    inside = {re.sub(r"^model\.", "model.language_model.", name): weight for name, weight in model.weights.items()}
    if not remote:
        return Model(config, inside)
    files = {"configuration.py": MULTIMODAL_CONFIG.format(model_type=model_type, text_type=remote)}
    return Model(config | REMOTE, inside, files)


def _qwen4_exp() -> Model:
    """Qwen3.8-Flash-Next without its sparse attention and its layer for multi-token prediction. Its first layers
    are Qwen3.5's with experts. Hyper-connections with several streams take the place of norms and residuals."""
    model = _gdn_mtp(experts=True)
    config = model.config | EXPERTS | QWEN4 | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "output_gate_type": "sigmoid",
    }  # fmt: skip
    config["layer_types"][-1] = _name_of_sparse_attention()
    hidden, streams = config["hidden_size"], QWEN4["hc_count"]
    wide, embedded, conv = streams * hidden, QWEN4["ple_embed_dim"], QWEN4["ple_conv_kernel_size"]
    weights = {
        name: weight
        for name, weight in model.weights.items()
        if not name.startswith("mtp.") and not re.search("(input|post_attention)_layernorm|model.norm", name)
    }
    generator = torch.Generator().manual_seed(45)

    def connection(prefix: str, injects: bool = True) -> dict[str, Tensor]:
        found = {
            f"{prefix}.hc_norm.weight": _zeros(wide),
            f"{prefix}.input_mix_weight_down.weight": matrix(generator, QWEN4["hc_lowrank"], wide),
            f"{prefix}.input_mix_weight_up.weight": matrix(generator, wide, QWEN4["hc_lowrank"]),
        }
        return found | ({f"{prefix}.block_inject_weight.weight": matrix(generator, streams, wide)} if injects else {})

    for layer in range(config["num_hidden_layers"]):
        for part in ("attn", "mlp"):
            weights |= connection(f"model.layers.{layer}.{part}_hyper_connection")
    weights |= connection("model.hyper_connection_mixer", injects=False)
    # The last mixer weighs each stream by about a half.
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = matrix(generator, VOCABULARY, hidden, LOGIT_SCALE) + 2 * _rule(embedding)
    for layer in QWEN4["ple_layer_ids"]:
        ple = f"model.layers.{layer - 1}.ple"
        convolution = torch.randn(wide, 1, conv, generator=generator) * (BLOCK_SCALE / conv**0.5)
        weights |= {
            f"{ple}.key_proj.weight": matrix(generator, wide, embedded),
            f"{ple}.value_proj.weight": matrix(generator, hidden, embedded),
            **{f"{ple}.norm_{name}.weight": _zeros(wide) for name in ("key", "query", "conv")},
            f"{ple}.conv1d.weight": convolution.to(torch.bfloat16),
            f"{ple}.ple_embedding.ngram_embedding.shard_0.weight": torch.randn(
                NGRAM_ROWS, embedded // ((QWEN4["ngram_size"] - 1) * QWEN4["heads_per_ngram"]), generator=generator
            ).to(torch.bfloat16),
        }
    return Model(config, weights)


def _name_of_sparse_attention() -> str:
    """Return the layer type of Qwen3.8-Flash-Next that the installed transformers accepts. 5.18 renamed it."""
    import transformers
    from packaging.version import Version

    renamed = Version(transformers.__version__) >= Version("5.18")
    return "indexed_attention" if renamed else "qwen_sparse_attention"


def _alice() -> Model:
    """Alice AI: Kimi Linear's KDA with Qwen3.5's attention and experts. Weighted sums of earlier layers' outputs
    take the place of its residuals. transformers has no configuration for it."""
    model = _gdn_mtp(WIDE_GDN | {"key_heads": 2, "value_heads": 2}, experts=True)
    config = model.config | EXPERTS | {
        "architectures": ["AliceAIForCausalLM"],
        "model_type": "alice_ai",
        "mtp_num_hidden_layers": 0,
        "block_attn_res_block_size": 2,
        "kda_allow_negative_eigenvalues": False,
        "router_score_function": "sigmoid",
        "router_bias_correction": True,
    }  # fmt: skip
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(46)
    weights = {
        name: weight
        for name, weight in model.weights.items()
        if not name.startswith("mtp.") and ".linear_attn." not in name
    }
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS["num_experts"])
        for part in ("attn_res", "mlp_res")[layer == 0 :]:
            weights[f"{prefix}.{part}_proj.weight"] = matrix(generator, 1, hidden)
            weights[f"{prefix}.{part}_norm_weight"] = _ones(hidden)
        if kind == "linear_attention":
            kda = _kda_layer(generator, prefix, config["linear_num_key_heads"], hidden)
            inside = f"{prefix}.self_attn."
            weights |= {
                name.replace("self_attn", "linear_attn"): weight
                for name, weight in kda.items()
                if name.startswith(inside)
            }
    weights |= {
        "model.attnres_final.res_proj.weight": matrix(generator, 1, hidden),
        "model.attnres_final.res_norm_weight": _ones(hidden),
    }
    return Model(config | REMOTE, weights, {"configuration.py": PLAIN_CONFIG.format(model_type="alice_ai")})


def _bailing(heads: int = 4) -> Model:
    """Bailing V3 without experts: three layers of KDA whose gates have full rank, and one of MLA."""
    hidden, width, layers = MLA["hidden"], KDA["state"], 4
    config = _mla_sizes(layers, heads) | {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "layer_group_size": layers,
        "head_dim": width,
        "short_conv_kernel_size": KDA["conv"],
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "num_experts": 2,
        "num_shared_experts": 0,
        "num_nextn_predict_layers": 0,
        "use_bias": False,
        "use_qkv_bias": False,
    }
    generator = torch.Generator().manual_seed(47)
    embedding = _embedding(generator, hidden)
    weights = {"model.word_embeddings.weight": embedding}
    for layer in range(layers - 1):
        prefix = f"model.layers.{layer}"
        kda = _kda_layer(generator, prefix, heads)
        for gate in "fg":
            for part in "ab":
                del kda[f"{prefix}.self_attn.{gate}_{part}_proj.weight"]
            kda[f"{prefix}.self_attn.{gate}_proj.weight"] = matrix(generator, heads * width, hidden)
        weights |= {name.replace("self_attn", "attention"): weight for name, weight in kda.items()}
    prefix = f"model.layers.{layers - 1}"
    for name, weight in _mla_layer(generator, prefix, heads).items():
        weights[name.replace("self_attn.o_proj", "attention.dense").replace("self_attn", "attention")] = weight
    weights |= _output(generator, embedding)
    return Model(config | REMOTE, weights, {"configuration.py": PLAIN_CONFIG.format(model_type="bailing_hybrid")})


def _qwen3_next_mtp(experts: bool = False) -> Model:
    """The same weights in Qwen3-Next's classes, whose projections are interleaved by key head: here there is one. To
    have no experts vLLM needs ``gpu_worker_hybrid``."""
    model = _gdn_mtp(experts=experts)
    config, weights = model.config, model.weights
    config |= {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **(EXPERTS if experts else {"num_experts": 0}),
        "num_nextn_predict_layers": 1,
    }
    for layer, kind in enumerate(config["layer_types"]):
        if kind == "linear_attention":
            prefix = f"model.layers.{layer}.linear_attn.in_proj_"
            for whole, parts in (("qkvz", ("qkv", "z")), ("ba", ("b", "a"))):
                rows = [weights.pop(f"{prefix}{part}.weight") for part in parts]
                weights[f"{prefix}{whole}.weight"] = torch.cat(rows)
    return model


def _delta_net(generator: torch.Generator, prefix: str, hidden: int, sizes: dict[str, int]) -> dict[str, Tensor]:
    """A layer of Gated DeltaNet without its MLP."""
    heads = sizes["value_heads"]
    keys, values = sizes["key_heads"] * sizes["state"], heads * sizes["state"]
    layer = f"{prefix}.linear_attn"
    convolution = torch.randn(2 * keys + values, 1, sizes["conv"], generator=generator) / sizes["conv"] ** 0.5
    return {
        f"{prefix}.input_layernorm.weight": _zeros(hidden),
        f"{prefix}.post_attention_layernorm.weight": _zeros(hidden),
        f"{layer}.in_proj_qkv.weight": matrix(generator, 2 * keys + values, hidden, 1.5),
        f"{layer}.in_proj_z.weight": matrix(generator, values, hidden),
        f"{layer}.in_proj_b.weight": matrix(generator, heads, hidden),
        f"{layer}.in_proj_a.weight": matrix(generator, heads, hidden),
        f"{layer}.conv1d.weight": convolution.to(torch.bfloat16),
        f"{layer}.dt_bias": _ones(heads),
        f"{layer}.A_log": torch.zeros(heads),
        f"{layer}.norm.weight": _ones(sizes["state"]),
        f"{layer}.out_proj.weight": matrix(generator, hidden, values, BLOCK_SCALE),
    }


def _mamba() -> Model:
    """Granite 4's layers in a small dense model: three of Mamba 2, two of attention."""
    size = Size()
    hidden, shared = size.hidden, size.intermediate
    layer_types = ["linear_attention", "full_attention"] * 2 + ["linear_attention"]
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": hidden,
        "intermediate_size": shared,
        "shared_intermediate_size": shared,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "attention_multiplier": size.head_size**-0.5,
        "attention_bias": False,
        "position_embedding_type": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "mamba_n_heads": MAMBA["heads"],
        "mamba_d_head": MAMBA["head_size"],
        "mamba_n_groups": MAMBA["groups"],
        "mamba_d_state": MAMBA["state"],
        "mamba_d_conv": MAMBA["conv"],
        "mamba_expand": MAMBA["expand"],
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        **COMMON,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
    }
    generator = torch.Generator().manual_seed(29)
    embedding = _embedding(generator, hidden)
    weights = {"model.embed_tokens.weight": embedding}
    for layer, kind in enumerate(layer_types):
        prefix = f"model.layers.{layer}"
        if kind == "full_attention":
            weights |= _attention(generator, prefix, hidden, size.heads, size.kv_heads, size.head_size, _ones)
            for name in ("q_norm", "k_norm"):
                del weights[f"{prefix}.self_attn.{name}.weight"]
        else:
            weights |= _mamba_layer(generator, prefix, hidden)
        weights |= {
            f"{prefix}.shared_mlp.input_linear.weight": matrix(generator, 2 * shared, hidden),
            f"{prefix}.shared_mlp.output_linear.weight": matrix(generator, hidden, shared, BLOCK_SCALE),
        }
    weights |= _output(generator, embedding)
    return Model(config, weights)


def _mamba_layer(generator: torch.Generator, prefix: str, hidden: int) -> dict[str, Tensor]:
    """A layer of Mamba 2 without its MLP."""
    values, heads, layer = MAMBA["expand"] * hidden, MAMBA["heads"], f"{prefix}.mamba"
    convolved = values + 2 * MAMBA["groups"] * MAMBA["state"]
    convolution = torch.randn(convolved, 1, MAMBA["conv"], generator=generator) / MAMBA["conv"] ** 0.5
    return {
        f"{prefix}.input_layernorm.weight": _ones(hidden),
        f"{prefix}.post_attention_layernorm.weight": _ones(hidden),
        f"{layer}.in_proj.weight": matrix(generator, values + convolved + heads, hidden, 1.5),
        f"{layer}.conv1d.weight": convolution.to(torch.bfloat16),
        f"{layer}.conv1d.bias": _zeros(convolved),
        f"{layer}.A_log": torch.zeros(heads),
        f"{layer}.D": _ones(heads),
        f"{layer}.dt_bias": _zeros(heads),
        f"{layer}.norm.weight": _ones(values),
        f"{layer}.out_proj.weight": matrix(generator, hidden, values, BLOCK_SCALE),
    }


def _attention(
    generator: torch.Generator,
    prefix: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    width: int,
    norm: Callable[[int], Tensor],
    gate: bool = False,
) -> dict[str, Tensor]:
    """A layer of attention as in Qwen3, keys and queries normed, without its MLP. With a gate the queries' projection
    has its rows, too, head by head."""
    layer, queries = f"{prefix}.self_attn", heads * width * (1 + gate)
    return {
        f"{prefix}.input_layernorm.weight": norm(hidden),
        f"{prefix}.post_attention_layernorm.weight": norm(hidden),
        f"{layer}.q_proj.weight": matrix(generator, queries, hidden, 1.5),
        f"{layer}.k_proj.weight": matrix(generator, kv_heads * width, hidden, 1.5),
        f"{layer}.v_proj.weight": matrix(generator, kv_heads * width, hidden),
        f"{layer}.o_proj.weight": matrix(generator, hidden, heads * width, BLOCK_SCALE),
        f"{layer}.q_norm.weight": norm(width),
        f"{layer}.k_norm.weight": norm(width),
    }


def _mlp(generator: torch.Generator, prefix: str, hidden: int, intermediate: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.gate_proj.weight": matrix(generator, intermediate, hidden),
        f"{prefix}.up_proj.weight": matrix(generator, intermediate, hidden),
        f"{prefix}.down_proj.weight": matrix(generator, hidden, intermediate, BLOCK_SCALE),
    }


def _experts(generator: torch.Generator, prefix: str, hidden: int, intermediate: int) -> dict[str, Tensor]:
    """Experts in the place of an MLP, and a gate that chooses two of them. One more expert, with a separate gate, gets
    every token."""
    width, shared = EXPERTS["moe_intermediate_size"], EXPERTS["shared_expert_intermediate_size"]
    weights = {
        f"{prefix}.gate.weight": matrix(generator, EXPERTS["num_experts"], hidden, 2.0),
        f"{prefix}.shared_expert_gate.weight": matrix(generator, 1, hidden),
        **_mlp(generator, f"{prefix}.shared_expert", hidden, shared),
    }
    for expert in range(EXPERTS["num_experts"]):
        weights |= _mlp(generator, f"{prefix}.experts.{expert}", hidden, width)
    return weights


def _embedding_and_noise(generator: torch.Generator, hidden: int) -> Tensor:
    """What a drafter makes of the next token's embedding and the target's hidden state: the first, with some noise."""
    noise = matrix(generator, hidden, hidden, 0.3)
    return torch.cat((torch.eye(hidden, dtype=torch.bfloat16), noise), dim=1)


def _embedding(generator: torch.Generator, hidden: int) -> Tensor:
    return matrix(generator, VOCABULARY, hidden, hidden**0.5)


def _output(generator: torch.Generator, embedding: Tensor) -> dict[str, Tensor]:
    """The norm and the output layer after the last layer."""
    hidden = embedding.shape[1]
    return {
        "model.norm.weight": _ones(hidden),
        "lm_head.weight": matrix(generator, VOCABULARY, hidden, LOGIT_SCALE) + _rule(embedding),
    }


def _rule(embedding: Tensor) -> Tensor:
    """What the output layer knows of the language."""
    rule = torch.empty_like(embedding)
    rule[[successor(token) for token in range(VOCABULARY)]] = embedding * (RULE / embedding.shape[1])
    return rule


def _target_embedding() -> Tensor:
    """The first weights that are drawn for the tiny Llama."""
    return _embedding(torch.Generator().manual_seed(SEED), Size().hidden)


def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.bfloat16)


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


# A draft model whose rows of keys and values are as wide as those of Gated DeltaNet's models.
DRAFT_OF_GDN = Size(layers=1, heads=GDN["heads"], kv_heads=GDN["kv_heads"], head_size=GDN["head_size"])
MODELS: dict[str, Callable[[], Model]] = {
    "llama": llama,
    "draft": lambda: llama(seed=21, size=Size(layers=1)),
    "eagle": eagle,
    "eagle_with_biases": lambda: eagle(biases=True),
    "sliding": lambda: _sliding(["sliding_attention"] * 3),
    "hybrid": lambda: _sliding(["sliding_attention", "full_attention"] * 2),
    "llama_lora": _lora,
    "gdn_lora": _gdn_lora,
    "mqa": lambda: llama(size=Size(kv_heads=1)),
    "mla": _mla,
    "mla_draft": lambda: _mla(seed=33),
    "mla_yarn": lambda: _mla(YARN),
    "mla_mtp": _mla_mtp,
    "gdn_mtp": _gdn_mtp,
    "gdn_mtp_wide": lambda: _gdn_mtp(WIDE_GDN),
    "gdn_mtp_multimodal": lambda: _multimodal("Qwen3_5", "qwen3_5"),
    "minicpm_v": lambda: _multimodal(
        "MiniCPMV4_6", "minicpmv4_6", {"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 64}
    ),
    "interns2_preview": lambda: _multimodal("InternS2Preview", "intern_s2_preview", remote="qwen3_5_moe_text"),
    "interns2_mobius": _interns2_mobius,
    "qwen3_next_mtp": _qwen3_next_mtp,
    "qwen3_next_experts_mtp": lambda: _qwen3_next_mtp(experts=True),
    "qwen4_exp": _qwen4_exp,
    "draft_of_gdn": lambda: llama(seed=21, size=DRAFT_OF_GDN),
    "kimi": _kimi,
    "kimi_of_one_head": lambda: _kimi(heads=1),
    "glm": _glm,
    "alice": _alice,
    "bailing": _bailing,
    "olmo": _olmo,
    "olmo_repeated": lambda: _olmo(OLMO | {"key_heads": 1}, allow_neg_eigval=False),
    "mamba": _mamba,
    "eagle3": eagle3,
    "medusa": _medusa,
    "mimo": _mimo,
    "dflash": lambda: _parallel_drafter(
        "DFlashDraftModel", dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}
    ),
    "dspark": _dspark,
}
