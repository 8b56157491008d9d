"""`make check`: every source has tests, and they exist."""

from __future__ import annotations

import re

import pytest
import touched
from touched import RULES, files_for


def test_every_source_has_tests_that_exist() -> None:
    sources = [
        str(path.relative_to(touched.ROOT))
        for folder, pattern in (("csrc", "*.*"), ("meta", "*.py"), ("nwor_ops", "*.py"))
        for path in (touched.ROOT / folder).rglob(pattern)
        if path.name != "__init__.py" or path.parent.name == "nwor_ops"
    ]
    assert len(sources) > 50
    assert [path for path in sources if not files_for([path])] == []
    plain = {f"tests/{name}" for _, names in RULES for name in names if "\\" not in name}
    named = plain | set(files_for(sources))
    assert [name for name in named if not (touched.ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("csrc/cuda/undo.cu", ["tests/ops/test_plane_table.py", "tests/ops/test_schema.py", "tests/ops/test_undo.py"]),
        (
            "csrc/cuda/recurrent_rows.h",
            ["tests/ops/test_plane_table.py", "tests/ops/test_recurrent.py", "tests/ops/test_schema.py"],
        ),
        ("nwor_ops/vllm/transaction/session.py", ["tests/vllm"]),
        ("docs/reference/ops.md", ["tests/package/test_documents.py"]),
        ("benchmarks/picture.py", []),
    ],
)
def test_of_one_path(path: str, tests: list[str]) -> None:
    assert files_for([path]) == tests


def test_a_test_that_changed_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Done:
        returncode = 1

    def run(command: list[str], **_: object) -> Done:
        commands.append(command[3:])
        return Done()

    monkeypatch.setattr(
        touched, "changed", lambda: ["tests/ops/test_undo.py", "csrc/cpu/undo.cpp", "tests/gone/test_a.py"]
    )
    monkeypatch.setattr(touched.subprocess, "run", run)
    assert touched.main(["-n", "2"]) == 1
    assert commands == [
        ["-n", "2", "tests/ops/test_undo.py"],
        ["-n", "2", "tests/ops/test_plane_table.py", "tests/ops/test_schema.py", "-m", "not vllm or smoke"],
    ]
    assert not re.search("gone", str(commands))
