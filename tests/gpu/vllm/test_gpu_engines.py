"""Each case of the table: every byte is audited at every step, and the output is vanilla's, token by token."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu_cases import (
    CASES,
    DRAFT_REFUSALS,
    DRAFT_WARNED,
    FUSED_WRITER,
    RECURRENT_REFUSALS,
    REFUSALS,
    STAGE_CASES,
    VOCABULARY_REFUSALS,
    WARNED,
    WATCHED,
    Case,
    Refusal,
)
from gpu_engine_checks import assert_same_tokens, check_case, finished, note, refused, run_case, session_of


@pytest.mark.parametrize("case", [*CASES, *STAGE_CASES], ids=lambda case: case.name)
def test_engine(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result, vanilla = run_case(case, engines, record)
    session = check_case(case, result)
    audit, stats = session["audit"], session["stats"]
    assert (result["replays"]["replays_with_drafts"] > 0) == (result["workers"][0]["cudagraph_mode"] != "NONE")

    assert [stats[name] for name in ("drafted", "accepted", "rejected")] == [
        audit[name] for name in ("drafted", "accepted", "rejected")
    ]
    if case.trimmed:
        assert stats["drafted"] < result["metrics"]["spec_decode_num_draft_tokens"]
    assert_same_tokens(result, vanilla, case.may_differ)


@pytest.mark.parametrize("case", [WATCHED], ids=lambda case: case.name)
def test_vanilla_leaves_stale_rows(case: Case, engines: Any, record: dict[str, Any]) -> None:
    """The reason for this library, and the proof that the audit finds stale rows."""
    audit = session_of(run_case(case, engines, record)[0])["audit"]
    assert audit["rejected"] > 0
    assert audit["stale_rows"] > 0


ALL_REFUSALS = [*REFUSALS, *DRAFT_REFUSALS, *RECURRENT_REFUSALS, *VOCABULARY_REFUSALS]


@pytest.mark.parametrize("refusal", ALL_REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_at_start_up(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    said = refused(refusal, engines, record)
    assert "nwor:" in said, said
    assert re.search(refusal.because, said), said
    if refusal.nwor.get("draft_graphs"):
        assert "draft graphs were asked for" in said


@pytest.mark.parametrize("refusal", [WARNED, DRAFT_WARNED], ids=lambda refusal: refusal.name)
def test_engine_starts_without_refused_feature(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    result = engines.start_refusal(refusal).result()
    record["seconds"] = result["seconds"]
    [worker] = finished(result)["workers"]
    assert worker["sessions"] == []
    assert not worker["wrapped"]
    assert all(report["captured"] == {} for report in worker["draft_graphs"])
    assert any(refusal.because in line for line in result["said"])


@pytest.mark.parametrize("case", [FUSED_WRITER], ids=lambda case: case.name)
def test_fused_writer_is_switched_off_or_refused(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result = engines.start_case(case)[1].result()
    note(record, case, result)
    if result["error"] is not None:
        assert "fuse_rope_kvcache_cat_mla" in "\n".join([result["error"], *result["said"]])
        return
    audit = session_of(result)["audit"]
    assert audit["rejected"] > 0
    assert audit["stale_rows"] == 0
