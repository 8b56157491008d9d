"""Checks that every engine with the transaction must pass."""

from __future__ import annotations

from typing import Any

COW = {"mode": "cow", "audit": True}
STAGE = {"mode": "stage", "audit": True}


def check_transaction(result: dict[str, Any], accepts: bool = True) -> dict[str, int]:
    """Check that the counts of audit and manager agree, and that there were accepted and rejected drafts."""
    session = result["session"]
    audit, stats = session["audit"], session["stats"]
    if session["mode"] == "stage":
        assert audit["moments"] == 2 * audit["steps"]
        for rows in session.get("copied_rows", ()):  # most rows are there from the previous step
            assert rows["copied"] < rows["committed"] / 2, rows
    else:
        assert audit["moments"] == 0
    assert audit["stale_rows"] == 0
    assert (audit["accepted"] > 0) == accepts
    assert audit["rejected"] > 0
    assert [stats[name] for name in ("drafted", "accepted", "rejected")] == [
        audit[name] for name in ("drafted", "accepted", "rejected")
    ]
    assert session["vanilla_steps"] == {}
    return audit


def check_vllm_counts(result: dict[str, Any]) -> None:
    """Compare with vLLM's counts. Not valid if requests are aborted or preempted, because the scheduler drops their
    counts."""
    audit = result["session"]["audit"]
    assert audit["drafted"] == result["metrics"]["spec_decode_num_draft_tokens"]
    assert audit["accepted"] == result["metrics"]["spec_decode_num_accepted_tokens"]
