"""The committed results: one reader and writer, and documents that agree with the files."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import sys
from typing import Any

import gpu_engines
import gpu_tests
import pytest
import results
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted(results.FOLDER.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
        (None, "cpu"),
    ],
)
def test_results_go_to_their_machine(gpu: str | None, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert results.this_machine() == machine


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("--seconds 5 --folder out --logs l", " --seconds 5"),
        ("--folder out -- -k v1", " -- -k v1"),
    ],
)
def test_folders_are_no_part_of_a_command(arguments: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", *arguments.split()])
    assert results.circumstances()["command"] == f"python benchmarks/some.py{command}"


def test_written_results_are_read(tmp_path: pathlib.Path) -> None:
    rows = [results.row("a/1", [1.0, 2.0, 4.0], "us", "lower", 3.0), results.row("a/2", [5.0], "ratio", "higher")]
    results.save("cpu", "new", rows, tmp_path)
    found = results.read("cpu", "new", tmp_path)
    made = results.circumstances()
    one = {"name": "a/1", "value": 2.0, "unit": "us", "better": "lower", "spread": [1.0, 4.0], "target": 3.0}
    two = {"name": "a/2", "value": 5.0, "unit": "ratio", "better": "higher", "spread": [5.0, 5.0]}
    assert found == {"a/1": one | made, "a/2": two | made}
    first, *others = (tmp_path / "cpu" / "new.jsonl").read_text().splitlines()
    assert json.loads(first) == made
    assert [json.loads(line)["name"] for line in others] == ["a/1", "a/2"]


def test_measuring_a_part_keeps_the_rest(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [{"name": name, "outcome": "passed"} for name in ("a", "b", "c")]
    monkeypatch.setenv("NWOR_COMMIT", "one")
    results.write_entries("h200", "some", before, tmp_path)
    monkeypatch.setenv("NWOR_COMMIT", "two")
    target = results.write_entries("h200", "some", [{"name": "b", "outcome": "failed"}], tmp_path, keep=True)
    found = results.read("h200", "some", tmp_path)
    assert {name: (entry["outcome"], entry["commit"]) for name, entry in found.items()} == {
        "a": ("passed", "one"), "b": ("failed", "two"), "c": ("passed", "one"),
    }  # fmt: skip
    assert len(target.read_text().splitlines()) == 2 + 3
    results.write_entries("h200", "some", before[:1], tmp_path)
    assert list(results.read("h200", "some", tmp_path)) == ["a"]


def test_passed_cases_of_these_versions_are_skipped(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, torch_version, outcomes in (
        ("h100", "2.14.0", {"a": "passed", "b": "failed"}),
        ("h200", "2.14.0", {"b": "passed", "c": "failed"}),
        ("a100", "2.11.0", {"d": "passed"}),
    ):
        _install(monkeypatch, torch_version, "0.33.0")
        entries = [{"name": name, "outcome": outcome} for name, outcome in outcomes.items()]
        results.write_entries(machine, "engines", entries, tmp_path)
    _install(monkeypatch, "2.14.0", "0.33.0")
    assert gpu_engines.passed_cases(tmp_path) == ["a", "b"]
    _install(monkeypatch, "2.11.0", "0.32.0")
    assert gpu_engines.passed_cases(tmp_path) == []


def test_sanitized_tests_exist() -> None:
    """A word that no test has would leave its kernels out of the sanitizers without a notice."""
    texts = [f"{path.stem} {path.read_text()}" for path in gpu_tests.FILES]
    names = " ".join(word for text in texts for word in (text.partition(" ")[0], *re.findall(r"def (test_\w+)", text)))
    chosen = gpu_tests.SANITIZED.partition(" and not ")[0]
    assert [word for word in re.findall(r"\w+", chosen) if word != "or" and word not in names] == []


def _install(monkeypatch: pytest.MonkeyPatch, torch_version: str, vllm_version: str) -> None:
    found = dict.fromkeys(results.CIRCUMSTANCES) | {"torch": torch_version, "vllm": vllm_version}
    for module in (results, gpu_engines):
        monkeypatch.setattr(module, "circumstances", lambda: found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_figures_say_how_they_were_measured(file: pathlib.Path) -> None:
    found = results.read(file.parent.name, file.stem)
    named = [line for line in file.read_text().splitlines() if "name" in json.loads(line)]
    assert len(found) == len(named) > 0
    for entry in found.values():
        assert set(entry) >= set(results.CIRCUMSTANCES)
        assert " /" not in entry["command"]  # a folder of the machine
        assert "outcome" in entry or set(entry) >= {"value", "unit", "better", "spread"}


def test_documents_name_each_file() -> None:
    documents = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    named = set().union(*(re.findall(r"\w+\.jsonl", path.read_text()) for path in documents)) - {"NAME.jsonl"}
    assert named == {file.name for file in FILES}


LOADS = (1, 16, 64, 128)
# README's rows by their first cells: machine, file and ratio.
SIDES = "h200", "gpu_engine_hybrid_sides"
GAINS = {
    "`recurrent` | the best vanilla": ("h200", "gpu_engine_hybrid_exact", "e2e/recurrent/over/bfloat16+fp8_head"),
    "`draft_vocabulary` | the best vanilla": (*SIDES, "e2e/vocabulary/over/bfloat16+fp8_head"),
    "both | the best vanilla": ("h200", "gpu_engine_hybrid_exact", "e2e/recurrent+vocabulary/over/bfloat16+fp8_head"),
    "both, chunk form and bfloat16 states | the best vanilla": (
        "h200", "gpu_engine_hybrid_load", "e2e/bfloat16+chunk+vocabulary/over/bfloat16+fp8_head"
    ),
    "the same with 4 drafts | the best vanilla with 4 drafts": (
        "h200", "gpu_engine_hybrid_drafts",
        "e2e/bfloat16+chunk+vocabulary+drafts_4/over/bfloat16+fp8_head+drafts_4",
    ),
    "`draft_vocabulary`, EAGLE | the same engine without it": (
        "h200", "gpu_engine_llama_vocabulary", "e2e/eagle+vocabulary/over/eagle"
    ),
    "`draft_graphs` | vLLM's default, V2": ("h200", "gpu_draft_model", "e2e_draft_model"),
    "`draft_graphs` | the same in V1, the best with a draft model": (
        "h200", "gpu_draft_model", "e2e_draft_model_over_v1",
    ),
    "`transaction`, `cow` | the same engine without it": ("h100", "gpu_methods_eagle", "e2e_cow_eagle"),
    "`transaction`, `stage` | the same engine without it": ("h100", "gpu_methods_eagle", "e2e_stage_eagle"),
}  # fmt: skip


def cell(entry: dict[str, Any] | None) -> str:
    """Return a ratio with its quartiles, as README has it."""
    if entry is None:
        return "not measured"
    low, high = entry["spread"]
    value = "no difference" if low <= 1 <= high else f"{entry['value']:.2f}"
    return f"{value} [{low:.2f}, {high:.2f}]"


def test_readme_has_the_gains() -> None:
    rows = []
    for label, (machine, file, ratio) in GAINS.items():
        found = results.read(machine, file)
        rows.append(f"| {label} | {' | '.join(cell(found.get(f'{ratio}/{load}')) for load in LOADS)} |")
        running = {name: entry["value"] for name, entry in found.items() if name.startswith("running")}
        assert [name for name, most in running.items() if most < min(int(name.rpartition("/")[2]), LOADS[-1])] == []
    section = (ROOT / "README.md").read_text().partition("## Measured gains")[2].partition("\n## ")[0]
    assert re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:] == rows


@pytest.mark.parametrize("load", LOADS)
def test_no_vanilla_is_faster_than_the_best(load: int) -> None:
    """Of the run in README. Without drafts the quartiles of 128 requests are on both sides of 1."""
    ratio = re.compile(f"e2e/([^/]*)/over/bfloat16[+]fp8_head/{load}")
    ours = re.compile("recurrent|chunk|vocabulary|graphs")
    rivals = {
        match[1]: entry["spread"][0]
        for name, entry in results.read(*SIDES).items()
        if (match := ratio.fullmatch(name)) and not ours.search(match[1])
    }
    assert rivals.keys() == {"vanilla", "bfloat16+drafts_0"}
    assert max(rivals.values()) < 1


def test_cell_says_what_was_measured() -> None:
    cells = [cell({"value": 1.126, "spread": [low, 1.2]}) for low in (1.1, 0.994)]
    assert cells == ["1.13 [1.10, 1.20]", "no difference [0.99, 1.20]"]
    assert cell(None) == "not measured"


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


# Numbers with a decimal point or with thousands separators.
FIGURE = re.compile(r"(?<![\w.,])(\d+\.\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?)(?![\w.]|,\d)")


def in_tables(section: str) -> list[str]:
    """Return the numbers of a section's tables, without their header rows."""
    lines = section.splitlines()
    rows = [line for line, below in itertools.pairwise([*lines, ""]) if line.startswith("|") and "|---" not in below]
    return [figure for row in rows for figure in FIGURE.findall(row)]


def is_of(figure: str, values: list[float]) -> bool:
    """Return whether the number is one of these, rounded."""
    digits = len(figure.partition(".")[2])
    return any(abs(float(figure.replace(",", "")) - abs(value)) <= 0.5 * 10**-digits + 1e-9 for value in values)


def sections() -> dict[str, str]:
    """Return, by heading, the sections of the documents that name files of results."""
    texts = [(ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "internals/tried.md")]
    found = [section for text in texts for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE)]
    return {section.partition("\n")[0]: section for section in found if re.search(r"`\w+\.jsonl`", section)}


@pytest.mark.parametrize("heading", sections())
def test_table_figures_are_in_named_files(heading: str) -> None:
    """A number may be a value, a quartile, a target, a percentage, or part of a name, rounded."""
    section = sections()[heading]
    known: list[float] = []
    for file in FILES:
        if f"`{file.name}`" in section:
            found = results.read(file.parent.name, file.stem)
            for name, entry in ((name, entry) for name, entry in found.items() if "value" in entry):  # no engine's case
                some = [entry["value"], *entry["spread"], entry.get("target", entry["value"])]
                known += [*some, *numbers(name), *(100 * value for value in some if entry["unit"] == "share")]
    assert [figure for figure in in_tables(section) if not is_of(figure, known)] == []


def cases_with_figures() -> dict[str, str]:
    """Return the rows of docs/guides/which-feature.md that have figures, by their first cell."""
    rows = re.findall(r"^\| (?!you )([^|]+) \|(.*)$", (ROOT / "docs/guides/which-feature.md").read_text(), re.MULTILINE)
    return {case: rest for case, rest in rows if FIGURE.search(rest)}


@pytest.mark.parametrize("case", cases_with_figures())
def test_case_figures_are_in_linked_section(case: str) -> None:
    """The table rounds some of them."""
    row = cases_with_figures()[case]
    linked = set(re.findall(r"\(\.\./benchmarks\.md#([\w-]+)\)", row))
    found = re.split(r"^(?=#+ )", (ROOT / "docs/benchmarks.md").read_text(), flags=re.MULTILINE)
    texts = [section for section in found if anchor(section.partition("\n")[0]) in linked]
    assert len(texts) == len(linked) > 0
    known = [float(figure.replace(",", "")) for text in texts for figure in in_tables(text)]
    assert [figure for figure in FIGURE.findall(row) if not is_of(figure, known)] == []


def anchor(heading: str) -> str:
    """Return the anchor that GitHub creates for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_figure_without_a_row_is_found() -> None:
    section = "| 1,000 | a |\n|---|---|\n| 1.03 (0.99 to 1.2), 7 | `a` 12,345 |\nand 3.14"
    assert in_tables(section) == ["1.03", "0.99", "1.2", "12,345"]
    assert [is_of(figure, [1.0251, -0.994, 12345.4]) for figure in in_tables(section)] == [True, True, False, True]
    assert sum(len(in_tables(section)) for section in sections().values()) > 300
