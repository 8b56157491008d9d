"""Draft vocabulary in real engines: the output is vanilla's, the rows follow the head, and the counters follow it."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import VOCABULARY_CASES, Case
from gpu_engine_checks import assert_same_tokens, check_worker, run_case

from nwor_ops.testing.tiny_llama import VOCABULARY


def _vocabulary(result: dict[str, Any]) -> dict[str, Any]:
    reports = [report for worker in result["workers"] for report in worker["draft_vocabulary"]]
    assert reports, f"no draft vocabulary in that engine; it logged {result['said']}; log: {result['log']}"
    assert all(report["consistent"] and not report["errors"] for report in reports), reports
    assert len({tuple(report["counters"]) for report in reports}) == 1
    return reports[0]


@pytest.mark.parametrize("case", VOCABULARY_CASES, ids=lambda case: case.name)
def test_draft_vocabulary(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result, vanilla = run_case(case, engines, record)
    report = _vocabulary(result)
    metrics, (sampled, missed) = result["metrics"], report["counters"]
    record["sampled"], record["missed"] = sampled, missed
    accepted, drafted = metrics["spec_decode_num_accepted_tokens"], metrics["spec_decode_num_draft_tokens"]
    record["accepted"], record["drafted"] = accepted, drafted
    assert 0 < accepted < drafted
    assert accepted < sampled
    assert (missed == 0) == (case.nwor["draft_vocabulary"] >= VOCABULARY)
    check_worker(case, result, {})
    if vanilla is not None:
        assert_same_tokens(result, vanilla, case.may_differ)
        if case.nwor["draft_vocabulary"] >= VOCABULARY:  # the same drafts
            assert accepted == pytest.approx(vanilla["metrics"]["spec_decode_num_accepted_tokens"], rel=0.05)
