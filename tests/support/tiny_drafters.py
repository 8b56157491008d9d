"""Drafters for the tiny Llama, and a model with its own drafter.

Their constructed weights know the rule of :mod:`nwor_ops.testing.tiny_llama`, so some of their proposals are accepted
and some are not. The output layer of the model maps the embedding of a token to the next token. A drafter therefore
knows the rule if it passes on the embedding of the token before the one that it drafts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable

import tiny_models
import torch
from tiny_models import Model, eagle, eagle3, llama
from torch import Tensor

from nwor_ops.testing import tiny_llama
from nwor_ops.testing.tiny_llama import VOCABULARY, Size, decoder_layer, matrix, successor

DRAFTS = 3
SIZE = Size()


@functools.cache
def _version() -> str:
    """Return a version of the weights, which changes with the code that writes them."""
    sources = (__file__, str(tiny_models.__file__), str(tiny_llama.__file__))
    return hashlib.sha256(b"".join(pathlib.Path(source).read_bytes() for source in sources)).hexdigest()[:12]


def tiny_folder(name: str) -> str:
    """Return the folder of a model. The first process that needs it writes it."""
    folder = pathlib.Path(tempfile.gettempdir(), f"nwor-tests-{os.getuid()}", f"tiny-{name}-{_version()}")
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        _MODELS[name]().save(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process wrote it first
            shutil.rmtree(unfinished)
            assert folder.exists()
    return str(folder)


def _medusa() -> Model:
    """One head per draft: the output layer, shifted by that number of tokens."""
    weights_of_llama = llama().weights
    head, weights = weights_of_llama["lm_head.weight"].float(), {}
    for number in range(DRAFTS):
        head = head @ _following(weights_of_llama)
        weights[f"blocks.{number}.layers.0.weight"] = torch.zeros(SIZE.hidden, SIZE.hidden)
        weights[f"lm_heads.{number}.weight"] = head
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": SIZE.hidden,
        "vocab_size": VOCABULARY,
        "num_heads": DRAFTS,
        "num_hidden_layers": 1,
        "torch_dtype": "bfloat16",
    }
    return _in_bfloat16(config, weights)


def _mimo() -> Model:
    """The tiny Llama with MiMo's biases, followed by the layer that predicts one more token (MTP)."""
    generator, hidden, layer = torch.Generator().manual_seed(25), SIZE.hidden, "model.mtp_layers.0"
    weights = llama().weights | dict(decoder_layer(generator, layer, SIZE))
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{layer}.{norm}.weight"] = torch.ones(hidden)
    noise = matrix(generator, hidden, hidden, 0.3)
    weights[f"{layer}.input_proj.weight"] = torch.cat((noise, torch.eye(hidden)), dim=1)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace("weight", "bias")] = torch.randn(len(weights[name]), generator=generator) / 8
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    return _in_bfloat16(SIZE.config() | mimo, weights)


_MODELS: dict[str, Callable[[], Model]] = {
    "llama": llama,
    "eagle": eagle,
    "eagle3": eagle3,
    "medusa": _medusa,
    "mimo": _mimo,
}


def _following(weights: dict[str, Tensor]) -> Tensor:
    """Return the linear map from the embedding of each token to that of its successor."""
    embedding = weights["model.embed_tokens.weight"].float()
    after = embedding[[successor(token) for token in range(VOCABULARY)]]
    return (torch.linalg.pinv(embedding) @ after).T


def _in_bfloat16(config: dict[str, object], weights: dict[str, Tensor]) -> Model:
    return Model(config, {name: weight.bfloat16().contiguous() for name, weight in weights.items()})
