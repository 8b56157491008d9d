"""Sample calls of the family drafter: those of a draft loop, and those for longer queries.

Padded rows come last and hold invalid contents.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch

from nwor_ops.testing.samples.dice import COUNTED, FLOATS, POISON, Call, Calls, Dice

MOST_TOKENS, MAX_MODEL_LEN = 5, 32


class Rows(NamedTuple):
    """Rows of a drafter after a step of the target. ``columns``: of a block table with all positions."""

    num_states: int
    lengths: list[int]  # tokens of each real row in the target's step
    states: list[int]
    seq_lens: list[int]
    rejected: list[int]
    block_size: int
    numbered: bool  # row i has state i, and no row is padded

    @property
    def num_rows(self) -> int:
        return len(self.states)

    @property
    def capacity(self) -> int:
        return self.num_rows * MOST_TOKENS + 1

    @property
    def columns(self) -> int:
        return (MAX_MODEL_LEN + 8) // self.block_size + 1

    def starts(self, padded: int) -> list[int]:
        """Return the first token of each row, then the end, with a value for padded rows."""
        return [*accumulate(self.lengths, initial=0), *[padded] * (self.num_rows - len(self.lengths))]

    def positions(self) -> list[int]:
        places = [
            end - length + place for end, length in zip(self.seq_lens, self.lengths, strict=False)
            for place in range(length)
        ]  # fmt: skip
        return places + [3] * (self.capacity - len(places))


def make_rows(dice: Dice) -> Rows:
    count, numbered = dice.requests(6), dice.maybe(0.3)
    num_states = count + dice.size(2)
    real = count if numbered else dice.number(count)
    lengths, padded = dice.numbers(real, MOST_TOKENS, 1), count - real
    return Rows(
        num_states,
        lengths,
        [*range(count)] if numbered else dice.data.sample(range(num_states), real) + [-1] * padded,
        [length + dice.number(25) for length in lengths] + [99] * padded,
        [dice.number(length - 1) for length in lengths] + [9] * padded,
        dice.choice((2, 4, 5, 16)),
        numbered,
    )


def window(dice: Dice) -> Calls[None]:
    rows = make_rows(dice)
    yield from _prefill(dice, rows)
    yield from _slots(dice, rows)
    yield from _sample_and_advance(dice, rows)
    yield from _padded_inputs(dice)
    yield from _eagle(dice, rows)
    yield from _longer_queries(dice, rows)
    yield from _step_tokens(dice, rows)
    yield from _vocabulary(dice)
    size = dice.size(4, 1)
    lengths = dice.int32(dice.numbers(rows.num_rows, 100, -3))
    yield Call(
        "dcp_local_seq_lens",
        (lengths, dice.poisoned(rows.num_rows + 2), size, dice.size(size - 1), dice.size(4, 1)),
    )


def _prefill(dice: Dice, rows: Rows) -> Calls[None]:
    count, capacity = rows.num_rows, rows.capacity
    yield Call("prepare_prefill_inputs", (
        dice.ids(dice.numbers(capacity, 999)), dice.int64(rows.positions()), dice.int32(rows.starts(-7)),
        dice.int32(rows.seq_lens), dice.ids(rows.states), dice.ids(dice.numbers(count, 2)), dice.ids(rows.rejected),
        dice.ids(dice.numbers(rows.num_states, 999)), dice.ids(dice.numbers(rows.num_states, 999)),
        dice.poisoned(capacity + 3), dice.poisoned(capacity + 3, dtype=torch.int64), dice.poisoned(count + 2),
        dice.poisoned(count + 1), dice.poisoned(count + 1, dtype=torch.int64),
        dice.poisoned(*dice.choice(((), (1,))), dtype=torch.int64),
    ))  # fmt: skip


def _slots(dice: Dice, rows: Rows) -> Calls[None]:
    groups, cp_size = dice.size(3, 1), dice.choice((1, 1, 2, 4))
    states = [-1 if dice.chance(0.1) else state for state in rows.states]  # here padding need not be last
    shared = dice.flags([dice.chance() for _ in range(groups)]) if dice.maybe(0.3) else None
    yield Call("compute_slot_mappings", (
        dice.ids(states), dice.int32(rows.starts(sum(rows.lengths))), dice.int64(rows.positions()),
        [dice.table(rows.num_states, rows.columns) for _ in range(groups)],
        [rows.block_size * dice.choice((1, 2)) if dice.maybe(0.9) else 0 for _ in range(groups)],
        dice.poisoned(groups, rows.capacity + 4, dtype=torch.int64), cp_size, dice.size(cp_size - 1),
        dice.choice((1, rows.block_size)), shared,
    ))  # fmt: skip


def _sample_and_advance(dice: Dice, rows: Rows) -> Calls[None]:
    """One step of a draft loop: its first inputs, a draw, and the inputs of the next step."""
    count, steps, vocabulary = rows.num_rows, dice.size(4, 1), dice.choice((1, 40, 301, 1024))
    dtype, states = dice.choice((*FLOATS, torch.float32)), dice.ids(rows.states)
    column, matrix = dice.number(steps - 1), dice.maybe(0.8)
    step = dice.placed(torch.full(dice.choice(((), (1,), (count,))), column))
    temperatures = [dice.data.choice((0.0, 0.7, 1.0, 2.5)) for _ in range(rows.num_states)]
    drawn = yield Call("gumbel_sample", (
        dice.strided(dice.normal(count, vocabulary, dtype=dtype, factor=3.0)), states,
        dice.placed(torch.tensor(temperatures)),
        dice.int64([dice.data.getrandbits(62) for _ in range(rows.num_states)]),
        dice.int64([2**33 + dice.number(10**6) for _ in range(count)]), step,
        dice.poisoned_ids(*((count + 1, steps) if matrix else (count + 1,))),
        dice.strided(dice.normal(rows.num_states, steps, vocabulary + 2, dtype=dtype)) if dice.maybe() else None,
        dice.int64([0] * (2 * count + 1)) if dice.maybe() else None,
    ))  # fmt: skip
    drafts = drawn[6] if matrix else dice.poisoned_ids(count + 1, steps)
    advance, with_states = dice.maybe(0.8), dice.maybe(0.8)
    mapping = states if with_states else None
    sample_positions = dice.int64([dice.number(2**34) for _ in range(count + 1)]) if dice.maybe(0.8) else None
    decoded = yield Call("prepare_decode_inputs", (
        drafts[:count], dice.int32(rows.seq_lens), dice.ids(rows.rejected), dice.poisoned(count + 2),
        dice.int64([min(length, MAX_MODEL_LEN) - 1 for length in rows.seq_lens] + [POISON]),
        dice.poisoned(count + 2), dice.poisoned(count + 1), MAX_MODEL_LEN, mapping, sample_positions, advance,
    ))  # fmt: skip
    width, element = dice.choice((1, 8, 24, 33, 64)), dice.choice((*FLOATS, torch.uint8, torch.float64))
    hidden = [dice.strided(dice.bytes(count + more, width, dtype=element)) for more in (0, 1)]
    yield Call("update_draft_inputs", (
        dice.ids(dice.numbers(count, 999)), dice.placed(torch.full(dice.choice(((), (1,))), column)), drafts,
        decoded[3], decoded[4], decoded[6], steps, MAX_MODEL_LEN, mapping,
        *(hidden if dice.maybe(0.8) else (None, None)), decoded[9], advance,
    ))  # fmt: skip


def _padded_inputs(dice: Dice) -> Calls[None]:
    count = dice.requests(6)
    drafts = dice.numbers(count, 4)
    discarded = dice.flags([dice.chance(0.2) for _ in range(count)])
    starts = [*accumulate((n + 1 for n in drafts), initial=0)]
    if count and dice.chance(0.2):
        starts[-1] = starts[-2]  # a row without tokens
    yield Call("prepare_inputs_padded", (
        dice.int32([*accumulate(drafts)]), dice.int32([dice.number(n + 1) for n in drafts]), dice.int32(starts),
        dice.poisoned_ids(count + 2), dice.poisoned_ids(count + 2), discarded if dice.maybe(0.8) else None,
    ))  # fmt: skip
    sampled = torch.tensor(dice.numbers(3 * count, 60, -2), dtype=dice.choice((torch.int32, torch.int64)))
    yield Call("prepare_next_token_padded", (
        dice.strided(sampled.view(count, 3)), discarded, dice.ids(dice.numbers(count, 49)),
        dice.poisoned_ids(count + 1), dice.poisoned_ids(count + 1), 50,
    ))  # fmt: skip


def _eagle(dice: Dice, rows: Rows) -> Calls[None]:
    count = dice.requests(6)
    positions = dice.numbers(count, MAX_MODEL_LEN + 3, -1)
    yield Call("eagle_step", (
        dice.int64(positions), dice.table(count, dice.choice((2, rows.columns))),
        dice.int32([p + 1 for p in positions] + [POISON] * 2), dice.poisoned(count + 1, dtype=torch.int64),
        dice.poisoned(count + 3, dtype=torch.int64), rows.block_size, MAX_MODEL_LEN,
    ))  # fmt: skip


def _longer_queries(dice: Dice, rows: Rows) -> Calls[None]:
    """Give each request new tokens after its last accepted one."""
    count, new, shift, mapped = rows.num_rows, dice.size(4, 1), dice.maybe(), dice.maybe()
    room, starts = rows.capacity + count * new + 2, dice.int32(rows.starts(-7))
    states = None if rows.numbered else dice.ids(rows.states)
    expanded = yield Call("copy_expand_inputs", (
        dice.ids(dice.numbers(rows.capacity, 999)), dice.int64(rows.positions()), starts, dice.ids(rows.rejected),
        dice.ids(dice.numbers(rows.num_states, 999)), dice.poisoned(room), dice.poisoned(room, dtype=torch.int64),
        dice.flags([True] * room), dice.flags([True] * room), dice.poisoned_ids(count * new + 1), new, 11, 12, shift,
        dice.choice((None, 20)), states,
        dice.poisoned_ids(rows.capacity + 1) if shift and mapped else None,
    ))  # fmt: skip
    yield Call("extend_queries", (
        starts, dice.int32(rows.seq_lens), expanded[6], expanded[7], dice.table(count, rows.columns),
        dice.poisoned(count + 2), dice.poisoned(count + 1), dice.poisoned(room, dtype=torch.int64), rows.block_size,
        MAX_MODEL_LEN - 2, new - shift, states,
    ))  # fmt: skip


def _step_tokens(dice: Dice, rows: Rows) -> Calls[None]:
    """A step in which some requests verify drafts, and others compute a prompt."""
    count, padding = rows.num_rows, [0] * (rows.num_rows - len(rows.lengths))
    drafts = [dice.number(length - 1) for length in rows.lengths]
    logits = [dice.number(1) if number == 0 else number + 1 for number in drafts]
    sampled = [dice.number(number) for number in logits]
    yield Call("gather_step_tokens", (
        dice.ids(dice.numbers(rows.capacity, 999)), dice.int32(rows.starts(-7)),
        dice.int32([*accumulate(logits, initial=0), *padding]), dice.ids(rows.states), dice.ids(sampled + padding),
        dice.ids(dice.numbers(rows.num_states, 999)), dice.poisoned_ids(count + dice.size(2), dice.size(6, 1)),
        dice.poisoned_ids(rows.capacity + dice.size(3)),
    ))  # fmt: skip


def _vocabulary(dice: Dice) -> Calls[None]:
    """Let a draft vocabulary follow some lists of tokens, and use its logits."""
    vocab, first, dtype = dice.size(90, 1), dice.choice((0, 7)), dice.choice((*FLOATS, torch.uint8, torch.float64))
    rows, width = dice.size(vocab, 1), dice.choice((1, 8, 33))
    head = dice.bytes(vocab, width + 1, dtype=dtype)[:, :width]
    tokens = torch.tensor(dice.data.sample(range(vocab), rows))
    row_of_token = torch.full((vocab,), -1, dtype=torch.int32)
    row_of_token[tokens] = torch.arange(rows, dtype=torch.int32)
    marks = [dice.data.getrandbits(min(rows - start, 32)) for start in range(0, rows, 32)]
    state: tuple[Any, ...] = (
        dice.placed(tokens + first), dice.placed(row_of_token), dice.placed(head[tokens]),
        dice.int32([(word ^ 2**31) - 2**31 for word in marks] + [POISON]), dice.int32([dice.number(rows - 1), POISON]),
        dice.int64(COUNTED),
    )  # fmt: skip
    for _ in range(2):
        sampled, prompt = (dice.ids(dice.numbers(dice.size(most), vocab + first + 3, -2)) for most in (9, 2 * vocab))
        after = yield Call("update_draft_vocabulary", (
            sampled, head, *state, prompt if dice.maybe() else None, first,
        ))  # fmt: skip
        state = after[2:8]
    count, floats = dice.size(9), dice.choice((*FLOATS, torch.float32))
    logits = dice.normal(count, rows, dtype=floats).round()  # with equal ones
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(dice.number(99))) < 0.3] = -torch.inf
    yield Call("argmax_draft_tokens", (
        dice.strided(logits), state[0], dice.poisoned_ids(count + 1),
        dice.poisoned(count + 1, dtype=torch.float32) if dice.maybe() else None,
    ))  # fmt: skip
    yield Call("expand_draft_logits", (
        dice.strided(logits), state[1], dice.strided(torch.full((count, vocab + dice.size(2)), POISON, dtype=floats)),
    ))  # fmt: skip
