"""``nwor-ops bench draft_vocabulary`` with two servers on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from engine_pool import SERVER_ENVIRONMENT
from gpu_cases import MTP

TRAFFIC = ("--requests", "2", "--rounds", "1", "--seconds", "1")
CLIENT = ("--client-args", "--random-input-len 32 --random-output-len 48")
SMALL = ("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.1", "--max-num-seqs", "8")


def test_bench_measures_draft_vocabulary(engines: Any, record: dict[str, Any]) -> None:
    """The command stops if the feature is not active in our server, or is active in vanilla's."""
    for package in ("typer", "rich"):
        pytest.importorskip(package)
    words = ["bench", "draft_vocabulary", *TRAFFIC, *CLIENT, "--output", str(engines.logs / "bench"), "--json", "--"]
    arguments = [engines.models["gdn_mtp"], *SMALL, "--speculative-config", json.dumps(MTP)]
    done = subprocess.run([sys.executable, "-m", "nwor_ops", *words, *arguments], env=os.environ | SERVER_ENVIRONMENT,
                          capture_output=True, text=True, timeout=560)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    [load] = json.loads(done.stdout)["loads"]
    record["acceptance"] = load["acceptance"]
    assert load["obstacle"] is None
    for runs in load["runs"].values():
        assert all(0 < run["accepted"] < run["drafts"] * MTP["num_speculative_tokens"] for run in runs)
