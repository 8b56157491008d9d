"""No file uses a word that docs/glossary.md retired."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("nwor_ops", "csrc", "meta", "docs", "examples", "benchmarks", "tests", "tools")
SUFFIXES = {".py", ".md", ".h", ".cpp", ".cu", ".yml", ".toml"}
# A retired word as a regular expression, and texts with it.
RETIRED: dict[str, tuple[str, ...]] = {
    r"spare (?:block|page)s?|\bspare\b.*\bshadow pages|\bspare\b.*num_shadow_blocks": ("a spare page",),
    r"\bjudge[sd]?\b": ("it was judged",),
    r"\bverdicts?\b": ("the verdict",),
    r"\b(?:falls?|falling|fell)[ -]?backs?\b": ("fell back", "it falls back", "a fallback", "counted as fall-backs"),
    r"\b(?:wrap_once|put_around)\b": ("put_around",),
    r"\bpipeline stages?\b": ("a pipeline stage",),
    r"num_refused|refused_requests|record_values": ("num_refused",),
}
EXEMPT = {"glossary.md", "test_glossary.py"}


def files() -> Iterator[pathlib.Path]:
    yield from (path for path in sorted(ROOT.glob("*")) if path.suffix in SUFFIXES or path.name == "Makefile")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.name not in EXEMPT and path.is_file():
                yield path


def uses(word: str) -> list[str]:
    """Return the lines with a retired word."""
    pattern = re.compile(word, re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", RETIRED)
def test_no_file_uses_a_retired_word(word: str) -> None:
    assert uses(word) == []


@pytest.mark.parametrize(("word", "text"), [(word, text) for word, texts in RETIRED.items() for text in texts])
def test_a_pattern_matches_its_word(word: str, text: str) -> None:
    assert re.search(word, text, re.IGNORECASE)


def test_the_search_finds_a_word_that_is_there() -> None:
    assert uses(r"\bshadow pages?\b") != []
