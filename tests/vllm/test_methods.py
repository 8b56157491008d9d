"""Methods of drafting with real vLLM CPU engines: every byte is audited at every step, and the output is vanilla's.

test_engine.py covers `ngram` and `draft_model`.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from custom_drafters import DRAFTS
from engine_checks import COW, STAGE, check_transaction, check_vllm_counts
from engines import Engines
from tiny_models import DEMO, tiny_folder

from nwor_ops.testing.tiny_llama import VOCABULARY

MODES = pytest.mark.parametrize("nwor", [COW, STAGE], ids=["cow", "stage"])


def requests() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(10, 70))] for _ in range(8)]


def arguments(target: str = "llama", **speculation: Any) -> dict[str, Any]:
    """Return the engine's arguments."""
    speculation.setdefault("num_speculative_tokens", DRAFTS)
    return {"model": tiny_folder(target), "load_format": "auto", "speculative_config": speculation}


def check(engines: Engines, nwor: dict[str, Any], layers: int = 0, accepts: bool = True, **settings: Any) -> None:
    """Check that drafts are rejected and, by default, accepted, and that the drafter's layers are left out."""
    vanilla, ours = engines.pair(requests(), nwor, **arguments(**settings))
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours, accepts)
    check_vllm_counts(ours)
    target = set(ours["session"]["layers"])
    assert len(target) == DEMO.layers
    assert len(ours["layers"]) == len(target) + layers
    assert {name for name, layer in ours["layers"].items() if layer["wrapped"]} == target


@MODES
def test_eagle(engines: Engines, nwor: dict[str, Any]) -> None:
    check(engines, nwor, layers=1, method="eagle", model=tiny_folder("eagle"))


@MODES
def test_eagle3(engines: Engines, nwor: dict[str, Any]) -> None:
    check(engines, nwor, layers=1, method="eagle3", model=tiny_folder("eagle3"))


@MODES
def test_mtp(engines: Engines, nwor: dict[str, Any]) -> None:
    check(engines, nwor, layers=1, target="mimo", method="mtp")


@MODES
def test_medusa(engines: Engines, nwor: dict[str, Any]) -> None:
    """Heads without attention layers."""
    check(engines, nwor, method="medusa", model=tiny_folder("medusa"))


@MODES
def test_suffix(engines: Engines, nwor: dict[str, Any]) -> None:
    pytest.importorskip("arctic_inference", reason="vLLM: Arctic Inference is required for suffix decoding")
    check(engines, nwor, method="suffix")


@MODES
def test_custom_class(engines: Engines, nwor: dict[str, Any]) -> None:
    check(engines, nwor, method="custom_class", model="custom_drafters.Successors")


def test_named_layers_are_left_alone(engines: Engines) -> None:
    check(engines, COW, layers=1, method="custom_class", model="custom_drafters.NamingOwner")


def test_unnamed_layers_are_refused(engines: Engines) -> None:
    """These layers may belong to the target, whose drafts must be undone."""
    settings = arguments(method="custom_class", model="custom_drafters.SilentOwner")
    said = (
        "nwor: speculation by custom_class: layers drafter.layers.9.attention have a KV cache, are in no module of the "
        "target's model, and SilentOwner does not name them as its own"
    )
    with pytest.raises(RuntimeError, match=re.escape(said)):
        engines.run(requests(), nwor=COW, **settings)


@MODES
def test_extract_hidden_states(engines: Engines, nwor: dict[str, Any]) -> None:
    """The drafter stores the model's states in its own layer. It drafts the last token again, which the tiny Llama
    hardly ever repeats."""
    states = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
    settings = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": states}
    check(engines, nwor, layers=1, accepts=False, **settings)
