"""Checks of an engine on a GPU, and the parts of its result that the report keeps."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from gpu_cases import ENGINE, Case, Refusal

from nwor_ops.testing.real_model import texts


def refused(refusal: Refusal, engines: Any, record: dict[str, Any]) -> str:
    """Return what an engine logged that must refuse to start."""
    result = engines.start_refusal(refusal).result()
    said = "\n".join([result["error"] or "", *result["said"]])
    record["seconds"] = result["seconds"]
    record["refused"] = found[0][:400] if (found := re.search("nwor: .*", said)) else None
    assert result["error"] is not None, "the engine started"
    return said


def finished(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of an engine that finished. Otherwise fail with its error and the path of its log."""
    if result["error"] is not None:
        said = "\n".join(result["said"][-6:])
        pytest.fail(f"{result['error'][:1200]}\n{said}\nlog: {result['log']}", pytrace=False)
    return result


def run_case(case: Case, engines: Any, record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Run the engines of a case. Return the results of ours and of vanilla's, if the case has one."""
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    note(record, case, result)
    finished(result)
    if "sleep" in case.use:  # the same requests before and after
        before, after = record["accepted_by_round"] = result["accepted"]
        assert after >= 0.9 * before > 0
    if "schema" in case.use:
        [answers] = result["rounds"]
        assert all(json.loads(text).keys() == case.use["schema"]["properties"].keys() for text in texts(answers))
    return result, None if vanilla is None else finished(vanilla.result())


def session_of(result: dict[str, Any]) -> dict[str, Any]:
    [worker] = result["workers"]
    assert worker["sessions"], f"nwor_ops was not active; it logged {result['said']}; log: {result['log']}"
    [session] = worker["sessions"]
    return session


def planted_in(worker: dict[str, Any]) -> dict[str, int]:
    """Return the errors planted in a worker, by reason. It counted each of them, and keeps none alive."""
    planted: dict[str, Any] = worker["planted"]
    assert planted["errors"] == planted["counts"]
    assert planted["alive"] == 0
    return dict(planted["counts"])


def note(record: dict[str, Any], case: Case, result: dict[str, Any]) -> None:
    record["engine"] = {name: value for name, value in case.engine.items() if name != "kv_cache_memory_bytes"}
    record["environment"] = case.environment
    record["seconds"] = result["seconds"]
    record["error"] = result["error"]
    if result["error"] is None:
        worker, *_ = result["workers"]
        record |= {key: worker[key] for key in ("runner", "cudagraph_mode", "kv_cache_layout", "attention")}
        record |= result.get("replays", {})
        record["steps_by_drafts"] = result.get("steps_by_drafts")
        for session in worker["sessions"]:
            record["session"] = session["describe"]
            record |= session["audit"] or {}
        for counted in result.get("copied_rows", ()):
            record |= {"tail_rows_committed": counted["committed"], "tail_rows_copied": counted["copied"]}


def assert_same_tokens(ours: dict[str, Any], vanilla: dict[str, Any] | None, may_differ: int = 0) -> None:
    """Check the tokens of every request, or of all except the given number, if there is a vanilla engine."""
    if vanilla is None:
        return
    differ = []
    for number, (mine, theirs) in enumerate(zip(ours["rounds"], vanilla["rounds"], strict=True)):
        for request, (tokens, wanted) in enumerate(zip(mine, theirs, strict=True)):
            if tokens == wanted:
                continue
            assert tokens is not None
            assert wanted is not None
            at = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if len(set(pair)) > 1), None)
            differ.append(f"round {number}, request {request} differs from vanilla's at token {at}")
    if len(differ) > may_differ:
        pytest.fail("; ".join(differ), pytrace=False)


def check_worker(case: Case, result: dict[str, Any], audit: dict[str, Any]) -> None:
    """Check what the case expects of its worker. The metrics survive their errors, so only a count shows them."""
    [worker], counts = result["workers"], {"metric": result["metrics"], "audit": audit}
    assert worker["runner"] == case.runner
    for what, wanted in case.expect.items():
        kind, _, name = what.partition(":")
        if name:
            assert counts[kind][name] >= wanted, f"{what} is {counts[kind][name]}, expected at least {wanted}"
        else:
            assert worker[what] == wanted, f"{what} is {worker[what]}, expected {wanted}"
    if "faults" not in case.use:
        assert not any(counted.get("nwor_errors") for counted in result["counters"].values()), result["counters"]


def check_case(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """Check everything that is expected of a case except its tokens, and return its session."""
    session = session_of(result)
    check_worker(case, result, {})
    assert session["mode"] == case.nwor["mode"]
    check_audit(session, case.share)
    for counted in result["copied_rows"]:
        assert counted["copied"] < counted["committed"], "no shadow page held a row of the step before"
    assert (session["audit"]["recurrent_bytes"] > 0) == (case.recurrent_groups > 0)
    steps = result["steps_by_drafts"]
    assert set(case.draft_counts) <= {int(drafts) for drafts in steps}, f"steps by drafts per request: {steps}"
    _check_warm_up(case, result["said"])
    return session


def check_recurrent(case: Case, result: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Check an engine with one state per request, except its tokens. Return the audit of its states."""
    [worker] = finished(result)["workers"]
    assert worker["recurrent"], f"there is one state per draft in that engine; it said {result['said']}"
    [state] = worker["recurrent"]
    audit: dict[str, Any] = state["audit"]
    record |= {"recurrent": state["describe"], **audit}
    check_worker(case, result, audit)
    assert (result["replays"]["graph_replays"] > 0) == (worker["cudagraph_mode"] != "NONE")

    assert audit["states_compared"] > 0
    assert (audit["folds"] > 0) == (case.engine.get("enable_prefix_caching", False) is not False)
    # Some windows lost drafts and some kept them. Otherwise a constant count would pass.
    windows, rows, most_pending = audit["windows"], audit["rows_reapplied"], 0
    if case.nwor["recurrent"] == "chunk":
        most_pending = 24
        assert (audit.get("moves", 0) > 0) == (audit["folds"] > 0)  # both only with prefix caching
    speculation = case.engine["speculative_config"]
    if speculation is None:  # nothing is pending before a request's first window, and after a fold
        assert windows < rows < windows * most_pending if most_pending else windows / 2 < rows < windows
        return audit
    drafts = speculation["num_speculative_tokens"]
    assert windows < rows < windows * (most_pending or drafts + 1)
    if case.expect.get("sessions") == []:
        return audit  # the transaction does not support the attention layers, so only the states are audited
    if case.nwor["mode"] == "off":
        # vLLM's warm-up runs the same tokens twice in the same slots. These drafts change no byte.
        most = ENGINE["max_num_seqs"] * drafts if case.warms_up else 0
        session = session_of(result)
        assert 0 <= session["audit"]["rejected"] - session["audit"]["stale_rows"] <= most
        assert session["audit"]["stale_rows"] > 0
    else:
        check_audit(session_of(result))
    return audit


def _check_warm_up(case: Case, said: list[str]) -> None:
    told = re.findall(r"nwor: vLLM's warm-up was audited, (\d+) steps with drafts", "\n".join(said))
    assert bool(told) == case.warms_up, said
    assert "0" not in told


def check_audit(session: dict[str, Any], share: float = Case.share) -> None:
    """Check that enough drafts were accepted and rejected, and that no rejected draft left a row.

    In mode stage, the audit must have compared twice during every step.
    """
    audit = session["audit"]
    if session["mode"] == "stage":
        assert audit["moments"] == 2 * audit["steps"]
        assert audit["tail_rows"] > 0
    assert audit["stale_rows"] == 0
    for what in ("accepted", "rejected"):
        assert audit[what] > share * audit["drafted"], f"{audit[what]} of {audit['drafted']} drafts were {what}"
    assert session["vanilla_steps"] == {}
