"""Make the documents of the tree a site: hooks of MkDocs (mkdocs.yml), and an extension of griffe for docstrings.

- README.md is the page Home, and so on (``PAGES``).
- Links between documents lead to pages. Links to other files of the tree lead to the forge, if ``NWOR_REPO_URL`` names
  the repository there. Otherwise they are plain text.
- Lists may be nested by two spaces. Python-Markdown wants four.
- ``<!-- ran on ... -->`` before a block of code becomes a line that readers see.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Page of the site: file of the tree.
PAGES = {
    "index.md": "README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
# Each of these is the only page of its tab. Without a list of pages there is more width for tables.
WIDE = (
    "index.md", "quick-start.md", "faq.md", "operate.md", "benchmarks.md", "glossary.md", "contributing.md",
    "changelog.md", "security.md",
)  # fmt: skip
# Pages that a search ranks last: for those who change the code, or know the name of a function.
RANKED_LAST = ("internals/", "reference/python/", "reference/every-op.md", "contributing.md", "changelog.md")

_FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc|obj):`~?\.?([^`]+)`")
_NAMES = re.compile(r"^( +(?:\w+, )*\w+,)\n +(?=(?:\w+, )*\w+[,:])", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents outside of docs/."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a document of the tree as a page of the site."""
    name = page.file.src_uri
    if name in WIDE:
        page.meta["hide"] = ["navigation"]
    if name.startswith(RANKED_LAST):
        page.meta["search"] = {"boost": 0.05}
    return for_site(markdown, PAGES.get(name, f"docs/{name}"), name, config.repo_url or "")


def for_site(markdown: str, source: str, page: str, repository: str = "") -> str:
    """Return a document of the tree as a page of the site.

    Args:
        markdown: its text.
        source: its path in the tree.
        page: its path in the site.
        repository: address of the tree on a forge, or "" for none.
    """
    pages = {file: name for name, file in PAGES.items()}

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path, mark, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if path in pages or path.startswith("docs/"):
            other = os.path.relpath(pages.get(path, path.removeprefix("docs/")), os.path.dirname(page) or ".")
            return f"{picture}[{text}]({other}{mark}{anchor})"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{text}]({repository.rstrip('/')}/{kind}/main/{path})" if repository else text

    def prose(text: str) -> str:
        text = re.sub(r"^<!-- (ran on .*?) -->$", r"*This \1:*\n", text, flags=re.MULTILINE)
        return re.sub(r"^ +(?=\S)", lambda found: 2 * found[0], _LINK.sub(link, text), flags=re.MULTILINE)

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [prose(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, prose(markdown[end:])])


class Docstrings(griffe.Extension):
    """Convert every docstring before it is parsed.

    They are in Google's style. Three things differ from what griffe reads. An example is a section ``Example:``. Names
    of the code are Sphinx roles. The names of several arguments with one description may take two lines.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^(\s*)Example:[ ]*$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _ROLE.sub(r"`\1`", _NAMES.sub(r"\1 ", text))
