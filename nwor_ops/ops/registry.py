"""Declare ops, register their kernels in Python, call them: the one place that talks to :mod:`torch.library`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.arguments import describe_type_error
from nwor_ops.torch_fixes import before_lowering

NAMESPACE = "nwor"

SCHEMAS: dict[str, str] = {}  # of all ops

_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# The overload itself: calling through the packet looks it up again each time.
_overloads: dict[str, torch._ops.OpOverload] = {}
_argument_names: dict[str, tuple[str, ...]] = {}


class Refusal(RuntimeError):
    """There is no kernel for a device, or a trace asks for what it must not have: not a matter of one argument."""


def declare(schemas: dict[str, str]) -> None:
    """Define the ops of one family; ``SCHEMAS`` holds all of them."""
    for name, schema in schemas.items():
        _library.define(name + " ".join(schema.split()), tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(torch.ops.nwor, name).default
        _overloads[name] = overload
        _argument_names[name] = tuple(argument.name for argument in overload._schema.arguments)
    SCHEMAS.update(schemas)


def implement(op: str, kernel: Callable[..., Any], dispatch_key: str) -> None:
    """Register a Python kernel of one op for one dispatch key."""
    _library.impl(op, kernel, dispatch_key)


def implement_fake(op: str, kernel: Callable[..., Any]) -> None:
    """Register the fake implementation of one op: what it does to shapes (see ``meta/``)."""
    torch.library.register_fake(f"{NAMESPACE}::{op}", before_lowering(kernel), lib=_library)


# The compiled kernels word a dtype or device complaint in exactly these two ways (csrc/check.h).
_TYPE_COMPLAINT = re.compile(r" must have dtype | must be on device ")


def call(op: str, *arguments: Any) -> Any:
    """Call one op with the arguments of its schema; every wrapper ends here.

    Raises:
        TypeError: an argument is of a type that the schema does not take, or of a wrong dtype or device.
        ValueError: anything else is wrong with an argument.
        RuntimeError: a tensor requires a gradient, or there is no kernel for its device.
    """
    if torch.is_grad_enabled():  # in serving it is not: then no plane of a cache is looked at
        _refuse_gradients(op, arguments)
    try:
        return _overloads[op](*arguments)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _translated(op, arguments, error) from None


def _refuse_gradients(op: str, arguments: Sequence[Any]) -> None:
    for name, argument in zip(_argument_names[op], arguments, strict=True):
        if isinstance(argument, Tensor):
            refuse_gradient(op, name, argument)
        elif isinstance(argument, (list, tuple)):
            for index, element in enumerate(argument):
                if isinstance(element, Tensor):
                    refuse_gradient(op, f"{name}[{index}]", element)


def refuse_gradient(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise RuntimeError(
            f"{op}: {name} must not require a gradient, the op has no backward; "
            "call it under torch.no_grad() or torch.inference_mode(), or pass .detach()"
        )


def _translated(op: str, arguments: Sequence[Any], error: Exception) -> Exception:
    """The error a caller should see.

    A kernel throws std::invalid_argument, which Python sees as ValueError up to torch 2.14 and as RuntimeError from
    2.15 on. Its complaints begin with the name of the op; so do the refusals of ``library.py``, which are
    RuntimeErrors and stay so.
    """
    if wrong_type := describe_type_error(_overloads[op], arguments):
        return wrong_type
    complaint = str(error)
    if isinstance(error, Refusal) or not complaint.startswith(f"{op}: "):
        return error
    return TypeError(complaint) if _TYPE_COMPLAINT.search(complaint) else ValueError(complaint)
