"""Bad input on CUDA: the calls of `bad_input`, whose answers are those of the CPU."""

from __future__ import annotations

import bad_input
import pytest
import torch
from bad_input import KINDS, any_data, any_integer, attempt, check_refused, only_declared_changed
from layouts import same_memory, twin
from samples import OPS


@pytest.mark.parametrize("op", OPS)
def test_another_device(op, device):
    """A tensor on the CPU beside those on CUDA goes to the CUDA kernel: no address of the host reaches a launch."""
    for case in bad_input.another_device(op, device, ("cpu", "meta")):
        check_refused(op, case)


@pytest.mark.parametrize("op", OPS)
def test_one_argument_on_cuda(op, device):
    """As seen from the CPU: the one stray tensor decides that the CUDA kernel is called."""
    for case in bad_input.another_device(op, "cpu", (device,)):
        check_refused(op, case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_refused(op, kind, device):
    for case in KINDS[kind](op, device):
        check_refused(op, case)


@pytest.mark.parametrize("op", OPS)
def test_any_integer(op, device):
    """What the CPU does. Where that complains of data, CUDA leaves it out, and writes inside the outputs."""
    for label, arguments in any_integer(op, "cpu"):
        ours, before = twin(arguments, device), twin(arguments, device)
        expected, cpu_error = attempt(op, arguments)
        result, error = attempt(op, ours)
        if error is not None:
            assert repr(error) == repr(cpu_error), label
            assert same_memory(ours, before), label
            continue
        torch.cuda.synchronize()
        if cpu_error is not None:
            assert only_declared_changed(op, ours, before), label
            continue
        assert same_memory(ours, arguments), label
        for one, other in zip(result or (), expected or (), strict=True):
            assert torch.equal(one.cpu(), other), label


@pytest.mark.parametrize("op", OPS)
def test_any_data(op, device):
    """Whatever indices, counts and starts say, only the outputs are written. compute-sanitizer sees reads too."""
    for label, arguments in any_data(op, device, seeds=20):
        before = twin(arguments)
        _, error = attempt(op, arguments)
        assert error is None, f"{label}: {error!r}"
        torch.cuda.synchronize()
        assert only_declared_changed(op, arguments, before), label
