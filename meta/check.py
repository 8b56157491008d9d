"""The checks that need no data, in the words of ``csrc/check.h``."""

from __future__ import annotations

import torch
from torch import Tensor


def described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def has_dims(op: str, name: str, tensor: Tensor, dims: int, shape: str) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"{op}: {name} must be {shape}, got {described(tensor)}")


def has_dtype(op: str, name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype) for dtype in expected)
        raise TypeError(f"{op}: {name} must have dtype {names}, got {described(tensor)}")


def same_device(op: str, like: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != like.device:
            raise TypeError(
                f"{op}: {name} must be on device {like.device} like the other arguments, got {tensor.device}"
            )


def is_vector(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: str) -> None:
    has_dtype(op, name, tensor, dtype)
    has_dims(op, name, tensor, 1, shape)


def no_plane_table(op: str, plane_table: Tensor | None) -> None:
    if plane_table is not None:
        raise RuntimeError(
            f"{op}: plane_table hides from a compiler which planes are mutated; pass all of them in caches and no table"
        )
