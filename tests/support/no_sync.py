"""Modes that forbid what would wait for a device, or allocate, between begin and commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nwor_ops import DraftCommitManager, validation
from nwor_ops.ops import registry


class Forbidden(Exception):
    pass


class NoHostReads(TorchFunctionMode):
    """Forbids what carries values between Python and tensors; some of it never reaches the dispatcher."""

    VALUES_OUT = frozenset(("item", "tolist", "numpy", "cpu", "cuda", "to", "__array__", "__contains__"))
    VALUES_OUT_AS_NUMBERS = frozenset(("__bool__", "__int__", "__float__", "__index__", "__format__"))
    VALUES_IN = frozenset(("tensor", "as_tensor", "from_numpy"))
    NAMES = VALUES_OUT | VALUES_OUT_AS_NUMBERS | VALUES_IN

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.NAMES:
            raise Forbidden(func.__name__)
        return func(*args, **(kwargs or {}))


class OnlyOursAndViews(TorchDispatchMode):
    """Forbids every operation but the ops of nwor_ops and views: whatever allocates, waits or copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != registry.NAMESPACE and not func.is_view:
            raise Forbidden(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Leave out the checks that read values, which only run on a CPU."""
    of_managers = property(lambda manager: False)
    with (
        patch.object(validation, "reads_values", lambda device: False),
        patch.object(DraftCommitManager, "_reads_values", of_managers, create=True),
    ):
        yield


@contextmanager
def guard():
    with as_on_a_device(), NoHostReads(), OnlyOursAndViews():
        yield


@contextmanager
def no_waits() -> Iterator[None]:
    """Within it, torch raises if the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def no_waits_or_allocations() -> Iterator[None]:
    """The same, and torch allocates no memory of the GPU."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits():
        yield
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
