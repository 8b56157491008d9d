"""Which bytes tensors occupy, and whether tensors of two groups share any.

The ops compare their own arguments (csrc/common/overlap.h). This module compares groups that no single op sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Area(NamedTuple):
    """The bytes of a strided view.

    Attributes:
        start: address of its first byte.
        size: bytes of one element.
        dimensions: size and stride of each dimension, the stride in bytes. No size is 0.
    """

    start: int
    size: int
    dimensions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Area:
        size = tensor.element_size()
        strides = (size * stride for stride in tensor.stride())
        return cls(tensor.data_ptr(), size, tuple(zip(tensor.shape, strides, strict=True)))

    @property
    def end(self) -> int:
        return self.start + self.size + sum((count - 1) * stride for count, stride in self.dimensions)


def first_overlap(areas: Iterable[tuple[str, Area]]) -> tuple[str, str] | None:
    """Return two groups whose areas share a byte, or None. Areas of the same group may share bytes.

    Args:
        areas: pairs of a group's name and one of its areas.
    """
    before: list[tuple[str, Area]] = []  # areas that may reach beyond the start of the next one
    for group, area in sorted(areas, key=lambda named: named[1].start):
        before = [(other, earlier) for other, earlier in before if earlier.end > area.start]
        for other, earlier in before:
            if other != group and share_bytes(earlier, area):
                return other, group
        before.append((group, area))
    return None


def share_bytes(a: Area, b: Area) -> bool:
    """Return whether two areas share a byte. Interleaved areas do not.

    They do if the distance of their starts is a sum of multiples of their strides, up to the size of an element. The
    search goes through the strides from the largest to the smallest. For each stride it tries only the multiples whose
    remainder the smaller strides can still cover.
    """
    multiples: dict[int, list[int]] = {}  # per stride: the least and the greatest multiple
    for sign, area in ((-1, b), (1, a)):
        for count, stride in area.dimensions:
            multiples.setdefault(stride, [0, 0])[sign > 0] += sign * (count - 1)
    terms = sorted((stride, *ends) for stride, ends in multiples.items() if stride > 0)
    reach = [(1 - b.size, a.size - 1)]  # of the sum of the smaller strides
    for stride, least, greatest in terms:
        reach.append((reach[-1][0] + least * stride, reach[-1][1] + greatest * stride))
    low, high = reach.pop()
    distances = {b.start - a.start} if low <= b.start - a.start <= high else set()
    for stride, least, greatest in reversed(terms):
        low, high = reach.pop()
        distances = {
            distance - multiple * stride
            for distance in distances
            for multiple in range(
                max(least, -((high - distance) // stride)), min(greatest, (distance - low) // stride) + 1
            )
        }
    return bool(distances)
