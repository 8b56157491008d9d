"""Minutes of load on vLLM's CPU engine, and the judgement of such runs.

tests/gpu/vllm/test_soak_gpu.py loads a hybrid model on a GPU.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

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
    found = asyncio.run(soak.run(plan))
    print(json.dumps(found, indent=1))
    assert soak.problems(found) == []
    assert found["answers_differ"] == 0
    assert f"nwor: active, mode {mode}" in (tmp_path / "log").read_text()


# ---------------------------------------------------------------- the judgement


def result(**changes: Any) -> dict[str, Any]:
    """Return a faultless result with some changes, by the last part of their keys."""
    found: dict[str, Any] = {
        "plan": {"drafts": 4},
        "requests": {"finished": 60, "aborted": 30, "short": 0},
        "memory": [{"host_mib": 1000.0 + place % 3, "gpu_mib": 5000.0} for place in range(40)],
        "log": [],
        "totals": {
            "vllm:num_preemptions_total": 3.0,
            "vllm:prefix_cache_hits_total": 640.0,
            "vllm:spec_decode_num_accepted_tokens_total": 100.0,
            "vllm:spec_decode_num_draft_tokens_total": 990.0,
            "vllm:num_requests_running": 0.0,
            "vllm:kv_cache_usage_perc": 0.0,
            "nwor_draft_tokens_total": 1000.0,
            "nwor_committed_tokens_total": 102.0,
            "nwor_rejected_tokens_total": 898.0,
        },
    }
    for part in (found["totals"], found["requests"]):
        part.update({name: value for name, value in changes.items() if name in part or name.startswith("nwor_")})
    return found | {name: value for name, value in changes.items() if name in found}


def rising(name: str, by: float) -> list[dict[str, float]]:
    samples = [{"host_mib": 1000.0, "gpu_mib": 5000.0} for _ in range(40)]
    for place, sample in enumerate(samples):
        sample[name] += by * place
    return samples


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"log": ["ERROR in a worker"]}, "in the log: ERROR in a worker"),
        ({"finished": 0}, "the load was too small"),
        ({"short": 2}, "2 answers were shorter than asked"),
        ({"vllm:num_preemptions_total": 0.0}, "vllm:num_preemptions is 0"),
        ({"vllm:num_requests_running": 1.0}, "1 requests are still there"),
        ({"vllm:kv_cache_usage_perc": 0.25}, "25.0% of the cache is in use"),
        ({"nwor_errors_total": 1.0}, "1 errors"),
        ({"nwor_abandoned_windows_total": 1.0}, "1 abandoned windows"),
        ({"nwor_recurrent_skipped_requests_total": 1.0}, "1 requests with invalid counts"),
        ({"nwor_committed_tokens_total": 101.0}, "1000 drafts, but 101 committed and 898 rejected"),
        ({"vllm:spec_decode_num_draft_tokens_total": 1001.0}, "1000 drafts, -1 more than the scheduler counted"),
        ({"vllm:spec_decode_num_draft_tokens_total": 200.0}, "1000 drafts, 800 more than the scheduler counted"),
        ({"memory": rising("host_mib", 4.0)}, "host memory grew"),
        ({"memory": rising("gpu_mib", 8.0)}, "GPU memory grew"),
    ],
    ids=lambda value: value.split(":")[0][:40] if isinstance(value, str) else "",
)
def test_each_fault_is_a_problem(changes: dict[str, Any], words: str) -> None:
    found = soak.problems(result(**changes))
    assert len(found) == bool(words)
    assert all(words in problem for problem in found)
