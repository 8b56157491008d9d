"""Minutes of load on vLLM's CPU engine.

tests/gpu/vllm/test_soak_gpu.py loads a hybrid model on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soak
from engines import ENVIRONMENT, NGRAM, Engines
from tiny_models import write_served_llama

CLIENTS = 16
# Twelve blocks of 128 tokens, and requests that cross the end of a block: vLLM preempts. Mode stage takes two shadow
# pages for each request.
BLOCKS = {"cow": 12, "stage": 12 + 2 * CLIENTS}
WORDS = ("--speculative-config", json.dumps(NGRAM), "--max-num-seqs", str(CLIENTS), "--enforce-eager")


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_soak(mode: str, tmp_path: Path, engines: Engines, request: pytest.FixtureRequest) -> None:
    plan = soak.Plan(
        words=[write_served_llama(tmp_path / "model"), *WORDS, "--num-gpu-blocks-override", str(BLOCKS[mode])],
        environment=ENVIRONMENT | {"VLLM_NWOR_MODE": mode, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        log=str(tmp_path / "log"),
        seconds=request.config.getoption("--soak-seconds"),
        clients=CLIENTS,
        longest=300,
    )
    found = soak.run(plan)
    print(json.dumps(found, indent=1))
    soak.check(found)
    assert found["answers_differ"] == 0
    assert f"nwor: active, mode {mode}" in (tmp_path / "log").read_text()
