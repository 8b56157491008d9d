"""Run an op and its oracle on copies of the same arguments, and compare results and all memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from nwor_ops import ops
from nwor_ops.testing import oracle
from nwor_ops.testing.layouts import bytes_of, storages, twin
from nwor_ops.testing.raw_rows import raw

Tolerances = Mapping[str, tuple[float, float]]


class Mismatch(AssertionError):
    """An op and its oracle differ."""


def compare_with_oracle(
    op: str, arguments: tuple[Any, ...], device: str = "cpu", tolerances: Tolerances | None = None
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run an op on a device and its oracle on the CPU, and compare them.

    Args:
        op: name of the op.
        arguments: positional arguments, on the CPU. They are copied with all their memory and not changed.
        device: device of the op.
        tolerances: relative and absolute tolerance of the elements of an argument, by its name. All other bytes must
            be equal, those around the arguments too.

    Returns:
        The arguments after the op, and after the oracle. Numbers within a tolerance are those of the oracle in both.

    Raises:
        Mismatch: a result or a byte differs. The message names the op, the argument and the first place.
    """
    ours, theirs = twin(arguments, device), twin(arguments)
    result, expected = getattr(ops, op)(*ours), getattr(oracle, op)(*theirs)
    compare(op, result, expected, ours, theirs, tolerances)
    return ours, theirs


def compare(
    op: str,
    result: Any,
    expected: Any,
    ours: tuple[Any, ...],
    theirs: tuple[Any, ...],
    tolerances: Tolerances | None = None,
) -> None:
    """Compare results and arguments after an op, on any device, with those after its oracle. See above."""
    assert_same_results(result, expected, f"{op}: ")
    names = [argument.name for argument in getattr(torch.ops.nwor, op).default._schema.arguments]
    pairs = list(zip(names, ours, theirs, strict=False))
    for name, mine, other in pairs:
        if name in (tolerances or {}):
            _accept_close(f"{op}: {name}", mine, other, *(tolerances or {})[name])
    for one, two in zip(storages(ours).values(), storages(theirs).values(), strict=True):
        if not torch.equal(bytes_of(one).cpu(), bytes_of(two)):
            found = (_first_difference(f"{op}: {name}", mine, other) for name, mine, other in pairs)
            raise Mismatch(next(filter(None, found), f"{op} wrote a byte outside its arguments"))


def assert_same_results(result: Any, expected: Any, what: str = "") -> None:
    """Compare trees of tensors, in all bytes. The first may be on any device."""
    (some, shape), (others, expected_shape) = tree_flatten(result), tree_flatten(expected)
    if shape != expected_shape:
        raise Mismatch(f"{what}the result must have the structure {expected_shape}, got {shape}")
    for index, (one, other) in enumerate(zip(some, others, strict=True)):
        if isinstance(other, Tensor) and (one.dtype, one.shape) != (other.dtype, other.shape):
            raise Mismatch(f"{what}result {index} must be {other.dtype} {list(other.shape)}, got {one.dtype}")
        if difference := _first_difference(f"{what}result {index}", one, other):
            raise Mismatch(difference)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _first_difference(what: str, mine: Any, other: Any) -> str | None:
    """Return a sentence about the first element that differs, or None."""
    for index, (one, two) in enumerate(zip(_tensors(mine), _tensors(other), strict=True)):
        of_list = f"[{index}]" if isinstance(mine, list) else ""
        differs = raw(one).cpu() != raw(two) if one.dtype != torch.bool else one.cpu() != two
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            got, expected = one.cpu()[place].item(), two[place].item()
            return (
                f"{what}{of_list}{list(place)} must be {expected}, as the oracle says, got {got} "
                f"({int(differs.sum())} of {differs.numel()} elements differ)"
            )
    return None


def _accept_close(what: str, mine: Any, other: Any, rtol: float, atol: float) -> None:
    """Check that numbers are close, and replace ours by those of the oracle."""
    for one, two in zip(_tensors(mine), _tensors(other), strict=True):
        here = one.cpu()
        close = raw(here) == raw(two)
        close[~close] = torch.isclose(here[~close].double(), two[~close].double(), rtol=rtol, atol=atol)
        if not close.all():
            place = tuple((~close).nonzero()[0].tolist())
            raise Mismatch(
                f"{what}{list(place)} must be within {rtol:.1e} (relative) or {atol:.1e} of {two[place].item()}, "
                f"got {here[place].item()} ({int((~close).sum())} of {close.numel()} elements differ)"
            )
        one.copy_(two)
