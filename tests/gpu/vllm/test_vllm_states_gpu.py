"""The audit of K + 1 recurrent states in engines on the GPU, with each kernel that decodes drafts there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu_cases import VLLM_STATES_CASES, Case
from gpu_engine_checks import run_case


@pytest.mark.parametrize("case", VLLM_STATES_CASES, ids=lambda case: case.name)
def test_the_states_of_vllm_are_right(case: Case, engines: Any, record: dict[str, Any]) -> None:
    result, _ = run_case(case, engines, record)
    [states] = result["workers"][0]["vllm_states"]
    assert states["steps"] > 10
    assert states["states_compared"] > states["steps"]
    assert states["states_computed"] > states["windows"]


@pytest.mark.parametrize("case", VLLM_STATES_CASES, ids=lambda case: case.name)
def test_error_names_layer_and_step(case: Case, engines: Any) -> None:
    settings = {**case.engine, "additional_config": {"nwor": case.nwor}}
    result = engines.start(f"{case.name}-wrong", settings, case.environment, **case.use, faults="states").result()
    said = "\n".join([result["error"] or "", *result["said"]])
    planted = re.search(r"planted wrong states in step (\d+) of layer (\S+)", said)
    found = re.search(r"nwor audit, step (\d+): vLLM's states of layer (\S+), request in block \d+: the state", said)
    assert planted is not None, said
    assert found is not None, said
    assert (int(found[1]), found[2]) == (int(planted[1]) + 1, planted[2])
