"""Planes passed as a table, on a GPU: the same bytes as with all of them in ``caches``."""

from __future__ import annotations

import pytest
from layouts import refuse, twin
from samples import sample_inputs
from test_plane_table import OPS, SAMPLES, assert_same_bytes, with_table

from nwor_ops import ops


@pytest.mark.parametrize(("op", "index"), SAMPLES)
def test_same_bytes_as_with_all_planes(device, op, index):
    assert_same_bytes(op, twin(sample_inputs(op)[index], device))


@pytest.mark.parametrize("op", OPS)
def test_a_table_on_the_device_is_refused(device, op):
    arguments = twin(sample_inputs(op)[0], device)
    table = ops.plane_table(arguments[0]).to(device)
    refuse(
        op, with_table(op, arguments, plane_table=table), TypeError, "plane_table must be on device cpu, got cuda:0$"
    )
