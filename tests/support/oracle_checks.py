"""Compare a call of an op with its oracle, and check that a call is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from nwor_ops import ops
from nwor_ops.testing.against_oracle import compare_with_oracle
from nwor_ops.testing.layouts import random_bytes, same_memory, surrounded, twin


def assert_same_as_oracle(op: str, arguments: Any, device: str = "cpu") -> Any:
    """Compare an op with its oracle in all memory. Return the op's twin, on its device."""
    ours, _ = compare_with_oracle(op, arguments, device)
    return ours


def assert_same_as_cpu(op: str, arguments: Any, device: str) -> Any:
    """Compare an op on a device with its CPU kernel in all memory, if the oracle is slow. Return the op's twin."""
    theirs, ours = twin(arguments), twin(arguments, device)
    getattr(ops, op)(*theirs)
    getattr(ops, op)(*ours)
    assert same_memory(ours, theirs), op
    return ours


def refuse(op: str, arguments: Any, error: type[Exception], sentence: str) -> None:
    """Check that an op refuses these arguments, writes nothing, and raises a matching message that begins with its
    name."""
    before = twin(arguments)
    with pytest.raises(error, match=sentence) as caught:
        getattr(ops, op)(*arguments)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{op}: ")
    assert same_memory(arguments, before)


def random_log(caches: list[Tensor], rows: int) -> Tensor:
    """Return a log [L, R, H, W] of random bytes for the planes."""
    shape = (len(caches), rows, *caches[0].shape[2:])
    count = len(caches) * rows * caches[0].shape[2] * caches[0].shape[3]
    return surrounded(random_bytes(count, caches[0].dtype, 7).view(shape))
