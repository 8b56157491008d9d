"""Graphs for a draft model: drafts, acceptance and output equal vanilla vLLM, and graphs really ran."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import DRAFT_CASES, ENGINE, DraftCase
from gpu_engine_checks import assert_same_tokens, check_audit, check_worker, run_case, session_of

# If a padded matrix product uses another kernel, one of two close logits may win that did not win before.
DIFFERENT_DRAFTS, DIFFERENT_ACCEPTANCE = 0.03, 0.05
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
NOT_BY_US = ("dummy run", "nothing captured")  # the warm-up, and steps before vLLM captures
TOO_LARGE = "more requests than the largest graph"
MIXED = "first pass of a batch with prompts, or with fewer drafts in some request"


def _report(result: dict[str, Any]) -> dict[str, Any]:
    [worker] = result["workers"]
    assert worker["draft_graphs"], f"no draft graphs in that engine; it logged {result['said']}; log: {result['log']}"
    [report] = worker["draft_graphs"]
    return report


def _compare_drafts(ours: dict[str, Any], vanilla: dict[str, Any], longest: int) -> tuple[int, int, int]:
    """Return the number of sequences that either side continued, that both continued, and that got different drafts.

    Drafts after the model's limit are left out: vLLM's first pass writes all tokens there to the last slot, in any
    order.
    """
    mine, theirs = (
        {
            (request, length): tokens[: max(0, longest - 1 - int(length))]
            for request, found in side.items()
            for length, tokens in found.items()
        }
        for side in (ours, vanilla)
    )
    both = mine.keys() & theirs.keys()
    # If the number of drafts is dynamic, one side may have been asked for more.
    shared = {at: min(len(mine[at]), len(theirs[at])) for at in both}
    different = sum(mine[at][:many] != theirs[at][:many] for at, many in shared.items())
    return len(mine.keys() | theirs.keys()), len(both), different


def _acceptance(result: dict[str, Any]) -> list[float]:
    """Return the acceptance by position of the draft."""
    return [count / result["metrics"]["spec_decode_num_drafts"] for count in result["metrics"][PER_POSITION]]


def _captured(case: DraftCase) -> dict[int, tuple[list[int], list[int]]]:
    """Return the request counts that must have a graph, by number of drafts: those of the first pass and of
    the loop."""
    if case.captured is not None:
        return case.captured
    drafts = case.engine["speculative_config"]["num_speculative_tokens"]
    counts = [size // (drafts + 1) for size in case.engine["compilation_config"]["cudagraph_capture_sizes"]]
    return {drafts: (counts, counts if drafts > 1 else [])}


def _check_graphs_ran(case: DraftCase, result: dict[str, Any], report: dict[str, Any]) -> None:
    captured, eager = _captured(case), report["eager"]
    assert report["captured"] == {
        str(drafts): {"first_pass": first, "decode": loops} for drafts, (first, loops) in captured.items()
    }
    if case.eager:
        assert set(eager) <= {*NOT_BY_US, case.eager}
        assert eager[case.eager] >= result["proposed"]["steps"]
        return
    by_drafts = {int(drafts): steps for drafts, steps in result["proposed"]["by_drafts"].items()}
    too_large = eager.get(TOO_LARGE, 0)
    largest = max(count for counts in captured.values() for count in (*counts[0], *counts[1]))
    assert (too_large > 0) == (largest < ENGINE["max_num_seqs"])
    assert set(eager) <= {*NOT_BY_US, MIXED, TOO_LARGE}
    # Each number of drafts was requested, and no other. Steps whose drafts cannot be used have 0.
    assert set(captured) <= set(by_drafts) <= {0, *captured}
    # The warm-up steps of vLLM may have added to these counts.
    decode_loops = max(0, sum(steps for drafts, steps in by_drafts.items() if drafts > 1) - too_large)
    first_passes = result["proposed"]["steps"] - too_large - eager.get(MIXED, 0)
    assert decode_loops > 0 or max(captured) == 1
    assert first_passes > 0
    assert report["replays"]["first_pass"] >= first_passes
    assert report["replays"]["decode"] >= decode_loops
    # As counted by torch, only during the run.
    assert result["replays"]["graph_replays"] >= first_passes + decode_loops


@pytest.mark.parametrize("case", DRAFT_CASES, ids=lambda case: case.name)
def test_same_drafts_and_output(case: DraftCase, engines: Any, record: dict[str, Any]) -> None:
    result, theirs = run_case(case, engines, record)
    report = _report(result)
    longest = case.engine.get("max_model_len", ENGINE["max_model_len"])
    proposed = (side["proposed"]["drafts"] for side in (result, theirs))
    sequences, compared, different = _compare_drafts(*proposed, longest)
    acceptance, expected = _acceptance(result), _acceptance(theirs)
    record |= {
        "draft_graphs": report,
        "draft_steps": result["proposed"]["steps"],
        "drafts_compared": compared,
        "drafts_different": different,
        "acceptance_per_position": acceptance,
        "acceptance_per_position_vanilla": expected,
    }
    check_worker(case, result, {})
    _check_graphs_ran(case, result, report)
    if case.nwor["mode"] != "off":
        assert session_of(result)["mode"] == case.nwor["mode"]
        check_audit(session_of(result))
        assert result["replays"]["replays_with_drafts"] > 0  # replays of the target, which the transaction concerns

    assert compared > 50
    random = case.use.get("temperature", 0.0) > 0
    if not random:
        assert compared >= 0.9 * sequences
        assert different <= (0 if case.exact else DIFFERENT_DRAFTS * compared)
    assert len(acceptance) == len(expected)
    for position, (mine, vanilla_s) in enumerate(zip(acceptance, expected, strict=True)):
        assert abs(mine - vanilla_s) <= DIFFERENT_ACCEPTANCE, f"draft {position}: {mine}, vanilla's {vanilla_s}"
    if not random:
        assert_same_tokens(result, theirs)
