"""Engines with several GPUs or nodes: each rank commits and audits its own part of the cache.

A case needs as many GPUs as it has ranks, and is skipped if there are fewer.
"""

from __future__ import annotations

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
    PLAIN_ALL_REDUCE,
    RECURRENT_RANKS,
    ROWS,
    V1,
    V2,
    Case,
    Refusal,
)
from gpu_engine_checks import assert_same_tokens, check_audit, refused, run_case

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
RUNNERS = (("v2", V2), ("v1", V1))
COUNTS = ("drafted", "accepted", "rejected")
TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"


def _ranks(speculation: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,
        "attention_config": {"backend": "FLASH_ATTN"},
        "speculative_config": speculation,
        "compilation_config": PLAIN_ALL_REDUCE,
        **more,
    }


def _staged(case: Case) -> Case:
    return case.staged(name=f"{case.name}-stage")


def _dp(name: str, environment: dict[str, str] = V2, ranks: int = 2, **more: Any) -> Case:
    return Case(name, _ranks(NGRAM, **{DP: ranks}, distributed_executor_backend=None, **more), environment)


# ---------------------------------------------------------------- the cases

TENSOR = [
    Case(f"tp2-{speculation['method']}-{runner}", _ranks(speculation, **{TP: 2}), environment)
    for speculation in (NGRAM, EAGLE)
    for runner, environment in RUNNERS
]
TENSOR += [_staged(case) for case in TENSOR]
FOUR = Case("tp4-eagle-v2", _ranks(EAGLE, **{TP: 4}))
TENSOR += [FOUR, _staged(FOUR)]
DATA = [_dp(f"dp2-dense-{runner}", environment) for runner, environment in RUNNERS]
DATA += [_dp("dp4-dense-v2", ranks=4), _dp("tp2-dp2-dense-v2", **{TP: 2})]
DATA += [_staged(case) for case in DATA]
# Both "nodes" are this host. Code that vLLM compiled for a rank may name a GPU that has another number in the other
# "node".
NODE = V2 | {"VLLM_DISABLE_COMPILE_CACHE": "1"}
NODES = [Case("nodes2-tp2-v2", _ranks(NGRAM, **{TP: 2}), NODE, use={"nodes": 2})]
NODES += [_staged(NODES[0])]
EVERY_GRAPH = {"cudagraph_capture_sizes": EVERY_COUNT, **PLAIN_ALL_REDUCE}
DRAFT_ENGINE = _ranks(DRAFT, **{TP: 2}, compilation_config=EVERY_GRAPH)
DRAFT_RANKS = [
    Case("tp2-draft-graphs", DRAFT_ENGINE, nwor=GRAPHED),
    Case("tp2-draft-graphs-cow", DRAFT_ENGINE, nwor=GRAPHED_COW),
    Case("tp2-draft-graphs-v1", DRAFT_ENGINE, V1, nwor=GRAPHED),
    Case("tp2-draft-graphs-v1-eagle", _ranks(EAGLE, **{TP: 2}, compilation_config=EVERY_GRAPH), V1, nwor=GRAPHED),
]
VOCABULARY_RANKS = [
    Case(
        f"tp2-vocabulary-{name}",
        _ranks(EAGLE | more, **{TP: 2}),
        nwor={"mode": "off", "draft_vocabulary": ROWS},
        same_tokens=not more,
        use={"temperature": 1.0} if more else {},
    )
    for name, more in (("greedy", {}), ("random", {"draft_sample_method": "probabilistic"}))
]
REFUSED = [
    Refusal("refused-pp2", "pipeline parallelism: a rank before the last", _ranks(NGRAM, **{PP: 2}), nwor=COW),
    Refusal("refused-dcp2", "decode context parallelism: with drafts, vanilla vLLM 0.33 generates",
            _ranks(NGRAM, model="@mqa", **{TP: 2}, decode_context_parallel_size=2)),
]  # fmt: skip


# ---------------------------------------------------------------- checks


def _check_ranks(case: Case, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Check each rank's session, audited at every step. Its counts must equal those of the audit."""
    workers = result["workers"]
    assert len(workers) == case.engine.get(TP, 1) * case.engine.get(DP, 1)
    sessions = []
    for worker in workers:
        [session] = worker["sessions"]
        audit = session["audit"]
        assert worker["runner"] == case.runner
        assert session["mode"] == case.nwor["mode"]
        check_audit(session)
        assert {name: session["stats"][name] for name in COUNTS} == {name: audit[name] for name in COUNTS}
        sessions.append(session)
    return sessions


@pytest.mark.parametrize("case", [*TENSOR, *NODES], ids=lambda case: case.name)
def test_ranks_of_one_engine(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """All ranks get the same drafts and the same outcome."""
    result, theirs = run_case(case, engines, record)
    first, *others = _check_ranks(case, result)
    for other in others:
        assert other["audit"] == first["audit"]
    # Counted once for all ranks on /metrics, even if the rank that samples is on another node.
    [counters] = result["counters"].values()
    assert counters["nwor_draft_tokens"] == first["stats"]["drafted"]
    assert counters["nwor_committed_tokens"] == first["stats"]["accepted"]
    assert_same_tokens(result, theirs)


@pytest.mark.parametrize("case", DATA, ids=lambda case: case.name)
def test_data_parallel_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """Ranks of one server. Output is compared only while one request runs at a time; otherwise it depends on arrival
    times."""
    result, theirs = run_case(case, engines, record)
    sessions = _check_ranks(case, result)
    assert set(result["counters"]) == {str(rank) for rank in range(case.engine[DP])}
    per_engine = case.engine.get(TP, 1)
    for rank, counters in result["counters"].items():
        of_engine = sessions[int(rank) * per_engine : (int(rank) + 1) * per_engine]
        for session in of_engine:
            assert session["stats"]["drafted"] == counters["nwor_draft_tokens"]
            assert session["stats"]["accepted"] == counters["nwor_committed_tokens"]
    assert theirs is not None
    assert_same_tokens({"rounds": result["rounds"][:1]}, {"rounds": theirs["rounds"][:1]})


@pytest.mark.parametrize("case", DRAFT_RANKS, ids=lambda case: case.name)
def test_draft_graphs_on_two_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """The collectives of the draft model are in the graphs."""
    result, theirs = run_case(case, engines, record)
    assert theirs is not None
    workers = result["workers"]
    acceptance, expected = result["metrics"][PER_POSITION], theirs["metrics"][PER_POSITION]
    record |= {"accepted_per_position": acceptance, "accepted_per_position_vanilla": expected}
    assert len(workers) == 2
    for worker in workers:
        [report] = worker["draft_graphs"]
        assert report["replays"]["first_pass"] > 0
        assert report["replays"]["decode"] > 0
    assert all(abs(mine - theirs) <= 0.05 * sum(expected) for mine, theirs in zip(acceptance, expected, strict=True))
    assert_same_tokens(result, theirs)


@pytest.mark.parametrize("case", VOCABULARY_RANKS, ids=lambda case: case.name)
def test_draft_vocabulary_on_two_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """Each rank has rows of its part of the head."""
    result, theirs = run_case(case, engines, record)
    workers = result["workers"]
    reports = [report for worker in workers for report in worker["draft_vocabulary"]]
    assert len(workers) == len(reports) == 2
    assert all(report["consistent"] and not report["errors"] for report in reports)
    accepted = result["metrics"]["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < result["metrics"]["spec_decode_num_draft_tokens"]
    assert_same_tokens(result, theirs, may_differ=2)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.name)
def test_refused_parallel_modes(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    assert refusal.because in refused(refusal, engines, record)


@pytest.mark.parametrize("case", RECURRENT_RANKS, ids=lambda case: case.name)
def test_recurrent_on_two_ranks(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """Both ranks plan the same windows, and each compares the states of its heads."""
    result, theirs = run_case(case, engines, record)
    workers = result["workers"]
    assert len(workers) == 2
    assert workers[0]["recurrent"] == workers[1]["recurrent"]
    for worker in workers:
        assert worker["recurrent"], f"that engine keeps one state per draft token; it logged {result['said']}"
        [state], [session] = worker["recurrent"], worker["sessions"]
        audit = state["audit"]
        record |= {"recurrent": state["describe"], **audit}
        assert worker["kv_cache_groups"] == case.expect["kv_cache_groups"]
        assert audit["states_compared"] > 0
        assert audit["windows"] < audit["rows_reapplied"] < 4 * audit["windows"]
        if case.nwor["mode"] != "off":
            check_audit(session)
    assert_same_tokens(result, theirs, case.may_differ)
