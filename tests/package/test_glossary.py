"""No file uses a word that docs/glossary.md retired."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("nwor_ops", "csrc", "meta", "docs", "examples", "benchmarks", "tests", "tools")
SUFFIXES = {".py", ".md", ".h", ".cpp", ".cu", ".yml", ".toml"}
# A retired word as a regular expression, and the files that may use it.
RETIRED: dict[str, tuple[str, ...]] = {
    r"spare (?:block|page)s?": (),
    r"\bjudge[sd]?\b": (),
    r"\bverdicts?\b": (),
    r"\b(?:falls?|falling|fell) back\b": (),
    r"\b(?:wrap_once|put_around)\b": (),
    r"\bpipeline stages?\b": (),
    r"num_refused|refused_requests|record_values": (),
}
EXEMPT = {"glossary.md", "test_glossary.py"}


def files() -> Iterator[pathlib.Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "setup.py", "pyproject.toml", "Makefile"))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.name not in EXEMPT and path.is_file():
                yield path


def uses(word: str, exceptions: tuple[str, ...]) -> list[str]:
    """Return the lines with a retired word."""
    pattern = re.compile(word, re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        if path.name not in exceptions
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", RETIRED)
def test_no_file_uses_a_retired_word(word: str) -> None:
    assert uses(word, RETIRED[word]) == []


EXAMPLES = (
    "a spare page",
    "it was judged",
    "the verdict",
    "fell back",
    "put_around",
    "a pipeline stage",
    "num_refused",
)


@pytest.mark.parametrize(("word", "example"), zip(RETIRED, EXAMPLES, strict=True))
def test_a_pattern_matches_its_word(word: str, example: str) -> None:
    assert re.search(word, example, re.IGNORECASE)


def test_the_search_finds_a_word_that_is_there() -> None:
    assert uses(r"\bshadow pages?\b", ()) != []
