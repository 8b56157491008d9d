"""Files that the command line reads and writes. A mistake is found before anything is measured."""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any


def make_folder(folder: pathlib.Path) -> None:
    """Create the folder for the results, and check that files can be created in it.

    Raises:
        ValueError: it is not possible; the message is a sentence.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output: {folder} is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output: {folder} cannot be created: {error.strerror}") from None
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--output: no file can be created in {folder}: {error.strerror}") from None


def check_file(file: pathlib.Path) -> None:
    """Check that a file can be written. This leaves its contents unchanged and creates no file.

    Raises:
        ValueError: it is not possible; the message is a sentence.
    """
    try:
        if file.is_dir() or not file.parent.is_dir():
            raise ValueError(f"--output: {file} must be a file in a folder that exists")
        is_new = not file.exists()
        if is_new or file.is_file():  # nothing else, such as a pipe, may be opened twice
            file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise ValueError(f"--output: {file} cannot be written: {error.strerror}") from None


def lines_of(option: str, file: pathlib.Path) -> list[str]:
    """Return the lines of a file. Only a newline ends a line: texts have other separators, such as U+2028.

    Raises:
        ValueError: the file cannot be read; the message is a sentence.
    """
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"{option}: {file} cannot be read: {error.strerror}") from None
    return text.removesuffix("\n").split("\n") if text else []


def parse_json(line: str) -> Any:
    """Return the value of a line of JSON, or None if Python cannot read it."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def not_written(output: pathlib.Path, error: OSError) -> str:
    """Return a sentence for results that could not be written, for example on a full disk."""
    return f"--output: {output} could not be written: {error.strerror}"
