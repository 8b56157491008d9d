"""Find and load the compiled libraries, and explain in one sentence what is missing.

The kernels are in two plain shared libraries next to this file. A missing library is not an error until an op is called
on its device. The error then says what to do.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nwor_ops import validation
from nwor_ops.ops import bound, registry

MIN_TORCH = (2, 11)  # as in pyproject.toml, from which setup.py derives the version of the stable ABI
STABLE_ABI_TARGET = f"{MIN_TORCH[0]}.{MIN_TORCH[1]}"
FOLDER = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class CompiledLibrary:
    """One compiled library: its path, and the problem that kept it from loading, if any."""

    kind: str
    dispatch_key: str
    path: pathlib.Path
    problem: str | None

    @property
    def loaded(self) -> bool:
        return self.problem is None


def check_torch() -> None:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < MIN_TORCH:
        raise ImportError(
            f"nwor_ops needs torch >= {STABLE_ABI_TARGET} (its kernels use that version of the "
            f"LibTorch stable ABI), found torch {torch.__version__}; upgrade torch"
        )


def check_fakes() -> None:
    """Raise if Python imported an uninstalled source tree, because the fakes are in another folder there."""
    if importlib.util.find_spec("nwor_ops.meta") is None:
        raise ImportError(
            f"nwor_ops was found in {FOLDER}, a source tree that is not installed; run Python in another folder if "
            "nwor_ops is installed, or install this tree in place: pip install --no-build-isolation --no-deps -e ."
        )


def _load(kind: str, dispatch_key: str) -> CompiledLibrary:
    path = FOLDER / f"libnwor_{kind}.so"
    problem = None
    if not path.exists():
        what = " with nvcc on the PATH" if kind == "cuda" else ""
        problem = (
            f"the {kind.upper()} library of nwor_ops is not built ({path.name} is missing); reinstall it from a "
            f"checkout{what}: pip install --no-build-isolation --force-reinstall --no-deps ."
        )
    elif kind == "cuda" and torch.version.cuda is None:
        problem = (
            f"the CUDA library of nwor_ops is built but this torch ({torch.__version__}) has no CUDA; install "
            "a CUDA build of torch"
        )
    else:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            problem = f"the {kind.upper()} library of nwor_ops does not load: {error}"
    return CompiledLibrary(kind, dispatch_key, path, problem)


def _refuse_device(op: str, problem: str, *arguments: Any) -> NoReturn:
    raise registry.Refusal(f"{op}: {problem}")


def _refuse_view(op: str, view: str, is_lazy: Callable[[Tensor], bool], *arguments: Any) -> NoReturn:
    declared = getattr(getattr(torch.ops, registry.NAMESPACE), op).default._schema.arguments
    named = zip((argument.name for argument in declared), arguments, strict=False)
    name = next(name for name, value in named if any(map(is_lazy, filter(torch.is_tensor, tree_leaves(value)))))
    raise validation.lazy_view_error(f"{op.removeprefix('_bind_')}: {name}", view)


@cache
def loaded_libraries() -> tuple[CompiledLibrary, ...]:
    """Load both libraries at the first call, which is the import of ``nwor_ops``, and return them.

    Ops whose library is missing raise an error that explains the reason, and so do ops that get a lazy view.
    """
    check_torch()
    check_fakes()
    libraries = (_load("cpu", "CPU"), _load("cuda", "CUDA"))
    for op in (*registry.OPS, *bound.NAMES):
        for library in libraries:
            if library.problem:
                registry.implement(op, partial(_refuse_device, op, library.problem), library.dispatch_key)
        for key, (view, is_lazy) in validation.LAZY_VIEWS.items():
            registry.implement(op, partial(_refuse_view, op, view, is_lazy), key)
    return libraries
