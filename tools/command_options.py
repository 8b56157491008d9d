"""Write the tables of options in docs/reference/commands.md, from the options of ``nwor-ops``.

python tools/command_options.py
"""

from __future__ import annotations

import pathlib
from enum import Enum
from typing import Any

import made_tables
import typer

from nwor_ops_cli import app

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "reference" / "commands.md"


def commands() -> dict[str, Any]:
    """Return the commands by name, in the order of their declaration."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def table(command: Any) -> str:
    """Return the table of a command's options."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for option in command.params:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        rows.append(f"| {names} | {_shown(option)} | {option.help.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _shown(option: Any) -> str:
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if option.required:
        return "required"
    return "" if default in (None, "") or isinstance(default, bool) else f"`{default}`"


def filled(text: str) -> str:
    """Return the document with a table between the marks of each command."""
    tables = {name: table(command) for name, command in commands().items()}
    return made_tables.filled(DOCUMENT, text, "command_options.py", tables)


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
