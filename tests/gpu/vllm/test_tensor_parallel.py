"""Tensor parallelism: each rank commits, and audits, its own part of the cache. Needs two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import COW, DRAFT, EAGLE, EVERY_COUNT, GRAPHED, GRAPHED_COW, NGRAM, V1, V2
from test_gpu_engines import _finished, _same_tokens

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
FLASH = {"attention_config": {"backend": "FLASH_ATTN"}}


@pytest.mark.parametrize("environment", [V2, V1], ids=["v2", "v1"])
@pytest.mark.parametrize("speculation", [NGRAM, EAGLE], ids=["ngram", "eagle"])
def test_two_ranks(
    speculation: dict[str, Any], environment: dict[str, str], engines: Any, record: dict[str, Any]
) -> None:
    engine = {**TWO_RANKS, **FLASH, "speculative_config": speculation}
    name = f"tp2-{speculation['method']}-{'v1' if environment else 'v2'}"
    vanilla = engines.start(f"{name}-vanilla", engine, {**environment, "VLLM_PLUGINS": ""})
    settings = {**engine, "additional_config": {"nwor": COW}}
    result = _finished(engines.start(f"{name}-nwor", settings, environment).result())
    record["seconds"] = result["seconds"]
    assert len(result["workers"]) == 2
    for worker in result["workers"]:
        [session] = worker["sessions"]
        assert session["audit"]["stale_rows"] == 0
        assert session["audit"]["rejected"] > 0
        assert session["audit"]["accepted"] > 0
        assert session["vanilla_steps"] == {}
        record |= {
            name: session["audit"][name] for name in ("steps", "drafted", "accepted", "rejected", "rows_checked")
        }
    assert result["workers"][0]["sessions"][0]["audit"] == result["workers"][1]["sessions"][0]["audit"]
    _same_tokens(result, _finished(vanilla.result()))


@pytest.mark.parametrize("nwor", [GRAPHED, GRAPHED_COW], ids=["off", "cow"])
def test_draft_graphs_on_two_ranks(nwor: dict[str, Any], engines: Any, record: dict[str, Any]) -> None:
    """The collectives of the draft model are in the graphs."""
    sizes = {"compilation_config": {"cudagraph_capture_sizes": EVERY_COUNT}}
    engine = {**TWO_RANKS, **FLASH, **sizes, "speculative_config": DRAFT}
    vanilla = engines.start("tp2-draft-graphs-vanilla", engine, {"VLLM_PLUGINS": ""})
    settings = {**engine, "additional_config": {"nwor": nwor}}
    result = _finished(engines.start(f"tp2-draft-graphs-{nwor['mode']}", settings, V2).result())
    theirs = _finished(vanilla.result())
    per_position = "spec_decode_num_accepted_tokens_per_pos"
    acceptance, expected = result["metrics"][per_position], theirs["metrics"][per_position]
    record |= {"seconds": result["seconds"], "accepted": acceptance, "accepted_by_vanilla": expected}
    assert len(result["workers"]) == 2
    for worker in result["workers"]:
        [report] = worker["draft_graphs"]
        assert report["replays"]["first_pass"] > 0
        assert report["replays"]["decode"] > 0
    assert all(abs(mine - theirs) <= 0.05 * sum(expected) for mine, theirs in zip(acceptance, expected, strict=True))
    _same_tokens(result, theirs)


def test_pipeline_parallelism_is_refused(engines: Any, record: dict[str, Any]) -> None:
    engine = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", **FLASH, "speculative_config": NGRAM}
    settings = {**engine, "additional_config": {"nwor": {"mode": "cow"}}}
    result = engines.start("pp2-refused", settings, V2).result()
    record["seconds"] = result["seconds"]
    assert result["error"] is not None
    assert any("pipeline parallelism" in line for line in [result["error"], *result["said"]])
