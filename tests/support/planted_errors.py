"""Errors that a test plants in this package's code, inside a real engine."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple


class PlantedError(RuntimeError):
    """An error of a test. Unlike RuntimeError, it can be referred to weakly."""


class Fault(NamedTuple):
    """Calls of a method that raise.

    Attributes:
        owner: the class, or one object.
        method: its method.
        every: each call with a multiple of this number raises.
        reason: the label of the counter that must grow; "" = none.
        after: whether the method does its work first.
        only: tells whether a call is counted, from its arguments.
    """

    owner: Any
    method: str
    every: int
    reason: str
    after: bool = False
    only: Callable[..., bool] = lambda *_, **__: True


class Planted:
    """Plant faults, and remember what they raised.

    Attributes:
        counts: number of errors raised, by reason.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self.counts: Counter[str] = Counter()
        self._raised: list[weakref.ref[PlantedError]] = []
        self._found = [(fault.owner, fault.method, getattr(fault.owner, fault.method)) for fault in faults]
        for fault in faults:
            self._plant(fault)

    def _plant(self, fault: Fault) -> None:
        original, calls = getattr(fault.owner, fault.method), 0

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += fault.only(*args, **kwargs)
            if calls == 0 or calls % fault.every or not fault.only(*args, **kwargs):
                return original(*args, **kwargs)
            if fault.after:
                original(*args, **kwargs)
            error = PlantedError(f"planted in {fault.method}")
            self.counts[fault.reason] += 1
            self._raised.append(weakref.ref(error))
            raise error

        setattr(fault.owner, fault.method, method)

    def remove(self) -> None:
        """Put the methods back."""
        for owner, name, original in reversed(self._found):
            setattr(owner, name, original)

    def alive(self) -> int:
        """Return the number of errors that something still refers to, with the frames and tensors of their traces."""
        gc.collect()
        return sum(error() is not None for error in self._raised)


class Lines(logging.Handler):
    """Keep level and text of each log line, but no exception.

    Attributes:
        lines: the lines of this package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("nwor:"):
            self.lines.append((record.levelname, message))
