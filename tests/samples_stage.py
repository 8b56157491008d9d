"""A few calls of every op of family stage, and whole windows of random requests in pages of any layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from torch import Tensor

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
    """Five rows and three layers; rows 0 and 2 are wanted and complete."""
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
    """`write_arguments` with six rows, of which some were accepted; `options` as there."""
    key, value, key_cache, value_cache, slots, *rest = write_arguments(**options)
    return (key, value, slots, flags(*accepted[: len(slots)]), key_cache, value_cache, *rest)


def commit_lengths(arguments: tuple[Any, ...], lengths: tuple[int, ...] = (2, 0, 1)) -> tuple[Any, ...]:
    """The same rows, accepted by a length of each request; row 4 belongs to none."""
    return (*arguments[:3], int32(*lengths), *arguments[4:], int32(0, 0, 1, 2, -1, 0), int32(0, 1, 0, 0, 0, 2))


def move_arguments(
    moves: tuple[tuple[int, int], ...] = ((1, 5), (5, 1), (7, 0), (0, 8), (-1, 3), (4, -2), (8, 11), (9, 9)),
    pages: Pages | None = None,
) -> tuple[Any, ...]:
    """Two slots that swap, a chain of moves, one that stays where it is, and two that are left out."""
    pages = pages or make_pages("one_backing", SMALL, torch.bfloat16)
    sources, destinations = zip(*moves, strict=True) if moves else ((), ())
    return pages.key_caches, int64(*sources), int64(*destinations), pages.key_offsets


# ---------------------------------------------------------------- windows


@dataclass(frozen=True)
class Sequence:
    """One request of a window."""

    length: int  # of the sequence, with this step's tokens
    given: int = 1  # tokens of this step that are no drafts
    drafts: int = 0
    accepted: int | tuple[int, ...] = 0  # so many, or which
    state: int = -1  # of the request; -1 = padded
    without_slot: int = 0  # drafts at the end that are past the longest sequence


MIXED = (
    Sequence(14, 1, 3, 1, state=2),  # the tail page is half full
    Sequence(7, 7, 0, state=0),  # a prompt
    Sequence(11, 1, 4, 4, state=4),  # over the end of a page
    Sequence(8, 5, 3, 0, state=1),  # several given tokens, some of them in an earlier page
    Sequence(10, 1, 2, (0, 1), state=5),  # starts a page; the second draft alone is accepted
    Sequence(0, 0, 0),  # padded
)


class GroupOfPlanes(NamedTuple):
    """One group of a window: its planes, slots and tables, all of them as an engine would have them."""

    planes: list[Tensor]
    slot_mapping: Tensor
    block_table: Tensor


@dataclass
class StagedWindow:
    """Everything that open_window and close_window take, for random pages of some requests.

    Shadow pages are the last pages of the caches; pages of requests are drawn from the others, so that no page is
    in two tables. `token_slots[g]` are the own slots of all tokens.
    """

    sequences: tuple[Sequence, ...]
    groups: list[GroupOfPlanes]
    page_offsets: Tensor | None
    block_size: int
    num_states: int
    num_shadows: int
    num_bonus_tokens: int = 0
    held: bool = False
    seed: int = 0
    idx_dtype: torch.dtype = torch.int32
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, generator = self.sequences, torch.Generator().manual_seed(self.seed)
        starts, counts, rows = [0], [], 0
        for q, sequence in enumerate(s):
            starts.append(starts[-1] + sequence.given + sequence.drafts)
            rows += sequence.drafts
            counts.append(rows + self.num_bonus_tokens * (q + 1))
        self.num_tokens, self.num_rows = starts[-1], rows
        num_blocks, num_groups = self.groups[0].planes[0].shape[0], len(self.groups)
        shadow = torch.arange(num_blocks - num_groups * self.num_states * self.num_shadows, num_blocks)
        shape = (num_groups, self.num_states, self.num_shadows)
        free = torch.randperm(int(shadow[0]), generator=generator).tolist()
        row_slots = torch.full((num_groups, rows + 2), -1)
        self.token_slots: list[list[int]] = []
        for g, group in enumerate(self.groups):
            slots = []
            for q, sequence in enumerate(s):
                pages = [free.pop() for _ in range(-(-sequence.length // self.block_size))]
                group.block_table[q, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
                first = sequence.length - sequence.given - sequence.drafts
                for position in range(first, sequence.length):
                    lost = position >= sequence.length - sequence.without_slot
                    page, offset = divmod(position, self.block_size)
                    slots.append(-1 if lost else pages[page] * self.block_size + offset)
            group.slot_mapping[: len(slots)] = torch.tensor(slots, dtype=torch.int64)
            row_slots[g, :rows] = torch.tensor([slots[t] for t in self.draft_tokens(starts)], dtype=torch.int64)
            self.token_slots.append(slots)
        states = [sequence.state for sequence in s]
        self.tensors = {
            "query_start_loc": int32(*starts), "cu_num_draft_tokens": int32(*counts),
            "seq_lens": int32(*(sequence.length for sequence in s)), "row_slots": surrounded(row_slots),
            "shadow_blocks": surrounded(shadow[torch.randperm(len(shadow), generator=generator)].int().view(shape)),
            "saved_slots": surrounded(torch.full((num_groups, self.num_tokens + 5), 77)),
            "tail_pages": surrounded(torch.full((num_groups, len(s) + 1), 77, dtype=torch.int32)),
            "idx_mapping": surrounded(torch.tensor(states, dtype=self.idx_dtype)),
            "row_rejected": flags(*self.rejected(), 1, 1),
        }  # fmt: skip
        if self.held:
            self.tensors["held_slots"] = surrounded(torch.full(shape, -1))

    def draft_tokens(self, starts: list[int]) -> list[int]:
        ends = zip(starts[1:], self.sequences, strict=True)
        return [token for end, s in ends for token in range(end - s.drafts, end)]

    def rejected(self) -> list[bool]:
        """Of each draft of the batch."""
        kept = [range(s.accepted) if isinstance(s.accepted, int) else s.accepted for s in self.sequences]
        return [i not in of for s, of in zip(self.sequences, kept, strict=True) for i in range(s.drafts)]

    @property
    def planes(self) -> list[Tensor]:
        return [plane for group in self.groups for plane in group.planes]

    def open_arguments(self, redirects: bool = True) -> tuple[Any, ...]:
        t = self.tensors
        return (
            self.planes, [len(group.planes) for group in self.groups], t["query_start_loc"],
            t["cu_num_draft_tokens"], t["seq_lens"], t["row_slots"], t["shadow_blocks"], *self.tables(redirects),
            t["saved_slots"], t["tail_pages"], t["idx_mapping"], t.get("held_slots"), self.page_offsets,
            self.num_bonus_tokens,
        )  # fmt: skip

    def close_arguments(self, redirects: bool = True) -> tuple[Any, ...]:
        t = self.tensors
        return (
            self.planes, [len(group.planes) for group in self.groups], t["query_start_loc"],
            t["cu_num_draft_tokens"], t["row_rejected"], t["shadow_blocks"], t["saved_slots"], t["tail_pages"],
            *self.tables(redirects), t["idx_mapping"], t.get("held_slots"), self.page_offsets, self.num_bonus_tokens,
        )  # fmt: skip

    def tables(self, redirects: bool) -> tuple[list[Tensor], list[Tensor]]:
        groups = self.groups if redirects else []
        return [group.slot_mapping for group in groups], [group.block_table for group in groups]


WINDOW_SHAPE = Shape(blocks=60, block_size=4, heads=2, key_width=8, value_width=8, layers=2)


def make_window(
    sequences: tuple[Sequence, ...] = MIXED,
    layout: str = "packed",
    shape: Shape = WINDOW_SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    groups: int = 1,
    num_shadows: int | None = None,
    num_states: int = 6,
    offset: int = 0,
    amx: bool = False,
    **options: Any,
) -> StagedWindow:
    """A window over planes of keys, in each group as many as the shape has layers."""
    pages = make_amx_pages(shape, dtype, offset) if amx else make_pages(layout, shape, dtype, offset)
    most_drafts = max((s.drafts for s in sequences), default=0)
    num_shadows = num_shadows or (shape.block_size - 2 + max(most_drafts, 1)) // shape.block_size + 1
    tokens = sum(s.given + s.drafts for s in sequences)
    columns = max((-(-s.length // shape.block_size) for s in sequences), default=0) + 1
    made = []
    for g in range(groups):
        table = surrounded(torch.full((len(sequences) + 1, columns + 2), 99, dtype=torch.int32))
        slots = surrounded(torch.full((tokens + 3,), -1))
        # Groups overlay one another's memory: all of them have the same planes.
        made.append(GroupOfPlanes(pages.key_caches if g == 0 else list(pages.key_caches), slots, table[:, :columns]))
    return StagedWindow(
        sequences, made, pages.key_offsets, shape.block_size, num_states, num_shadows, **options
    )  # fmt: skip


def opened(window: StagedWindow) -> StagedWindow:
    ops.open_window(*window.open_arguments())
    return window


def held_window(**options: Any) -> StagedWindow:
    """A window some of whose shadow pages hold rows already."""
    window = make_window(held=True, **options)
    held, row_slots = window.tensors["held_slots"], window.tensors["row_slots"]
    held[:, 2, :] = row_slots[0, 0] - 3  # one of two committed rows of the first request's tail page
    held[:, 0, :] = 5  # of a request without drafts: forgotten
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
            make_window(groups=2, num_bonus_tokens=1, idx_dtype=torch.int64).open_arguments(),
            make_window(layout="vec", dtype=torch.float32).open_arguments(redirects=False),
            make_window(shape=Shape(60, 16, 2, 16, 16), amx=True).open_arguments(),
            make_window(()).open_arguments(),
        ],
        "close_window": lambda: [
            opened(held_window()).close_arguments(),
            opened(make_window(groups=2, num_bonus_tokens=1)).close_arguments(),
            opened(make_window(layout="vec", dtype=torch.float32)).close_arguments(redirects=False),
            opened(make_window(shape=Shape(60, 16, 2, 16, 16), amx=True)).close_arguments(),
            make_window(()).close_arguments(),
        ],
    }
    return samples[op]()
