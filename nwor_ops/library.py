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
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from nwor_ops.ops import registry

MIN_TORCH = (2, 11)  # as in pyproject.toml, from which setup.py derives the version of the stable ABI
STABLE_ABI_TARGET = f"{MIN_TORCH[0]}.{MIN_TORCH[1]}"
FOLDER = pathlib.Path(__file__).resolve().parent

# Dispatch keys whose ops raise an explanation if there is no kernel.
_DEVICES = {
    "CPU": "cpu",
    "CUDA": "cuda",
    "XPU": "xpu",
    "MPS": "mps",
    "HPU": "hpu",
}


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


def _refusal(op: str, sentence: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise registry.Refusal(f"{op}: {sentence}")

    return refuse


# Views that torch resolves when they are read, by dispatch key: name, test, and function to resolve them. A kernel
# would read the unresolved memory. (The default kernel of torch for these keys copies mutated arguments, including
# whole caches. It then fails to copy them back, after other arguments were written.)
_LAZY_VIEWS: dict[str, tuple[str, Callable[[Tensor], bool], Callable[[Tensor], Tensor]]] = {
    "Negative": ("a negative view", Tensor.is_neg, Tensor.resolve_neg),
    "Conjugate": ("a conjugate view", Tensor.is_conj, Tensor.resolve_conj),
    "ZeroTensor": ("a zero without memory", Tensor._is_zerotensor, Tensor.clone),
}


def _without_lazy_views(op: str, dispatch_key: str) -> Callable[..., Any]:
    """Return an op's kernel for a lazy-view key. It refuses such views if the op mutates them, and resolves others."""
    overload = registry.OPS[op].overload
    what, is_lazy, read = _LAZY_VIEWS[dispatch_key]

    def resolved(name: str, mutated: bool, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [resolved(f"{name}[{index}]", mutated, element) for index, element in enumerate(value)]
        if not isinstance(value, Tensor) or not is_lazy(value):
            return value
        if mutated:
            raise ValueError(f"{op}: {name} must not be {what}, the op writes to it; pass a tensor with its own memory")
        return read(value)

    def kernel(*arguments: Any) -> Any:
        declared = overload._schema.arguments[: len(arguments)]
        return overload(*(
            resolved(argument.name, argument.alias_info is not None, value)
            for argument, value in zip(declared, arguments, strict=True)
        ))  # fmt: skip

    return kernel


@cache
def loaded_libraries() -> tuple[CompiledLibrary, ...]:
    """Load both libraries at the first call, which is the import of ``nwor_ops``, and return them.

    Ops on a device without kernels raise an error that explains the reason.
    """
    check_torch()
    check_fakes()
    libraries = (_load("cpu", "CPU"), _load("cuda", "CUDA"))
    missing = {library.dispatch_key: library.problem for library in libraries if library.problem}
    for key, device in _DEVICES.items():
        if key in ("CPU", "CUDA") and key not in missing:
            continue
        sentence = missing.get(key) or (
            f"there is no kernel for {device}; nwor_ops has kernels for cpu and cuda, move the tensors there"
        )
        for op in registry.OPS:
            registry.implement(op, _refusal(op, sentence), key)
    for key in _LAZY_VIEWS:
        for op in registry.OPS:
            registry.implement(op, _without_lazy_views(op, key), key)
    return libraries
