"""Tensor parallelism: each rank commits, and audits, its own part of the cache. Needs two GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu_cases import (
    COW,
    DRAFT,
    EAGLE,
    EVERY_COUNT,
    GRAPHED,
    GRAPHED_COW,
    NGRAM,
    ONE_STATE_RANKS,
    SPARE,
    STAGE,
    V1,
    V2,
    Case,
    Refusal,
)
from gpu_engine_checks import assert_same_tokens, check_audit, finished

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def _ranks(speculation: dict[str, Any], parallel: str = "tensor_parallel_size", **more: Any) -> dict[str, Any]:
    return {
        parallel: 2,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
        "attention_config": {"backend": "FLASH_ATTN"},
        "speculative_config": speculation,
        **more,
    }


RANKS = [
    Case(f"tp2-{speculation['method']}-{runner}", _ranks(speculation), environment, nwor=COW)
    for speculation in (NGRAM, EAGLE)
    for runner, environment in (("v2", V2), ("v1", V1))
]
RANKS += [replace(case, name=f"{case.name}-stage", nwor=STAGE, more_blocks=SPARE) for case in RANKS]
DRAFT_ENGINE = _ranks(DRAFT, compilation_config={"cudagraph_capture_sizes": EVERY_COUNT})
DRAFT_RANKS = [
    Case("tp2-draft-graphs", DRAFT_ENGINE, nwor=GRAPHED),
    Case("tp2-draft-graphs-cow", DRAFT_ENGINE, nwor=GRAPHED_COW),
    Case("tp2-draft-graphs-v1", DRAFT_ENGINE, V1, nwor=GRAPHED),
    Case(
        "tp2-draft-graphs-v1-eagle",
        _ranks(EAGLE, compilation_config={"cudagraph_capture_sizes": EVERY_COUNT}),
        V1,
        nwor=GRAPHED,
    ),
]
PIPELINE = Refusal("refused-pp2", "pipeline parallelism", _ranks(NGRAM, "pipeline_parallel_size"))


def _note(record: dict[str, Any], case: Case, result: dict[str, Any]) -> None:
    record |= {"engine": case.engine, "environment": case.environment}
    record |= {name: result[name] for name in ("seconds", "error")}


@pytest.mark.parametrize("case", RANKS, ids=lambda case: case.name)
def test_two_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    _note(record, case, result)
    workers = finished(result)["workers"]
    assert len(workers) == 2
    for worker in workers:
        [session] = worker["sessions"]
        audit = session["audit"]
        record |= {
            name: audit[name] for name in ("steps", "drafted", "accepted", "rejected", "rows_checked", "stale_rows")
        }
        assert worker["runner"] == case.runner
        assert session["mode"] == case.nwor["mode"]
        check_audit(session)
    assert workers[0]["sessions"][0]["audit"] == workers[1]["sessions"][0]["audit"]
    assert_same_tokens(result, finished(vanilla.result()))


@pytest.mark.parametrize("case", DRAFT_RANKS, ids=lambda case: case.name)
def test_draft_graphs_on_two_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """The collectives of the draft model are in the graphs."""
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    _note(record, case, result)
    workers, theirs = finished(result)["workers"], finished(vanilla.result())
    acceptance, expected = result["metrics"][PER_POSITION], theirs["metrics"][PER_POSITION]
    record |= {"accepted_per_position": acceptance, "accepted_per_position_vanilla": expected}
    assert len(workers) == 2
    for worker in workers:
        [report] = worker["draft_graphs"]
        assert report["replays"]["first_pass"] > 0
        assert report["replays"]["decode"] > 0
    assert all(abs(mine - theirs) <= 0.05 * sum(expected) for mine, theirs in zip(acceptance, expected, strict=True))
    assert_same_tokens(result, theirs)


@pytest.mark.parametrize("case", ONE_STATE_RANKS, ids=lambda case: case.name)
def test_one_state_on_two_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """Both plan the same windows, and each compares the states of its own heads."""
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    _note(record, case, result)
    workers = finished(result)["workers"]
    assert len(workers) == 2
    assert workers[0]["one_state"] == workers[1]["one_state"]
    for worker in workers:
        assert worker["one_state"], f"there is one state per draft in that engine; it said {result['said']}"
        [state], [session] = worker["one_state"], worker["sessions"]
        audit = state["audit"]
        record |= {"one_state": state["describe"], **audit}
        assert worker["kv_cache_groups"] == case.expect["kv_cache_groups"]
        assert audit["states_compared"] > 0
        assert audit["windows"] < audit["rows_replayed"] < 4 * audit["windows"]
        if case.nwor["mode"] != "off":
            check_audit(session)
    assert_same_tokens(result, finished(vanilla.result()), case.may_differ)


@pytest.mark.parametrize("refusal", [PIPELINE], ids=lambda refusal: refusal.name)
def test_pipeline_parallelism_is_refused(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    result = engines.start_refusal(refusal).result()
    record["seconds"] = result["seconds"]
    assert result["error"] is not None, "the engine started"
    assert any(refusal.because in line for line in [result["error"], *result["said"]])
