"""A few calls of every op of family shadow."""

from __future__ import annotations

from typing import Any

import torch
from shadow_windows import ShadowWindow, make_window

from nwor_ops import ops
from nwor_ops.testing.layouts import Shape


def opened(window: ShadowWindow) -> ShadowWindow:
    ops.open_window(*window.open_arguments())
    return window


def held_window(**options: Any) -> ShadowWindow:
    """A window with shadow pages that hold rows already."""
    window = make_window(held=True, **options)
    held, row_slots = window.tensors["held_slots"], window.tensors["row_slots"]
    held[:, 2, :] = row_slots[0, 0] - 3  # one of two committed rows of the tail page of the first request
    held[:, 0, :] = 5  # of a request without drafts: cleared
    held[:, 1, :] = 3  # of another page
    return window


def shadow_samples(op: str) -> list[tuple[Any, ...]]:
    samples: dict[str, Any] = {
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
