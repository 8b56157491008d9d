"""One recurrent state per request: the output of vanilla vLLM, which keeps K + 1, and each state compared with them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu_cases import RECURRENT_CASES, RECURRENT_REFUSALS, Case, Refusal
from gpu_engine_checks import assert_same_tokens, check_recurrent, finished, note, refused


@pytest.mark.parametrize("case", RECURRENT_CASES, ids=lambda case: case.name)
def test_same_output_and_states(case: Case, engines: Any, record: dict[str, Any]) -> None:
    vanilla, ours = engines.start_case(case)
    result = ours.result()
    note(record, case, result)
    check_recurrent(case, result, record)
    if vanilla is not None:
        assert_same_tokens(result, finished(vanilla.result()), case.may_differ)


@pytest.mark.parametrize("refusal", RECURRENT_REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_at_start_up(refusal: Refusal, engines: Any, record: dict[str, Any]) -> None:
    said = refused(refusal, engines, record)
    assert re.search(refusal.because, said), said
