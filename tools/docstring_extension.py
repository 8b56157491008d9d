"""Read the project's docstrings for the documentation site: a griffe extension (mkdocs.yml).

The docstrings are in Google's style. Three things differ from what griffe reads. An example is a section ``Example:``.
Names of the code are Sphinx roles. The names of several arguments with one description may take two lines.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc|obj):`~?\.?([^`]+)`")
_NAMES = re.compile(r"^( +(?:\w+, )*\w+,)\n +(?=(?:\w+, )*\w+[,:])", re.MULTILINE)


def in_markdown(docstring: str) -> str:
    """Return a docstring as griffe reads it."""
    docstring = re.sub(r"^(\s*)Example:[ ]*$", r"\1Examples:", docstring, flags=re.MULTILINE)
    return _ROLE.sub(r"`\1`", _NAMES.sub(r"\1 ", docstring))


class Docstrings(griffe.Extension):
    """Convert every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = in_markdown(obj.docstring.value)
