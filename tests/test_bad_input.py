"""Bad input to every op: argument by argument, from the schema (`bad_input`). Refusals write nothing."""

from __future__ import annotations

import bad_input
import oracle
import pytest
import torch
from bad_input import KINDS, any_data, any_integer, check_refused, only_declared_changed
from layouts import same_memory, twin
from samples import OPS

from nwor_ops import ops


@pytest.mark.parametrize("op", OPS)
def test_another_device(op):
    """`meta` stands for any other device: the fake answers, which must not take the call for one of its own."""
    for case in bad_input.another_device(op, "cpu", ("meta",)):
        check_refused(op, case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_refused(op, kind):
    for case in KINDS[kind](op, "cpu"):
        check_refused(op, case)


@pytest.mark.parametrize("op", OPS)
def test_any_integer(op):
    """An error that names the op, or what the oracle gives."""
    for label, arguments in any_integer(op, "cpu"):
        ours, theirs = twin(arguments), twin(arguments)
        try:
            result = getattr(ops, op)(*ours)
        except (ValueError, IndexError) as error:
            print(label, error)
            assert str(error).startswith(f"{op}: "), f"{label}: {error}"
            assert same_memory(ours, arguments), label
            continue
        expected = getattr(oracle, op)(*theirs)
        assert same_memory(ours, theirs), label
        for one, other in zip(result or (), expected or (), strict=True):
            assert torch.equal(one, other), label


@pytest.mark.parametrize("op", OPS)
def test_any_data(op):
    """An error that names the op and writes nothing, or a result inside the outputs."""
    for label, arguments in any_data(op, "cpu", seeds=60):
        before = twin(arguments)
        try:
            getattr(ops, op)(*arguments)
        except (ValueError, IndexError) as error:
            assert str(error).startswith(f"{op}: "), f"{label}: {error}"
            assert same_memory(arguments, before), label
        else:
            assert only_declared_changed(op, arguments, before), label
