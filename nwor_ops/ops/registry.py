"""Declare ops, register their Python kernels, and call them. Only this module uses :mod:`torch.library`."""

from __future__ import annotations

import functools
import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nwor_ops import validation
from nwor_ops.arguments import bool_error, describe_type_error
from nwor_ops.torch_fixes import before_lowering

NAMESPACE = "nwor"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Op:
    """A declared op.

    Attributes:
        name: name of the op and of its function.
        family: name of the file that declares it.
        function: the function as written: its signature, its docstring, and a body that returns the result of a trace.
        overload: the op's overload. A call through the packet would look it up each time.
        names: names of the arguments.
    """

    name: str
    family: str
    function: Callable[..., Any]
    overload: torch._ops.OpOverload
    names: tuple[str, ...]

    def arguments(self, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name, in the order of the schema, with defaults.

        Raises:
            TypeError: an argument is missing or unknown.
        """
        try:
            bound = inspect.signature(self.function).bind(*positional, **named)
        except TypeError as wrong_call:
            raise TypeError(f"{self.name}: {wrong_call}") from None
        bound.apply_defaults()
        return bound.arguments


OPS: dict[str, Op] = {}  # in the order of declaration


class Refusal(RuntimeError):
    """No kernel exists for a device, or a trace got an argument that only eager calls may have."""


def op(*, mutates: Sequence[str], results: Sequence[str] = ()) -> Callable[[_Function], _Function]:
    """Declare the op of a function. The schema is inferred from the signature, and calling the function calls the op.

    The body of the function runs only in traces, after the checks of ``meta/``. It returns what the op returns.

    Args:
        mutates: names of the arguments that the op writes to.
        results: names of the results.

    A call raises:
        TypeError: an argument has a type that the schema does not accept, or an invalid dtype or device.
        ValueError: an argument is invalid in another way.
        RuntimeError: a tensor requires a gradient or has a tangent, or there is no kernel for its device.
    """

    def declare(function: _Function) -> _Function:
        name = function.__name__
        _library.define(name + _schema(function, mutates, results), tags=(torch.Tag.pt2_compliant_tag,))
        overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        names = tuple(inspect.signature(function).parameters)
        declared = OPS[name] = Op(name, function.__module__.rpartition(".")[2], function, overload, names)
        booleans = tuple(
            (place, argument.name, f"{name}: {argument.name}")
            for place, argument in enumerate(overload._schema.arguments)
            if isinstance(argument.type, torch._C.BoolType)
        )

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            for place, option, label in booleans:
                value = arguments[place] if place < len(arguments) else named.get(option, False)
                if (error := bool_error(label, value)) is not None:  # torch 2.11 cannot trace `if error`
                    raise error
            # Serving disables gradients, which skips this check of every plane.
            if torch.is_grad_enabled() or forward_ad._current_level >= 0:
                refuse_gradients(declared, arguments, named)
            try:
                return overload(*arguments, **named)
            except (ValueError, TypeError, AttributeError, RuntimeError) as error:
                raise translated(declared, arguments, named, error) from None

        return cast("_Function", call)

    return declare


def _schema(function: Callable[..., Any], mutates: Sequence[str], results: Sequence[str]) -> str:
    """Return the schema that torch infers, in the form that compiled graphs have held since version 0.1.

    A letter marks each mutated argument. Integers are never symbols, because the stable ABI of the kernels has none.
    Results have names.
    """
    letters = iter(string.ascii_lowercase)
    arguments, _, returned = torch.library.infer_schema(function, mutates_args=mutates).rpartition(" -> ")
    if returned.count("Tensor") != len(results):
        raise ValueError(f"{function.__name__} returns {returned}, its results are named {tuple(results)}")
    arguments = re.sub(r"\(a\d+!\)", lambda _: f"({next(letters)}!)", arguments).replace("SymInt", "int")
    return f"{arguments} -> ({', '.join(f'Tensor {result}' for result in results)})"


def declare_private(name: str, schema: str, refusal: str) -> torch._ops.OpOverload:
    """Declare an op that is not public. In a trace it raises ``refusal``."""

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise Refusal(f"{name}: {refusal}")

    _library.define(name + schema)
    implement_fake(name, refuse)
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def implement(op: str, kernel: Callable[..., Any], dispatch_key: str) -> None:
    """Register a Python kernel of one op for one dispatch key."""
    _library.impl(op, kernel, dispatch_key)


def implement_fake(op: str, kernel: Callable[..., Any]) -> None:
    """Register the fake implementation of one op, which computes shapes (see ``meta/``)."""
    torch.library.register_fake(f"{NAMESPACE}::{op}", before_lowering(kernel), lib=_library)


# Every dtype or device error of the compiled kernels contains one of these two phrases (csrc/common/argument.h).
_TYPE_ERROR = re.compile(r" must have dtype | must be on device ")


def refuse_gradients(op: Op, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    for name, argument in (*zip(op.names, arguments, strict=False), *named.items()):
        elements = argument if isinstance(argument, (list, tuple)) else (argument,)
        for index, element in enumerate(elements):
            if isinstance(element, Tensor) and (error := validation.gradient_error(element)) is not None:
                place = name if element is argument else f"{name}[{index}]"
                raise RuntimeError(f"{op.name}: {place} {error}")


def translated(op: Op, arguments: Sequence[Any], named: Mapping[str, Any], error: Exception) -> Exception:
    """Return the exception that the caller should see.

    A kernel throws std::invalid_argument. Python sees it as ValueError up to torch 2.14, and as RuntimeError from 2.15
    on. The message of such an error begins with the name of the op. Messages of the refusals in ``library.py`` do so
    too, but they stay RuntimeErrors.
    """
    if wrong_type := describe_type_error(op.overload, op.arguments(arguments, named).values()):
        return wrong_type
    return with_own_type(error, op.name)


def with_own_type(error: Exception, *ops: str) -> Exception:
    """Return the error of a kernel of one of these ops as TypeError or ValueError; other errors as they are."""
    message = str(error)
    if isinstance(error, Refusal) or not message.startswith(tuple(f"{op}: " for op in ops)):
        return error
    return TypeError(message) if _TYPE_ERROR.search(message) else ValueError(message)
