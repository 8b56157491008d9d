"""Write the tables of options in docs/reference/commands.md, from the options of ``nwor-ops``.

python tools/command_options.py
"""

from __future__ import annotations

import pathlib
import re
from enum import Enum
from typing import Any

import typer

from nwor_ops.cli.app import app

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "reference" / "commands.md"


def commands() -> dict[str, Any]:
    """Return the commands by name, in the order of their declaration."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def table(command: Any) -> str:
    """Return the table of a command's options."""
    rows = ["| option | default | |", "|---|---|---|"]
    for option in command.params:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        rows.append(f"| {names} | {_shown(option)} | {option.help.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _shown(option: Any) -> str:
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if option.required:
        return "required"
    return "" if default is None or isinstance(default, bool) else f"`{default}`"


def filled(text: str) -> str:
    """Return the document with a table between the marks of each command."""
    for name, command in commands().items():
        marks = f"<!-- {name}: made by tools/command_options.py -->", f"<!-- end of {name} -->"
        text, found = re.subn(
            f"{re.escape(marks[0])}.*?{re.escape(marks[1])}",
            f"{marks[0]}\n{table(command)}\n{marks[1]}".replace("\\", r"\\"),
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise SystemExit(f"{DOCUMENT.name} must have the mark {marks[0]!r} once, got {found}")
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
