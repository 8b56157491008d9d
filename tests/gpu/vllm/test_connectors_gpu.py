"""KV connectors on a GPU: loaded rows are correct and audited, and an exporter reads every page at each stage of a
step."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import CONNECTOR_CASES, EXPORT_CASES, Case
from gpu_engine_checks import assert_same_tokens, check_case, run_case, session_of


def _run(case: Case, engines: Any, record: dict[str, Any]) -> dict[str, Any]:
    result, vanilla = run_case(case, engines, record)
    assert result["workers"][0]["runner"] == case.runner
    assert_same_tokens(result, vanilla)
    return result


@pytest.mark.parametrize("case", CONNECTOR_CASES, ids=lambda case: case.name)
def test_what_is_stored_can_be_loaded(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result = _run(case, engines, record)
    record["loaded"] = result["metrics"]["external_prefix_cache_hits"]
    assert record["loaded"] > 0
    assert result["replays"]["replays_with_drafts"] > 0
    check_case(case, result)


@pytest.mark.parametrize("case", EXPORT_CASES, ids=lambda case: case.name)
def test_what_an_exporter_sees(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result = _run(case, engines, record)
    exports = record["exports"] = result["exports"]
    assert result["workers"][0]["cudagraph_mode"] == "PIECEWISE"
    assert session_of(result)["audit"]["verify_steps"] > 0
    # A replay counts as one with drafts only inside a window, and without a transaction there is no window.
    assert result["replays"]["graph_replays" if case.nwor["mode"] == "off" else "replays_with_drafts"] > 0
    # The last request told the worker that the others ended; no request tells it that this one ended.
    assert [name.split("-")[0] for name in exports["unfinished"]] in (["last"], [])
    assert exports["shadow_slots"] == 0
    rejected = {moment: found["rejected"] for moment, found in exports["counts"].items()}
    assert all(found["rows"] > 0 for found in exports["counts"].values()), exports
    assert not any(found["missing"] for found in exports["counts"].values()), exports
    if case.nwor["mode"] == "off":
        assert all(rejected.values()), exports
        return
    assert (rejected.pop("forward") > 0) == (case.nwor["mode"] == "cow"), exports
    assert not any(rejected.values()), exports
    check_case(case, result)
