"""Sample calls of the family shadow: two windows of the same requests. Shadow pages keep the rows of the first."""

from __future__ import annotations

import itertools
from itertools import accumulate

import torch

from nwor_ops.testing.samples.dice import COUNTED, IDS, Call, Calls, Dice, make_requests
from nwor_ops.testing.samples.undo import make_caches, write_rows

MOST_GIVEN = MOST_DRAFTS = 4


def window(dice: Dice) -> Calls[None]:
    groups, count = dice.size(2, 1), dice.requests(3)
    states = count + dice.size(2, 1)
    caches = make_caches(dice, 52 * (count + 1), most_layers=2, blocks=24 * (count + 1))
    planes, offsets, size = caches.pages.key_caches, caches.pages.key_offsets, caches.shape.block_size
    blocks = iter(dice.data.sample(range(caches.shape.blocks), caches.shape.blocks))
    num_shadows = (size + MOST_DRAFTS - 2) // size + 1
    columns = (2 * size + 2 * (MOST_GIVEN + MOST_DRAFTS)) // size + 1
    lengths, dtype = dice.numbers(count, 2 * size), dice.choice(IDS)
    order = dice.data.sample(range(states), count)
    numbered, holds = dice.maybe(0.2), dice.maybe(0.7)
    shadows = [[[next(blocks) for _ in range(num_shadows)] for _ in range(states)] for _ in range(groups)]
    pages = [[[next(blocks) for _ in range(columns)] for _ in range(count)] for _ in range(groups)]
    shadow_blocks = dice.placed(torch.tensor(shadows, dtype=torch.int32))
    held = dice.placed(torch.full((groups, states, num_shadows), -1)) if holds and not numbered else None
    if held is not None:  # shadow pages hold some rows already
        for group, (request, length) in itertools.product(range(groups), enumerate(lengths)):
            page, row = divmod(dice.number(length), size)
            held[group, order[request], page % num_shadows] = pages[group][request][page] * size + row
    rows, tokens = count * MOST_DRAFTS + 1, count * (MOST_GIVEN + MOST_DRAFTS) + 2
    given, per_group = planes * groups, [len(planes)] * groups  # groups share their memory, and own other pages
    for _ in range(2):
        requests = make_requests(dice, count, MOST_GIVEN, MOST_DRAFTS)
        begun, lengths = lengths, [length + sum(r[:2]) for length, r in zip(lengths, requests, strict=True)]
        lost = [dice.number(r.drafts) if dice.chance(0.1) else 0 for r in requests]  # drafts past the longest sequence
        slot_mappings, row_slots = [], []
        for group in range(groups):
            slots, drafted = [], []
            for table, length, r, without in zip(pages[group], lengths, requests, lost, strict=True):
                places = range(length - r.given - r.drafts, length)
                slots += [table[p // size] * size + p % size if p < length - without else -1 for p in places]
                drafted += slots[len(slots) - r.drafts :]
            slot_mappings.append(dice.int64(slots + [-1] * (tokens - len(slots))))
            row_slots.append(drafted + [-1] * (rows - len(drafted)))
        tables = [dice.placed(torch.tensor([*table, [0] * columns], dtype=torch.int32)) for table in pages]
        starts = dice.int32([*accumulate((r.given + r.drafts for r in requests), initial=0)])
        draft_starts = dice.int32([*accumulate((r.drafts for r in requests), initial=0)])
        saved, tails = dice.poisoned(groups, tokens, dtype=torch.int64), dice.poisoned(groups, count + 1)
        real = [state if any(r[:2]) else -1 for state, r in zip(order, requests, strict=True)]
        mapping = None if numbered else dice.placed(torch.tensor(real, dtype=dtype))
        before = (per_group, starts, draft_starts)
        opening = (
            *before, dice.int32(lengths), dice.placed(torch.tensor(row_slots)), shadow_blocks,
        )  # fmt: skip
        twice = dice.maybe(0.2)  # a call without tables copies rows only
        if twice:
            after = yield Call("open_window", (given, *opening, [], [], saved, tails, mapping, held, offsets))
            given = after[0]
        after = yield Call(
            "open_window", (given, *opening, slot_mappings, tables, saved, tails, mapping, held, offsets)
        )
        given, slot_mappings, tables, saved, tails, held = (after[i] for i in (0, 7, 8, 9, 10, 12))
        planes = given[: len(planes)]
        for plane, slots in itertools.product(planes, slot_mappings):
            write_rows(dice, plane, offsets, slots)
        closing = (shadow_blocks, saved, tails)
        prefix = [[i >= r.accepted for i in range(r.drafts)] for r in requests]
        rejected = prefix if dice.chance(0.7) else [[dice.chance() for _ in of] for of in prefix]
        counts = dice.int32([*(r.drafts - r.accepted for r in requests), 7])
        buffers = (dice.flags([True] * rows), dice.poisoned(count + 1), dice.int64(COUNTED))
        flags = [*itertools.chain(*rejected)]
        op, result = dice.choice((
            ("close_window", (dice.flags(flags + [True] * (rows - len(flags))),)),
            ("close_window_from_rejected", (counts, *buffers)),
        ))  # fmt: skip
        if op != "close_window":
            rejected = prefix
        if twice:
            after = yield Call(op, (given, *before, *result, *closing, [], [], mapping, held, offsets))
            given = after[0]
        after = yield Call(op, (given, *before, *result, *closing, slot_mappings, tables, mapping, held, offsets))
        given, held = after[0], after[-2]
        stays = [[*gone, True].index(True) for gone in rejected]
        lengths = [at + r.given + n for at, r, n in zip(begun, requests, stays, strict=True)]
