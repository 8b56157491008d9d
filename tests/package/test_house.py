"""The structure of the code: no cycles of imports, including those inside functions, and no cycles of includes.

tests/support/house.py draws the graphs.
"""

from __future__ import annotations

import pathlib
import re

import pytest
from house import ROOT, House, circles, edges_of, includes, trespasses, uphill

HOUSE = House()


def test_no_circle_of_rooms() -> None:
    rooms = HOUSE.rooms()
    assert [edges_of(circle, rooms) for circle in circles(rooms)] == []


def test_no_circle_of_files() -> None:
    files = HOUSE.files()
    assert [edges_of(circle, files) for circle in circles(files)] == []


def test_no_private_name_crosses_a_file() -> None:
    assert HOUSE.private_names() == []


def test_no_circle_of_includes() -> None:
    graph = includes()
    assert [edges_of(circle, graph) for circle in circles(graph)] == []


def test_no_include_leaves_its_floor() -> None:
    assert uphill(includes()) == []


def test_no_family_includes_a_part_of_another() -> None:
    assert trespasses(includes()) == []


def test_a_family_has_one_name_on_every_floor() -> None:
    floors = {
        pattern: {path.stem for path in ROOT.glob(pattern)} - {"__init__", "registry", "check", "relations"}
        for pattern in ("csrc/*.h", "csrc/cpu/*.cpp", "csrc/cuda/*.cu", "meta/*.py", "nwor_ops/ops/*.py")
    }
    assert len({frozenset(families) for families in floors.values()}) == 1, floors


def test_every_package_is_shipped() -> None:
    named = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r'"(.+?)"', named)) == {HOUSE.package(module) for module in HOUSE.paths}


def test_the_graphs_are_those_of_the_tree() -> None:
    """An empty graph would have no cycles either."""
    assert HOUSE.files()["nwor_ops"] >= {"nwor_ops.library", "nwor_ops.meta"}
    assert any(found.lazy for found in HOUSE.imports)
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


def house(folder: pathlib.Path, **files: str) -> House:
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
    return House(tree(folder, {"p/__init__.py": ""} | {names[name]: files.get(name, "") for name in names}), {"p": "p"})


@pytest.mark.parametrize(
    "back", ["import p.q.b", "from p.q.b import f", "from ..q import b", "def f():\n    from p.q import b"]
)
def test_a_circle_of_rooms_and_files_is_found(tmp_path: pathlib.Path, back: str) -> None:
    found = house(tmp_path, b="from p.r import d", d=back)
    assert circles(found.rooms()) == [["p.q", "p.r"]]
    assert circles(found.files()) == [["p.q.b", "p.r.d"]]
    assert edges_of(["p.q", "p.r"], found.rooms()) == ["p.q -> p.r", "p.r -> p.q"]


def test_rooms_may_have_a_circle_where_files_have_none(tmp_path: pathlib.Path) -> None:
    found = house(tmp_path, b="from ..r import d", d="from p.q import c")
    assert (circles(found.rooms()), circles(found.files())) == ([["p.q", "p.r"]], [])


def test_a_file_beside_rooms_is_a_room(tmp_path: pathlib.Path) -> None:
    """It is not a cycle that a.py imports p.q, which imports p."""
    found = house(tmp_path, a="from p.q import b", b="import p")
    assert found.rooms() == {"p": set(), "p.a": {"p.q"}, "p.q": {"p"}, "p.r": set()}
    assert circles(found.rooms()) == circles(found.files()) == []


def test_an_import_for_types_alone_does_not_count(tmp_path: pathlib.Path) -> None:
    found = house(
        tmp_path, b="from p.q import c", c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.q.b"
    )
    assert found.files()["p.q.c"] == set()


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
    assert house(tmp_path, d=use).private_names() == [f"p.r.d, line {use.count(chr(10)) + 1}: p.q.b._f"]


@pytest.mark.parametrize(
    "use", ["from p.q import b\nb.f()", "from p.q import __version__", "class A:\n    def f(self):\n        self._f"]
)
def test_other_names_are_not_private(tmp_path: pathlib.Path, use: str) -> None:
    assert house(tmp_path, d=use).private_names() == []


def test_includes_that_leave_their_floor_are_found(tmp_path: pathlib.Path) -> None:
    files = {
        "csrc/common/views.h": '#include "undo.h"\n#include <vector>\n',
        "csrc/undo.h": '#include "common/views.h"\n#include "cpu/rows.h"\n',
        "csrc/cpu/rows.h": '#include "common/views.h"\n',
        "csrc/cpu/undo.cpp": '#include "rows.h"\n#include "../undo.h"\n',
        "csrc/cuda/undo.cu": '#  include "cpu/rows.h"\n',
    }
    graph = includes(tree(tmp_path, files))
    assert graph["cpu/undo.cpp"] == {"cpu/rows.h", "undo.h"}
    assert uphill(graph) == [
        "common/views.h includes undo.h", "cuda/undo.cu includes cpu/rows.h", "undo.h includes cpu/rows.h"
    ]  # fmt: skip
    assert circles(graph) == [["common/views.h", "cpu/rows.h", "undo.h"]]


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
    assert trespasses(graph) == ["cuda/shadow.cu includes cuda/undo_rows.h", "cuda/write.h includes cuda/undo_rows.h"]
