"""One recurrent state per request: the output of vanilla vLLM, which keeps K + 1, and each state compared with them.

With KV connectors, engines load what they stored, and the states that they read are vanilla's. An engine decodes with
drafts after another engine has prefilled.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import RECURRENT_CASES, RECURRENT_CONNECTORS, RECURRENT_PREFILLED, Case
from gpu_engine_checks import assert_same_tokens, check_recurrent, run_case


@pytest.mark.parametrize("case", RECURRENT_CASES, ids=lambda case: case.name)
def test_same_output_and_states(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result, vanilla = run_case(case, engines, record)
    check_recurrent(case, result, record)
    assert_same_tokens(result, vanilla, case.may_differ)


@pytest.mark.parametrize("case", RECURRENT_CONNECTORS, ids=lambda case: case.name)
def test_stores_and_loads(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result, vanilla = run_case(case, engines, record)
    check_recurrent(case, result, record)
    record["loaded"] = result["metrics"].get("external_prefix_cache_hits", 0)
    assert_same_tokens(result, vanilla, case.may_differ)
    if vanilla is not None and "states" in result:
        is_chunk = case.nwor["recurrent"] == "chunk"
        _assert_same_states(result["states"], vanilla["states"], record, has_same_bits=not is_chunk)


def _assert_same_states(
    ours: dict[str, Any], vanilla: dict[str, Any], record: dict[str, Any], has_same_bits: bool
) -> None:
    """Every state with a cache key is complete. It has the bytes of vanilla's, except in the chunk form."""
    record["states"] = len(ours)
    assert len(ours) > 30
    assert ours.keys() == vanilla.keys()
    assert not {name: pending for name, (_, _, pending) in ours.items() if pending}
    differ = [name for name, found in ours.items() if found[:2] != vanilla[name][:2]]
    if not has_same_bits:
        record["states_differ"] = len(differ)
        return
    assert not differ, f"{len(differ)} of {len(ours)} states differ, the first is {differ[0]}"


@pytest.mark.parametrize("case", RECURRENT_PREFILLED, ids=lambda case: case.name)
def test_prefilled_by_another_engine(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result, vanilla = run_case(case, engines, record)
    check_recurrent(case, result, record)
    prefill = result["prefill"]
    [state] = prefill["worker"]["recurrent"]
    # The last tokens of some prompts ran as windows there, and their states were folded.
    assert state["audit"]["tail_folds"] > 0
    if prefill["handed_over"]:
        handed_over = record["handed_over"] = prefill["handed_over"] | {"loaded": result["handed_over"]["loaded"]}
        assert handed_over == {"exported": 8, "loaded": 8, "pending": 0}
    assert_same_tokens(result, vanilla, case.may_differ)
