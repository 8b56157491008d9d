"""The committed figures: one reader and writer, and documents that say what the files say."""

from __future__ import annotations

import json
import pathlib
import re
import sys

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
def test_results_go_to_the_machine_that_they_are_of(
    gpu: str | None, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert results.this_machine() == machine


def test_a_script_that_takes_a_folder_is_asked_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert results.asked_folder("What it does.", []) == results.FOLDER
    assert results.asked_folder(None, ["elsewhere"]) == pathlib.Path("elsewhere")
    with pytest.raises(SystemExit, match=r"^0$"):
        results.asked_folder("What it does.", ["--help"])
    assert "What it does." in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^2$"):
        results.asked_folder(None, ["--requests"])
    assert "unrecognized arguments: --requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("folder", ""),
        ("--seconds 5 --folder out --logs l", " --seconds 5"),
        ("folder -- -k v1", " -- -k v1"),
        ("-- -k v1 --folder f", " -- -k v1 --folder f"),
    ],
)
def test_folders_are_no_part_of_a_command(arguments: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", *arguments.split()])
    assert results.circumstances()["command"] == f"python benchmarks/some.py{command}"


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    rows = [results.row("a/1", [1.0, 2.0, 4.0], "us", "lower", 3.0), results.row("a/2", [5.0], "ratio", "higher")]
    results.write("cpu", "new", rows, tmp_path)
    found = results.read("cpu", "new", tmp_path)
    made = results.circumstances()
    one = {"name": "a/1", "value": 2.0, "unit": "us", "better": "lower", "spread": [1.0, 4.0], "target": 3.0}
    two = {"name": "a/2", "value": 5.0, "unit": "ratio", "better": "higher", "spread": [5.0, 5.0]}
    assert found == {"a/1": one | made, "a/2": two | made}
    first, *others = (tmp_path / "cpu" / "new.jsonl").read_text().splitlines()
    assert json.loads(first) == made
    assert [json.loads(line)["name"] for line in others] == ["a/1", "a/2"]


def test_a_part_that_is_measured_again_leaves_the_rest(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_figure_says_how_it_was_measured(file: pathlib.Path) -> None:
    found = results.read(file.parent.name, file.stem)
    named = [line for line in file.read_text().splitlines() if "name" in json.loads(line)]
    assert len(found) == len(named) > 0
    for entry in found.values():
        assert set(entry) >= set(results.CIRCUMSTANCES)
        assert "outcome" in entry or set(entry) >= {"value", "unit", "better", "spread"}


def test_documents_name_every_file_and_no_other() -> None:
    documents = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    named = set().union(*(re.findall(r"\w+\.jsonl", path.read_text()) for path in documents)) - {"NAME.jsonl"}
    assert named == {file.name for file in FILES}


def test_the_table_in_the_readme() -> None:
    """Output tok/s with a draft model, and the ratios."""
    found = results.read("h200", "gpu_draft_model")

    def line(name: str) -> list[str]:
        return [f"{found[f'tok_s_{name}/{number}']['value']:,.0f}" for number in (1, 16, 64)]

    def ratios(number: int) -> str:
        return "; ".join(
            f"{found[f'{name}/{number}']['value']:.2f}" for name in ("e2e_draft_model", "e2e_draft_model_over_v1")
        )

    rows = [
        ["`vllm serve` (V2 runner)", *line("draft_model_vanilla")],
        ["`VLLM_USE_V2_MODEL_RUNNER=0 vllm serve`, the best that vanilla does", *line("draft_model_vanilla_v1")],
        ["`VLLM_NWOR_DRAFT_GRAPHS=1 vllm serve`", *(f"**{speed}**" for speed in line("draft_model"))],
        ["over the default; over the best", *(ratios(number) for number in (1, 16, 64))],
    ]
    readme = (ROOT / "README.md").read_text()
    for row in rows:
        assert f"| {' | '.join(row)} |" in readme
