"""Random windows of every family of ops, compared with the oracles in all memory.

A window is a chain of calls as an engine makes them. Each call runs on the device, and its oracle runs on the CPU. The
next call continues from the oracle's result, so the first difference is in the op that is named.

Example:
    >>> from nwor_ops.testing.random_windows import run_round
    >>> sorted(run_round(7, "cpu"))[:2]  # the ops of this round, and the number of their calls
    ['acceptance_mask', 'acceptance_mask_from_rejected']
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops.testing.against_oracle import Tolerances, compare_with_oracle
from nwor_ops.testing.layouts import (
    LAYOUTS,
    Pages,
    Shape,
    make_amx_pages,
    make_pages,
    random_bytes,
    surrounded,
)
from nwor_ops.testing.raw_rows import raw, write_row

POISON = 77  # the former contents of outputs
FLOATS = (torch.float16, torch.bfloat16)


class Window:
    """The calls of one window.

    Args:
        family: the family of its ops.
        seed: the same seed gives the same window.
        device: device of the ops.

    Attributes:
        dice: the random numbers of the window.
        calls: number of calls of each op.
    """

    def __init__(self, family: str, seed: int, device: str) -> None:
        self.dice, self._device = random.Random(f"{family} {seed}"), device
        self.calls: Counter[str] = Counter()

    def call(self, op: str, *arguments: Any, tolerances: Tolerances | None = None) -> tuple[Any, ...]:
        """Compare an op with its oracle. Return the arguments after the oracle."""
        self.calls[op] += 1
        return compare_with_oracle(op, arguments, self._device, tolerances)[1]

    # ------------------------------------------------------------ random tensors, inside foreign memory

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.dice.getrandbits(40))
        return surrounded((torch.randn(shape, generator=generator) * factor).to(dtype), edge=64)

    def bytes(self, *shape: int, dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        return random_bytes(count + 128, dtype, self.dice.getrandbits(40))[64 : 64 + count].view(shape)

    def some(self, most: int, least: int = 0) -> int:
        return self.dice.randint(least, most)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.dice.random() < probability


def int32(values: Sequence[int]) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.int32))


def int64(values: Sequence[int]) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.int64))


def flags(values: Sequence[bool]) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.bool))


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return surrounded(torch.full(shape, POISON, dtype=dtype))


class Request(NamedTuple):
    """One request of a batch: tokens that are not drafts, drafts, and how many of these are accepted."""

    given: int
    drafts: int
    accepted: int


class Batch(NamedTuple):
    """Random requests, and what an engine gives to the ops for them."""

    requests: list[Request]
    query_start_loc: Tensor
    draft_start_loc: Tensor
    draft_token_ids: Tensor
    sampled_token_ids: Tensor
    num_rejected: Tensor

    @property
    def num_tokens(self) -> int:
        return sum(request.given + request.drafts for request in self.requests)

    @property
    def num_drafts(self) -> int:
        return sum(request.drafts for request in self.requests)


def make_batch(window: Window, most_requests: int = 5, most_drafts: int = 5) -> Batch:
    dice, requests = window.dice, []
    for _ in range(window.some(most_requests, 1)):
        drafts = window.some(most_drafts)
        requests.append(Request(dice.choice((1, 1, window.some(5, 1))), drafts, window.some(drafts)))
    ids: list[int] = []
    rows = []
    for request in requests:
        of_request = [dice.randrange(1000) for _ in range(request.drafts)]
        last = dice.randrange(1000)  # the bonus token, or the replacement of a draft
        if request.accepted < request.drafts:
            last = of_request[request.accepted] + 1
        kept = [*of_request[: request.accepted], last]
        ids += of_request
        rows.append(kept + [-1] * (most_drafts + 1 - len(kept)))
    return Batch(
        requests,
        int32([0, *accumulate(request.given + request.drafts for request in requests)]),
        int32([0, *accumulate(request.drafts for request in requests)]),
        surrounded(torch.tensor(ids, dtype=dice.choice((torch.int32, torch.int64)))),
        surrounded(torch.tensor(rows, dtype=dice.choice((torch.int32, torch.int64)))),
        int32([request.drafts - request.accepted for request in requests]),
    )


# ---------------------------------------------------------------- accept


def plan(window: Window, batch: Batch, slot_mappings: list[Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Plan a batch. Return the log row of each token, and the slot of each row."""
    bonus = window.some(1)
    counts = list(accumulate(request.drafts + bonus for request in batch.requests))
    leading_zero = window.maybe()
    planned = window.call(
        "plan_window", batch.query_start_loc, int32([0, *counts] if leading_zero else counts), slot_mappings,
        poisoned(len(slot_mappings[0]) + 2), poisoned(len(slot_mappings), rows, dtype=torch.int64), poisoned(rows),
        poisoned(rows), int64(range(10, 60, 10)), poisoned(len(batch.requests) + 3), None, bonus, leading_zero,
    )  # fmt: skip
    return planned[3], planned[4]


def outcome_buffers(batch: Batch, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return former flags of rows, counts of requests, and counters."""
    return flags([True] * rows), poisoned(len(batch.requests) + 1), int64(range(10, 60, 10))


def accept(window: Window) -> None:
    batch = make_batch(window, 8, 7)
    groups, padding = window.some(3, 1), window.some(4)
    slots = [int64([window.some(500, -1) for _ in range(batch.num_tokens)] + [-1] * padding) for _ in range(groups)]
    rows = batch.num_drafts + window.some(3)
    plan(window, batch, slots, rows)
    tokens = (batch.draft_token_ids, batch.sampled_token_ids, batch.draft_start_loc)
    window.call("acceptance_mask", *tokens)
    window.call("acceptance_mask_from_rejected", batch.num_rejected, batch.draft_start_loc, batch.num_drafts)
    window.call("reject_rows", *tokens, *outcome_buffers(batch, rows))
    window.call("reject_rows_from_rejected", batch.num_rejected, batch.draft_start_loc, *outcome_buffers(batch, rows))


# ---------------------------------------------------------------- undo


class Caches(NamedTuple):
    """Pages of some layers, the dtype of their sources, and how these are stored."""

    pages: Pages
    shape: Shape
    dtype: torch.dtype
    kv_cache_dtype: str

    @property
    def num_slots(self) -> int:
        return self.shape.blocks * self.shape.block_size


def make_caches(window: Window, blocks: int = 12, most_layers: int = 3, amx: bool = True) -> Caches:
    """Make pages in any layout. ``amx``: also pages whose inner order needs a table."""
    dice = window.dice
    dtype, offset, seed = dice.choice((*FLOATS, torch.float32)), window.some(3), dice.getrandbits(40)
    layers, heads = window.some(most_layers, 1), window.some(4, 1)
    if amx and window.maybe(0.15):
        shape = Shape(blocks, 16, heads, 32, 32, layers)
        return Caches(make_amx_pages(shape, torch.bfloat16, 0, seed), shape, torch.bfloat16, "auto")
    widths = dice.choice((4, 8, 16, 24, 64, 128)), dice.choice((4, 8, 16, 24, 64, 128))
    shape = Shape(blocks, dice.choice((4, 5, 8, 16)), heads, *widths, layers)
    kv_cache_dtype = dice.choice(("auto", "auto", "fp8", "fp8_e5m2"))
    stored = dtype if kv_cache_dtype == "auto" else torch.uint8
    return Caches(make_pages(dice.choice(list(LAYOUTS)), shape, stored, offset, seed), shape, dtype, kv_cache_dtype)


def scales(window: Window, caches: Caches, tokens: int) -> tuple[Tensor, Tensor]:
    """Return a scale per tensor, per head or per token."""
    shape = window.dice.choice([(1,), (caches.shape.heads,), (tokens, 1)])
    return window.normal(*shape).abs() + 0.1, window.normal(*shape).abs() + 0.1


def sources(window: Window, caches: Caches, tokens: int) -> tuple[Tensor, Tensor]:
    """Return keys and values: random bits, or numbers if they are converted."""
    heads, widths = caches.shape.heads, (caches.shape.key_width, caches.shape.value_width)
    if caches.kv_cache_dtype == "auto":
        key, value = (window.bytes(tokens, heads, width, dtype=caches.dtype) for width in widths)
    else:
        key, value = (window.normal(tokens, heads, width, dtype=caches.dtype, factor=30.0) for width in widths)
    return key, value


def distinct_slots(window: Window, num_slots: int, tokens: int, padding: int) -> list[int]:
    slots = window.dice.sample(range(num_slots), tokens)
    return [-1 if window.maybe(0.1) else slot for slot in slots] + [-1] * padding


def undo(window: Window) -> None:
    """Log and write every layer, then restore what was rejected."""
    caches, batch, padding = make_caches(window), make_batch(window), window.some(3)
    tokens, rows = batch.num_tokens, batch.num_drafts + window.some(3, 1)
    slots = int64(distinct_slots(window, caches.num_slots, tokens, padding))
    log_rows, row_slots = plan(window, batch, [slots], rows)
    keys, values, key_offsets, value_offsets = caches.pages
    window_id, row_windows = int64([2**33 + 5]), surrounded(torch.full((len(keys), rows), 5, dtype=torch.int64))
    logs = [window.bytes(len(keys), rows, *cache.shape[2:], dtype=cache.dtype) for cache in (keys[0], values[0])]
    for layer, (key_cache, value_cache) in enumerate(zip(keys, values, strict=True)):
        marks = (window_id, row_windows[layer])
        if key_offsets is None and window.maybe(0.7):
            key, value = sources(window, caches, tokens + padding + window.some(2))
            written = window.call(
                "write_kv_logged", key, value, key_cache, value_cache, slots, *scales(window, caches, len(key)),
                caches.kv_cache_dtype, log_rows, logs[0][layer], logs[1][layer], *marks,
            )  # fmt: skip
            _keep(written, key_cache=(2, key_cache), value_cache=(3, value_cache), key_log=(9, logs[0][layer]),
                  value_log=(10, logs[1][layer]), marks=(12, row_windows[layer]))  # fmt: skip
            continue
        for cache, log, offsets in ((key_cache, logs[0], key_offsets), (value_cache, logs[1], value_offsets)):
            logged = window.call("log_slots", cache, slots, log_rows, log[layer], offsets, *marks)
            _keep(logged, log=(3, log[layer]), marks=(6, row_windows[layer]))
        if key_offsets is None:
            key, value = sources(window, caches, tokens + padding)
            written = window.call(
                "write_kv", key, value, key_cache, value_cache, slots, *scales(window, caches, len(key)),
                caches.kv_cache_dtype,
            )  # fmt: skip
            _keep(written, key_cache=(2, key_cache), value_cache=(3, value_cache))
        else:
            _write_rows(window, (key_cache, key_offsets), slots)
            _write_rows(window, (value_cache, value_offsets), slots)
    buffers = outcome_buffers(batch, rows)
    if window.maybe():
        tokens_of = (batch.draft_token_ids, batch.sampled_token_ids, batch.draft_start_loc)
        rejected = window.call("reject_rows", *tokens_of, *buffers)[3]
        outcome = (rejected,)
        op = "restore_slots"
    else:
        outcome = (batch.num_rejected, batch.draft_start_loc, *buffers)  # type: ignore[assignment]
        op = "restore_slots_from_rejected"
    for planes, log, offsets in ((keys, logs[0], key_offsets), (values, logs[1], value_offsets)):
        window.call(op, planes, log, row_slots[0], *outcome, offsets, window_id, row_windows, rows)


def _keep(after: tuple[Any, ...], **places: tuple[int, Tensor]) -> None:
    """Copy arguments after the oracle to the tensors that the next call takes, bit by bit."""
    for index, tensor in places.values():
        raw(tensor).copy_(raw(after[index]))


def _write_rows(window: Window, plane: tuple[Tensor, Tensor | None], slots: Tensor) -> None:
    """Write a row of random bytes for each token, as a writer outside this library."""
    cache, offsets = plane
    for slot in slots.tolist():
        if slot >= 0:
            write_row(cache, slot, raw(window.bytes(*cache.shape[2:], dtype=cache.dtype)), offsets)


# ---------------------------------------------------------------- shadow


def shadow(window: Window) -> None:
    """Two windows of the same requests in shadow pages, which keep the rows of the first."""
    dice, groups, most_drafts = window.dice, window.some(2, 1), 4
    requests, states = window.some(3, 1), 4
    caches = make_caches(window, blocks=80, most_layers=2)
    planes, offsets, size = caches.pages.key_caches, caches.pages.key_offsets, caches.shape.block_size
    num_shadows = (size - 1 + most_drafts - 1) // size + 1
    blocks = list(range(80))
    dice.shuffle(blocks)
    shadows = [[[blocks.pop() for _ in range(num_shadows)] for _ in range(states)] for _ in range(groups)]
    shadow_blocks = surrounded(torch.tensor(shadows, dtype=torch.int32))
    held = surrounded(torch.full((groups, states, num_shadows), -1)) if window.maybe(0.7) else None
    lengths = [window.some(3 * size // 2) for _ in range(requests)]
    columns = (max(lengths) + 2 * (5 + most_drafts)) // size + 1
    pages = [[[blocks.pop() for _ in range(columns)] for _ in range(requests)] for _ in range(groups)]
    order = dice.sample(range(states), requests)
    for _ in range(2):
        steps = []
        for _ in range(requests):
            drafts = window.some(most_drafts)
            steps.append(Request(window.some(4, 1), drafts, window.some(drafts)))
        lengths = [length + sum(step[:2]) for length, step in zip(lengths, steps, strict=True)]
        slot_mappings, drafted = [], []
        for of_group in pages:
            slots = []
            for request, step in enumerate(steps):
                positions = range(lengths[request] - step.given - step.drafts, lengths[request])
                slots += [of_group[request][p // size] * size + p % size for p in positions]
                drafted += slots[len(slots) - step.drafts :]
            slot_mappings.append(int64([*slots, -1, -1]))
        rows = sum(step.drafts for step in steps)
        tables = [surrounded(torch.tensor([*of, [0] * columns], dtype=torch.int32)) for of in pages]
        starts = int32([0, *accumulate(step.given + step.drafts for step in steps)])
        draft_starts = int32([0, *accumulate(step.drafts for step in steps)])
        count, mapping = [len(planes)] * groups, int32(order)
        if groups > 1:  # all groups use the same memory, with other pages
            count, given = [len(planes)] * groups, planes * groups
        else:
            given = planes
        saved = poisoned(groups, len(slot_mappings[0]), dtype=torch.int64)
        tails = poisoned(groups, requests + 1)
        opened = window.call(
            "open_window", given, count, starts, draft_starts, int32(lengths),
            surrounded(torch.tensor(drafted, dtype=torch.int64).view(groups, rows)), shadow_blocks, slot_mappings,
            tables, saved, tails, mapping, held, offsets,
        )  # fmt: skip
        given, slot_mappings, tables, saved, tails, held = (opened[i] for i in (0, 7, 8, 9, 10, 12))
        planes = given[: len(planes)]
        for plane in planes:
            for slots in slot_mappings:
                _write_rows(window, (plane, offsets), slots)
        rejected = [place >= step.accepted for step in steps for place in range(step.drafts)]
        buffers = (flags([True] * (rows + 1)), poisoned(requests + 1), int64(range(10, 60, 10)))
        before = (given, count, starts, draft_starts)
        after = (shadow_blocks, saved, tails, slot_mappings, tables, mapping, held, offsets)
        if window.maybe():
            closed = window.call("close_window", *before, flags([*rejected, True]), *after)
        else:
            of_requests = int32([step.drafts - step.accepted for step in steps])
            closed = window.call("close_window_from_rejected", *before, of_requests, *buffers, *after)
        planes, held = closed[0][: len(planes)], closed[-2]
        lengths = [length - step.drafts + step.accepted for length, step in zip(lengths, steps, strict=True)]


# ---------------------------------------------------------------- staging


def staging(window: Window) -> None:
    """Stage the rows of some layers, commit them in all or none, and move slots."""
    caches, rows = make_caches(window, amx=False), window.some(8, 1)
    tokens, layers = rows + window.some(3), len(caches.pages.key_caches)
    stage_rows = [*range(rows), *[-1] * (tokens - rows)]
    window.dice.shuffle(stage_rows)
    slots = int64(distinct_slots(window, caches.num_slots, rows, 0))
    window_id, row_windows = int64([2**33 + 5]), surrounded(torch.full((layers, rows), 5, dtype=torch.int64))
    staged = []
    for layer in range(layers):
        key, value = sources(window, caches, tokens)
        like = tuple(window.bytes(rows, *source.shape[1:], dtype=source.dtype) for source in (key, value))
        lost = [-1 if window.maybe(0.03) else row for row in stage_rows]  # sometimes a layer lacks a row
        after = window.call("stage_kv", key, value, int32(lost), *like, window_id, row_windows[layer])
        _keep(after, marks=(6, row_windows[layer]))
        staged.append(after[3:5])
    by_length = window.maybe()
    accepted = int32([window.some(3) for _ in range(3)]) if by_length else flags([window.maybe() for _ in range(rows)])
    places = (int32([window.some(2) for _ in range(rows)]), int32([window.some(3) for _ in range(rows)]))
    committed = window.call(
        "accept_staged", accepted, slots, window_id, row_windows, caches.num_slots, flags([True] * rows),
        int64(range(10, 70, 10)), *(places if by_length else ()),
    )[5]  # fmt: skip
    finite = [[torch.nan_to_num(part) if caches.kv_cache_dtype != "auto" else part for part in rows] for rows in staged]
    for layer, (key, value) in enumerate(finite):
        window.call(
            "commit_staged", key, value, slots, committed, caches.pages.key_caches[layer],
            caches.pages.value_caches[layer], *scales(window, caches, rows), caches.kv_cache_dtype,
        )  # fmt: skip
    moves = window.some(10)
    sources_of = [window.some(caches.num_slots - 1, -1) for _ in range(moves)]
    targets = distinct_slots(window, caches.num_slots, moves, 0)
    window.call("move_slots", caches.pages.key_caches, int64(sources_of), int64(targets), caches.pages.key_offsets)


# ---------------------------------------------------------------- drafter


class Rows(NamedTuple):
    """Requests of a drafter, followed by padded rows with invalid contents."""

    lengths: list[int]  # tokens of the target's step
    starts: list[int]
    states: list[int]
    rejected: list[int]
    seq_lens: list[int]


def make_rows(window: Window, num_states: int) -> Rows:
    real, padded = window.some(num_states), window.some(2)
    lengths = [window.some(5, 1) for _ in range(real)]
    return Rows(
        lengths,
        [0, *accumulate(lengths), *[-7] * padded],
        window.dice.sample(range(num_states), real) + [-1] * padded,
        [window.some(length - 1) for length in lengths] + [9] * padded,
        [length + window.some(20) for length in lengths] + [99] * padded,
    )


def drafter(window: Window) -> None:
    """The calls of a draft loop, and those for longer queries."""
    num_states, size, most = window.some(7, 1), window.dice.choice((2, 4, 5, 16)), 32
    rows = make_rows(window, num_states)
    count, tokens = len(rows.states), sum(rows.lengths)
    ids = int32([window.some(999) for _ in range(tokens + 1)])
    positions = [
        length - of + place for length, of in zip(rows.seq_lens, rows.lengths, strict=False) for place in range(of)
    ]
    first = int64([*positions, 0])
    starts, states, rejected, seq_lens = map(int32, rows[1:])
    sampled = int32([window.some(2) for _ in rows.states])
    window.call(
        "prepare_prefill_inputs", ids, first, starts, seq_lens, states, sampled, rejected,
        int64([window.some(999) for _ in range(num_states)]), int32([window.some(999) for _ in range(num_states)]),
        poisoned(tokens + 3), poisoned(tokens + 3, dtype=torch.int64), poisoned(count + 2), poisoned(count + 1),
        poisoned(count + 1, dtype=torch.int64), poisoned(1, dtype=torch.int64),
    )  # fmt: skip
    columns = most // size + 8
    real_starts = [*rows.starts[: len(rows.lengths) + 1], *[tokens] * (count - len(rows.lengths))]
    groups = window.some(3, 1)
    tables = [_table(window, num_states, columns) for _ in range(groups)]
    cp_size = window.dice.choice((1, 1, 2, 4))
    window.call(
        "compute_slot_mappings", states, int32(real_starts), first, tables,
        [size * window.dice.choice((1, 2)) for _ in range(groups)], poisoned(groups, tokens + 4, dtype=torch.int64),
        cp_size, window.some(cp_size - 1), window.dice.choice((1, size)),
    )  # fmt: skip
    _sample_and_advance(window, rows, most)
    _padded_inputs(window)
    eagle = [window.some(most + 3, -1) for _ in range(window.some(6))]
    window.call(
        "eagle_step", int64(eagle), _table(window, len(eagle), columns), int32([p + 1 for p in eagle] + [POISON] * 2),
        poisoned(len(eagle) + 1, dtype=torch.int64), poisoned(len(eagle) + 3, dtype=torch.int64), size, most,
    )  # fmt: skip
    _longer_queries(window, rows, ids, first, (starts, states, rejected, seq_lens), size, columns)
    size_of_dcp = window.some(4, 1)
    window.call(
        "dcp_local_seq_lens", int32([window.some(100) for _ in range(count)]), poisoned(count + 2), size_of_dcp,
        window.some(size_of_dcp - 1), window.some(4, 1),
    )  # fmt: skip


def _table(window: Window, rows: int, columns: int) -> Tensor:
    values = [window.some(10**6) for _ in range(rows * columns)]
    return surrounded(torch.tensor(values, dtype=torch.int32).view(rows, columns))


def _sample_and_advance(window: Window, rows: Rows, most: int) -> None:
    """One step of a draft loop: its first inputs, a draw, and the inputs of the next step."""
    count, steps, vocabulary = len(rows.states), window.some(4, 1), window.dice.choice((1, 40, 301, 1024))
    dtype, states, step = window.dice.choice((*FLOATS, torch.float32)), int32(rows.states), window.some(steps - 1)
    num_states = max([0, *rows.states]) + 1
    temperatures = [window.dice.choice((0.0, 0.7, 1.0, 2.5)) for _ in range(num_states)]
    drawn = window.call(
        "gumbel_sample", window.normal(count, vocabulary, dtype=dtype, factor=3.0), states,
        surrounded(torch.tensor(temperatures)), int64([window.dice.getrandbits(62) for _ in range(num_states)]),
        int64([2**33 + window.some(10**6) for _ in range(count)]), int64([step]),
        poisoned(count + 1, steps, dtype=torch.int64),
        window.normal(num_states, steps, vocabulary + 2, dtype=dtype) if window.maybe() else None,
    )[6]  # fmt: skip
    advance, sample_positions = window.maybe(0.8), int64([window.some(2**34) for _ in range(count + 1)])
    decoded = window.call(
        "prepare_decode_inputs", drawn[:count].contiguous(), int32(rows.seq_lens), int32(rows.rejected),
        poisoned(count + 2), int64([min(length, most) - 1 for length in rows.seq_lens] + [POISON]),
        poisoned(count + 2), poisoned(count + 1), most, states, sample_positions, advance,
    )  # fmt: skip
    width = window.dice.choice((8, 24, 64))
    window.call(
        "update_draft_inputs", drawn[:count, step].clone(), int64([step])[0], drawn, decoded[3], decoded[4],
        decoded[6], steps, most, states, window.bytes(count, width, dtype=dtype),
        window.bytes(count + 1, width, dtype=dtype), decoded[9], advance,
    )  # fmt: skip


def _padded_inputs(window: Window) -> None:
    requests = window.some(6)
    drafts = [window.some(4) for _ in range(requests)]
    valid = [window.some(of + 1) for of in drafts]
    discarded = flags([window.maybe(0.2) for _ in range(requests)])
    window.call(
        "prepare_inputs_padded", int32(list(accumulate(drafts))), int32(valid),
        int32([0, *accumulate(of + 1 for of in drafts)]), poisoned(requests + 2), poisoned(requests + 2), discarded,
    )  # fmt: skip
    sampled = torch.tensor([window.some(60, -2) for _ in range(3 * requests)], dtype=torch.int32).view(requests, 3)
    window.call(
        "prepare_next_token_padded", surrounded(sampled), discarded, int32([window.some(49) for _ in range(requests)]),
        poisoned(requests + 1), poisoned(requests + 1), 50,
    )  # fmt: skip


def _longer_queries(
    window: Window, rows: Rows, ids: Tensor, positions: Tensor, of_rows: tuple[Tensor, ...], size: int, columns: int
) -> None:
    """Give each request new tokens after its last accepted one."""
    starts, states, rejected, seq_lens = of_rows
    new, shift = window.some(4, 1), window.maybe()
    room = sum(rows.lengths) + len(rows.states) * new + 2
    expanded = window.call(
        "copy_expand_inputs", ids, positions, starts, rejected, int64([window.some(999) for _ in range(9)]),
        poisoned(room), poisoned(room, dtype=torch.int64), flags([True] * room), flags([True] * room),
        poisoned(len(rows.states) * new + 1), new, 11, 12, shift, window.dice.choice((None, 20)), states,
        poisoned(sum(rows.lengths) + 2) if shift else None,
    )  # fmt: skip
    window.call(
        "extend_queries", starts, seq_lens, expanded[6], expanded[7], _table(window, len(rows.states), columns),
        poisoned(len(rows.states) + 2), poisoned(len(rows.states) + 1), poisoned(room, dtype=torch.int64), size, 30,
        new - shift, states,
    )  # fmt: skip


# ---------------------------------------------------------------- recurrent

# Sums in another order differ in their last bits, and CUDA rounds reapplied rows in another way. A dtype with fewer
# bits may round to an adjacent number, and later tokens start from it. A wrong row or state differs much more.
EPSILONS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _tolerances(dtype: torch.dtype, state_dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    absolute = 2e-4 if state_dtype == torch.float32 else 5e-2
    of_state, of_out, of_record = ((4 * EPSILONS[of], absolute) for of in (state_dtype, dtype, torch.float32))
    return {
        "state": of_state, "states": of_state, "all_states": of_state, "record_updates": of_record,
        "record_norms": of_record, "record_decays": of_record, "out": (of_out[0], max(absolute, 4 * EPSILONS[dtype])),
    }  # fmt: skip


def recurrent(window: Window) -> None:
    """Three windows of some requests, and a fold of what is pending. With a ring six, which pass its end."""
    dice, most, slots = window.dice, window.some(6, 1), window.some(5, 2)
    key_heads, dtype = window.some(2, 1), dice.choice(FLOATS)
    heads, (dk, dv) = key_heads * window.some(3, 1), dice.choice(((64, 64), (64, 128), (128, 64), (96, 64)))
    state_dtype, per_channel, norm = dice.choice((torch.float32, torch.bfloat16)), window.maybe(0.3), window.maybe()
    channels = (dk,) if per_channel else ()
    ring_rows = most + window.some(3) if window.maybe(0.4) else 0
    halves, all_rows = (1, ring_rows + most) if ring_rows else (2, most)
    layer = (
        window.normal(slots, heads, dv, dk, dtype=state_dtype, factor=0.3),
        window.normal(slots, halves, all_rows, key_heads, dk, dtype=dtype),
        window.normal(slots, halves, all_rows, key_heads).abs() + 0.1,
        torch.sigmoid(window.normal(slots, halves, all_rows, heads, *channels)),
        window.normal(slots, all_rows, heads, dv, factor=0.3),
        int64([POISON]),
    )
    A_log, dt_bias = window.normal(heads, factor=0.5), window.normal(heads, *channels, dtype=dtype)
    weight = window.normal(dv).abs() if norm else None
    cursors = surrounded(torch.zeros(slots, 3 if ring_rows else 2, dtype=torch.int32))
    window_id = int64([2**33 + 5])
    tolerances, lower_bound = _tolerances(dtype, state_dtype), dice.choice((None, None, -5.0))
    for _ in range(6 if ring_rows else 3):
        requests = dice.sample(range(1, slots), window.some(slots - 1, 1))
        lengths, padding = [window.some(most, 1) for _ in requests], window.some(2)
        starts = int32([0, *accumulate(lengths)])
        kept = int32([window.some(max(1, int(cursors[slot, 0])), 1) for slot in requests])
        plan_, cursors, window_id, *_ = window.call(
            "plan_recurrent_window", poisoned(len(requests) + 1, 4), cursors, window_id, int32(requests), starts, kept,
            most, None, None, ring_rows,
        )  # fmt: skip
        tokens = sum(lengths) + padding
        value = (tokens, heads, dv)
        after = window.call(
            "gated_delta_verify", poisoned(*value, dtype=dtype), *layer,
            window.normal(tokens, key_heads, dk, dtype=dtype), window.normal(tokens, key_heads, dk, dtype=dtype),
            window.normal(*value, dtype=dtype),
            window.normal(tokens, heads, *channels, dtype=dtype), window.normal(tokens, heads, dtype=dtype), A_log,
            dt_bias, plan_, window_id, starts, dk**-0.5, 1.0, 20.0, True,
            window.normal(*value, dtype=dtype) if norm else None, weight, 1e-5, dice.choice(("silu", "sigmoid")),
            window.bytes(*value, dk, dtype=state_dtype) if window.maybe() else None, window.maybe(), lower_bound,
            ring_rows, tolerances=tolerances,
        )  # fmt: skip
        layer = after[1:7]
    targets = list(range(1, slots))
    rows = int32([window.some(most, -1) for _ in targets])
    plan_, cursors, *_ = window.call(
        "plan_recurrent_fold", poisoned(slots, 4), cursors, int32(targets), int32(targets), rows, window.maybe()
    )
    window.call("gated_delta_fold", *([part] for part in layer), plan_, tolerances=tolerances)
    _recurrent_blocks(window, bool(ring_rows))


def _recurrent_blocks(window: Window, ring: bool) -> None:
    """Requests at the ends of their blocks, before or after a step. Each has two blocks of each of two groups."""
    dice, states, size, after = window.dice, window.some(4, 1), window.some(5, 1), window.maybe()
    blocks = torch.tensor(dice.sample(range(1, 4 * states + 1), 4 * states), dtype=torch.int32).view(2, states, 2)
    cursors = [[window.some(5), window.some(1), *([window.some(3)] if ring else [])] for _ in range(4 * states + 1)]
    of_states = {
        name: int32([window.some(most, -1) for _ in range(states)])
        for name, most in (("source", 1), ("kept", 6), ("target", 1), ("computed", 2 * size))
    }
    window.call(
        "plan_recurrent_block_fold", poisoned(2 * states + 1, 4), surrounded(torch.tensor(cursors, dtype=torch.int32)),
        list(blocks), int32(dice.sample(range(-1, states), states)), of_states["source"], of_states["kept"],
        None if after else of_states["target"], of_states["computed"] if after else None, size if after else 0,
        ring and not after and window.maybe(),
    )  # fmt: skip


# ---------------------------------------------------------------- rounds

FAMILIES: dict[str, Callable[[Window], None]] = {
    "accept": accept,
    "undo": undo,
    "shadow": shadow,
    "staging": staging,
    "drafter": drafter,
    "recurrent": recurrent,
}


def run_round(seed: int, device: str) -> Counter[str]:
    """Compare a random window of each family with the oracles.

    Args:
        seed: the same seed gives the same windows, on any device.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        The number of calls of each op.

    Raises:
        Mismatch: an op and its oracle differ.
        Exception: an op refused its arguments. Notes of the exception name the family.
    """
    calls: Counter[str] = Counter()
    for family in FAMILIES:
        calls += run_window(family, seed, device)
    return calls


def run_window(family: str, seed: int, device: str) -> Counter[str]:
    """Compare a random window of one family with the oracles. See :func:`run_round`."""
    window = Window(family, seed, device)
    FAMILIES[family](window)
    return window.calls
