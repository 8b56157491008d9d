"""What an engine on a GPU must come to, and what the report keeps of it."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import Case

AUDITED = (
    "steps",
    "verify_steps",
    "drafted",
    "accepted",
    "rejected",
    "rows_checked",
    "stale_rows",
    "exposed_rows",
    "recurrent_bytes",
    "moments",
    "committed_rows",
    "committed_bytes",
)


def finished(result: dict[str, Any]) -> dict[str, Any]:
    """The result of an engine that came to its end; else fail with its error and where its log is."""
    if result["error"] is not None:
        said = "\n".join(result["said"][-6:])
        pytest.fail(f"{result['error'][:1200]}\n{said}\nlog: {result['log']}", pytrace=False)
    return result


def session_of(result: dict[str, Any]) -> dict[str, Any]:
    [worker] = result["workers"]
    assert worker["sessions"], f"nwor_ops was not active; it said {result['said']}; log: {result['log']}"
    [session] = worker["sessions"]
    return session


def note(record: dict[str, Any], case: Case, result: dict[str, Any]) -> None:
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


def assert_same_tokens(ours: dict[str, Any], vanilla: dict[str, Any]) -> None:
    for number, (mine, theirs) in enumerate(zip(ours["rounds"], vanilla["rounds"], strict=True)):
        for request, (tokens, wanted) in enumerate(zip(mine, theirs, strict=True)):
            if tokens == wanted:
                continue
            assert tokens is not None
            assert wanted is not None
            at = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if len(set(pair)) > 1), None)
            pytest.fail(f"round {number}, request {request} differs from vanilla's at token {at}", pytrace=False)


def check_audit(session: dict[str, Any]) -> None:
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
