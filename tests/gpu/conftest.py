"""What the GPU tests share: why they are skipped, and the comparison of one call with the oracle."""

from __future__ import annotations

from pathlib import Path

import oracle
import pytest
import torch
from layouts import same_memory, twin

import nwor_ops

DEVICE = "cuda"


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    problems = [library.problem for library in nwor_ops.LIBRARIES if library.kind == "cuda"]
    return problems[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def same_as_oracle():
    """Runs an op on a GPU twin of the arguments and its oracle on a CPU twin, and compares every byte of
    all memory behind them; returns the GPU twin. `expected_from` are the oracle's arguments where a GPU
    call with bad indices must come to what a call without them does."""

    def compare(op, arguments, expected_from=None):
        ours, theirs = twin(arguments, DEVICE), twin(expected_from or arguments)
        results, expected = getattr(nwor_ops, op)(*ours), getattr(oracle, op)(*theirs)
        for result, wanted in zip(results or (), expected or (), strict=True):
            assert result.dtype == wanted.dtype
            assert torch.equal(result.cpu(), wanted)
        if expected_from is None:
            assert same_memory(ours, theirs)
        else:  # the indices differ on purpose
            names = [a.name for a in getattr(torch.ops.nwor, op).default._schema.arguments]
            for name, one, other in zip(names, ours, theirs, strict=False):
                if name not in ("slot_mapping", "log_rows", "row_slots", "page_offsets"):
                    assert same_memory([one], [other]), name
        return ours

    return compare
