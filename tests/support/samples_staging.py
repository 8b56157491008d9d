"""A few calls of every op of family staging."""

from __future__ import annotations

from typing import Any

import samples_undo
import torch
from tensors import (
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
)

from nwor_ops import ops
from nwor_ops.testing.layouts import Pages, Shape, make_amx_pages, make_pages, random_bytes, surrounded

STAGE_ROWS = (-1, 1, 2, 0, -1, -9)


# ---------------------------------------------------------------- the staging buffer


def stage(
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


def accept_staged(
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
        # Before the call: the opposite of the default result, and counters that are not 0.
        flags(*(1 - bit for bit in (1, 0, 1, 0, 0))) if len(slots) == 5 else flags(*[1] * len(slots)),
        int64(*range(10, 10 * len(ops.STAGE_COUNTERS) + 10, 10)),
    )  # fmt: skip
    return arguments if requests is None else (*arguments, int32(*requests), int32(*positions))


def commit(accepted: tuple[int, ...] = (1, 0, 1, 1, 0, 1), **options: Any) -> tuple[Any, ...]:
    """`write` with six rows, some of them accepted; `options` as in `write`."""
    key, value, key_cache, value_cache, slots, *rest = samples_undo.write(**options)
    return (key, value, slots, flags(*accepted[: len(slots)]), key_cache, value_cache, *rest)


def commit_lengths(arguments: tuple[Any, ...], lengths: tuple[int, ...] = (2, 0, 1)) -> tuple[Any, ...]:
    """Return a call of `commit_staged` with a number of accepted rows per request. Row 4 belongs to no request."""
    return (*arguments[:3], int32(*lengths), *arguments[4:], int32(0, 0, 1, 2, -1, 0), int32(0, 1, 0, 0, 0, 2))


def move(
    moves: tuple[tuple[int, int], ...] = ((1, 5), (5, 1), (7, 0), (0, 8), (-1, 3), (4, -2), (8, 11), (9, 9)),
    pages: Pages | None = None,
) -> tuple[Any, ...]:
    """Two slots that swap, a chain of moves, one that keeps its slot, and two that are skipped."""
    pages = pages or make_pages("one_backing", SMALL, torch.bfloat16)
    sources, destinations = zip(*moves, strict=True) if moves else ((), ())
    return pages.key_caches, int64(*sources), int64(*destinations), pages.key_offsets


def staging_samples(op: str) -> list[tuple[Any, ...]]:
    per_head = numbers(4).abs(), numbers(4, seed=1).abs()
    amx_pages = make_amx_pages(Shape(2, 16, 2, 16, 16, 2), torch.bfloat16)
    samples: dict[str, Any] = {
        "stage_kv": lambda: [
            stage(),
            stage(WIDE_VALUES, torch.bfloat16, marks=False),
            stage(stage_rows=(), extra_tokens=0),
        ],
        "accept_staged": lambda: [
            accept_staged(),
            accept_staged(staged_by_layer=((0, 1, 2), (0,), (0, 2))),
            accept_staged((2, 0, 1), requests=(0, 0, 1, -1, 2), positions=(0, 1, 0, 0, 0)),
            accept_staged((), (), ((), ())),
        ],
        "commit_staged": lambda: [
            commit(),
            commit_lengths(commit()),
            commit(layout="vec", kv_cache_dtype="fp8", scales=per_head),
            commit(layout="nhd", kv_cache_dtype="fp8_e5m2", cache_dtype=torch.float8_e5m2),
            commit(slots=(), extra_tokens=0),
        ],
        "move_slots": lambda: [
            move(),
            move(((3, 17), (17, 31), (31, 3)), amx_pages),
            move(()),
        ],
    }
    return samples[op]()
