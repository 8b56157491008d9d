"""Who imports whom in nwor_ops and meta, and which files csrc includes.

    python tests/support/house.py             # every room, and the rooms that it imports
    python tests/support/house.py --files     # every file
    python tests/support/house.py --dot       # for Graphviz; dashed: imported by a function, when it runs

A room is a folder of Python files that has no such folders in it; where it has, each file beside them is a room.
Imports below `if TYPE_CHECKING` are left out: they never run.
"""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = {"nwor_ops": "nwor_ops", "meta": "nwor_ops.meta"}  # folder: package, as in pyproject.toml
Graph = dict[str, set[str]]


@dataclass(frozen=True)
class Import:
    """`file` binds `bound` to the module `target`, or to what `target` calls `name`."""

    file: str
    line: int
    target: str
    name: str | None
    bound: str
    lazy: bool


class House:
    """The Python files below `root`, each by the name of its module."""

    def __init__(self, root: pathlib.Path = ROOT, packages: dict[str, str] = PACKAGES):
        self.paths = {
            ".".join((package, *path.relative_to(root / folder).with_suffix("").parts)).removesuffix(".__init__"): path
            for folder, package in packages.items()
            for path in sorted((root / folder).rglob("*.py"))
        }
        self.trees = {module: ast.parse(path.read_text()) for module, path in self.paths.items()}
        self.imports = [found for module in self.paths for found in self.imports_of(module)]

    def package(self, module: str) -> str:
        return module if self.paths[module].name == "__init__.py" else module.rpartition(".")[0]

    def imports_of(self, module: str) -> Iterator[Import]:
        for node, lazy in import_statements(self.trees[module]):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    target, name = alias.name, None
                else:
                    above = self.package(module).split(".")
                    source = [*above[: len(above) - node.level + 1]] if node.level else []
                    target, name = ".".join([*source, *filter(None, [node.module])]), alias.name
                    if f"{target}.{name}" in self.paths:
                        target, name = f"{target}.{name}", None
                if target in self.paths and target != module:
                    yield Import(module, node.lineno, target, name, alias.asname or alias.name, lazy)

    def files(self) -> Graph:
        graph: Graph = {module: set() for module in self.paths}
        for found in self.imports:
            graph[found.file].add(found.target)
        return graph

    def room(self, module: str) -> str:
        package = self.package(module)
        inner = (other for other in self.paths if other.startswith(f"{package}.") and other == self.package(other))
        return module if any(inner) else package

    def rooms(self) -> Graph:
        graph: Graph = {self.room(module): set() for module in self.paths}
        for file, targets in self.files().items():
            graph[self.room(file)] |= {self.room(target) for target in targets} - {self.room(file)}
        return graph

    def private_names(self) -> list[str]:
        """Where a file uses a name of another that begins with an underscore."""
        uses = [(found.file, found.line, f"{found.target}.{found.name}") for found in self.imports if found.name]
        for file, tree in self.trees.items():
            modules = {found.bound: found.target for found in self.imports if found.file == file and not found.name}
            uses += [
                (file, node.lineno, f"{modules[of]}.{node.attr}")
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and (of := ast.unparse(node.value)) in modules
            ]
        return [f"{file}, line {line}: {name}" for file, line, name in uses if re.search(r"\._(?!_\w+__$)[^.]*$", name)]


def import_statements(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, lazy
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from import_statements(node, lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def includes(root: pathlib.Path = ROOT) -> Graph:
    """Files of csrc, and which others of csrc each includes: from its own folder, else from csrc."""
    csrc = root / "csrc"
    paths = sorted(path for path in csrc.rglob("*.*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
    graph: Graph = {str(path.relative_to(csrc)): set() for path in paths}
    for path in paths:
        for name in re.findall(r'^\s*#\s*include\s+"(.+)"', path.read_text(), re.MULTILINE):
            beside = os.path.normpath(path.parent.relative_to(csrc) / name)
            graph[str(path.relative_to(csrc))].add(beside if beside in graph else os.path.normpath(name))
    return graph


def uphill(graph: Graph) -> list[str]:
    """Includes that leave their floor: csrc/common knows no family, a family's header no device, a device no other."""
    allowed = {"common": ("common",), "": ("common", ""), "cpu": ("common", "", "cpu"), "cuda": ("common", "", "cuda")}
    return [
        f"{file} includes {target}"
        for file, targets in graph.items()
        for target in sorted(targets)
        if os.path.dirname(target) not in allowed[os.path.dirname(file)]
    ]


def trespasses(graph: Graph) -> list[str]:
    """Includes of a part of one family's kernels, such as cuda/recurrent_rows.h, by another's files."""
    families = {os.path.splitext(file)[0] for file in graph if os.path.dirname(file) == ""}

    def family(file: str) -> str:
        return re.split(r"[_.]", os.path.basename(file))[0]

    return [
        f"{file} includes {target}"
        for file, targets in graph.items()
        for target in sorted(targets)
        if "_" in target and family(target) in families - {family(file)}
    ]


def circles(graph: Graph) -> list[list[str]]:
    """Nodes that reach each other, largest circle first."""

    def reach(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    reached = {node: reach(node) for node in graph}
    found = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted((sorted(circle) for circle in found), key=lambda circle: (-len(circle), circle))


def edges_of(circle: list[str], graph: Graph) -> list[str]:
    return [f"{node} -> {target}" for node in circle for target in sorted(graph[node] & set(circle))]


def text(graph: Graph) -> str:
    width = max(map(len, graph))
    return "\n".join(
        f"{node:<{width}}  {' '.join(sorted(targets))}".rstrip() for node, targets in sorted(graph.items())
    )


def dot(house: House) -> str:
    lines = ["digraph house {", "  rankdir=LR; node [shape=box];"]
    now = {(house.room(found.file), house.room(found.target)) for found in house.imports if not found.lazy}
    for room, targets in sorted(house.rooms().items()):
        lines += [f'  "{room}" -> "{to}"{"" if (room, to) in now else " [style=dashed]"};' for to in sorted(targets)]
    for file, targets in sorted(includes().items()):
        lines += [f'  "csrc/{file}" -> "csrc/{to}";' for to in sorted(targets)]
    return "\n".join([*lines, "}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--dot", action="store_true")
    options = parser.parse_args()
    house = House()
    if options.dot:
        print(dot(house))
        return
    graph = house.files() if options.files else house.rooms()
    print(text(graph), "", text(includes()), sep="\n")
    for title, found in {
        "circle of rooms": house.rooms(), "circle of files": house.files(), "circle of includes": includes()
    }.items():  # fmt: skip
        for circle in circles(found):
            print(f"\n{title}: {len(circle)}", *edges_of(circle, found), sep="\n  ")
    for title, found in {"private names": house.private_names(), "uphill includes": uphill(includes())}.items():
        if found:
            print(f"\n{title}: {len(found)}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
