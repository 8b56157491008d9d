"""Errors of this package in engines on the GPU: draft graphs, the transaction in both modes, recurrent states.

``tests/vllm/test_errors.py`` has the same for what a CPU engine runs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu_cases import ERROR_CASES, REFUSED_COUNTS, DraftCase
from gpu_engine_checks import assert_same_tokens, finished, note


@pytest.mark.parametrize("case", ERROR_CASES, ids=lambda case: case.name)
def test_an_engine_goes_on_after_an_error(case: DraftCase, engines: Any, record: dict[str, Any]) -> None:
    """Some graphs fail after they ran, some windows cannot begin, and some commits fail."""
    vanilla, ours = engines.start_case(case)
    result = finished(ours.result())
    note(record, case, result)
    assert_same_tokens(result, finished(vanilla.result()), case.may_differ)
    planted = result["planted"]["counts"]
    of_windows = {"begin failed", "commit failed"} if case.nwor["mode"] != "off" else set()
    assert set(planted) == {"draft graphs failed"} | of_windows
    assert result["planted"]["errors"] == planted
    assert result["planted"]["alive"] == 0
    [worker] = result["workers"]
    assert worker["draft_graphs"][0]["eager"]["draft graphs failed"] == planted.pop("draft graphs failed")
    for session in worker["sessions"]:
        assert session["vanilla_steps"] == planted
        assert session["stats"]["windows"] > sum(planted.values()) > 2


def test_a_request_with_invalid_counts_stops_the_engine(engines: Any) -> None:
    """Before, its tokens came from outputs of zeros until it ended, with a normal response."""
    case = REFUSED_COUNTS
    settings = {**case.engine, "additional_config": {"nwor": case.nwor}}
    error = engines.start(case.name, settings, case.environment, **case.use).result()["error"]
    said = r"counts of accepted tokens of requests (\d+-\d|of earlier).* are invalid.* so the engine stops"
    assert re.search(said, error), error
