"""``nwor-ops check`` on a GPU machine: its costs are those of the engine that then starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from tiny_models import write_models

# Other engines may run on the same GPU.
SHARED_GPU = ("--skip-tokenizer-init", "--gpu-memory-utilization", "0.1")


def checked(folder: str, environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "nwor_ops", "check", "--json", "--", folder, *SHARED_GPU, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


START = """
import json, sys
from vllm import LLM
llm = LLM(**json.loads(sys.argv[1]), skip_tokenizer_init=True, gpu_memory_utilization=0.1)
llm.llm_engine.engine_core.shutdown()
"""


def started(environment: dict[str, str], **engine: Any) -> str:
    """Start an engine, and return its log."""
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(engine)],
        env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize(("mode", "recurrent"), [("cow", "0"), ("stage", "0"), ("off", "1")])
def test_the_costs_of_a_hybrid_engine_are_those_that_it_logs(tmp_path: Any, mode: str, recurrent: str) -> None:
    [folder] = write_models(tmp_path, "gdn_mtp").values()
    speculation = {"method": "mtp", "num_speculative_tokens": 3}
    environment = {"VLLM_NWOR_MODE": mode, "VLLM_NWOR_RECURRENT": recurrent}
    seqs = 128  # the undo log has 0.8 MiB then
    arguments = ("--max-num-seqs", str(seqs), "--max-model-len", "512", "--load-format", "dummy")
    size = ("--kv-cache-memory-bytes", str(1 << 30), "--speculative-config", json.dumps(speculation))
    found = checked(folder, environment, *arguments, *size)
    assert found["costs_unknown"] is None
    [prediction] = [prediction for prediction in found["features"] if prediction["switched_on"]]
    log = started(environment, model=folder, max_num_seqs=seqs, max_model_len=512,
                  load_format="dummy", kv_cache_memory_bytes=1 << 30, speculative_config=speculation)  # fmt: skip
    costs = prediction["costs"]
    if mode == "cow":
        logged = float(re.search(r"log ([\d.]+) MiB", log)[1])
        # The log is rounded to 0.1 MiB. The drafter's layers are reserved for and get no log.
        rounding = 0.05
        reserved = costs["undo_log_bytes"] / 2**20
        assert reserved / 2 - rounding < logged <= reserved + rounding
    elif mode == "stage":
        assert re.search(rf"\b{costs['shadow_pages']} of \d+ blocks", log)
    else:
        fit, before = map(int, re.search(r"(\d+) of them fit \(about (\d+)\)", log).groups())
        assert abs(costs["requests_that_fit"] - fit) <= 1
        assert costs["requests_that_fit_in_vllm"] == pytest.approx(before, rel=0.1)


def test_the_graphs_of_a_draft_model_are_those_that_the_engine_captures(tmp_path: Any) -> None:
    from nwor_ops.testing.tiny_llama import write_tiny_llama

    folder = str(write_tiny_llama(tmp_path / "llama"))
    speculation = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    environment = {"VLLM_NWOR_DRAFT_GRAPHS": "1"}
    found = checked(folder, environment, "--max-num-seqs", "8", "--speculative-config", json.dumps(speculation))
    [prediction] = [prediction for prediction in found["features"] if prediction["switched_on"]]
    log = started(environment, model=folder, max_num_seqs=8, speculative_config=speculation)
    captured = int(re.search(r"draft graphs: active: (\d+) graphs", log)[1])
    assert 0 < captured <= prediction["costs"]["graphs_at_most"]
