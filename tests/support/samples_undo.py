"""A few calls of every op of family undo."""

from __future__ import annotations

from typing import Any

import torch
from samples_accept import outcome_buffers
from tensors import (
    LATENT,
    NUM_LOG_ROWS,
    SMALL,
    WIDE_VALUES,
    WINDOW,
    flags,
    int32,
    int64,
    log_for,
    numbers,
    row_windows,
    surrounded_layers,
)
from torch import Tensor

from nwor_ops.testing.layouts import Shape, make_amx_pages, make_pages

SLOTS = (5, -1, 0, 11, 7, -1)  # inside SMALL; two tokens are skipped
LOG_ROWS = (-1, 1, 2, 0, -1, -1)  # the draft with row 1 has no slot


def write(
    layout: str = "packed",
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    cache_dtype: torch.dtype | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    slots: tuple[int, ...] = SLOTS,
    extra_tokens: int = 2,
    offset: int = 0,
) -> tuple[Any, ...]:
    """Arguments of write_kv. `key` and `value` are longer than `slot_mapping`, as vLLM pads them."""
    cache_dtype = cache_dtype or (dtype if kv_cache_dtype == "auto" else torch.uint8)
    pages = make_pages(layout, shape, cache_dtype, offset)
    tokens = len(slots) + extra_tokens
    k_scale, v_scale = scales or (numbers(1).abs(), numbers(1, seed=1).abs())
    return (
        numbers(tokens, shape.heads, shape.key_width, dtype=dtype, seed=2),
        numbers(tokens, shape.heads, shape.value_width, dtype=dtype, seed=3),
        pages.key_caches[0], pages.value_caches[0], int64(*slots), k_scale, v_scale, kv_cache_dtype,
    )  # fmt: skip


def write_logged(log_rows: tuple[int, ...] = LOG_ROWS, **options: Any) -> tuple[Any, ...]:
    arguments = write(**options)
    return (*arguments, int32(*log_rows), log_for(arguments[2]), log_for(arguments[3], seed=8))


def undo_samples(op: str) -> list[tuple[Any, ...]]:
    per_token = numbers(8, 1).abs(), numbers(8, 1, seed=1).abs()
    per_head = numbers(4).abs(), numbers(4, seed=1).abs()
    write_options = [
        {},
        {"layout": "one_backing", "dtype": torch.bfloat16},
        {"layout": "hnd", "shape": WIDE_VALUES, "dtype": torch.float16},
        {"layout": "vec", "kv_cache_dtype": "fp8", "scales": per_head},
        {
            "layout": "nhd",
            "kv_cache_dtype": "fp8_e5m2",
            "cache_dtype": torch.float8_e5m2,
            "scales": per_token,
        },
        {"slots": (), "extra_tokens": 0},
    ]
    pages = make_pages("one_backing", SMALL, torch.bfloat16)
    latent = make_pages("nhd", LATENT, torch.uint8)
    wide = make_pages("nhd", LATENT, torch.int64)
    amx = make_amx_pages(Shape(2, 16, 2, 16, 16), torch.bfloat16)
    amx_slots, amx_rows = int64(3, 17, 31), int32(0, 2, 1)

    def layer_log(caches: list[Tensor], rows: int = NUM_LOG_ROWS) -> Tensor:
        return surrounded_layers([log_for(cache, rows, seed=20 + i) for i, cache in enumerate(caches)])

    if op == "write_kv":
        return [write(**options) for options in write_options]
    if op == "write_kv_logged":
        return [
            write_logged(**options, log_rows=LOG_ROWS if "slots" not in options else ()) for options in write_options
        ] + [(*write_logged(), int64(WINDOW), row_windows(NUM_LOG_ROWS))]
    if op == "log_slots":
        return [
            (cache, int64(*slots), int32(*LOG_ROWS), log_for(cache))
            for cache, slots in [
                (pages.key_caches[1], SLOTS),
                (latent.key_caches[0], (1, -1, 0, 7, 5, 2)),
                (wide.value_caches[0], (1, -1, 0, 7, 5, 2)),
            ]
        ] + [
            (amx.key_caches[0], amx_slots, amx_rows, log_for(amx.key_caches[0]), amx.key_offsets),
            (
                pages.key_caches[0],
                int64(*SLOTS),
                int32(*LOG_ROWS),
                log_for(pages.key_caches[0]),
                None,
                int64(WINDOW),
                row_windows(NUM_LOG_ROWS),
            ),
        ]
    if op == "restore_slots":
        logged_by_one_layer = row_windows(2, NUM_LOG_ROWS)
        logged_by_one_layer[1] = WINDOW
        return [
            (pages.key_caches, layer_log(pages.key_caches), int64(5, -1, 0, 11), flags(1, 1, 0, 1)),
            (pages.value_caches[:1], layer_log(pages.value_caches[:1]), int64(2, 4, 0, 1), flags(0, 0, 0, 0)),
            (latent.key_caches, layer_log(latent.key_caches), int64(5, 6, 0, 1), flags(1, 1, 1, 1)),
            (
                amx.value_caches,
                layer_log(amx.value_caches),
                int64(5, 31, 0, 1),
                flags(0, 1, 1, 1),
                amx.value_offsets,
            ),
            (pages.key_caches, layer_log(pages.key_caches, 0), int64(), flags()),
            (pages.key_caches, layer_log(pages.key_caches), int64(5, 3, 0, 11), flags(1, 0, 1, 1), None, None, None, 3),
            (
                pages.key_caches,
                layer_log(pages.key_caches),
                int64(5, -1, 0, 11),
                flags(1, 1, 0, 1),
                None,
                int64(WINDOW),
                logged_by_one_layer,
            ),
        ]
    if op == "restore_slots_from_rejected":
        planes, log, slots = pages.key_caches, layer_log(pages.key_caches), int64(5, -1, 0, 11)
        counts = int32(1, 0, 2), int32(0, 1, 1, 4)
        amx_log = layer_log(amx.value_caches)
        return [
            (planes, log, slots, *counts, *outcome_buffers()),
            (amx.value_caches, amx_log, int64(5, 31, 0, 1), *counts, *outcome_buffers(requests=5), amx.value_offsets),
            (planes, layer_log(planes, 0), int64(), int32(), int32(0), *outcome_buffers(0, 0)),
            (planes, log, slots, int32(-3, 9, 9), int32(0, 1, 1, 4), *outcome_buffers(), None, int64(WINDOW),
             row_windows(2, NUM_LOG_ROWS), 3),
            (planes, log, slots, int32(2, 3), int32(0, 0, 0), *outcome_buffers()),  # an unplanned window
        ]  # fmt: skip
    raise KeyError(op)
