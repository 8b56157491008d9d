"""Sample calls of the family staging: rows of some layers are staged, committed in all layers or none, and moved."""

from __future__ import annotations

import torch

from nwor_ops.testing.samples.dice import Call, Calls, Dice
from nwor_ops.testing.samples.undo import (
    EARLIER_WINDOW,
    WINDOW,
    distinct_slots,
    keep,
    make_caches,
    scales,
    sources,
)


def window(dice: Dice) -> Calls[None]:
    rows = dice.requests(8)
    caches, tokens = make_caches(dice, rows + 10, writable=True), rows + dice.size(3)
    layers = len(caches.pages.key_caches)
    stage_rows = [*range(rows), *[-1] * (tokens - rows)]
    dice.data.shuffle(stage_rows)
    slots = dice.int64(distinct_slots(dice, caches.num_slots, rows))
    window_id, row_windows = dice.int64([WINDOW]), torch.full((layers, rows), EARLIER_WINDOW, dtype=torch.int64)
    row_windows, staged = dice.placed(row_windows), []
    for layer in range(layers):
        key, value = sources(dice, caches, tokens)
        buffers = [dice.strided(dice.bytes(rows, *source.shape[1:], dtype=source.dtype)) for source in (key, value)]
        lost = [-1 if dice.chance(0.03) else row for row in stage_rows]  # sometimes a layer lacks a row
        marked = dice.maybe(0.9)  # otherwise the layer's rows count as missing
        marks = (window_id, row_windows[layer]) if marked else (None, None)
        after = yield Call("stage_kv", (key, value, dice.int32(lost), *buffers, *marks))
        if marked:
            keep(after, marks=(6, row_windows[layer]))
        staged.append(after[3:5])
    by_length = dice.maybe()
    accepted = dice.int32(dice.numbers(3, 3)) if by_length else dice.flags([dice.chance() for _ in range(rows)])
    places = (dice.int32(dice.numbers(rows, 2, -1)), dice.int32(dice.numbers(rows, 3)))
    after = yield Call("accept_staged", (
        accepted, slots, window_id, row_windows, caches.num_slots - int(dice.maybe(0.1)), dice.flags([True] * rows),
        dice.int64(range(10, 70, 10)), *(places if by_length else ()),
    ))  # fmt: skip
    chosen = (accepted, places) if by_length and dice.maybe() else (after[5], ())
    for layer, (key, value) in enumerate(staged):
        if caches.kv_cache_dtype != "auto":  # NaNs have one encoding
            key, value = torch.nan_to_num(key), torch.nan_to_num(value)
        yield Call("commit_staged", (
            key, value, slots, chosen[0], caches.pages.key_caches[layer], caches.pages.value_caches[layer],
            *scales(dice, caches, rows), caches.kv_cache_dtype, *chosen[1],
        ))  # fmt: skip
    moved, count = make_caches(dice, 30), dice.size(10)
    for planes, table in (
        (moved.pages.key_caches, moved.pages.key_offsets),
        (moved.pages.value_caches, moved.pages.value_offsets),
    ):
        targets = dice.int64(distinct_slots(dice, moved.num_slots, count))
        yield Call("move_slots", (planes, dice.int64(dice.numbers(count, moved.num_slots - 1, -1)), targets, table))
