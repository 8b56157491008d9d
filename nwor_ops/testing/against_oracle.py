"""Run ops and their oracles on copies of the same arguments, and compare results and all memory.

Example:
    >>> from nwor_ops.testing.against_oracle import run_round
    >>> sorted(run_round(7, "cpu"))[:2]  # the ops of this round, and the number of their calls
    ['acceptance_mask', 'acceptance_mask_from_rejected']
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from nwor_ops import ops
from nwor_ops.testing import oracle
from nwor_ops.testing.layouts import bytes_of, raw, storages, twin
from nwor_ops.testing.samples import FAMILIES, run
from nwor_ops.testing.samples.dice import Call, Dice, Tolerances


class Mismatch(AssertionError):
    """An op and its oracle differ."""


def run_round(seed: int, device: str) -> Counter[str]:
    """Compare a random window of each family with the oracles, and return the number of calls of each op.

    Raises:
        Mismatch: an op and its oracle differ.
        Exception: an op refused its arguments. Its message names the op.
    """
    return sum((run_window(family, seed, device) for family in FAMILIES), Counter[str]())


def run_window(family: str, seed: int, device: str, num_requests: int | None = None) -> Counter[str]:
    """Compare a random window of one family with the oracles. See :func:`run_round` and :class:`Dice`.

    Each call continues from the oracle's result of the call before, so the first difference is in the op that is named.
    """

    def compared(call: Call) -> tuple[Any, ...]:
        return compare_with_oracle(call.op, call.arguments, device, call.tolerances)[1]

    return Counter(call.op for call in run(FAMILIES[family](Dice(family, seed, 0, num_requests)), compared))


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
