"""Each case of the table: every byte audited at every step, output as vanilla's, token by token."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import CASES, FEW_GRAPHS, FUSED_WRITER, REFUSALS, STAGE_CASES, WARNED, WATCHED, Case, Refusal

AUDITED = (
    "steps",
    "verify_steps",
    "drafted",
    "accepted",
    "rejected",
    "rows_checked",
    "stale_rows",
    "exposed_rows",
    "moments",
    "committed_rows",
    "committed_bytes",
)


def _finished(result: dict[str, Any]) -> dict[str, Any]:
    """The result of an engine that came to its end; else fail with its error and where its log is."""
    if result["error"] is not None:
        said = "\n".join(result["said"][-6:])
        pytest.fail(f"{result['error'][:1200]}\n{said}\nlog: {result['log']}", pytrace=False)
    return result


def _session(result: dict[str, Any]) -> dict[str, Any]:
    [worker] = result["workers"]
    assert worker["sessions"], f"nwor_ops was not active; it said {result['said']}; log: {result['log']}"
    [session] = worker["sessions"]
    return session


def _note(record: dict[str, Any], case: Case, result: dict[str, Any]) -> None:
    record["engine"] = {name: value for name, value in case.engine.items() if name != "kv_cache_memory_bytes"}
    record["environment"] = case.environment
    record["seconds"] = result["seconds"]
    record["error"] = result["error"]
    if result["error"] is None:
        [worker] = result["workers"]
        record |= {key: worker[key] for key in ("runner", "cudagraph_mode", "kv_cache_layout", "attention")}
        record |= result["replays"]
        for session in worker["sessions"]:
            record["session"] = session["describe"]
            record |= {name: session["audit"][name] for name in AUDITED if session["audit"]}


def _same_tokens(ours: dict[str, Any], vanilla: dict[str, Any]) -> None:
    for number, (mine, theirs) in enumerate(zip(ours["rounds"], vanilla["rounds"], strict=True)):
        for request, (tokens, wanted) in enumerate(zip(mine, theirs, strict=True)):
            if tokens == wanted:
                continue
            assert tokens is not None
            assert wanted is not None
            at = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if len(set(pair)) > 1), None)
            pytest.fail(f"round {number}, request {request} differs from vanilla's at token {at}", pytrace=False)


def _check_audit(session: dict[str, Any]) -> None:
    """Rejected and accepted drafts were seen, no rejected one left a row. In mode stage the audit looked twice in the
    middle of every step; in cow what it looks for there is found."""
    audit = session["audit"]
    if session["mode"] == "stage":
        assert audit["exposed_rows"] == 0
        assert audit["moments"] == 2 * audit["steps"]
        assert audit["committed_rows"] > audit["accepted"]
    else:
        assert audit["exposed_rows"] > 0
    assert audit["stale_rows"] == 0
    assert audit["stale_rows_at_end"] == 0
    assert audit["accepted"] > 0
    assert audit["rejected"] > 0
    assert session["vanilla_steps"] == {}


@pytest.mark.parametrize("case", [*CASES, *STAGE_CASES], ids=lambda case: case.name)
def test_engine(case: Case, engines: Any, record: dict[str, Any]) -> None:
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    _note(record, case, result)
    _finished(result)
    session = _session(result)
    audit, stats = session["audit"], session["stats"]

    assert result["workers"][0]["runner"] == case.runner
    for what, wanted in case.expect.items():
        if what.startswith("metric:"):
            counted = result["metrics"][what.removeprefix("metric:")]
            assert counted >= wanted, f"{what} is {counted}, expected at least {wanted}"
        else:
            found = result["workers"][0][what]
            assert found == wanted, f"{what} is {found}, expected {wanted}"
    replays = result["replays"]["graph_replays" if case.name in FEW_GRAPHS else "replays_with_drafts"]
    assert (replays > 0) == (result["workers"][0]["cudagraph_mode"] != "NONE")

    assert session["mode"] == case.nwor["mode"]
    _check_audit(session)
    assert [stats[name] for name in ("drafted", "accepted", "rejected")] == [
        audit[name] for name in ("drafted", "accepted", "rejected")
    ]
    if vanilla is not None:
        _same_tokens(result, _finished(vanilla.result()))


@pytest.mark.parametrize("case", [WATCHED], ids=lambda case: case.name)
def test_vanilla_leaves_stale_rows(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """The reason for this library, and the proof that the audit sees what it looks for."""
    result = engines.start_case(case)[1].result()
    _note(record, case, result)
    audit = _session(_finished(result))["audit"]
    assert audit["rejected"] > 0
    assert audit["stale_rows"] > 0


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_at_start_up(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    result = engines.start_refusal(refusal).result()
    said = "\n".join([result["error"] or "", *result["said"]])
    record["seconds"] = result["seconds"]
    record["refused"] = found[0][:400] if (found := re.search("nwor: .*", said)) else None
    assert result["error"] is not None, "the engine started"
    assert "nwor:" in said, result["error"]
    assert re.search(refusal.because, said), said


@pytest.mark.parametrize("refusal", [WARNED], ids=lambda refusal: refusal.name)
def test_refused_engine_goes_on_where_that_is_asked_for(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    result = engines.start_refusal(refusal).result()
    record["seconds"] = result["seconds"]
    [worker] = _finished(result)["workers"]
    assert worker["sessions"] == []
    assert not worker["wrapped"]
    assert any(refusal.because in line for line in result["said"])


@pytest.mark.parametrize("case", [FUSED_WRITER], ids=lambda case: case.name)
def test_fused_writer_is_switched_off_or_refused(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result = engines.start_case(case)[1].result()
    _note(record, case, result)
    if result["error"] is not None:
        assert "fuse_rope_kvcache_cat_mla" in "\n".join([result["error"], *result["said"]])
        return
    audit = _session(result)["audit"]
    assert audit["rejected"] > 0
    assert audit["stale_rows"] == 0
