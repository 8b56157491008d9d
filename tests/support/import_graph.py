"""List the imports between the files of nwor_ops and meta, and the includes of csrc.

    python tests/support/import_graph.py             # every component, and the components that it imports
    python tests/support/import_graph.py --files     # every file
    python tests/support/import_graph.py --dot       # for Graphviz; dashed: imported inside a function

A component is a package without subpackages. In a package with subpackages, each file is a component. Imports inside
functions and below `if TYPE_CHECKING` count too.
"""

from __future__ import annotations

import argparse
import ast
import functools
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
    """`file` binds the name `bound` to the module `target`, or to the attribute `name` of `target`."""

    file: str
    line: int
    target: str
    name: str | None
    bound: str
    lazy: bool


class SourceTree:
    """The Python files below `root`, by module name."""

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

    def component(self, module: str) -> str:
        package = self.package(module)
        inner = (other for other in self.paths if other.startswith(f"{package}.") and other == self.package(other))
        return module if any(inner) else package

    def components(self) -> Graph:
        graph: Graph = {self.component(module): set() for module in self.paths}
        for file, targets in self.files().items():
            graph[self.component(file)] |= {self.component(target) for target in targets} - {self.component(file)}
        return graph

    def private_names(self) -> list[str]:
        """Return the uses of a name of another file that starts with an underscore."""
        uses = [(found.file, found.line, f"{found.target}.{found.name}") for found in self.imports if found.name]
        for file, tree in self.trees.items():
            modules = {found.bound: found.target for found in self.imports if found.file == file and not found.name}
            uses += [
                (file, node.lineno, f"{modules[of]}.{node.attr}")
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and (of := ast.unparse(node.value)) in modules
            ]
        return [f"{file}, line {line}: {name}" for file, line, name in uses if re.search(r"\._(?!_\w+__$)[^.]*$", name)]

    @functools.cached_property
    def bound_names(self) -> dict[str, set[str]]:
        """The names that each module binds outside of its functions and classes, and its submodules."""
        return {module: self._bound_names(module) for module in self.paths}

    def _bound_names(self, module: str) -> set[str]:
        names = {other.rpartition(".")[2] for other in self.paths if other.rpartition(".")[0] == module}
        rest: list[ast.AST] = [self.trees[module]]
        while rest:
            for node in ast.iter_child_nodes(rest.pop()):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    names.add(node.name)
                    continue
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                elif isinstance(node, (ast.Import, ast.ImportFrom)):
                    names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
                rest.append(node)
        return names

    def unknown_imports(self, path: pathlib.Path) -> list[str]:
        """Return the absolute imports in a file that name a lost module of this tree, or a name that it lacks."""
        tops = {module.split(".")[0] for module in self.paths}
        found = []
        for node, _ in import_statements(ast.parse(path.read_text())):
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or ""
                if module.split(".")[0] not in tops or (isinstance(node, ast.ImportFrom) and node.level):
                    continue
                if module not in self.paths:
                    found.append(f"{path.name}, line {node.lineno}: {module}")
                elif isinstance(node, ast.ImportFrom) and alias.name not in self.bound_names[module] | {"*"}:
                    found.append(f"{path.name}, line {node.lineno}: {module}.{alias.name}")
        return found


def import_statements(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, lazy
        else:
            yield from import_statements(node, lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def includes(root: pathlib.Path = ROOT) -> Graph:
    """Return the files of csrc, and the files of csrc that each includes: from its own folder, otherwise from csrc."""
    csrc = root / "csrc"
    paths = sorted(path for path in csrc.rglob("*.*") if path.suffix in (".h", ".cuh", ".cpp", ".cu"))
    graph: Graph = {str(path.relative_to(csrc)): set() for path in paths}
    for path in paths:
        for name in re.findall(r'^\s*#\s*include\s+"(.+)"', path.read_text(), re.MULTILINE):
            beside = os.path.normpath(path.parent.relative_to(csrc) / name)
            graph[str(path.relative_to(csrc))].add(beside if beside in graph else os.path.normpath(name))
    return graph


def upward_includes(graph: Graph) -> list[str]:
    """Return includes that leave their level.

    csrc/common may not include a family, the header of a family no device, and a device no other device.
    """
    allowed = {"common": ("common",), "": ("common", ""), "cpu": ("common", "", "cpu"), "cuda": ("common", "", "cuda")}
    return [
        f"{file} includes {target}"
        for file, targets in graph.items()
        for target in sorted(targets)
        if os.path.dirname(target) not in allowed[os.path.dirname(file)]
    ]


def foreign_includes(graph: Graph) -> list[str]:
    """Return includes of a part of one family's kernels, such as cuda/recurrent_rows.h, in files of another family."""
    families = {os.path.splitext(file)[0] for file in graph if os.path.dirname(file) == ""}

    def family(file: str) -> str:
        return re.split(r"[_.]", os.path.basename(file))[0]

    return [
        f"{file} includes {target}"
        for file, targets in graph.items()
        for target in sorted(targets)
        if "_" in target and family(target) in families - {family(file)}
    ]


def cycles(graph: Graph) -> list[list[str]]:
    """Return sets of nodes that reach each other, the largest cycle first."""

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
    return sorted((sorted(cycle) for cycle in found), key=lambda cycle: (-len(cycle), cycle))


def edges_of(cycle: list[str], graph: Graph) -> list[str]:
    return [f"{node} -> {target}" for node in cycle for target in sorted(graph[node] & set(cycle))]


def text(graph: Graph) -> str:
    width = max(map(len, graph))
    return "\n".join(
        f"{node:<{width}}  {' '.join(sorted(targets))}".rstrip() for node, targets in sorted(graph.items())
    )


def dot(sources: SourceTree) -> str:
    lines = ["digraph nwor_ops {", "  rankdir=LR; node [shape=box];"]
    now = {
        (sources.component(found.file), sources.component(found.target)) for found in sources.imports if not found.lazy
    }
    for component, targets in sorted(sources.components().items()):
        lines += [
            f'  "{component}" -> "{to}"{"" if (component, to) in now else " [style=dashed]"};' for to in sorted(targets)
        ]
    for file, targets in sorted(includes().items()):
        lines += [f'  "csrc/{file}" -> "csrc/{to}";' for to in sorted(targets)]
    return "\n".join([*lines, "}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--dot", action="store_true")
    options = parser.parse_args()
    sources = SourceTree()
    if options.dot:
        print(dot(sources))
        return
    graph = sources.files() if options.files else sources.components()
    print(text(graph), "", text(includes()), sep="\n")
    for title, found in {
        "cycle of components": sources.components(), "cycle of files": sources.files(), "cycle of includes": includes()
    }.items():  # fmt: skip
        for cycle in cycles(found):
            print(f"\n{title}: {len(cycle)}", *edges_of(cycle, found), sep="\n  ")
    for title, found in {
        "private names": sources.private_names(),
        "upward includes": upward_includes(includes()),
    }.items():
        if found:
            print(f"\n{title}: {len(found)}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
