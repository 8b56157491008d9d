"""Show the progress of a command that takes more than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Tasks:
    """Show the progress: a live line on a terminal, otherwise one line before and one line after each task."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._count = count
        self._begun = 0

    @contextmanager
    def task(self, what: str, most: int | None = None) -> Iterator[Callable[[], None]]:
        """Show one task. Yields a function to call after each of its ``most`` parts."""
        self._begun += 1
        title = f"{self._begun}/{self._count} {what}"
        started = time.monotonic()
        if self._console.is_terminal:
            bar = () if most is None else (BarColumn(), MofNCompleteColumn())
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *bar, TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                added = progress.add_task(title, total=most)
                yield lambda: progress.advance(added)
        else:
            self._console.print(f"{title} ...", soft_wrap=True, markup=False)
            yield lambda: None
        self._console.print(f"[green]done[/] in {time.monotonic() - started:3.0f} s: {escape(title)}", soft_wrap=True)
