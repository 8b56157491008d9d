"""Counts of drafts that begin with a zero, on a GPU: the same as without it."""

from __future__ import annotations

import pytest
from layouts import same_memory, twin
from samples import sample_inputs
from test_leading_zero import SAMPLES, others, with_zero

from nwor_ops import ops


@pytest.mark.parametrize(("op", "index"), SAMPLES)
def test_same_bytes_as_without(device, op, index):
    plain = twin(sample_inputs(op)[index], device)
    ours = with_zero(op, twin(plain))
    getattr(ops, op)(*ours)
    getattr(ops, op)(*plain)
    assert same_memory(others(op, ours[: len(plain)]), others(op, plain))
