"""Report which vLLM functions that the plugin uses differ in another vLLM: ``make next-vllm VERSION=0.34.0``.

    python tools/next_vllm.py                           # the newest version of the index
    python tools/next_vllm.py 0.33.0 --base 0.32.0      # or wheels, or folders that contain vllm/
    python tools/next_vllm.py 0.34.0 --diff             # shows the changed code too

The base is by default the newest version that the plugin supports. Wheels are downloaded to build/next-vllm. Their
files are parsed and never imported. Each :class:`~nwor_ops.vllm.hooks.Hook` is compared, by parameters and by code, and
everything that a file of the plugin imports from vLLM. Of a class these are the methods that the file names.

Comments, docstrings, annotations and formatting do not count. Functions that these functions call are not compared.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nwor_ops.vllm.hooks import Hook, ModulePatch
from nwor_ops.vllm.support.features import SUPPORTED_VERSIONS, TRANSACTION

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "nwor_ops" / "vllm"
DOWNLOADS = ROOT / "build" / "next-vllm"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Name = tuple[str, str]  # a module of vLLM, and a name there


# ---------------------------------------------------------------- vLLM's side: definitions in a tree of sources


class Sources:
    """The Python files of one vLLM, by module name, in a wheel or in a folder that contains the folder ``vllm``."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        if path.is_dir():
            self._texts = {str(file.relative_to(path)): file.read_text() for file in path.glob("vllm/**/*.py")}
        else:
            with zipfile.ZipFile(path) as wheel:
                names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
                self._texts = {name: wheel.read(name).decode() for name in names}
        if not self._texts:
            sys.exit(f"next-vllm: {path} contains no file vllm/*.py")

    @property
    def version(self) -> str:
        """The version in the wheel's name; for a folder, its name."""
        parts = self.path.name.split("-")
        return parts[1] if self.path.suffix == ".whl" and len(parts) > 2 else self.path.name

    @functools.cache  # noqa: B019 - there are two objects of this class
    def tree(self, module: str) -> ast.Module | None:
        """Return a parsed module, or None if no module has this name."""
        base = module.replace(".", "/")
        text = self._texts.get(f"{base}.py", self._texts.get(f"{base}/__init__.py"))
        return None if text is None else ast.parse(text)

    def find(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> list[ast.stmt]:
        """Return the definitions of a name, which may contain one dot. Imports and base classes are followed.

        There is more than one definition if branches of an ``if`` or overloads define the name.
        """
        return [one for _, one in self._find(module, name, seen)]

    def _find(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> list[tuple[str, ast.stmt]]:
        """Return the definitions, each with its module."""
        if (module, name) in seen or (tree := self.tree(module)) is None:
            return []
        seen |= {(module, name)}
        owner, _, member = name.rpartition(".")
        if owner:
            classes = [(at, one) for at, one in self._find(module, owner, seen) if isinstance(one, ast.ClassDef)]
            own = [(at, found) for at, one in classes for found in _bound(one.body, member)]
            bases = ((at, base) for at, one in classes for base in map(_dotted, one.bases) if base and "." not in base)
            inherited = (self._find(at, f"{base}.{member}", seen) for at, base in bases)
            return own or next(filter(None, inherited), [])
        found: list[tuple[str, ast.stmt]] = []
        for one in _bound(tree.body, name) or _bound(tree.body, "*"):
            if isinstance(one, ast.ImportFrom):
                found += self._find(*self._imported(module, name, one), seen)
            elif isinstance(one, ast.Assign) and isinstance(one.value, ast.Name):  # another name of it
                found += self._find(module, one.value.id, seen) or [(module, one)]
            else:
                found.append((module, one))
        return found

    def _imported(self, module: str, name: str, one: ast.ImportFrom) -> tuple[str, str]:
        """Return the module and the name there that an import binds to ``name``."""
        original = next((alias.name for alias in one.names if (alias.asname or alias.name) == name), name)
        if not one.level:
            return one.module or "", original
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._texts
        parents = module.split(".")[: None if is_package and one.level == 1 else is_package - one.level]
        return ".".join([*parents, *([one.module] if one.module else [])]), original


def _bound(body: Iterable[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements of a module or class that bind a name."""
    found: list[ast.stmt] = []
    for one in body:
        match one:
            case ast.If() | ast.Try() | ast.With():
                blocks = (getattr(one, field, []) for field in ("body", "orelse", "finalbody"))
                found += [inner for block in blocks for inner in _bound(block, name)]
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if one.name == name:
                found.append(one)
            case ast.Assign() if name in (target.id for target in one.targets if isinstance(target, ast.Name)):
                found.append(one)
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                found.append(one)
            case ast.ImportFrom() if name in (alias.asname or alias.name for alias in one.names):
                found.append(one)
    return found


def _dotted(expression: ast.expr) -> str:
    """Return ``a.b`` for names and attributes, or an empty string."""
    match expression:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if owner := _dotted(value):
            return f"{owner}.{name}"
        case ast.Subscript(value=value):  # a generic class
            return _dotted(value)
    return ""


def parameters(found: Iterable[ast.stmt]) -> list[str]:
    """Return the names of the parameters of functions, or of the fields of classes, as in ``Hook.signature``."""
    shown = []
    for one in found:
        match one:
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                if "overload" not in map(_dotted, one.decorator_list):
                    named = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
                    names = [one.arg for one in named if one is not None and one.arg not in ("self", "cls")]
                    shown.append(", ".join(names))
            case ast.ClassDef(body=body):
                shown.append(", ".join(ast.unparse(one.target) for one in body if isinstance(one, ast.AnnAssign)))
    return shown


class _Plain(ast.NodeTransformer):
    """Remove docstrings and annotations."""

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None and not isinstance(node, ast.AnnAssign):
                setattr(node, field, None)
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                node.body = rest or [ast.Pass()]  # type: ignore[attr-defined]
        return super().visit(node)


def code(found: list[ast.stmt]) -> str:
    """Return definitions in one format. A class is only its bases and fields: its methods are compared by name."""
    shown = []
    for one in found:
        if isinstance(one, ast.ClassDef):
            fields: list[ast.stmt] = [inner for inner in one.body if isinstance(inner, ast.AnnAssign)]
            one = ast.ClassDef(one.name, one.bases, one.keywords, fields or [ast.Pass()], one.decorator_list)
        plain = _Plain().visit(ast.parse(ast.unparse(one)))
        shown.append(ast.unparse(plain))
    return "\n".join(shown) + "\n"


# ---------------------------------------------------------------- our side: what the plugin uses


def hooks() -> list[Hook]:
    """Return every hook in a module of the plugin that does not need vLLM."""
    for name in ("plugin", "check"):
        importlib.import_module(f"nwor_ops.vllm.{name}")
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("nwor_ops.vllm")]
    return [hook for module in modules for hook in _hooks_in(list(vars(module).values()))]


def _hooks_in(value: object) -> Iterator[Hook]:
    if isinstance(value, Hook):
        yield value
    elif isinstance(value, ModulePatch):
        yield value.hook
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _hooks_in(one)
    elif isinstance(value, dict):
        yield from _hooks_in(list(value.values()))
    elif isinstance(getattr(value, "hooks", None), tuple):  # a class of runners, or a kind of layers
        yield from _hooks_in(value.hooks)  # type: ignore[attr-defined]


def imports(sources: Sources) -> Iterator[Name]:
    """Yield what files of the plugin import from vLLM, with functions of modules and methods that they name."""
    for path in PLUGIN.rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
        named |= {one.name for one in ast.walk(tree) if isinstance(one, FUNCTIONS)}
        for module, name in _imported_names(tree):
            if (other := sources.tree(f"{module}.{name}")) is not None:
                defined = {one.name for one in other.body if isinstance(one, (*FUNCTIONS, ast.ClassDef))}
                yield from ((f"{module}.{name}", one) for one in defined & named)
            else:
                yield module, name
                for method in named:
                    if any(isinstance(one, FUNCTIONS) for one in sources.find(module, f"{name}.{method}")):
                        yield module, f"{name}.{method}"


def _imported_names(tree: ast.Module) -> set[Name]:
    """Return the module and the name there of everything that a file imports from vLLM."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    older = {inner for handler in handlers for inner in ast.walk(handler)}  # for a vLLM that lacks the first import
    return {
        (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm" and node not in older
        for alias in node.names
    }


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Change:
    """A difference of one name between two vLLMs, and the changed code."""

    what: str
    diff: str = ""


def uses(sources: Sources) -> dict[Name, str | None]:
    """Return the names that the plugin uses, in the order of modules, with the parameters that a hook expects."""
    expected: dict[Name, str | None] = dict.fromkeys(imports(sources))
    expected |= {(hook.module, hook.name): hook.signature for hook in hooks()}
    return dict(sorted(expected.items()))


def change_of(old: list[ast.stmt], now: list[ast.stmt], expected: str | None = None) -> Change | None:
    """Return the difference between the definitions of a name in two vLLMs."""
    if not now:
        return Change("gone" if old else "in neither version: look by hand")
    before, after = parameters(old), parameters(now)
    problem = ""
    if after and expected is not None and expected not in after:
        problem = f"; the hook does not fit: it takes ({'), or ('.join(after)})"
    if not old:
        return Change(f"new{problem}")
    codes = code(old), code(now)
    if codes[0] == codes[1]:
        return Change(problem.lstrip("; ")) if problem else None
    lines = [text.splitlines(keepends=True) for text in codes]
    diff = "".join(difflib.unified_diff(lines[0], lines[1], "base", "new"))
    if before == after:
        return Change(f"body{problem}", diff)
    removed, added = (
        sorted({*", ".join(some).split(", ")} - {*", ".join(others).split(", ")})
        for some, others in ((before, after), (after, before))
    )
    return Change(f"parameters: without {removed}, with {added}{problem}", diff)


def report(base: Sources, new: Sources, with_diffs: bool = False) -> str:
    """Return the report in Markdown."""
    names = uses(base)
    compared = {name: change_of(base.find(*name), new.find(*name), expected) for name, expected in names.items()}
    changes = {".".join(name): change for name, change in compared.items() if change is not None}
    lines = [f"vLLM {base.version} -> {new.version}: {len(changes)} of {len(names)} names that the plugin uses differ."]
    if changes:
        lines += ["", "| vLLM | difference |", "|---|---|"]
        lines += [f"| `{name}` | {change.what} |" for name, change in changes.items()]
    if with_diffs:
        lines += ["", *(f"`{name}`\n```diff\n{change.diff}```" for name, change in changes.items() if change.diff)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the command


def wheel(version: str) -> pathlib.Path:
    """Return vLLM's wheel of a version (``0.33.*`` is the newest patch), and download it if it is missing."""
    wanted = f"vllm=={version}" if version else "vllm"
    if cached := sorted(DOWNLOADS.glob(f"vllm-{version}-*.whl")) if version else []:
        return cached[-1]
    folder = DOWNLOADS / "new"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"next-vllm: downloading {wanted} (0.3 GB)", file=sys.stderr, flush=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
    done = subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(folder), wanted], check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        sys.exit(f"next-vllm: pip found no wheel of {wanted}")
    return found[-1].rename(DOWNLOADS / found[-1].name)


def sources(version: str) -> Sources:
    """Return the sources of a version, a wheel or a folder."""
    path = pathlib.Path(version)
    return Sources(path if version and path.exists() else wheel(version))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", default="", help="a version, a wheel or a folder; default: the newest")
    newest = max(SUPPORTED_VERSIONS[TRANSACTION], key=lambda version: [int(part) for part in version.split(".")])
    parser.add_argument("--base", default=f"{newest}.*", help="a version, a wheel or a folder; default: %(default)s")
    parser.add_argument("--diff", action="store_true", help="show the changed code")
    options = parser.parse_args()
    print(report(sources(options.base), sources(options.version), options.diff), end="")


if __name__ == "__main__":
    main()
