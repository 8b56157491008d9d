"""Test the tool that prepares and checks the documentation site: links, lists, marks, and what it finds wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import docs_site
import pytest
from processes import ROOT

SITE = "https://forge.example/owner/name"


@pytest.mark.parametrize(
    ("source", "page", "link", "expected"),
    [
        ("README.md", "index.md", "[a](docs/guides/transaction.md#memory)", "[a](guides/transaction.md#memory)"),
        ("docs/guides/transaction.md", "guides/transaction.md", "[a](../benchmarks.md)", "[a](../benchmarks.md)"),
        (
            "docs/guides/custom-engine.md",
            "guides/custom-engine.md",
            "[a](../../examples/README.md)",
            "[a](../examples.md)",
        ),
        (
            "examples/README.md",
            "examples.md",
            "[`a`](draft_loop.py)",
            f"[`a`]({SITE}/blob/main/examples/draft_loop.py)",
        ),
        ("README.md", "index.md", "[a](tests/)", f"[a]({SITE}/tree/main/tests)"),
        ("README.md", "index.md", "![a](docs/h200.png)", "![a](h200.png)"),
        ("README.md", "index.md", "[a](#here) [b](https://x.example)", "[a](#here) [b](https://x.example)"),
    ],
)
def test_links_of_a_document_become_links_of_its_page(source: str, page: str, link: str, expected: str) -> None:
    assert docs_site.for_site(link, source, page, SITE) == expected


def test_a_link_to_a_source_is_plain_text_without_a_forge() -> None:
    assert (
        docs_site.for_site("[`a`](setup.py), [b](docs/install.md)", "README.md", "index.md") == "`a`, [b](install.md)"
    )


def test_nested_lists_get_four_spaces_and_code_stays() -> None:
    text = "- a\n  b\n  - c\n```python\n  [x](setup.py)\n```\n"
    assert docs_site.for_site(text, "README.md", "index.md") == text.replace("\n  b\n  - c", "\n    b\n    - c")


def test_the_hardware_of_a_block_is_shown() -> None:
    text = "<!-- ran on an H200 -->\n```bash\nls\n```"
    assert docs_site.for_site(text, "README.md", "index.md") == "*This ran on an H200:*\n\n```bash\nls\n```"


def test_ops_of_the_map_lead_to_their_reference() -> None:
    text = "| `write_kv`, `no_op` | `log_slots` |"
    linked = "| [`write_kv`](every-op.md#nwor_ops.ops.undo.write_kv), `no_op` | `log_slots` |"
    assert docs_site.with_links_to_ops(text) == linked


def test_pages_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(docs_site, "FOLDER", tmp_path / "pages")
    docs_site.write_pages("")
    written = {str(path.relative_to(tmp_path / "pages")) for path in (tmp_path / "pages").rglob("*.md")}
    assert written == {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | set(
        docs_site.PAGES
    )
    assert (tmp_path / "pages/index.md").read_text().startswith("---\nhide: [navigation]\n---\n# nwor_ops")


def site(folder: Path, body: str, texts: tuple[str, ...] = docs_site.SEARCHED) -> Path:
    (folder / "search").mkdir()
    (folder / "search/search_index.json").write_text(json.dumps({"docs": [{"text": text} for text in texts]}))
    (folder / "page").mkdir()
    (folder / "page/index.html").write_text('<h1 id="title">Title</h1>')
    (folder / "index.html").write_text(body)
    return folder


def test_a_good_site_has_no_problem(tmp_path: Path) -> None:
    body = '<a href="page/#title">a</a> <a href="#here" id="here">b</a> <a href="https://x.example">c</a>'
    assert list(docs_site.problems(site(tmp_path, body))) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="other/">a</a>', "index.html: the link other/ leads nowhere"),
        ('<img src="no.png">', "index.html: the link no.png leads nowhere"),
        ('<a href="page/#other">a</a>', "index.html: the link page/#other names no heading"),
        ("<p>:class:<code>A</code></p>", "index.html: the role :class: of a docstring was not read"),
        ("<blockquote>&gt; a</blockquote>", "index.html: an example of a docstring was not read"),
    ],
)
def test_a_problem_of_a_site_is_found(tmp_path: Path, body: str, problem: str) -> None:
    assert list(docs_site.problems(site(tmp_path, body))) == [problem]


def test_a_word_that_the_search_does_not_find_is_a_problem(tmp_path: Path) -> None:
    found = list(docs_site.problems(site(tmp_path, "", texts=("VLLM_NWOR_RECURRENT",))))
    assert found == ["the search does not find refused"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_unknown_command_shows_the_usage() -> None:
    done = run(sys.executable, "tools/docs_site.py")
    assert done.returncode == 2
    assert "docs_site.py pages" in done.stderr


def test_make_docs_installs_the_pinned_tools() -> None:
    printed = run("make", "--dry-run", "--always-make", "docs").stdout
    for package in ("mkdocs==", "mkdocs-material==", "mkdocstrings-python=="):
        assert package in printed
    assert "mkdocs build --quiet --strict" in printed


@pytest.mark.parametrize(
    ("page", "text", "parts"),
    [
        ("operate.md", "# A\n## B\n", ["navigation"]),
        ("guides/a.md", "# A\n## B\n", []),
        ("guides/a.md", "# A\ntext ## B\n", ["toc"]),
        ("reference/a.md", "# A\n\n::: nwor_ops.A\n", []),
    ],
)
def test_a_page_without_sections_shows_no_list_of_them(page: str, text: str, parts: list[str]) -> None:
    assert docs_site.hidden(page, text) == parts
