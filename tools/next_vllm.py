"""Report which vLLM functions that the plugin uses differ in another vLLM: ``make next-vllm VERSION=0.34.0``.

    python tools/next_vllm.py                           # the newest version of the index
    python tools/next_vllm.py 0.33.0 --base 0.32.0      # or wheels, or folders that contain vllm/
    python tools/next_vllm.py 0.34.0 --diff             # shows the changed code too

The base is by default the newest version that the plugin supports. Wheels are downloaded to build/next-vllm. Their
files are parsed and never imported. Three kinds of functions are compared, by parameters and by code:

- each :class:`~nwor_ops.vllm.hooks.Hook`;
- each target of a :class:`~nwor_ops.vllm.hooks.Patch` that is named in a ``put`` call;
- everything that a file of the plugin imports from vLLM. If it imports a class, the methods are compared that the file
  names or that a subclass overrides.

Comments, docstrings, annotations and formatting do not count. Functions that these functions call are not compared.
"""

from __future__ import annotations

import argparse
import ast
import collections
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
PUTS = ("put", "put_once", "put_methods")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
        if (module, name) in seen or (tree := self.tree(module)) is None:
            return []
        seen |= {(module, name)}
        owner, _, member = name.rpartition(".")
        if not owner:
            found = _bound(tree.body, name) or _bound(tree.body, "*")
            return [step for one in found for step in self._followed(module, name, one, seen)]
        classes = [one for one in self.find(module, owner) if isinstance(one, ast.ClassDef)]
        found = [one for one_class in classes for one in _bound(one_class.body, member)]
        if found or not classes:
            return found
        where = self._home(module, owner)
        bases = [base for one_class in classes for base in map(_dotted, one_class.bases) if base]
        inherited = (self.find(where, f"{base}.{member}", seen) for base in bases if "." not in base)
        return next(filter(None, inherited), [])

    def _followed(self, module: str, name: str, one: ast.stmt, seen: frozenset[tuple[str, str]]) -> list[ast.stmt]:
        if isinstance(one, ast.ImportFrom):
            return self.find(*self._imported(module, name, one), seen)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name):  # another name of it
            return self.find(module, one.value.id, seen) or [one]
        return [one]

    def _imported(self, module: str, name: str, one: ast.ImportFrom) -> tuple[str, str]:
        """Return the module and the name there that an import binds to ``name``."""
        original = next((alias.name for alias in one.names if (alias.asname or alias.name) == name), name)
        if not one.level:
            return one.module or "", original
        is_package = f"{module.replace('.', '/')}/__init__.py" in self._texts
        parents = module.split(".")[: None if is_package and one.level == 1 else is_package - one.level]
        return ".".join([*parents, *([one.module] if one.module else [])]), original

    def _home(self, module: str, name: str) -> str:
        """Return the module that defines a name, if ``module`` may import it."""
        tree = self.tree(module)
        for one in _bound(tree.body, name) or _bound(tree.body, "*") if tree is not None else []:
            if isinstance(one, ast.ImportFrom) and self.find(*(imported := self._imported(module, name, one))):
                return self._home(*imported)
        return module


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


@dataclass(frozen=True)
class Use:
    """A vLLM name that the plugin needs. ``why`` is "hook", "patch" or "import", and the file of ours for the last two.
    ``expected`` are the parameters that a hook expects; None for the others."""

    module: str
    name: str
    why: str
    expected: str | None = None


def hooks() -> Iterator[Use]:
    """Yield every hook in a module of the plugin that does not need vLLM."""
    for name in ("plugin", "check"):
        importlib.import_module(f"nwor_ops.vllm.{name}")
    for name, module in sorted(sys.modules.items()):
        if name.startswith("nwor_ops.vllm"):
            for hook in _hooks_in(list(vars(module).values())):
                yield Use(hook.module, hook.name, "hook", hook.signature)


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


def patches(sources: Sources) -> Iterator[Use]:
    """Yield the targets of ``put`` calls without a hook, in the modules that the plugin patches at import.

    If a call does not name a class, each method of this name is a target, except ``__init__``.
    """
    from nwor_ops.vllm.plugin import PATCHES

    hooked = {use.name.rpartition(".")[2] for use in hooks()}
    for path in sorted(PLUGIN.rglob("*.py")):
        for owner, name in _put_calls(ast.parse(path.read_text())):
            if not owner and (name in hooked or name == "__init__"):
                continue
            for module in dict.fromkeys(patch.hook.module for patch in PATCHES):
                tree = sources.tree(module)
                defined = [one.name for one in tree.body if isinstance(one, ast.ClassDef)] if tree is not None else []
                targets = [f"{one}.{name}" for one in defined if owner in ("", one)] + [name] * (not owner)
                yield from (
                    Use(module, target, f"patch, {path.relative_to(PLUGIN)}")
                    for target in targets
                    if _defined_here(sources, module, target)
                )


def _defined_here(sources: Sources, module: str, name: str) -> bool:
    """Return whether a module itself defines a function, or a method of one of its classes."""
    return any(
        isinstance(one, FUNCTIONS) and one in ast.walk(sources.tree(module) or ast.Module([], []))
        for one in sources.find(module, name)
    )


def _put_calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the class (or an empty string) and the attribute of each call of ``put``, ``put_once``, ``put_methods``."""
    for call in ast.walk(tree):
        match call:
            case ast.Call(func=ast.Attribute(attr=put), args=[owner, names, *more]) if put in PUTS:
                where = names if put != "put_methods" else next(iter(more), names)
                texts = [one.value for one in ast.walk(where) if isinstance(one, ast.Constant)]
                match owner:
                    case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                        pass
                    case _:
                        name = ""
                yield from ((name, text) for text in texts if isinstance(text, str))


def imports(sources: Sources) -> Iterator[Use]:
    """Yield what files of the plugin import from vLLM, and the members that they name of it."""
    for path in sorted(PLUGIN.rglob("*.py")):
        why, tree = f"import, {path.relative_to(PLUGIN)}", ast.parse(path.read_text())
        names = _imported_names(tree)
        for module, original in names.values():
            if sources.tree(f"{module}.{original}") is None:  # not a module
                yield Use(module, original, why)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=member) if (dotted := _dotted(node)) and dotted.split(".")[0] in names:
                    first, *rest = dotted.split(".")
                    yield from _member(sources, *names[first], rest, why)
                case ast.ClassDef(bases=bases, body=body):
                    members = {one.name for one in body if isinstance(one, FUNCTIONS)}
                    members |= {
                        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and _is_own(one.value)
                    }
                    for first, *rest in (dotted.split(".") for dotted in map(_dotted, bases) if dotted):
                        if first in names:
                            for member in sorted(members):
                                yield from _member(sources, *names[first], [*rest, member], why)


def _is_own(value: ast.expr) -> bool:
    """Return whether an expression is ``self`` or ``super()``."""
    return (isinstance(value, ast.Name) and value.id == "self") or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
    )


def _imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return the module and the original name of each name that a file imports from vLLM."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    older = {inner for handler in handlers for inner in ast.walk(handler)}  # for a vLLM that lacks the first import
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm" and node not in older
        for alias in node.names
    }


def _member(sources: Sources, module: str, name: str, rest: list[str], why: str) -> Iterator[Use]:
    """Yield the use of ``name.rest`` if ``name`` is a module or a class, and ``rest`` a function or class there."""
    if sources.tree(f"{module}.{name}") is not None:
        module, path = f"{module}.{name}", rest
    else:
        path = [name, *rest]
    dotted = ".".join(path[:2])
    found = sources.find(module, dotted) if path else []
    if found and isinstance(found[-1], (*FUNCTIONS, ast.ClassDef)):
        yield Use(module, dotted, why)


# ---------------------------------------------------------------- the comparison


@dataclass(frozen=True)
class Change:
    """A difference of one name between two vLLMs, its kind and the changed code. ``use.why`` has all uses."""

    use: Use
    what: str
    diff: str = ""


def uses(sources: Sources) -> list[Use]:
    """Return what the plugin uses, in the order of modules in vLLM. ``why`` has all uses of a name."""
    found: dict[tuple[str, str], list[Use]] = collections.defaultdict(list)
    for use in (*hooks(), *patches(sources), *imports(sources)):
        found[use.module, use.name].append(use)
    return [
        Use(
            *name,
            "; ".join(dict.fromkeys(use.why for use in one)),
            next((use.expected for use in one if use.expected is not None), None),
        )
        for name, one in sorted(found.items())
    ]


def compare(base: Sources, new: Sources, names: Iterable[Use]) -> list[Change]:
    """Return the differences of names between two vLLMs."""
    changes = (_change(base.find(use.module, use.name), new.find(use.module, use.name), use) for use in names)
    return [change for change in changes if change is not None]


def _change(old: list[ast.stmt], now: list[ast.stmt], use: Use) -> Change | None:
    if not now:
        return Change(use, "gone" if old else "in neither version: look by hand")
    before, after = parameters(old), parameters(now)
    problem = ""
    if after and use.expected is not None and use.expected not in after:
        problem = f"; the hook does not fit: it takes ({'), or ('.join(after)})"
    if not old:
        return Change(use, f"new{problem}")
    codes = code(old), code(now)
    if codes[0] == codes[1]:
        return Change(use, problem.lstrip("; ")) if problem else None
    lines = [text.splitlines(keepends=True) for text in codes]
    diff = "".join(difflib.unified_diff(lines[0], lines[1], f"base/{use.module}", f"new/{use.module}"))
    if before == after:
        return Change(use, f"body{problem}", diff)
    names = [list(filter(None, ", ".join(one).split(", "))) for one in (before, after)]
    removed, added = ([name for name in names[i] if name not in names[1 - i]] for i in (0, 1))
    said = [f"without {', '.join(removed)}"] if removed else []
    said += [f"with {', '.join(added)}"] if added else []
    return Change(use, f"parameters: {'; '.join(said) or 'another order'}{problem}", diff)


def report(base: Sources, new: Sources, with_diffs: bool = False) -> str:
    """Return the report in Markdown."""
    names = uses(base)
    changes = compare(base, new, names)
    lines = [
        f"vLLM {base.version} -> {new.version}: {len(changes)} of {len(names)} names that the plugin uses differ.",
        "",
    ]
    if changes:
        lines += ["| vLLM | used as | difference |", "|---|---|---|"]
        lines += [f"| `{one.use.module}.{one.use.name}` | {one.use.why} | {one.what} |" for one in changes]
    if with_diffs:
        lines += ["", *(f"```diff\n{one.diff}```" for one in changes if one.diff)]
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
