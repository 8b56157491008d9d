"""`make check`: every source has tests, and they exist."""

from __future__ import annotations

import re

import pytest
import touched
from touched import RULES, files_for

SOURCES = (
    ("csrc", "*.*"), ("meta", "*.py"), ("nwor_ops", "*.py"), ("tests/support", "*.py"), ("benchmarks", "*.py"),
    ("tools", "*.py"), ("examples", "*.py"), ("docs", "*.md"), ("docs/monitoring", "*"), (".github/workflows", "*.yml"),
)  # fmt: skip
ONLY_ON_A_GPU = ["tests/support/engine_pool.py", "tests/support/gpu_engine_checks.py"]  # helpers of tests/gpu alone


def test_every_source_has_tests_that_exist() -> None:
    found = {
        folder: [
            str(path.relative_to(touched.ROOT))
            for path in (touched.ROOT / folder).rglob(pattern)
            if path.name != "__init__.py" or path.parent.name == "nwor_ops"
        ]
        for folder, pattern in SOURCES
    }
    assert [folder for folder, paths in found.items() if not paths] == []
    sources = [path for paths in found.values() for path in paths]
    assert sorted(path for path in sources if not files_for([path])) == ONLY_ON_A_GPU
    plain = {f"tests/{name}" for _, names in RULES for name in names if "\\" not in name}
    named = plain | set(files_for(sources))
    assert [name for name in named if not (touched.ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("csrc/cuda/undo.cu", ["ops/test_plane_table.py", "ops/test_schema.py", "ops/test_undo.py"]),
        ("csrc/common/op.h", ["ops/test_plane_table.py", "ops/test_schema.py", "ops/test_undo.py"]),
        ("csrc/cuda/recurrent_rows.h", ["ops/test_plane_table.py", "ops/test_recurrent.py", "ops/test_schema.py"]),
        ("nwor_ops/vllm/transaction/session.py", ["vllm"]),
        ("docs/reference/ops.md", ["package/test_documents.py"]),
        ("docs/internals/hooks.md", ["package/test_documents.py", "vllm"]),
        ("docs/compatibility.json", ["package/test_release.py"]),
        ("docs/monitoring/alerts.yml", ["package/test_monitoring.py"]),
        (".github/workflows/ci.yml", ["package/test_release.py"]),
        ("tests/conftest.py", ["ops/test_undo.py", "transaction/test_manager_state_machine.py"]),
        # imported by tests
        ("benchmarks/gpu_hybrid.py", ["package/test_documents.py", "package/test_gpu_hybrid.py"]),
        ("tests/support/killed_engine.py", ["transaction/test_killed.py"]),
        ("tools/next_vllm.py", ["package/test_next_vllm.py", "package/test_tools.py", "package/test_touched.py"]),
        # imported by helpers
        ("tests/support/manager_machine.py", ["transaction/test_manager_state_machine.py"]),
        ("tests/support/prometheus.py", ["package/test_monitoring.py", "vllm/test_metrics.py"]),
        # the script of a process
        ("tests/support/draft_kernels.py", ["vllm"]),
        # too many tests import it
        ("tests/support/samples_undo.py", ["ops/test_undo.py"]),
        ("README", []),
    ],
)
def test_of_one_path(path: str, tests: list[str]) -> None:
    assert files_for([path]) == [f"tests/{name}" for name in tests]


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
