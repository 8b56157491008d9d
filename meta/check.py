"""The checks that need no data, in the words of ``csrc/check.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops import ops

CACHE_SHAPE = "[num_blocks, block_size, num_kv_heads, width]"


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


def check_planes(op: str, caches: list[Tensor], plane_table: Tensor | None = None) -> None:
    """Planes of one geometry, all of them in ``caches``."""
    if plane_table is not None:
        raise ops.Refusal(
            f"{op}: plane_table hides from a compiler which planes are mutated; pass all of them in caches and no table"
        )
    if not caches:
        raise ValueError(f"{op}: caches must hold at least one plane, got none")
    first = caches[0]
    same_device(op, first, **{f"caches[{index}]": cache for index, cache in enumerate(caches)})
    has_dims(op, "caches[0]", first, 4, CACHE_SHAPE)
    for index, cache in enumerate(caches):
        has_dtype(op, f"caches[{index}]", cache, first.dtype)
        if cache.shape != first.shape:
            raise ValueError(
                f"{op}: caches[{index}] must be of the shape and strides of caches[0], {described(first)}, got "
                f"{described(cache)}"
            )
