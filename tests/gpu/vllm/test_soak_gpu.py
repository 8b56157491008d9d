"""Minutes of load on a hybrid model with one recurrent state per request and the transaction, on a GPU.

An ``AsyncLLM`` and ``vllm serve`` run at the same time, with 64 clients each, prefix caching, preemption, aborts and
mixed temperatures.
For ten minutes: ``pytest tests/gpu/vllm/test_soak_gpu.py --soak-seconds 600``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import soak
from engine_pool import SERVER_ENVIRONMENT
from readme_serve import readme_commands

from nwor_ops.testing.server import PROGRAM

CLIENTS = 64
# Blocks for about half of the clients.
BLOCKS = 120
SMALL_CACHE = (
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(CLIENTS)),
    *("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05"),
)
# vLLM's kernel for prompts adds in another order if a prefix is cached, so one of two close logits may win.
MAY_DIFFER = 3


@pytest.fixture(scope="module")
def found(engines: Any, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the results of both engines."""
    command = readme_commands()["recurrent"]
    words = [*command.with_models(MODEL=engines.models["gdn_mtp"]), *SMALL_CACHE]
    plans = {
        name: soak.Plan(
            program=list(PROGRAM) if name == "http" else [],
            words=words,
            environment=SERVER_ENVIRONMENT | command.environment | {"VLLM_NWOR_MODE": "cow"},
            log=str(engines.logs / f"soak-{name}.log"),
            seconds=request.config.getoption("--soak-seconds"),
            clients=CLIENTS,
            longest=450,
            drafts=command.drafts,
        )
        for name in ("async", "http")
    }
    with ThreadPoolExecutor(len(plans)) as pool:
        return dict(zip(plans, pool.map(soak.run_in_process, plans.values()), strict=True))


@pytest.mark.parametrize("name", ["async", "http"])
def test_soak(name: str, found: dict[str, dict[str, Any]], record: dict[str, Any]) -> None:
    result = found[name]
    record |= {"requests": result["requests"], "totals": result["totals"], "memory": result["memory"][::8]}
    record["answers_differ"] = result["answers_differ"]
    assert soak.problems(result) == []
    assert result["totals"]["nwor_one_state_steps_total"] > 0
    assert result["answers_differ"] <= MAY_DIFFER
