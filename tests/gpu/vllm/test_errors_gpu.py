"""Errors of this package in engines on the GPU: draft graphs, the transaction in both modes, recurrent states.

``tests/vllm/test_errors.py`` has those in engines on the CPU.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine_faults import RECURRENT
from gpu_cases import (
    CANCEL_ERROR_CASES,
    CAPTURE_ERROR_CASE,
    ERROR_CASES,
    LOAD_ERROR_CASES,
    REFUSED_COUNTS,
    STATE_ERROR_CASES,
    Case,
    DraftCase,
)
from gpu_engine_checks import assert_same_tokens, planted_in, run_case, session_of


@pytest.mark.parametrize("case", ERROR_CASES, ids=lambda case: case.name)
def test_an_engine_goes_on_after_an_error(case: DraftCase, engines: Any, record: dict[str, Any]) -> None:
    """Some graphs fail after they ran, some windows cannot begin, and some commits fail."""
    result, vanilla = run_case(case, engines, record)
    assert_same_tokens(result, vanilla, case.may_differ)
    [worker] = result["workers"]
    planted = planted_in(worker)
    of_windows = {"begin failed", "commit failed"} if case.nwor["mode"] != "off" else set()
    assert set(planted) == {"draft graphs failed"} | of_windows
    assert worker["draft_graphs"][0]["eager"]["draft graphs failed"] == planted.pop("draft graphs failed")
    for session in worker["sessions"]:
        assert session["vanilla_steps"] == planted
        assert session["stats"]["windows"] > sum(planted.values()) > 2


def test_a_request_with_invalid_counts_stops_the_engine(engines: Any) -> None:
    """Before, its tokens came from outputs of zeros until it ended, with a normal response."""
    case = REFUSED_COUNTS
    settings = {**case.engine, "additional_config": {"nwor": case.nwor}}
    error = engines.start(case.name, settings, case.environment, **case.use).result()["error"]
    said = "counts of accepted tokens of some requests are invalid.* so the engine stops"
    assert re.search(said, error), error


@pytest.mark.parametrize("case", LOAD_ERROR_CASES, ids=lambda case: case.name)
def test_engine_with_connector_survives_errors(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """Steps with exports and loads fail. The second round loads what the first one stored."""
    result, vanilla = run_case(case, engines, record)
    assert_same_tokens(result, vanilla, case.may_differ)
    assert result["metrics"]["external_prefix_cache_hits"] > 0
    planted = planted_in(result["workers"][0])
    of_loads = {"load failed"} if case.nwor["mode"] == "stage" else set()
    assert set(planted) == {"begin failed", "commit failed"} | of_loads
    assert session_of(result)["vanilla_steps"] == planted


@pytest.mark.parametrize("case", CANCEL_ERROR_CASES, ids=lambda case: case.name)
def test_engine_ends_with_error_of_failed_step(case: Case, engines: Any) -> None:
    """And its log has the error of the cancel."""
    result = engines.start_case(case)[1].result()
    assert re.search("planted in _?sample", result["error"]), result["error"]
    assert any("nwor: cancel failed: planted in cancel; the engine goes on" in line for line in result["said"])


def test_error_during_capture_stops_the_start(engines: Any) -> None:
    """No replay of such a graph would log the drafts of that layer."""
    error = engines.start_case(CAPTURE_ERROR_CASE)[1].result()["error"]
    assert "write failed while a CUDA graph was captured: planted in write" in error, error


@pytest.mark.parametrize("case", STATE_ERROR_CASES, ids=lambda case: case.name)
def test_an_error_with_recurrent_states_stops_the_engine(case: Case, engines: Any) -> None:
    """The states may have the tokens of the step twice or never, so nothing continues."""
    error = engines.start_case(case)[1].result()["error"]
    _, method, _ = RECURRENT[case.use["faults"]]
    assert f"planted in {method}" in error, error
