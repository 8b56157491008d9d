"""Draft vocabulary in real engines: the output is vanilla's, the rows follow the head, and the counters follow it."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import VOCABULARY_CASES, VOCABULARY_REFUSALS, Case, Refusal
from gpu_engine_checks import assert_same_tokens, finished, note, refused

from nwor_ops.testing.tiny_llama import VOCABULARY


def _vocabulary(result: dict[str, Any]) -> dict[str, Any]:
    reports = [report for worker in result["workers"] for report in worker["draft_vocabulary"]]
    assert reports, f"no draft vocabulary in that engine; it logged {result['said']}; log: {result['log']}"
    assert all(report["consistent"] and not report["errors"] for report in reports), reports
    assert len({tuple(report["counters"]) for report in reports}) == 1
    return reports[0]


@pytest.mark.parametrize("case", VOCABULARY_CASES, ids=lambda case: case.name)
def test_draft_vocabulary(case: Case, engines: Any, record: dict[str, Any]) -> None:
    vanilla, ours = engines.start_case(case)
    result = finished(ours.result())
    note(record, case, result)
    report = _vocabulary(result)
    metrics, (sampled, missed) = result["metrics"], report["counters"]
    record["sampled"], record["missed"] = sampled, missed
    accepted, drafted = metrics["spec_decode_num_accepted_tokens"], metrics["spec_decode_num_draft_tokens"]
    record["accepted"], record["drafted"] = accepted, drafted
    assert 0 < accepted < drafted
    assert accepted < sampled
    assert (missed == 0) == (case.nwor["draft_vocabulary"] >= VOCABULARY)
    for name, least in case.expect.items():
        if name.startswith("metric:"):
            assert metrics[name.removeprefix("metric:")] >= least
    if vanilla is not None:
        other = finished(vanilla.result())
        assert_same_tokens(result, other, case.may_differ)
        if case.nwor["draft_vocabulary"] >= VOCABULARY:  # the same drafts
            assert accepted == pytest.approx(other["metrics"]["spec_decode_num_accepted_tokens"], rel=0.05)


@pytest.mark.parametrize("refusal", VOCABULARY_REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_at_start_up(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    assert refusal.because in refused(refusal, engines, record)
