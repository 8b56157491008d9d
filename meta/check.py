"""The checks that need no data, in the words of ``csrc/check.h``."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.ops.registry import Refusal

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


def not_negative(op: str, **values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{op}: {name} must not be negative, got {value}")
        _below_2_31(op, name, value)


def positive(op: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if value <= 0:
            raise ValueError(f"{op}: {name} must be positive, got {value}")
        _below_2_31(op, name, value)


def _below_2_31(op: str, name: str, value: int) -> None:
    if value >= 2**31:
        raise ValueError(f"{op}: {name} must be below 2^31, got {value}")


def is_vector(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: str) -> None:
    has_dtype(op, name, tensor, dtype)
    has_dims(op, name, tensor, 1, shape)


def check_page_offsets(op: str, like: Tensor, page_offsets: Tensor | None) -> None:
    if page_offsets is None:
        return
    same_device(op, like, page_offsets=page_offsets)
    has_dtype(op, "page_offsets", page_offsets, torch.int32)
    has_dims(op, "page_offsets", page_offsets, 2, "[block_size, width]")


def check_windows(op: str, like: Tensor, window_id: Tensor | None, row_windows: Tensor | None, dims: int) -> None:
    """The number of the open window, and those of a row's windows, in one layer (1 dimension) or in all."""
    if (window_id is None) != (row_windows is None):
        raise ValueError(f"{op}: window_id and row_windows must be given together")
    if window_id is not None and row_windows is not None:
        same_device(op, like, window_id=window_id, row_windows=row_windows)
        is_vector(op, "window_id", window_id, torch.int64, "[1]")
        has_dtype(op, "row_windows", row_windows, torch.int64)
        has_dims(op, "row_windows", row_windows, dims, "[num_rows]" if dims == 1 else "[num_layers, num_rows]")


def check_planes(op: str, caches: list[Tensor], plane_table: Tensor | None = None) -> None:
    """Planes of one geometry, all of them in ``caches``."""
    if plane_table is not None:
        if plane_table.device.type != "cpu":
            raise TypeError(f"{op}: plane_table must be on device cpu, got {plane_table.device}")
        raise Refusal(
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
