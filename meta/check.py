"""Requirements of single arguments, and their check. The messages are the same as those of the compiled kernels."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops.ops.registry import Op


class Array(NamedTuple):
    """Requirements of a tensor, or of each tensor in a list.

    Attributes:
        shape: as shown in messages. The parts in brackets give the allowed numbers of dimensions; no brackets = any
            number.
        dtypes: allowed dtypes; none = any.
        like: name of the argument whose dtype it must have; for a list, that of its first tensor.
    """

    shape: str
    dtypes: tuple[torch.dtype, ...] = ()
    like: str | None = None

    @property
    def dims(self) -> set[int]:
        inside = re.findall(r"\[([^\]]*)\]", self.shape)
        return {text.count(",") + (text != "") for text in inside}


class Number(NamedTuple):
    """Requirements of an integer, or of each integer in a list.

    Attributes:
        least: smallest allowed value; None = any value of 32 bits.
        bounded: whether it must be below 2^31.
    """

    least: int | None
    bounded: bool = True


class Choice(NamedTuple):
    """The allowed values of an integer."""

    values: tuple[int, ...]


class Real(NamedTuple):
    """Requirements of a float option. It must be finite after rounding to float32, as the kernels compute with it.

    Attributes:
        range: the range in messages; empty = any finite number.
        least, most: the range of the rounded number.
    """

    range: str = ""
    least: float = -math.inf
    most: float = math.inf


Spec = Array | Number | Choice | Real

TINY = 2.0**-149  # smallest positive float32
POSITIVE, NOT_NEGATIVE, ID, SIZE = Number(1), Number(0), Number(None), Number(0, bounded=False)
SOURCES = (torch.float32, torch.float16, torch.bfloat16)
CACHE = "[num_blocks, block_size, num_kv_heads, width]"
ANY = Array("")


def ids(shape: str) -> Array:
    return Array(shape, (torch.int32, torch.int64))


def int32(shape: str) -> Array:
    return Array(shape, (torch.int32,))


def int64(shape: str) -> Array:
    return Array(shape, (torch.int64,))


def flags(shape: str) -> Array:
    return Array(shape, (torch.bool,))


def by_name(table: Mapping[Spec, str]) -> dict[str, Spec]:
    """Return the table of a family by argument. A name ``OP.ARGUMENT`` overrides the argument for one op."""
    return {name: spec for spec, names in table.items() for name in names.split()}


def specs_of(op: Op, table: Mapping[str, Spec]) -> dict[str, Spec]:
    """Return the requirements of the arguments of one op, in order."""
    unchecked = ("bool", "str")
    checked = [a.name for a in op.overload._schema.arguments if str(a.type) not in unchecked]
    return {name: table[f"{op.name}.{name}" if f"{op.name}.{name}" in table else name] for name in checked}


def check(op: str, specs: Mapping[str, Spec], given: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for the first invalid argument."""
    values = [
        (name if value is given[name] else f"{name}[{index}]", spec, value)
        for name, spec in specs.items()
        for index, value in enumerate(elements(given[name]))
    ]
    tensors = [(name, spec, value) for name, spec, value in values if isinstance(spec, Array) and name != "plane_table"]
    for name, _, tensor in tensors:
        same_device(op, name, tensor, tensors[0][2])
    for name, spec, tensor in tensors:
        like = elements(given[spec.like])[:1] if spec.like else []
        has_dtype(op, name, tensor, *spec.dtypes, *(other.dtype for other in like))
        if spec.dims and tensor.dim() not in spec.dims:
            raise ValueError(f"{op}: {name} must be {spec.shape}, got {described(tensor)}")
    for name, limits, value in values:
        if isinstance(limits, Number):
            is_number(op, name, value, limits)
        elif isinstance(limits, Choice):
            is_choice(op, name, value, limits)
        elif isinstance(limits, Real):
            is_real(op, name, value, limits)


def check_apart(op: str, mutated: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise ValueError if elements of a mutated tensor share memory. Symbolic sizes count as larger than 1."""
    for name in mutated:
        for index, tensor in enumerate(elements(given[name])):
            if overlaps_itself(tensor):
                label = f"{name}[{index}]" if isinstance(given[name], (list, tuple)) else name
                raise ValueError(
                    f"{op}: {label} must not overlap itself, got {described(tensor)} with strides "
                    f"{list(tensor.stride())}"
                )


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether a stride is not larger than the span of all smaller strides, as ``check_elements_apart``."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if not all(isinstance(number, int) for number in (*sizes, *strides)):  # a comparison of symbols adds a guard
        return any(
            isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size < 2)
            for size, stride in zip(sizes, strides, strict=True)
        )
    span = 0
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride <= span:
            return 0 not in sizes
        span += (size - 1) * stride
    return False


def elements(value: Any) -> list[Any]:
    """Return the elements of a list; a single value as a list; nothing for None."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def one_of(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = map(str, dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def has_dtype(op: str, name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    if expected and tensor.dtype not in expected:
        raise TypeError(f"{op}: {name} must have dtype {one_of(expected)}, got {described(tensor)}")


def same_device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise TypeError(f"{op}: {name} must be on device {like.device} like the other arguments, got {tensor.device}")


def is_real(op: str, name: str, value: float, spec: Real) -> None:
    rounded = ctypes.c_float(value).value
    if not (math.isfinite(rounded) and spec.least <= rounded <= spec.most):
        words = f"{spec.range} and finite" if spec.range else "finite"
        raise ValueError(f"{op}: {name} must be {words} in float32, got {value:g}")


def is_choice(op: str, name: str, value: int, spec: Choice) -> None:
    if value not in spec.values:
        raise ValueError(f"{op}: {name} must be {' or '.join(map(str, spec.values))}, got {value}")


def is_number(op: str, name: str, value: int, spec: Number) -> None:
    if spec.least is None:
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{op}: {name} must fit 32 bits, got {value}")
        return
    if value < spec.least:
        raise ValueError(f"{op}: {name} must {'be positive' if spec.least else 'not be negative'}, got {value}")
    if spec.bounded and value >= 2**31:
        raise ValueError(f"{op}: {name} must be below 2^31, got {value}")
