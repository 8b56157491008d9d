"""Sample calls of the family undo: every layer is logged and written, then the rejected rows are restored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops.testing.layouts import LAYOUTS, Pages, Shape, make_amx_pages, make_pages, raw, write_row
from nwor_ops.testing.samples.accept import outcome, plan
from nwor_ops.testing.samples.dice import FLOATS, Call, Calls, Dice, make_batch

WINDOW, EARLIER_WINDOW = 2**33 + 5, 5  # their low 32 bits are equal
FORMATS = (
    ("fp8", torch.uint8), ("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.uint8),
    ("fp8_e5m2", torch.float8_e5m2),
)  # fmt: skip
BITS = (torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float32, torch.int64)
WIDTHS = (1, 4, 7, 8, 16, 24, 64, 128)


class Caches(NamedTuple):
    """Pages of some layers, the dtype of their sources, and how these are stored (None = by another writer)."""

    pages: Pages
    shape: Shape
    dtype: torch.dtype
    kv_cache_dtype: str | None

    @property
    def num_slots(self) -> int:
        return self.shape.blocks * self.shape.block_size


def make_caches(dice: Dice, slots: int, most_layers: int = 3, writable: bool = False, blocks: int = 1) -> Caches:
    """Make at least this many slots and blocks, in any layout. ``writable``: only pages that our writer can write."""
    dtype, offset, seed = dice.choice((*FLOATS, torch.float32)), dice.size(3), dice.data.getrandbits(40)
    layers, heads, size = dice.size(most_layers, 1), dice.size(4, 1), dice.choice((1, 3, 4, 8, 16))
    layout, widths, stored = dice.choice(list(LAYOUTS)), (dice.choice(WIDTHS), dice.choice(WIDTHS)), dtype
    if not writable and dice.maybe(0.15):  # pages whose inner order needs a table
        shape = Shape(max(blocks, slots // 16 + 1), 16, heads, 32, 32, layers)
        return Caches(make_amx_pages(shape, dice.choice(BITS[:2]), offset, seed), shape, dtype, None)
    kind = dice.size(5)
    kv_cache_dtype: str | None = "auto"
    if kind == 0 and not writable:
        kv_cache_dtype, stored = None, dice.choice(BITS)
    elif kind <= 2:
        kv_cache_dtype, stored = dice.choice(FORMATS)
    elif kind == 3:  # a latent without values, or rows without bytes
        widths, heads = (widths[0], 0), 0 if dice.maybe(0.2) else 1
    shape = Shape(max(blocks, slots // size + 1), size, heads, *widths, layers)
    return Caches(make_pages(layout, shape, stored, offset, seed), shape, dtype, kv_cache_dtype)


def scales(dice: Dice, caches: Caches, tokens: int) -> tuple[Tensor, Tensor]:
    """Return a scale per tensor, per head or per token."""
    shape = dice.choice([(), (1,), (caches.shape.heads,), (tokens, 1)])
    key, value = (dice.strided(dice.normal(*shape).abs() + 0.1) for _ in range(2))
    return key, value


def sources(dice: Dice, caches: Caches, tokens: int) -> tuple[Tensor, Tensor]:
    """Return keys and values: random bits, or numbers if they are converted."""
    shape = caches.shape
    if caches.kv_cache_dtype == "auto":
        made = [dice.bytes(tokens, shape.heads, width, dtype=caches.dtype) for width in shape[3:5]]
    else:
        made = [dice.normal(tokens, shape.heads, width, dtype=caches.dtype, factor=30.0) for width in shape[3:5]]
    key, value = map(dice.strided, made)
    return key, value


def distinct_slots(dice: Dice, num_slots: int, tokens: int, padding: int = 0) -> list[int]:
    slots = dice.data.sample(range(num_slots), tokens)
    if dice.chance():  # runs of adjacent slots, in either direction
        slots = [*range(num_slots)][:: dice.data.choice((1, -1))][dice.number(num_slots - tokens) :][:tokens]
    return [-1 if dice.chance(0.1) else slot for slot in slots] + [-1] * padding


def keep(after: tuple[Any, ...], **places: tuple[int, Tensor]) -> None:
    """Copy arguments after the call to the tensors that the next call takes, bit by bit."""
    for index, tensor in places.values():
        raw(tensor).copy_(raw(after[index]))


def write_rows(dice: Dice, plane: Tensor, offsets: Tensor | None, slots: Tensor) -> None:
    """Write a row of random bytes for each token, as another writer does."""
    for slot in slots.tolist():
        if slot >= 0:
            write_row(plane, slot, raw(dice.bytes(*plane.shape[2:], dtype=plane.dtype)), offsets)


def window(dice: Dice) -> Calls[None]:
    batch = make_batch(dice)
    tokens, padding, rows = batch.num_tokens, dice.size(3), batch.num_drafts + dice.size(3)
    caches = make_caches(dice, tokens)
    keys, values, *tables = caches.pages
    slots = dice.int64(distinct_slots(dice, caches.num_slots, tokens, padding))
    log_rows, row_slots = yield from plan(dice, batch, [slots], rows)
    marked, longer = dice.maybe(0.7), dice.size(2)
    window_id, row_windows = dice.int64([WINDOW]), torch.full((len(keys), rows), EARLIER_WINDOW, dtype=torch.int64)
    row_windows = dice.placed(row_windows)
    logs = [
        dice.strided(dice.bytes(len(keys), rows, *cache.shape[2:], dtype=cache.dtype)) for cache in (keys[0], values[0])
    ]
    for layer, planes in enumerate(zip(keys, values, strict=True)):
        marks = (window_id, row_windows[layer]) if marked else (None, None)
        if marked and dice.maybe(0.1):  # a forward that did not reach the layer
            continue
        if caches.kv_cache_dtype is not None and dice.maybe(0.7):
            key, value = sources(dice, caches, tokens + padding + longer)
            after = yield Call("write_kv_logged", (
                key, value, *planes, slots, *scales(dice, caches, len(key)), caches.kv_cache_dtype, log_rows,
                logs[0][layer], logs[1][layer], *marks,
            ))  # fmt: skip
            keep(after, key_cache=(2, planes[0]), value_cache=(3, planes[1]), key_log=(9, logs[0][layer]),
                 value_log=(10, logs[1][layer]), **({"marks": (12, row_windows[layer])} if marked else {}))  # fmt: skip
            continue
        for plane, log, table in zip(planes, logs, tables, strict=True):
            after = yield Call("log_slots", (plane, slots, log_rows, log[layer], table, *marks))
            keep(after, log=(3, log[layer]), **({"marks": (6, row_windows[layer])} if marked else {}))
        if caches.kv_cache_dtype is not None:
            key, value = sources(dice, caches, tokens + padding)
            after = yield Call(
                "write_kv", (key, value, *planes, slots, *scales(dice, caches, len(key)), caches.kv_cache_dtype)
            )
            keep(after, key_cache=(2, planes[0]), value_cache=(3, planes[1]))
        else:
            for plane, table in zip(planes, tables, strict=True):
                write_rows(dice, plane, table, slots)
    buffers, flags = outcome(dice, batch, rows), dice.flags([dice.chance() for _ in range(rows)])
    op, rejected = dice.choice((
        ("restore_slots", (flags,)),
        ("restore_slots_from_rejected", (batch.num_rejected, batch.draft_start_loc, *buffers)),
    ))  # fmt: skip
    if dice.maybe(0.3):
        tokens_of = (batch.draft_token_ids, batch.sampled_token_ids, batch.draft_start_loc)
        op, rejected = "restore_slots", (yield Call("reject_rows", (*tokens_of, *buffers)))[3:4]
    marks = (window_id, row_windows) if marked else (None, None)
    for layers, log, table in zip((keys, values), logs, tables, strict=True):
        num_rows = dice.choice((None, batch.num_drafts, rows))
        yield Call(op, (layers, log, row_slots[0], *rejected, table, *marks, num_rows))
