"""Sample calls of the family accept: a batch is planned, and its outcome is determined in each way."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from nwor_ops.testing.samples.dice import COUNTED, Batch, Call, Calls, Dice, make_batch


def plan(
    dice: Dice, batch: Batch, slot_mappings: list[Tensor], rows: int, token_offset: int | None = None
) -> Calls[tuple[Tensor, Tensor]]:
    """Plan a batch. Return the log row of each token, and the slot of each row."""
    bonus, leading_zero = dice.size(2), dice.maybe()
    counts = list(accumulate(request.drafts + bonus for request in batch.requests))
    planned = yield Call("plan_window", (
        batch.query_start_loc, dice.int32([0, *counts] if leading_zero else counts), slot_mappings,
        dice.poisoned(len(slot_mappings[0]) + dice.size(2)),
        dice.poisoned(len(slot_mappings), rows, dtype=torch.int64), dice.poisoned(rows), dice.poisoned(rows),
        dice.int64(COUNTED), dice.poisoned(len(batch.requests) + 1 + dice.size(2)), token_offset, bonus, leading_zero,
    ))  # fmt: skip
    return planned[3], planned[4]


def outcome(dice: Dice, batch: Batch, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return former flags of rows, counts of requests, and counters."""
    return dice.flags([True] * rows), dice.poisoned(len(batch.requests) + dice.size(2)), dice.int64(COUNTED)


def window(dice: Dice) -> Calls[None]:
    batch = make_batch(dice, dice.choice((1, 8)), 7)
    groups, rows = dice.size(3, 1), batch.num_drafts + dice.size(3)
    micro = dice.maybe(0.3)  # a part of the batch
    tokens, offset = dice.size(batch.num_tokens) if micro else batch.num_tokens, dice.size(batch.num_tokens)
    slots = [dice.int64(dice.numbers(tokens, 500, -1)) for _ in range(groups)]
    yield from plan(dice, batch, slots, rows, offset if micro else None)
    drafts = batch.draft_start_loc
    if dice.chance(0.1):  # a window that could not be planned has no drafts
        drafts = torch.zeros_like(drafts)
    drafts = dice.placed(drafts)
    tokens_of = (batch.draft_token_ids, batch.sampled_token_ids, drafts)
    yield Call("acceptance_mask", tokens_of)
    yield Call("acceptance_mask_from_rejected", (batch.num_rejected, drafts, batch.num_drafts + dice.size(2)))
    yield Call("reject_rows", (*tokens_of, *outcome(dice, batch, rows)))
