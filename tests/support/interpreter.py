"""Triton's interpreter, in a process that :func:`processes.interpreted` started."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def use_interpreter() -> None:
    """Enable Triton's interpreter, which vLLM's CPU build leaves out. Call this before other modules of vLLM load."""
    import triton
    import triton.language as tl
    import vllm.triton_utils as utils

    utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True
    remember_dtypes()
    patch_once_per_launch()
    leave_out_overflow_checks()


@functools.cache
def remember_dtypes() -> None:
    """Let the interpreter make its table of dtypes once, and not for each operation."""
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = dtype_of


@functools.cache
def leave_out_overflow_checks() -> None:
    """Switch off the interpreter's checks for integer overflow.

    Without ``debug`` it ignores their result. They took some 15 % of the time of these scripts.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@functools.cache
def patch_once_per_launch() -> None:
    """Let the interpreter patch ``triton.language`` once per launch.

    It replaces the builtins of ``triton.language`` when a launch begins, and again whenever a kernel calls a device
    function. It never undoes the patches of device functions, so only the first one of a module has an effect. The
    others took a quarter of the time of these scripts.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    of_launch: list[Any] = []  # modules
    of_functions: list[Any] = []

    class Scope:
        def __init__(self, fn: Any) -> None:
            of_launch.extend(_languages(fn))
            self._scope = patch(fn)

        def restore(self) -> None:
            of_launch.clear()
            self._scope.restore()

    def patch_once(fn: Any) -> Any:
        if not of_launch:
            return Scope(fn)
        if new := [language for language in _languages(fn) if language not in of_launch + of_functions]:
            of_functions.extend(new)
            patch(fn)
        return None

    interpreter._patch_lang = patch_once


def _languages(fn: Any) -> list[Any]:
    import triton.language as tl

    return [value for value in fn.__globals__.values() if value is tl or value is tl.core]
