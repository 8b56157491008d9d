"""A few calls of every op of the families staging and shadow."""

from __future__ import annotations

from typing import Any

import torch
from layouts import Pages, Shape, make_amx_pages, make_pages, random_bytes, surrounded
from samples import (
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
    write_arguments,
)
from staged_windows import StagedWindow, make_window

from nwor_ops import ops

STAGE_ROWS = (-1, 1, 2, 0, -1, -9)


# ---------------------------------------------------------------- the staging buffer


def stage_arguments(
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    stage_rows: tuple[int, ...] = STAGE_ROWS,
    rows: int = NUM_LOG_ROWS,
    marks: bool = True,
    extra_tokens: int = 2,
) -> tuple[Any, ...]:
    tokens = len(stage_rows) + extra_tokens
    sources, staged = [], []
    for seed, width in enumerate((shape.key_width, shape.value_width)):
        sources.append(
            surrounded(random_bytes(tokens * shape.heads * width, dtype, seed).view(tokens, shape.heads, width))
        )
        like = torch.empty(0, 0, shape.heads, width, dtype=dtype)
        staged.append(log_for(like, rows, seed + 30))
    arguments = (*sources, int32(*stage_rows), *staged)
    return (*arguments, int64(WINDOW), row_windows(rows)) if marks else arguments


def accept_staged_arguments(
    accepted: tuple[int, ...] = (1, 0, 1, 1, 0),
    slots: tuple[int, ...] = (5, 7, 0, -1, 3),
    staged_by_layer: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0, 2), (0, 2, 3)),
    num_slots: int = 12,
    requests: tuple[int, ...] | None = None,
    positions: tuple[int, ...] | None = None,
) -> tuple[Any, ...]:
    """Five rows and three layers. Rows 0 and 2 are wanted and complete."""
    windows = row_windows(len(staged_by_layer), len(slots))
    for layer, rows in enumerate(staged_by_layer):
        for row in rows:
            windows[layer, row] = WINDOW
    arguments = (
        flags(*accepted) if requests is None else int32(*accepted), int64(*slots), int64(WINDOW), windows, num_slots,
        flags(*(1 - bit for bit in (1, 0, 1, 0, 0))) if len(slots) == 5 else flags(*[1] * len(slots)),
        int64(*range(10, 10 * len(ops.STAGE_COUNTERS) + 10, 10)),
    )  # fmt: skip
    return arguments if requests is None else (*arguments, int32(*requests), int32(*positions))


def commit_arguments(accepted: tuple[int, ...] = (1, 0, 1, 1, 0, 1), **options: Any) -> tuple[Any, ...]:
    """`write_arguments` with six rows, some of them accepted; `options` as in `write_arguments`."""
    key, value, key_cache, value_cache, slots, *rest = write_arguments(**options)
    return (key, value, slots, flags(*accepted[: len(slots)]), key_cache, value_cache, *rest)


def commit_lengths(arguments: tuple[Any, ...], lengths: tuple[int, ...] = (2, 0, 1)) -> tuple[Any, ...]:
    """The same rows, accepted by a number of rows per request. Row 4 belongs to no request."""
    return (*arguments[:3], int32(*lengths), *arguments[4:], int32(0, 0, 1, 2, -1, 0), int32(0, 1, 0, 0, 0, 2))


def move_arguments(
    moves: tuple[tuple[int, int], ...] = ((1, 5), (5, 1), (7, 0), (0, 8), (-1, 3), (4, -2), (8, 11), (9, 9)),
    pages: Pages | None = None,
) -> tuple[Any, ...]:
    """Two slots that swap, a chain of moves, one that keeps its slot, and two that are skipped."""
    pages = pages or make_pages("one_backing", SMALL, torch.bfloat16)
    sources, destinations = zip(*moves, strict=True) if moves else ((), ())
    return pages.key_caches, int64(*sources), int64(*destinations), pages.key_offsets


# ---------------------------------------------------------------- windows


def opened(window: StagedWindow) -> StagedWindow:
    ops.open_window(*window.open_arguments())
    return window


def held_window(**options: Any) -> StagedWindow:
    """A window with shadow pages that hold rows already."""
    window = make_window(held=True, **options)
    held, row_slots = window.tensors["held_slots"], window.tensors["row_slots"]
    held[:, 2, :] = row_slots[0, 0] - 3  # one of two committed rows of the tail page of the first request
    held[:, 0, :] = 5  # of a request without drafts: cleared
    held[:, 1, :] = 3  # of another page
    return window


def stage_samples(op: str) -> list[tuple[Any, ...]]:
    per_head = numbers(4).abs(), numbers(4, seed=1).abs()
    amx_pages = make_amx_pages(Shape(2, 16, 2, 16, 16, 2), torch.bfloat16)
    samples: dict[str, Any] = {
        "stage_kv": lambda: [
            stage_arguments(),
            stage_arguments(WIDE_VALUES, torch.bfloat16, marks=False),
            stage_arguments(stage_rows=(), extra_tokens=0),
        ],
        "accept_staged": lambda: [
            accept_staged_arguments(),
            accept_staged_arguments(staged_by_layer=((0, 1, 2), (0,), (0, 2))),
            accept_staged_arguments((2, 0, 1), requests=(0, 0, 1, -1, 2), positions=(0, 1, 0, 0, 0)),
            accept_staged_arguments((), (), ((), ())),
        ],
        "commit_staged": lambda: [
            commit_arguments(),
            commit_lengths(commit_arguments()),
            commit_arguments(layout="vec", kv_cache_dtype="fp8", scales=per_head),
            commit_arguments(layout="nhd", kv_cache_dtype="fp8_e5m2", cache_dtype=torch.float8_e5m2),
            commit_arguments(slots=(), extra_tokens=0),
        ],
        "move_slots": lambda: [
            move_arguments(),
            move_arguments(((3, 17), (17, 31), (31, 3)), amx_pages),
            move_arguments(()),
        ],
        "open_window": lambda: [
            held_window().open_arguments(),
            make_window(groups=2, idx_dtype=torch.int64).open_arguments(),
            make_window(layout="vec", dtype=torch.float32).open_arguments(redirects=False),
            make_window(shape=Shape(60, 16, 2, 16, 16), amx=True).open_arguments(),
            make_window(()).open_arguments(),
        ],
        "close_window": lambda: [
            opened(held_window()).close_arguments(),
            opened(make_window(groups=2)).close_arguments(),
            opened(make_window(layout="vec", dtype=torch.float32)).close_arguments(redirects=False),
            opened(make_window(shape=Shape(60, 16, 2, 16, 16), amx=True)).close_arguments(),
            make_window(()).close_arguments(),
        ],
        "close_window_from_rejected": lambda: [
            opened(held_window()).counted_arguments(),
            opened(make_window(groups=2)).counted_arguments(),
            opened(make_window(layout="vec", dtype=torch.float32)).counted_arguments(redirects=False),
            opened(make_window(shape=Shape(60, 16, 2, 16, 16), amx=True)).counted_arguments(),
            make_window(()).counted_arguments(),
        ],
    }
    return samples[op]()
