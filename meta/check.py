"""Requirements of single tensors, and their check. The messages are the same as those of the compiled kernels."""

from __future__ import annotations

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


def by_name(table: Mapping[Array, str]) -> dict[str, Array]:
    """Return the table of a family by argument. A name ``OP.ARGUMENT`` overrides the argument for one op."""
    return {name: spec for spec, names in table.items() for name in names.split()}


def specs_of(op: Op, table: Mapping[str, Array]) -> dict[str, Array]:
    """Return the requirements of the tensors of one op, in order."""
    tensors = [a.name for a in op.overload._schema.arguments if "Tensor" in str(a.type)]
    return {name: table[f"{op.name}.{name}" if f"{op.name}.{name}" in table else name] for name in tensors}


def check(op: str, specs: Mapping[str, Array], arguments: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError for the first tensor with a wrong device, dtype or number of dimensions."""
    tensors = [
        (name if tensor is arguments[name] else f"{name}[{index}]", spec, tensor)
        for name, spec in specs.items()
        for index, tensor in enumerate(_elements(arguments[name]))
    ]
    for name, _, tensor in tensors:
        device = tensors[0][2].device
        if tensor.device != device:
            raise TypeError(f"{op}: {name} must be on device {device} like the other arguments, got {tensor.device}")
    for name, spec, tensor in tensors:
        like = _elements(arguments[spec.like])[:1] if spec.like else []
        dtypes = (*spec.dtypes, *(other.dtype for other in like))
        described = f"{tensor.dtype} {list(tensor.shape)}"
        if dtypes and tensor.dtype not in dtypes:
            raise TypeError(f"{op}: {name} must have dtype {one_of(dtypes)}, got {described}")
        if spec.dims and tensor.dim() not in spec.dims:
            raise ValueError(f"{op}: {name} must be {spec.shape}, got {described}")


def _elements(value: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]  # type: ignore[list-item]


def one_of(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = map(str, dtypes)
    return f"{', '.join(others)} or {last}" if others else last
