"""The one way to patch vLLM and to undo it, and the checks of what the patches need.

A :class:`Hook` names a vLLM function and the parameters that it must have. A :class:`Patch` replaces one attribute of a
vLLM module, class or object. It knows the original, refuses to patch twice, and can be undone. :class:`Patches` holds
the patches of one feature or engine. A :class:`ModulePatch` is made when vLLM has imported a module.
:func:`undo_all` undoes the patches of the whole plugin.

:func:`check_vllm` and :func:`check_library` refuse an engine if its vLLM or our compiled library does not fit.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nwor_ops import library
from nwor_ops.config import NworConfig
from nwor_ops.vllm.support.features import SUPPORTED_VERSIONS, TRANSACTION
from nwor_ops.vllm.support.refusals import Unsupported

# Takes the original function, and returns its replacement. The argument is None if the function may be missing.
Decorator = Callable[[Any], Any]

# ---------------------------------------------------------------- hooks


@dataclass(frozen=True)
class Hook:
    """A vLLM function that the plugin patches or calls.

    Attributes:
        module, name: its module, and its name there. ``name`` may contain one dot.
        signature: its parameters in order, without ``self``, separated by ``", "``.
        cuda: whether only CUDA engines call it. On a CPU, vLLM may define another function with this name, or may lack
            a dependency of the module.
        calls: a function that its code must call, or "".
    """

    module: str
    name: str
    signature: str
    cuda: bool = False
    calls: str = ""

    def problem(self) -> str | None:
        """Return the difference between vLLM's function and this description, or None if they match."""
        try:
            return self.problem_in(importlib.import_module(self.module))
        except ImportError as error:
            return f"{self.module}.{self.name} does not exist ({error})"

    def problem_in(self, module: Any) -> str | None:
        """The same for a module that is already there, even if its import is not over."""
        name = f"{self.module}.{self.name}"
        try:
            target = functools.reduce(getattr, self.name.split("."), module)
        except AttributeError as error:
            return f"{name} does not exist ({error})"
        if self.calls and self.calls not in inspect.unwrap(target).__code__.co_names:
            return f"{name} does not call {self.calls}"
        parameters = tuple(parameter for parameter in inspect.signature(target).parameters if parameter != "self")
        expected = tuple(self.signature.split(", ")) if self.signature else ()
        return None if parameters == expected else f"{name} takes {parameters}, expected {expected}"


# ---------------------------------------------------------------- patches

_MISSING = object()
_PATCH = "_nwor_patch"  # attribute of a replacement: its Patch
_numbers = itertools.count()


class PatchError(RuntimeError):
    """A function cannot be patched, because this feature patched it already, or a patch cannot be undone."""


class Patch:
    """A replacement of one attribute of vLLM. Only the replacement keeps this object alive.

    Args:
        owner: the module, class or object whose attribute is replaced.
        name: name of the attribute.
        decorator: takes the original function and returns its replacement: a function, or a classmethod.
        patches: what it belongs to. Several features may patch one function, each of them once.
        may_be_missing: whether the attribute need not exist. ``decorator`` is then called with None.

    Attributes:
        original: the function that was found, or None.
        replacement: the value that the patch put there; None before :meth:`apply`.
        number: position of this patch among all patches.
    """

    def __init__(
        self, owner: Any, name: str, decorator: Decorator, patches: Patches, may_be_missing: bool = False
    ) -> None:
        self.owner, self.name, self.patches, self.by = owner, name, patches, patches.by
        self.original = getattr(owner, name, None)
        self.replacement: Any = None
        self._found = vars(owner).get(name, _MISSING)
        self._decorator, self._may_be_missing, self.number = decorator, may_be_missing, next(_numbers)

    @property
    def target(self) -> str:
        """The name of the attribute, for messages."""
        owner = self.owner
        if isinstance(owner, ModuleType):
            return f"{owner.__name__}.{self.name}"
        owner = owner if isinstance(owner, type) else type(owner)
        return f"{owner.__module__}.{owner.__qualname__}.{self.name}"

    @property
    def is_repeated(self) -> bool:
        """Whether this feature has patched the function already."""
        patch = getattr(self.original, _PATCH, None)
        while patch is not None and patch.by != self.by:
            patch = getattr(patch.original, _PATCH, None)
        return patch is not None

    def apply(self) -> None:
        """Replace the attribute."""
        if self.is_repeated:
            raise PatchError(f"nwor: {self.target} is already patched by {self.by}")
        if self.original is None and not self._may_be_missing:
            raise Unsupported(f"{self.target} does not exist")
        self.replacement = self._decorator(self.original)
        function = getattr(self.replacement, "__func__", self.replacement)
        if self.original is not None and not hasattr(function, "__wrapped__"):
            functools.update_wrapper(function, self.original)
        setattr(function, _PATCH, self)
        setattr(self.owner, self.name, self.replacement)
        _applied.add(self)

    def undo(self) -> None:
        """Put the original back."""
        current = vars(self.owner).get(self.name, _MISSING)
        if current is not self._found:  # other code may have put the original back
            if current is not self.replacement:
                raise PatchError(f"nwor: {self.target}: other code replaced the patch by {self.by}: undo that first")
            if self._found is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self._found)
        _applied.discard(self)


_applied: weakref.WeakSet[Patch] = weakref.WeakSet()
_when_undone: list[Callable[[], object]] = []


class Patches:
    """The patches of one feature, or of one feature in one engine.

    It does not keep an engine alive: a patch lives as long as its target.
    """

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[Patch]:
        """Return the patches in the order in which they were made."""
        return (patch for patch in applied() if patch.patches is self)

    def put(self, owner: Any, name: str, decorator: Decorator) -> None:
        """Make a patch; the arguments are those of :class:`Patch`, and the errors those of :meth:`Patch.apply`."""
        Patch(owner, name, decorator, self).apply()

    def put_once(self, owner: Any, name: str, decorator: Decorator, may_be_missing: bool = False) -> None:
        """Make a patch, unless this feature has patched the function already."""
        patch = Patch(owner, name, decorator, self, may_be_missing)
        if not patch.is_repeated:
            patch.apply()

    def put_methods(self, owner: Any, ours: Any, names: Iterable[str]) -> None:
        """Patch methods of an object so that they call the methods of the same name of ``ours``.

        Those receive the original first, and then the arguments of the call.
        """
        for name in names:
            self.put(owner, name, _calling(getattr(ours, name)))

    def undo(self) -> None:
        """Undo the patches, the last one first."""
        for patch in reversed(list(self)):
            patch.undo()


@dataclass(frozen=True)
class ModulePatch:
    """A patch of a module or a class that engines need whose settings are ``wanted``. ``by`` is the feature."""

    hook: Hook
    decorator: Decorator
    by: str
    wanted: Callable[[NworConfig], bool]

    def apply(self, module: Any, config: NworConfig, logger: Any) -> None:
        """Make the patch, unless it is made already.

        Raises:
            RuntimeError: the function does not fit, and the settings do not permit an engine without the feature.
        """
        if problem := self.hook.problem_in(module):
            unsupported = Unsupported.join((why, "") for why in (version_problem(), problem) if why)
            unsupported.refuse(self.by, config.strict, logger, f"{self.by} was asked for")
            return
        *classes, name = self.hook.name.split(".")
        Patches(self.by).put_once(functools.reduce(getattr, classes, module), name, self.decorator)


def _calling(ours: Callable[..., Any]) -> Decorator:
    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        def patched(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        return patched

    return decorator


def when_undone(action: Callable[[], object]) -> None:
    """Call ``action`` in :func:`undo_all`. It takes back other changes than of attributes."""
    _when_undone.append(action)


def applied() -> list[Patch]:
    """Return all patches of this process, in the order in which they were made."""
    return sorted(_applied, key=lambda patch: patch.number)


def undo_all() -> None:
    """Undo every patch of this process, the last one first."""
    problems = [problem for patch in reversed(applied()) if (problem := _undone_problem(patch)) is not None]
    while _when_undone:
        _when_undone.pop()()
    if problems:
        raise PatchError("; ".join(problems))


def _undone_problem(patch: Patch) -> str | None:
    """Undo a patch. Return why that is not possible, or None."""
    try:
        patch.undo()
    except PatchError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- checks: each raises Unsupported


def version_problem(use: str = TRANSACTION) -> str | None:
    """Return why the installed vLLM does not support a feature, or None if it does."""
    import vllm

    installed, supported = re.match(r"\d+\.\d+", vllm.__version__), SUPPORTED_VERSIONS[use]
    if installed is not None and installed[0] in supported:
        return None
    purpose, are = ("", "are") if use == TRANSACTION else (f" for {use}", "is")
    return f"vLLM {vllm.__version__} is not supported{purpose}; supported {are} {', '.join(supported)}"


def check_vllm(hooks: Iterable[Hook], use: str = TRANSACTION) -> None:
    """Check the version of vLLM, and that each hook exists with the expected parameters."""
    problem = version_problem(use)
    problems = [problem] if problem else [hook.problem() for hook in hooks]
    if any(problems):
        raise Unsupported.join((problem, "") for problem in problems if problem)


def check_library(device_type: str) -> None:
    """Check that the compiled library for a device is loaded."""
    problem = next(compiled.problem for compiled in library.loaded_libraries() if compiled.kind == device_type)
    if problem:
        raise Unsupported(problem)
