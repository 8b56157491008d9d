"""Argument checks of the classes: an error names the argument, before anything changes.

The ops check their own arguments in C++. These checks are for constructors, and for methods that pass an argument to no
op.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

INT32_MAX = 2**31 - 1  # rows, tokens and requests are numbered in int32

# Dispatch keys of views that torch resolves when they are read. A kernel would read the unresolved memory, and torch's
# default for these keys copies mutated arguments, including whole caches.
LAZY_VIEWS = {
    "Negative": ("a negative view", Tensor.is_neg),
    "Conjugate": ("a conjugate view", Tensor.is_conj),
    "ZeroTensor": ("a zero without memory", Tensor._is_zerotensor),
}


def reads_values(device: torch.device) -> bool:
    """Return whether checks may read the values of tensors. On the CPU nobody waits for them."""
    return device.type == "cpu"


def shown(value: object) -> str:
    """Return a value as error messages show it."""
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{value.dtype} {shape} on {value.device}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(what: str, value: object, least: int = 1, most: int = INT32_MAX) -> int:
    """Return ``value`` as an int from ``least`` to ``most``. ``what`` names the class or method and the argument.

    Raises:
        TypeError: the value is not an integer. A bool or a tensor is not an integer.
        ValueError: the value is out of range.
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
    """Raise TypeError if ``value`` is not an instance of ``kind``. ``wanted`` describes that type."""
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
    """Check a tensor argument.

    Raises:
        TypeError: ``value`` is not a dense tensor, has none of ``dtypes`` (none given = any), or is not on ``device``.
        ValueError: ``value`` does not have ``dims`` dimensions, or fewer than ``least`` elements in the first one.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} must be a tensor, got {shown(value)}")
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else value.dtype if value.is_quantized else value.layout
        raise TypeError(f"{what} must be a dense tensor, got {kind}")
    if dtypes and value.dtype not in dtypes:
        raise TypeError(f"{what} must have dtype {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if device is not None and value.device != device:
        raise TypeError(f"{what} must be on device {device}, got {value.device}")
    if dims is not None and (value.dim() != dims or (dims > 0 and value.shape[0] < least)):
        words = "one dimension" if dims == 1 else f"{dims} dimensions"
        raise ValueError(f"{what} must have {words}, the first of at least {least}, got {list(value.shape)}")


def gradient_error(tensor: Tensor) -> str | None:
    """Return why a tensor with derivatives is refused, or None if it has none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return (
            "must not require a gradient, the op has no backward; call it under torch.no_grad() or "
            "torch.inference_mode(), or pass .detach()"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "must not have a tangent, the op has no forward derivative; pass .detach()"
    return None


def lazy_view_error(what: str, view: str) -> ValueError:
    """Return the error for one of `LAZY_VIEWS`."""
    return ValueError(f"{what} must have its own memory, got {view}; pass a copy")


def own_memory(what: str, value: Tensor) -> None:
    """Raise as the ops for a tensor whose address is kept: ValueError for a lazy view, RuntimeError for derivatives."""
    for view, is_lazy in LAZY_VIEWS.values():
        if is_lazy(value):
            raise lazy_view_error(what, view)
    if (error := gradient_error(value)) is not None:
        raise RuntimeError(f"{what} {error}")


def device(what: str, value: Any) -> torch.device:
    """Return a device, given as a device or by name; ``"cuda"`` is the current one.

    Raises:
        TypeError: the value is neither a device nor a string.
        ValueError: torch knows no such device.
        RuntimeError: ``"cuda"`` without a CUDA device.
    """
    instance(what, value, (torch.device, str), "a torch.device or its name")
    try:
        found = torch.device(value)
    except RuntimeError:
        raise ValueError(f"{what} must be a device that torch knows, got {shown(value)}") from None
    if found.type == "cpu":
        return torch.device("cpu")  # of any index, as torch does for tensors
    if found.type == "cuda" and found.index is None:
        try:
            return torch.device("cuda", torch.cuda.current_device())
        except (AssertionError, RuntimeError) as error:
            raise RuntimeError(f"{what} must be an available device, got {shown(value)}: {error}") from None
    return found


def token_offset(method: str, layer: str, value: Any, num_tokens: int, max_num_tokens: int) -> None:
    """Raise if a micro-batch of ``num_tokens`` at this offset is not inside a batch of ``max_num_tokens``."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt))):
        raise TypeError(f"{method} of layer {layer!r}: token_offset must be an integer, got {shown(value)}")
    most: Any = max(max_num_tokens - num_tokens, 0)
    if value < 0 or value > most or num_tokens > max_num_tokens:
        raise ValueError(
            f"{method} of layer {layer!r}: token_offset must be 0 to {most} for {num_tokens} of {max_num_tokens} "
            f"tokens (max_num_tokens), got {value}"
        )


class BoundToMemory:
    """Base of classes that find tensors by their addresses. They refuse ``copy``, ``deepcopy`` and ``pickle``.

    A copy would write to memory of the original, or to memory that nothing reads.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled, it is bound to the memory of its tensors")
