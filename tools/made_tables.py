"""Write tables into a document, between their marks. The tools that make tables from the code use it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping


def filled(document: pathlib.Path, text: str, tool: str, tables: Mapping[str, str]) -> str:
    """Return the text of a document with its tables.

    Args:
        document: the document, for the message.
        text: its text.
        tool: name of the file that makes the tables, as in the marks.
        tables: the tables, by the names in their marks.

    Raises:
        SystemExit: the text does not have the marks of a table, or has them twice.
    """
    for name, table in tables.items():
        first, last = f"<!-- {name}: made by tools/{tool} -->", f"<!-- end of {name} -->"
        parts = re.split(f"{re.escape(first)}.*?{re.escape(last)}", text, flags=re.DOTALL)
        if len(parts) != 2:
            raise SystemExit(f"{document.name} must have the mark {first!r} once, got {len(parts) - 1}")
        text = f"{first}\n{table}\n{last}".join(parts)
    return text
