"""Counts of drafts that begin with a zero, on a GPU: the same as without it."""

from __future__ import annotations

import pytest
from layouts import twin
from samples import sample_inputs
from test_leading_zero import SAMPLES, assert_same_bytes


@pytest.mark.parametrize(("op", "index"), SAMPLES)
def test_same_bytes_as_without(device, op, index):
    assert_same_bytes(op, twin(sample_inputs(op)[index], device))
