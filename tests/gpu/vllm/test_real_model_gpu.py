"""A real model with real prompts: what a draft vocabulary of a quarter of the tokens costs in acceptance."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from nwor_ops.testing.real_model import PACKAGES, PROMPTS, is_installed, model_folder

ENGINE = pathlib.Path(__file__).resolve().parents[2] / "support" / "real_model_engine.py"
VOCABULARY = 49_152
LEAST = 0.98  # of the acceptance with the whole head


def _run(target: pathlib.Path, drafter: pathlib.Path, **settings: str) -> dict[str, Any]:
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | settings
    command = [sys.executable, str(ENGINE), str(target), str(drafter)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


@pytest.mark.skipif(not is_installed(), reason=f"needs the packages {PACKAGES}")
def test_acceptance_of_real_model() -> None:
    target, drafter = model_folder(), model_folder(without=(20, 24))
    whole = _run(target, drafter, VLLM_PLUGINS="")
    ours = _run(target, drafter, VLLM_NWOR_DRAFT_VOCABULARY=str(VOCABULARY // 4))
    rates = {
        kind: [side[kind]["accepted"] / side[kind]["drafted"] for side in (whole, ours)] for kind in PROMPTS
    }  # fmt: skip
    print(json.dumps(rates))
    for side in (whole, ours):
        answers = [json.loads(text) for text in side["JSON"]["texts"]]
        assert all(answer.keys() == {"topic", "level", "steps"} for answer in answers)
    for kind, (before, after) in rates.items():
        assert 0.2 < before < 0.95
        assert after >= LEAST * before, kind
