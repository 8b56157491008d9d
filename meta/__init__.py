"""Fake implementations: the shapes that each op returns, for ``torch.compile``, FakeTensor and ``device="meta"``.

A fake checks the dtype, the device and the number of dimensions of each tensor by ``arguments.py``. The kernels check
the rest when they are called. The body of the op's declaration in ``nwor_ops/ops/`` returns the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.meta.arguments import SPECS, Spec
from nwor_ops.ops import registry


def check(op: str, specs: Mapping[str, Spec], arguments: Mapping[str, Any]) -> None:
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
            raise ValueError(f"{op}: {name} must be of {' or '.join(map(str, spec.dims))} dimensions, got {described}")


def _elements(value: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]  # type: ignore[list-item]


def one_of(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = map(str, dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def _register(op: registry.Op) -> None:
    def fake(*positional: Any, **named: Any) -> Any:
        arguments = op.arguments(positional, named)
        if arguments.get("plane_table") is not None:
            raise registry.Refusal(
                f"{op.name}: plane_table hides from a compiler which planes are mutated; pass all of them in caches "
                "and no table"
            )
        check(op.name, SPECS[op.name], arguments)
        return op.function(*positional, **named)

    registry.implement_fake(op.name, fake)


for _op in registry.OPS.values():
    _register(_op)
