"""Test which areas of memory share a byte, against sets of all their bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor_ops.overlap import Area, first_overlap, share_bytes

SIZES = st.sampled_from([1, 2, 4, 8])
DIMENSIONS = st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]))
AREAS = st.builds(Area, st.integers(1, 80), SIZES, st.lists(DIMENSIONS, max_size=4).map(tuple))


def bytes_of(area: Area) -> set[int]:
    starts = {area.start}
    for count, stride in area.dimensions:
        starts = {start + index * stride for start in starts for index in range(count)}
    return {start + offset for start in starts for offset in range(area.size)}


@given(AREAS, AREAS)
def test_two_areas(a, b):
    assert share_bytes(a, b) == share_bytes(b, a) == bool(bytes_of(a) & bytes_of(b))
    assert a.end == max(bytes_of(a)) + 1


@given(st.lists(st.tuples(st.sampled_from("abc"), AREAS), max_size=6))
def test_areas_of_groups(areas):
    of_group = {group: set().union(*(bytes_of(area) for g, area in areas if g == group)) for group in "abc"}
    shared = {(a, b) for a in "abc" for b in "abc" if a != b and of_group[a] & of_group[b]}
    found = first_overlap(areas)
    assert found in shared if shared else found is None


def test_the_area_of_a_tensor():
    pool = torch.zeros(4, 6, dtype=torch.int16)
    area = Area.of(pool[1:, ::2])
    assert bytes_of(area) == {
        pool.data_ptr() + 2 * (6 * row + column) + byte for row in (1, 2, 3) for column in (0, 2, 4) for byte in (0, 1)
    }
