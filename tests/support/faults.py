"""Simulated launch failures and signals."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

import nwor_ops
import nwor_ops.transaction.manager
from nwor_ops import ops

LAUNCHES = (
    "plan_window", "restore_slots", "accept_staged", "commit_staged",
    "plan_recurrent_window", "plan_recurrent_fold", "gated_delta_fold",
)  # fmt: skip
BOUND = ("begin_bound", "begin_redirected_bound", "commit_bound", "commit_tokens_bound")  # all launches of a call


class Lost(Exception):
    """The device is lost."""


@contextmanager
def failing(when: str, error: type[BaseException] = Lost) -> Iterator[None]:
    """Raise "before" or "after" each bound call of a manager. Any other word: do not raise."""

    def broken(call: Callable) -> Callable:
        def run(*arguments: object) -> None:
            if when == "before":
                raise error
            call(*arguments)
            if when == "after":
                raise error

        return run

    manager = nwor_ops.transaction.manager
    with pytest.MonkeyPatch().context() as patched:
        for name in BOUND:
            patched.setattr(manager, name, broken(getattr(manager, name)))
        yield


@contextmanager
def fail_at(launch: int, when: str = "before", error: type[BaseException] = Lost) -> Iterator[None]:
    """Raise "before" or "after" the launch with this number, counted from 0, and all later ones that are not bound."""
    made = 0

    def broken(op: Callable) -> Callable:
        def run(*arguments: object, **named: object) -> None:
            nonlocal made
            fails, made = made >= launch, made + 1
            if fails and when == "before":
                raise error
            op(*arguments, **named)
            if fails:
                raise error

        return run

    with pytest.MonkeyPatch().context() as patched:
        for name in LAUNCHES:
            patched.setattr(ops, name, broken(getattr(ops, name)))
        yield


OURS = tuple(
    os.path.join(os.path.dirname(nwor_ops.__file__), folder, "") for folder in ("transaction", "ops", "recurrent")
)


class Interrupts:
    """Raises KeyboardInterrupt in our Python code, as a signal handler does. `place` counts the lines and returns.

    Python runs a signal handler between two of its instructions, also right after a kernel has run.
    """

    def __init__(self, place: int) -> None:
        self.left = place

    def __enter__(self) -> Interrupts:
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: object, *_: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        ours = frame.f_code.co_filename.startswith(OURS)
        return self._line if ours and not frame.f_code.co_flags & inspect.CO_GENERATOR else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable:
        if event in ("line", "return"):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self._line
