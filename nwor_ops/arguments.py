"""Explain Python type errors of a failed call from the schema of the op.

The dispatcher prints five lines with whole tensors, or a line of a C++ header if None was passed for a tensor. Nothing
in this module runs in a call that succeeds, except :func:`bool_error` for the boolean options of an op.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_NUMBERS_AND_TEXT = {
    torch._C.FloatType: "a float",
    torch._C.IntType: "an int",
    torch._C.StringType: "a str",
}


def describe_type_error(overload: torch._ops.OpOverload, arguments: Iterable[Any]) -> TypeError | ValueError | None:
    """Return an error for the first argument that the schema does not accept; None if it accepts all.

    The error is a ``TypeError``, or a ``ValueError`` for an integer that does not fit 64 bits. Only values that torch
    refuses too are reported, so that other errors of the op propagate. The exception is a boolean option: torch would
    take the truth value of any object.

    Args:
        overload: the op.
        arguments: values in the order of the schema. Trailing ones may be missing.
    """
    op = overload._schema.name.split("::")[-1]
    for declared, value in zip(overload._schema.arguments, arguments, strict=False):
        if error := _error(f"{op}: {declared.name}", declared.type, value):
            return error
    return None


def _error(name: str, expected: torch._C.JitType, value: Any) -> TypeError | ValueError | None:
    if isinstance(expected, torch._C.OptionalType):
        return None if value is None else _error(name, expected.getElementType(), value)
    if isinstance(expected, torch._C.ListType):
        return _error_in_list(name, expected.getElementType(), value)
    if isinstance(expected, torch._C.TensorType):
        if not isinstance(value, Tensor):
            return TypeError(f"{name} must be a tensor, got {_named(value)}")
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            kind = "nested" if value.is_nested else value.dtype if value.is_quantized else value.layout
            return TypeError(f"{name} must be a dense tensor, got {kind}")
        return None
    if isinstance(expected, torch._C.IntType) and _converts(value, "__index__", int):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return ValueError(f"{name} must fit 64 bits, got {value}")
        return None
    if isinstance(expected, torch._C.FloatType) and _converts(value, "__float__", float):
        return None
    if isinstance(expected, torch._C.BoolType):
        return bool_error(name, value)
    if isinstance(expected, torch._C.StringType) and isinstance(value, str):
        return None
    return TypeError(f"{name} must be {_NUMBERS_AND_TEXT[type(expected)]}, got {_named(value)}")


def _converts(value: Any, method: str, number: type[int] | type[float]) -> bool:
    """Return whether torch accepts a value as a number. A tensor of several elements has the method, but is not one."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return True
    try:
        number(value)
    except Exception:
        return False
    return hasattr(value, method)


def _error_in_list(name: str, expected: torch._C.JitType, values: Any) -> TypeError | ValueError | None:
    if not isinstance(values, list | tuple):
        elements = "tensors" if isinstance(expected, torch._C.TensorType) else "ints"
        return TypeError(f"{name} must be a list of {elements}, got {_named(values)}")
    errors = (_error(f"{name}[{index}]", expected, value) for index, value in enumerate(values))
    return next((error for error in errors if error), None)


def bool_error(name: str, value: Any) -> TypeError | None:
    """Return an error for a value that is neither True nor False. The dispatcher would take its truth value."""
    if type(value) is bool or isinstance(value, torch.SymBool):
        return None
    return TypeError(f"{name} must be a bool, got {_named(value)}")


def _named(value: Any) -> str:
    if value is None:
        return "None"
    kind = f"a value of type {type(value).__name__}"
    return f"{value!r:.40}, {kind}" if isinstance(value, str | int | float) else kind
