"""The structure of the code: no cycles of imports, not even inside functions or for types only, and none of includes.

tests/support/import_graph.py draws the graphs.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import re

import pytest
from import_graph import ROOT, SourceTree, cycles, edges_of, foreign_includes, includes, upward_includes
from samples import ops_of

SOURCES = SourceTree()
TESTS_OF_OPS = sorted((ROOT / "tests" / "ops").glob("test_*.py"))
MOST_NAMES = 12  # that a file of tests imports from the helpers


def test_no_cycle_of_components() -> None:
    components = SOURCES.components()
    assert [edges_of(cycle, components) for cycle in cycles(components)] == []


def test_no_cycle_of_files() -> None:
    files = SOURCES.files()
    assert [edges_of(cycle, files) for cycle in cycles(files)] == []


def test_no_private_name_crosses_a_file() -> None:
    assert SOURCES.private_names() == []


@pytest.mark.parametrize("folder", ["nwor_ops", "meta", "tests", "tools", "benchmarks", "examples"])
def test_imports_of_our_modules_exist(folder: str) -> None:
    """Mypy reads neither tests nor benchmarks, and an import in a function fails only when the function runs."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [unknown for file in files for unknown in SOURCES.unknown_imports(file)] == []


def test_no_cycle_of_includes() -> None:
    graph = includes()
    assert [edges_of(cycle, graph) for cycle in cycles(graph)] == []


def test_no_include_leaves_its_level() -> None:
    assert upward_includes(includes()) == []


def test_no_family_includes_a_part_of_another() -> None:
    assert foreign_includes(includes()) == []


def test_a_family_has_one_name_on_every_level() -> None:
    shared = {"registry", "bound", "check", "relations"}
    levels = {
        pattern: {path.stem for path in ROOT.glob(pattern) if "_" not in path.stem} - shared
        for pattern in ("csrc/*.h", "csrc/cpu/*.cpp", "csrc/cuda/*.cu", "meta/*.py", "nwor_ops/ops/*.py")
    }
    assert len({frozenset(families) for families in levels.values()}) == 1, levels


@pytest.mark.parametrize(
    "pattern", ["nwor_ops/testing/oracle/[a-z]*.py", "tests/support/samples_*.py", "tests/ops/test_*.py"]
)
def test_a_family_has_its_own_tests(pattern: str) -> None:
    """Each family has one oracle, one file of samples, and one file of tests. The oracle is that of its ops."""
    families = {path.stem for path in ROOT.glob("csrc/*.h") if "_" not in path.stem}
    found = {re.sub("^(samples|test)_", "", path.stem) for path in ROOT.glob(pattern)}
    assert families == (found & families if "ops/test" in pattern else found)
    for name in families if "oracle" in pattern else ():
        oracle = importlib.import_module(f"nwor_ops.testing.oracle.{name}")
        assert sorted(oracle.__all__) == sorted(ops_of(name))


@pytest.mark.parametrize("file", TESTS_OF_OPS, ids=lambda path: path.stem)
def test_tests_of_ops_import_helpers_by_module(file: pathlib.Path) -> None:
    helpers = {path.stem for path in (ROOT / "tests" / "support").glob("*.py")}
    imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports if node.module in helpers for alias in node.names]
    assert len(names) <= MOST_NAMES, names


def test_every_package_is_shipped() -> None:
    named = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)[1]
    packages = {SOURCES.package(module) for module in SOURCES.paths}
    assert set(re.findall(r'"(.+?)"', named)) == packages | {"nwor_ops.examples"}


def test_the_graphs_are_those_of_the_tree() -> None:
    """An empty graph would have no cycles either."""
    assert SOURCES.files()["nwor_ops"] >= {"nwor_ops.library", "nwor_ops.meta"}
    assert any(found.lazy for found in SOURCES.imports)
    assert {"cpu/undo.cpp", "cuda/undo.cu"} <= set(includes())
    kernels = {file: targets for file, targets in includes().items() if file.startswith(("cpu/", "cuda/"))}
    assert all(targets for file, targets in kernels.items() if not file.endswith(".h"))


# ---------------------------------------------------------------- the checks can fail


def tree(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, lines in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    return folder


def source_tree(folder: pathlib.Path, **files: str) -> SourceTree:
    """Return a tree with p/a.py, p/q/__init__.py, p/q/b.py, p/q/c.py, p/r/__init__.py and p/r/d.py; files not given are
    empty."""
    names = {
        "a": "p/a.py",
        "q": "p/q/__init__.py",
        "b": "p/q/b.py",
        "c": "p/q/c.py",
        "r": "p/r/__init__.py",
        "d": "p/r/d.py",
    }
    return SourceTree(
        tree(folder, {"p/__init__.py": ""} | {names[name]: files.get(name, "") for name in names}), {"p": "p"}
    )


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("def f():\n    from p.q import lost", "test.py, line 2: p.q.lost"),
        ("import p.lost", "test.py, line 1: p.lost"),
        ("from p.lost import f", "test.py, line 1: p.lost"),
        ("from p.q.b import lost", "test.py, line 1: p.q.b.lost"),
        ("from p.q import b", None),
        ("from p.q.b import f, g, h", None),
        ("import torch.lost", None),
    ],
)
def test_an_import_of_a_lost_name_is_found(tmp_path: pathlib.Path, line: str, unknown: str | None) -> None:
    found = source_tree(tmp_path, b="f = 1\ntry:\n    import g\nexcept ImportError:\n    def h(): lost = 1")
    assert found.unknown_imports(tree(tmp_path, {"test.py": line}) / "test.py") == ([unknown] if unknown else [])


@pytest.mark.parametrize(
    "back", ["import p.q.b", "from p.q.b import f", "from ..q import b", "def f():\n    from p.q import b"]
)
def test_a_cycle_of_components_and_files_is_found(tmp_path: pathlib.Path, back: str) -> None:
    found = source_tree(tmp_path, b="from p.r import d", d=back)
    assert cycles(found.components()) == [["p.q", "p.r"]]
    assert cycles(found.files()) == [["p.q.b", "p.r.d"]]
    assert edges_of(["p.q", "p.r"], found.components()) == ["p.q -> p.r", "p.r -> p.q"]


def test_components_may_have_a_cycle_if_files_have_none(tmp_path: pathlib.Path) -> None:
    found = source_tree(tmp_path, b="from ..r import d", d="from p.q import c")
    assert (cycles(found.components()), cycles(found.files())) == ([["p.q", "p.r"]], [])


def test_a_file_next_to_packages_is_a_component(tmp_path: pathlib.Path) -> None:
    """It is not a cycle that a.py imports p.q, which imports p."""
    found = source_tree(tmp_path, a="from p.q import b", b="import p")
    assert found.components() == {"p": set(), "p.a": {"p.q"}, "p.q": {"p"}, "p.r": set()}
    assert cycles(found.components()) == cycles(found.files()) == []


def test_an_import_for_types_only_counts(tmp_path: pathlib.Path) -> None:
    found = source_tree(
        tmp_path, b="from p.q import c", c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.q.b"
    )
    assert cycles(found.files()) == [["p.q.b", "p.q.c"]]


@pytest.mark.parametrize(
    "use",
    [
        "from p.q.b import _f",
        "from p.q.b import _f as f",
        "from p.q import b\nb._f()",
        "import p.q.b\np.q.b._f()",
        "import p.q.b as x\nx._f()",
    ],
)
def test_a_private_name_is_found(tmp_path: pathlib.Path, use: str) -> None:
    assert source_tree(tmp_path, d=use).private_names() == [f"p.r.d, line {use.count(chr(10)) + 1}: p.q.b._f"]


@pytest.mark.parametrize(
    "use", ["from p.q import b\nb.f()", "from p.q import __version__", "class A:\n    def f(self):\n        self._f"]
)
def test_other_names_are_not_private(tmp_path: pathlib.Path, use: str) -> None:
    assert source_tree(tmp_path, d=use).private_names() == []


def test_includes_that_leave_their_level_are_found(tmp_path: pathlib.Path) -> None:
    files = {
        "csrc/common/views.h": '#include "undo.h"\n#include <vector>\n',
        "csrc/undo.h": '#include "common/views.h"\n#include "cpu/rows.h"\n',
        "csrc/cpu/rows.h": '#include "common/views.h"\n',
        "csrc/cpu/undo.cpp": '#include "rows.h"\n#include "../undo.h"\n',
        "csrc/cuda/undo.cu": '#  include "cpu/rows.h"\n',
    }
    graph = includes(tree(tmp_path, files))
    assert graph["cpu/undo.cpp"] == {"cpu/rows.h", "undo.h"}
    assert upward_includes(graph) == [
        "common/views.h includes undo.h", "cuda/undo.cu includes cpu/rows.h", "undo.h includes cpu/rows.h"
    ]  # fmt: skip
    assert cycles(graph) == [["common/views.h", "cpu/rows.h", "undo.h"]]


def test_an_include_of_another_family_s_part_is_found(tmp_path: pathlib.Path) -> None:
    files = {
        "csrc/undo.h": "",
        "csrc/shadow.h": '#include "undo.h"\n',
        "csrc/cuda/async_copies.h": "",
        "csrc/cuda/undo_rows.h": '#include "../undo.h"\n#include "async_copies.h"\n',
        "csrc/cuda/undo.cu": '#include "undo_rows.h"\n',
        "csrc/cuda/shadow.cu": '#include "undo_rows.h"\n#include "async_copies.h"\n',
        "csrc/cuda/write.h": '#include "undo_rows.h"\n',
    }
    graph = includes(tree(tmp_path, files))
    assert foreign_includes(graph) == [
        "cuda/shadow.cu includes cuda/undo_rows.h",
        "cuda/write.h includes cuda/undo_rows.h",
    ]
