"""The ops of family undo in plain Python.

fp8 codes come from a table of the values of the 256 codes, not from torch casts.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nwor_ops.testing.layouts import raw, read_row, write_row
from nwor_ops.testing.oracle.accept import reject_by_counts

# ---------------------------------------------------------------- fp8


@functools.cache
def fp8_values(kv_cache_dtype: str) -> Tensor:
    """The values of the non-negative finite codes 0, 1, 2, ... (OCP 8-bit formats), float64."""
    exponent_bits, mantissa_bits, last_code = {"e4m3": (4, 3, 0x7E), "e5m2": (5, 2, 0x7B)}[kv_cache_dtype[-4:]]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(last_code + 1):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        values.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return torch.tensor(values, dtype=torch.float64)


def to_fp8(numbers: Tensor, kv_cache_dtype: str) -> Tensor:
    """Return uint8 codes of float32 numbers: nearest, ties to the even code, saturated. NaN is 0x7f in both formats.

    The result is that of CUDA's `__nv_cvt_float_to_fp8(x, __NV_SATFINITE, format)`.
    """
    values = fp8_values("fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype)
    midpoints = (values[1:] + values[:-1]) / 2
    magnitude = numbers.double().abs()
    code = torch.searchsorted(midpoints, magnitude.contiguous())  # on a midpoint: the code below it
    on_midpoint = magnitude == midpoints[code.clamp(max=len(midpoints) - 1)]
    code = code + (on_midpoint & (code % 2 == 1))
    code = code.clamp(max=len(values) - 1) + 0x80 * torch.signbit(numbers)
    return torch.where(numbers.isnan(), 0x7F, code).to(torch.uint8)


def _scale_of(scale: Tensor, token: int, num_heads: int) -> Tensor:
    """The scale of each head of one token, float32 [H, 1]."""
    if scale.numel() == 1 and scale.dim() <= 1:
        return scale.reshape(1, 1).expand(num_heads, 1)
    if scale.dim() == 1:
        return scale.reshape(num_heads, 1)
    return scale[token].reshape(1, 1).expand(num_heads, 1)


def _stored(source: Tensor, token: int, scale: Tensor, kv_cache_dtype: str) -> Tensor:
    """The contents of the cache after writing one token of `source`: integers [H, W]."""
    if kv_cache_dtype == "auto":
        return raw(source)[token]
    numbers = source[token].float() / _scale_of(scale, token, source.size(1))
    return to_fp8(numbers, kv_cache_dtype)


# ---------------------------------------------------------------- the ops


def write_kv(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            write_row(key_cache, slot, _stored(key, token, k_scale, kv_cache_dtype), None)
            write_row(value_cache, slot, _stored(value, token, v_scale, kv_cache_dtype), None)


def write_kv_logged(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype,
    log_rows, key_log, value_log, window_id=None, row_windows=None,
) -> None:  # fmt: skip
    log_slots(key_cache, slot_mapping, log_rows, key_log, None, window_id, row_windows)
    log_slots(value_cache, slot_mapping, log_rows, value_log, None, window_id, row_windows)
    write_kv(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype)


def log_slots(cache, slot_mapping, log_rows, log, page_offsets=None, window_id=None, row_windows=None) -> None:
    for slot, row in zip(slot_mapping.tolist(), log_rows.tolist(), strict=False):
        if slot < 0 or row < 0:
            continue
        if row_windows is not None:
            row_windows[row] = window_id[0]
        raw(log)[row] = read_row(cache, slot, page_offsets)


def restore_slots(
    caches, log, row_slots, row_rejected, page_offsets=None, window_id=None, row_windows=None, num_rows=None
) -> None:
    last = log.shape[1] if num_rows is None else num_rows
    for layer, cache in enumerate(caches):
        for row, (slot, rejected) in enumerate(zip(row_slots.tolist(), row_rejected.tolist(), strict=True)):
            if slot < 0 or not rejected or row >= last:
                continue
            if row_windows is not None and row_windows[layer, row] != window_id[0]:
                continue  # this layer did not log the row in this window
            write_row(cache, slot, raw(log)[layer, row], page_offsets)


def restore_slots_from_rejected(
    caches, log, row_slots, num_rejected, draft_start_loc, row_rejected, num_accepted, counters, *rest
) -> None:
    reject_by_counts(num_rejected, draft_start_loc, row_rejected, num_accepted, counters)
    restore_slots(caches, log, row_slots, row_rejected, *rest)
