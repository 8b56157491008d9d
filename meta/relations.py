"""Relations between arguments, as far as a trace needs them. The kernels check the rest when they are called."""

from __future__ import annotations

from typing import Any

import torch

from nwor_ops.meta.check import described, has_dtype
from nwor_ops.ops.registry import Refusal

_TOGETHER = (
    ("window_id", "row_windows"),
    ("row_requests", "row_positions"),
    ("hidden_states", "next_hidden_states"),
    ("gate", "norm_weight"),
    ("A_log", "dt_bias"),
)
# The first has the heads and the width of the second.
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
    """Raise ValueError or TypeError for the first relation between arguments of an op that does not hold."""
    if given.get("plane_table") is not None:
        if given["plane_table"].device.type != "cpu":
            raise TypeError(f"{op}: plane_table must be on device cpu, got {given['plane_table'].device}")
        raise Refusal(
            f"{op}: plane_table hides from a compiler which planes are mutated; pass all of them in caches and no table"
        )
    if "caches" in given:
        _planes_are_of_one_geometry(op, given["caches"])
    for one, other in _TOGETHER:
        if one in given and other in given and (given[one] is None) != (given[other] is None):
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
    if "cp_interleave" in given and "block_sizes" in given:
        _blocks_hold_whole_runs(op, given)
    if "record_keys" in given:
        _records_fit(op, given)
    if "gate_activation" in given:
        _gates_fit(op, given)
    pointers = ("draft_start_loc", "cu_num_draft_tokens") if given.get("leading_zero") else ("draft_start_loc",)
    for name in pointers:
        length = given[name].shape[0] if name in given else None
        if isinstance(length, int) and length == 0:  # not a symbol in a trace
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


def _blocks_hold_whole_runs(op: str, given: dict[str, Any]) -> None:
    """Check, without ``cp_sharded``, that no run of tokens of one rank crosses the end of a block."""
    if given["cp_size"] == 1 or given["cp_sharded"] is not None:
        return
    for group, size in enumerate(given["block_sizes"]):
        if size % given["cp_interleave"] != 0:
            raise ValueError(
                f"{op}: block_sizes[{group}] must be a multiple of cp_interleave ({given['cp_interleave']}) with "
                f"cp_size > 1, got {size}"
            )


def _records_fit(op: str, given: dict[str, Any]) -> None:
    """Check, for family recurrent, that heads and widths agree with the state and with the record's keys."""
    layers = given.get("states")
    if layers is None:
        _layer_fits(op, given["state"], given, {name: name for name in given})
        return
    lists = [name for name, value in given.items() if isinstance(value, (list, tuple))]
    for name in lists:
        if len(given[name]) != len(layers) or not layers:
            raise ValueError(
                f"{op}: {name} must hold a tensor for each of the {len(layers)} states and at least one, got "
                f"{len(given[name])}"
            )
    for layer, state in enumerate(layers):
        names = {name: f"{name}[{layer}]" for name in lists}
        _layer_fits(op, state, {name: given[name][layer] for name in lists}, names)


def _gates_fit(op: str, given: dict[str, Any]) -> None:
    """Check the options of the gates of family recurrent."""
    if given["A_log"] is None and given["gate_lower_bound"] is not None:
        raise ValueError(f"{op}: gate_lower_bound must be None without A_log and dt_bias")
    if given["A_log"] is None and given["allow_neg_eigval"]:
        raise ValueError(f"{op}: allow_neg_eigval must be False without A_log and dt_bias")
    if given["gate_activation"] not in ("silu", "sigmoid"):
        raise ValueError(f"{op}: gate_activation must be silu or sigmoid, got {given['gate_activation']}")


def _layer_fits(op: str, state: torch.Tensor, given: dict[str, Any], names: dict[str, str]) -> None:
    _, heads, value_width, key_width = state.shape
    keys = given["record_keys"]
    halves, rows, key_heads = keys.shape[1:4]  # a ring has one half
    channels = (key_width,) if given["record_decays"].dim() == 5 else ()
    key, value = (key_heads, key_width), (heads, value_width)
    inner = {
        "record_keys": (halves, rows, *key),
        "record_norms": (halves, rows, key_heads),
        "record_decays": (halves, rows, heads, *channels),
        "record_updates": (rows, *value),
        "q": key, "k": key, "v": value, "out": value, "gate": value, "a": (heads, *channels), "b": (heads,),
        "dt_bias": (heads, *channels), "A_log": (heads,), "norm_weight": (value_width,),
        "all_states": (*value, key_width),
    }  # fmt: skip
    for name, expected in inner.items():
        tensor = given.get(name)
        if tensor is None:
            continue
        whole = name in ("A_log", "dt_bias", "norm_weight")
        if tuple(tensor.shape if whole else tensor.shape[1:]) != expected:
            shape = ", ".join(map(str, expected if whole else ("...", *expected)))
            raise ValueError(f"{op}: {names[name]} must be [{shape}], got {described(tensor)}")
