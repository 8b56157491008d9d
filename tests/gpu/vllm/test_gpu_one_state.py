"""One recurrent state per request: the output of vanilla vLLM, which keeps K + 1, and each state compared with them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu_cases import ONE_STATE_CASES, ONE_STATE_REFUSALS, Case, Refusal
from gpu_engine_checks import assert_same_tokens, check_audit, finished, note, refused, session_of


@pytest.mark.parametrize("case", ONE_STATE_CASES, ids=lambda case: case.name)
def test_same_output_and_states(case: Case, engines: Any, record: dict[str, Any]) -> None:
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    note(record, case, result)
    [worker] = finished(result)["workers"]
    assert worker["one_state"], f"there is one state per draft in that engine; it said {result['said']}"
    [state] = worker["one_state"]
    audit = state["audit"]
    record |= {"one_state": state["describe"], **audit}
    counts = {"metric": result["metrics"], "audit": audit}
    for what, wanted in case.expect.items():
        kind, _, name = what.partition(":")
        if name:
            assert counts[kind][name] >= wanted, f"{what} is {counts[kind][name]}"
        else:
            assert worker[what] == wanted, f"{what} is {worker[what]}"
    assert worker["runner"] == case.runner
    assert (result["replays"]["graph_replays"] > 0) == (worker["cudagraph_mode"] != "NONE")

    assert audit["states_compared"] > 0
    assert (audit["folds"] > 0) == (case.engine.get("enable_prefix_caching", False) is not False)
    # Some windows lost drafts and some kept them: else a count that is always the same would do.
    windows, rows = audit["windows"], audit["rows_replayed"]
    drafts = case.engine["speculative_config"]["num_speculative_tokens"]
    assert windows < rows < windows * (drafts + 1)
    if case.nwor["mode"] == "off":
        session = session_of(result)
        assert session["audit"]["stale_rows"] == session["audit"]["rejected"] > 0
    else:
        check_audit(session_of(result))
    if vanilla is not None:
        assert_same_tokens(result, finished(vanilla.result()), case.may_differ)


@pytest.mark.parametrize("refusal", ONE_STATE_REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_at_start_up(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    said = refused(refusal, engines, record)
    assert re.search(refusal.because, said), said
