"""Minutes of load on a hybrid model with one recurrent state per request and the transaction, on a GPU.

A server with our features and one of vanilla vLLM run at the same time, with 64 clients each, prefix caching,
preemption, aborts and mixed temperatures.
For ten minutes: ``pytest tests/gpu/vllm/test_soak_gpu.py --soak-seconds 600``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import soak
from engine_pool import SERVER_ENVIRONMENT
from readme_serve import readme_commands

CLIENTS = 64
# Blocks for about half of the clients.
BLOCKS = 120
SMALL_CACHE = (
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(CLIENTS)),
    *("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05"),
)
# vLLM's kernel for prompts adds in another order if a prefix is cached, so one of two close logits may win.
MAY_DIFFER = 3
# By how much more the memory of our host may grow from the third to the last quarter of the load.
MORE_THAN_VANILLA_MIB = 16.0


@pytest.fixture(scope="module")
def found(engines: Any, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Return the results of all engines."""
    command = readme_commands()["recurrent"]
    words = [*command.with_models(MODEL=engines.models["gdn_mtp"]), *SMALL_CACHE]
    plans = {
        name: soak.Plan(
            words=words,
            environment=SERVER_ENVIRONMENT | command.environment | environment,
            log=str(engines.logs / f"soak-{name}.log"),
            seconds=request.config.getoption("--soak-seconds"),
            clients=CLIENTS,
            longest=450,
            drafts=command.drafts,
        )
        for name, environment in {
            "ours": {"VLLM_NWOR_MODE": "cow"},
            "vanilla": {"VLLM_NWOR": "off"},
        }.items()
    }
    with ThreadPoolExecutor(len(plans)) as pool:
        return dict(zip(plans, pool.map(soak.run, plans.values()), strict=True))


def recorded(result: dict[str, Any]) -> dict[str, Any]:
    return {"requests": result["requests"], "totals": result["totals"], "memory": result["memory"][::8]}


def test_soak(found: dict[str, dict[str, Any]], record: dict[str, Any]) -> None:
    result = found["ours"]
    record |= recorded(result)
    record["answers_differ"] = result["answers_differ"]
    soak.check(result)
    assert result["totals"]["nwor_recurrent_steps_total"] > 0
    assert result["answers_differ"] <= MAY_DIFFER


def test_host_memory_grows_like_vanillas(found: dict[str, dict[str, Any]], record: dict[str, Any]) -> None:
    record |= recorded(found["vanilla"])
    assert not any(name.startswith("nwor_") for name in found["vanilla"]["totals"])
    grown = {}
    for name, result in found.items():
        early, late = soak.growth(result["memory"], "host_mib")
        grown[name] = late - early
    record["grown_mib"] = grown
    assert grown["ours"] <= grown["vanilla"] + MORE_THAN_VANILLA_MIB
