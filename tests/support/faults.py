"""Simulated launch failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nwor_ops import ops

LAUNCHES = (
    "plan_window", "open_window", "reject_rows", "reject_rows_from_rejected", "restore_slots",
    "restore_slots_from_rejected", "close_window", "close_window_from_rejected",
)  # fmt: skip


class Lost(Exception):
    """The device is lost."""


@contextmanager
def fail_at(launch: int, lasting: bool = False) -> Iterator[list[int]]:
    """Make the launch of a manager with this number fail, counted from 0. If `lasting`, all later launches fail too.

    Yields a list with the number of launches made.
    """
    made, failed = [0], [False]

    def failing(op):
        def run(*arguments):
            if made[0] == launch and (lasting or not failed[0]):
                failed[0] = True
                raise Lost
            made[0] += 1
            op(*arguments)

        return run

    with pytest.MonkeyPatch().context() as patched:
        for name in LAUNCHES:
            patched.setattr(ops, name, failing(getattr(ops, name)))
        yield made


@contextmanager
def raising_after_launch(error: type[Exception]) -> Iterator[None]:
    """Make the launches, and raise after each of them."""

    def raising(op):
        def run(*arguments):
            op(*arguments)
            raise error(f"{op.__name__}: found after the launch")

        return run

    with pytest.MonkeyPatch().context() as patched:
        for name in LAUNCHES:
            patched.setattr(ops, name, raising(getattr(ops, name)))
        yield
