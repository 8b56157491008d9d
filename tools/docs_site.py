"""Prepare and check the documentation site: ``make docs``.

    python tools/docs_site.py pages         # the pages, from docs/ and the documents of the root, to build/site-pages
    python tools/docs_site.py check         # the built site in build/site: links, examples, search

MkDocs builds the site between the two (mkdocs.yml). Only Python's standard library is used.

- README.md is the page Home, and so on (``PAGES``).
- Links between documents lead to pages. Links to other files of the tree lead to the forge, if ``NWOR_REPO_URL`` names
  the repository there. Otherwise they are plain text.
- Lists may be nested by two spaces. Python-Markdown wants four.
- ``<!-- ran on ... -->`` before a block of code becomes a line that readers see.
"""

from __future__ import annotations

import ast
import html.parser
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from urllib.parse import unquote, urlsplit

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER, SITE = ROOT / "build" / "site-pages", ROOT / "build" / "site"
# Page of the site: file of the tree.
PAGES = {
    "index.md": "README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
MAP_OF_OPS = "reference/ops.md"
# Each of these is the only page of its tab. Without a list of pages there is more width for tables. A page without
# sections has no list of them.
WIDE = ("index.md", "operate.md", "benchmarks.md", "glossary.md", "contributing.md", "changelog.md", "security.md")
# Users must find these words.
SEARCHED = ("VLLM_NWOR_RECURRENT", "refused")

_FENCE = re.compile(r"^(?P<fence>```+).*?^(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)(?P<target>[^)\s]+)\)")
_SECTION = re.compile(r"^(?:## |::: )", re.MULTILINE)
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data|exc|obj):")


# ---------------------------------------------------------------- pages


def write_pages(repository: str) -> None:
    """Write the pages and the files that they show."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(ROOT / "docs", FOLDER)
    sources = {str(path.relative_to(FOLDER)): f"docs/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.md")}
    for page, source in (sources | PAGES).items():
        text = (ROOT / source).read_text()
        if page == MAP_OF_OPS:
            text = with_links_to_ops(text)
        text = for_site(text, source, page, repository)
        if parts := hidden(page, text):
            text = f"---\nhide: [{', '.join(parts)}]\n---\n" + text
        (FOLDER / page).write_text(text)


def hidden(page: str, text: str) -> list[str]:
    """Return the lists that a page does not show, for more width."""
    return ["navigation"] * (page in WIDE) + ["toc"] * (not _SECTION.search(text))


def for_site(markdown: str, source: str, page: str, repository: str = "") -> str:
    """Return a document of the tree as a page of the site.

    Args:
        markdown: its text.
        source: its path in the tree.
        page: its path in the site.
        repository: address of the tree on a forge, or "" for none.
    """

    def link(found: re.Match[str]) -> str:
        target = resolved(found["target"], source, page)
        if target is not None:
            return f"{found['picture']}[{found['text']}]({target})"
        path = os.path.normpath(os.path.join(os.path.dirname(source), found["target"].partition("#")[0]))
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{found['text']}]({repository.rstrip('/')}/{kind}/main/{path})" if repository else found["text"]

    def prose(text: str) -> str:
        text = re.sub(r"^<!-- (ran on .*?) -->$", r"*This \1:*\n", text, flags=re.MULTILINE)
        return re.sub(r"^ +(?=\S)", lambda found: 2 * found[0], _LINK.sub(link, text), flags=re.MULTILINE)

    return outside_fences(markdown, prose)


def resolved(link: str, source: str, page: str) -> str | None:
    """Return a link of a document as a link of its page, or None if its target is not in the site."""
    path, mark, anchor = link.partition("#")
    target = os.path.normpath(os.path.join(os.path.dirname(source), path))
    pages = {file: name for name, file in PAGES.items()}
    if target not in pages and not target.startswith("docs/"):
        return None
    other = pages.get(target, target.removeprefix("docs/"))
    return os.path.relpath(other, os.path.dirname(page) or ".") + mark + anchor


def with_links_to_ops(markdown: str) -> str:
    """Link the ops in the first cells of the map to their reference."""
    families = {
        node.name: file.stem
        for file in sorted((ROOT / "nwor_ops" / "ops").glob("[a-z]*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }

    def linked(found: re.Match[str]) -> str:
        name = found[1]
        return f"[`{name}`](every-op.md#nwor_ops.ops.{families[name]}.{name})" if name in families else found[0]

    return re.sub(r"^\|[^|\n]*", lambda cell: re.sub(r"`(\w+)`", linked, cell[0]), markdown, flags=re.MULTILINE)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Apply a change to all text that is not in a block of code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


# ---------------------------------------------------------------- check


class Page(html.parser.HTMLParser):
    """The links, the anchors and the text of a built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        self.links += [value for name in ("href", "src") if (value := values.get(name))]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def problems(site: pathlib.Path) -> Iterator[str]:
    """Yield what is wrong with a built site."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name.name == "404.html":
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{name}: the link {link} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: the link {link} names no heading"
        text = "".join(page.words)
        for role in _ROLE.findall(text):
            yield f"{name}: the role {role} of a docstring was not read"
        if "blockquote" in page.tags:  # `>>>` in prose; the documents have no quotes
            yield f"{name}: an example of a docstring was not read"
    index = json.loads((site / "search" / "search_index.json").read_text())
    for word in SEARCHED:
        if not any(word in entry["text"] for entry in index["docs"]):
            yield f"the search does not find {word}"


def main(arguments: list[str]) -> int:
    if arguments == ["pages"]:
        write_pages(os.environ.get("NWOR_REPO_URL", ""))
        return 0
    if arguments == ["check"]:
        found = list(problems(SITE))
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
