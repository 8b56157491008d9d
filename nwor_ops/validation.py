"""What the classes ask of their arguments: a sentence that names them, before anything changes.

The ops check their own arguments, in C++. This is for constructors and for the methods that call no op with an
argument, or that call one by another name; :func:`explained` costs a step nothing, because it looks after the failure.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1  # rows, tokens and requests are numbered in int32


def shown(value: object) -> str:
    """A value as an error message shows it."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(what: str, value: object, least: int = 1, most: int = INT32_MAX) -> int:
    """``value`` as an int from ``least`` to ``most``. ``what`` names class or method and argument.

    Raises:
        TypeError: it is no integer; a bool and a tensor are none.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{what} must be an integer, got {shown(value)}")
    number = int(value)
    if number < least:
        raise ValueError(f"{what} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{what} must be at most {most}, got {number}")
    return number


def instance(what: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises TypeError where ``value`` is not of a type, ``wanted`` in words."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be {wanted}, got {shown(value)}")


def boolean(what: str, value: object) -> None:
    instance(what, value, bool, "True or False")


def function(what: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{what} must be callable, got {shown(value)}")


def tensor(
    what: str,
    value: object,
    *dtypes: torch.dtype,
    dims: int | None = None,
    least: int = 0,
    device: torch.device | None = None,
) -> None:
    """Raises where ``value`` is not a tensor of one of ``dtypes`` (none = any) on ``device``, or does not have ``dims``
    dimensions and at least so many elements in the first of them."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, got {shown(value)}")
    if dtypes and value.dtype not in dtypes:
        raise TypeError(f"{what} must have dtype {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if device is not None and value.device != device:
        raise TypeError(f"{what} must be on device {device}, got {value.device}")
    if dims is not None and (value.dim() != dims or (dims > 0 and value.shape[0] < least)):
        words = "one dimension" if dims == 1 else f"{dims} dimensions"
        raise ValueError(f"{what} must have {words}, the first of at least {least}, got {list(value.shape)}")


def tensors(method: str, **arguments: object) -> None:
    """Raises TypeError for the first argument of a method that is no tensor."""
    for name, value in arguments.items():
        tensor(f"{method}: {name}", value)


def device(what: str, value: Any) -> torch.device:
    """A device by itself or by its name; ``"cuda"`` is the current one.

    Raises:
        TypeError: neither of both.
        ValueError: torch knows no such device.
        RuntimeError: ``"cuda"`` where there is none.
    """
    instance(what, value, (torch.device, str), "a torch.device or its name")
    try:
        found = torch.device(value)
    except RuntimeError:
        raise ValueError(f"{what} must be a device that torch knows, got {shown(value)}") from None
    if found.type == "cuda" and found.index is None:
        try:
            return torch.device("cuda", torch.cuda.current_device())
        except (AssertionError, RuntimeError) as error:
            raise RuntimeError(f"{what} must be a device that is there, got {shown(value)}: {error}") from None
    return found


def token_offset(method: str, value: Any, num_tokens: int, max_num_tokens: int) -> None:
    """Raises where a micro-batch of ``num_tokens`` does not lie in a batch of ``max_num_tokens``."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt))):
        raise TypeError(f"{method}: token_offset must be an integer, got {shown(value)}")
    most: Any = max(max_num_tokens - num_tokens, 0)
    if value < 0 or value > most:
        raise ValueError(
            f"{method}: token_offset must be 0 to {most} for {num_tokens} of {max_num_tokens} tokens "
            f"(max_num_tokens), got {value}"
        )


def explained(error: Exception, check: Callable[..., None], *arguments: Any, **named: Any) -> Exception:
    """The error of a call that failed, in the words of its caller if ``check`` finds the reason in an argument."""
    try:
        check(*arguments, **named)
    except (TypeError, ValueError) as reason:
        return reason
    return error


class BoundToMemory:
    """What finds tensors by their addresses: a copy would write to memory of the original, or to memory that nothing
    reads. So there is none, by ``copy``, ``deepcopy`` or ``pickle``."""

    _in_place_of_a_copy = "make another one"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: cannot be copied or pickled, it is bound to the memory of its tensors; "
            f"{self._in_place_of_a_copy}"
        )
