"""What arguments ask of each other, as far as a trace needs it. The kernels check the rest when they are called."""

from __future__ import annotations

from typing import Any

import torch

from nwor_ops.meta.check import described, has_dtype
from nwor_ops.ops.registry import Refusal

_TOGETHER = (
    ("window_id", "row_windows"),
    ("row_requests", "row_positions"),
    ("hidden_states", "next_hidden_states"),
)
# Heads and width of the first are those of the second.
_ROWS_OF = (
    ("key", "key_cache"), ("value", "value_cache"), ("staged_key", "key_cache"), ("staged_value", "value_cache"),
    ("key_log", "key_cache"), ("value_log", "value_cache"), ("staged_key", "key"), ("staged_value", "value"),
    ("log", "cache"), ("log", "caches"),
)  # fmt: skip
_FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def check_relations(op: str, given: dict[str, Any]) -> None:
    """Raises ValueError or TypeError for the first relation that does not hold between the arguments of an op."""
    if given.get("plane_table") is not None:
        if given["plane_table"].device.type != "cpu":
            raise TypeError(f"{op}: plane_table must be on device cpu, got {given['plane_table'].device}")
        raise Refusal(
            f"{op}: plane_table hides from a compiler which planes are mutated; pass all of them in caches and no table"
        )
    if "caches" in given:
        _planes_are_of_one_geometry(op, given["caches"])
    for one, other in _TOGETHER:
        if one in given and (given[one] is None) != (given[other] is None):
            raise ValueError(f"{op}: {one} and {other} must be given together")
    for rows, like in _ROWS_OF:
        if rows in given and like in given:
            place = given[like][0] if like == "caches" else given[like]
            if given[rows].shape[-2:] != place.shape[-2:]:
                raise ValueError(
                    f"{op}: {rows} must be [..., {place.shape[-2]}, {place.shape[-1]}] (num_kv_heads and width of "
                    f"{like}), got {described(given[rows])}"
                )
    if "kv_cache_dtype" in given:
        _cache_has_the_format(op, given)
    if "row_accepted" in given:
        lengths = given["row_requests"] is not None
        has_dtype(op, "row_accepted", given["row_accepted"], torch.int32 if lengths else torch.bool)
    pointers = ("draft_start_loc", "cu_num_draft_tokens") if given.get("leading_zero") else ("draft_start_loc",)
    for name in pointers:
        length = given[name].shape[0] if name in given else None
        if isinstance(length, int) and length == 0:  # not a symbol of a trace
            raise ValueError(
                f"{op}: {name} must be [num_requests + 1] with at least 1 elements, got {described(given[name])}"
            )


def _planes_are_of_one_geometry(op: str, caches: list[torch.Tensor]) -> None:
    if not caches:
        raise ValueError(f"{op}: caches must hold at least one plane, got none")
    for index, cache in enumerate(caches):
        has_dtype(op, f"caches[{index}]", cache, caches[0].dtype)
        if cache.shape != caches[0].shape:
            raise ValueError(
                f"{op}: caches[{index}] must be of the shape and strides of caches[0], {described(caches[0])}, got "
                f"{described(cache)}"
            )


def _cache_has_the_format(op: str, given: dict[str, Any]) -> None:
    key, dtype = given["key"] if "key" in given else given["staged_key"], given["kv_cache_dtype"]
    if dtype == "auto":
        has_dtype(op, "key_cache", given["key_cache"], key.dtype)
        return
    if dtype not in _FORMATS:
        raise ValueError(f"{op}: kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got {dtype}")
    for scale in ("k_scale", "v_scale"):
        has_dtype(op, scale, given[scale], torch.float32)
    has_dtype(op, "key_cache", given["key_cache"], torch.uint8, _FORMATS[dtype])
