"""Simulated launch failures and signals."""

from __future__ import annotations

import inspect
import itertools
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
    "plan_window", "open_window", "reject_rows", "reject_rows_from_rejected", "restore_slots",
    "restore_slots_from_rejected", "close_window", "close_window_from_rejected",
)  # fmt: skip
BOUND = ("begin_bound", "commit_bound", "commit_tokens_bound")  # all launches of a begin or a commit


class Lost(Exception):
    """The device is lost."""


@contextmanager
def _launches(replaced: Callable) -> Iterator[None]:
    """Replace each function that launches, by what `replaced` makes of it."""
    with pytest.MonkeyPatch().context() as patched:
        for module, names in ((ops, LAUNCHES), (nwor_ops.transaction.manager, BOUND)):
            for name in names:
                patched.setattr(module, name, replaced(getattr(module, name)))
        yield


@contextmanager
def fail_at(launch: int, lasting: bool = False) -> Iterator[list[int]]:
    """Make the launch of a manager with this number fail, counted from 0. If `lasting`, all later launches fail too.

    Yields a list with the number of launches made.
    """
    made, failed = [0], [False]

    def failing(op):
        def run(*arguments, **named):
            if made[0] == launch and (lasting or not failed[0]):
                failed[0] = True
                raise Lost
            op(*arguments, **named)
            made[0] += 1

        return run

    with _launches(failing):
        yield made


@contextmanager
def raising_after_launch(error: type[Exception]) -> Iterator[None]:
    """Make the launches, and raise after each of them."""

    def raising(op):
        def run(*arguments, **named):
            op(*arguments, **named)
            raise error(f"{op.__name__}: found after the launch")

        return run

    with _launches(raising):
        yield


FOLDERS = ("transaction", "ops", "recurrent")
OURS = tuple(os.path.join(os.path.dirname(nwor_ops.__file__), folder, "") for folder in FOLDERS)


class Interrupts:
    """Raises KeyboardInterrupt in our Python code, as a signal handler does. `place` counts the lines and returns.

    Python runs a signal handler between two of its instructions, also right after a kernel has run.
    """

    def __init__(self, place: int) -> None:
        self.place = self.left = place

    def __enter__(self) -> Interrupts:
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: object, *_: object) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    @property
    def raised(self) -> bool:
        return self.left < 0

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        ours = frame.f_code.co_filename.startswith(OURS)
        return self._line if ours and not frame.f_code.co_flags & inspect.CO_GENERATOR else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable:
        if event in ("line", "return"):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self._line


def every_interrupt() -> Iterator[Interrupts]:
    """Yield an interrupt for each place of a call, until one was not reached."""
    for place in itertools.count():
        interrupt = Interrupts(place)
        yield interrupt
        if not interrupt.raised:
            assert place > 5
            return
