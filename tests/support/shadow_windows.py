"""Complete windows of shadow pages: random requests in pages of any layout, and the expected result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensors import flags, int32, int64
from torch import Tensor

from nwor_ops import ops
from nwor_ops.testing.layouts import Shape, make_amx_pages, make_pages, random_bytes, same_memory, surrounded, twin
from nwor_ops.testing.oracle import shadow as oracle
from nwor_ops.testing.raw_rows import raw


@dataclass(frozen=True)
class Sequence:
    """One request of a window."""

    length: int  # length of the sequence, including this step's tokens
    given: int = 1  # tokens of this step that are not drafts
    drafts: int = 0
    accepted: int | tuple[int, ...] = 0  # their number, or a flag for each
    state: int = -1  # state of the request; -1 = padded
    without_slot: int = 0  # drafts at the end that are past the longest sequence


MIXED = (
    Sequence(14, 1, 3, 1, state=2),  # the tail page is half full
    Sequence(7, 7, 0, state=0),  # a prompt
    Sequence(11, 1, 4, 4, state=4),  # over the end of a page
    Sequence(8, 5, 3, 0, state=1),  # several given tokens, some of them in an earlier page
    Sequence(10, 1, 2, (0, 1), state=5),  # starts a page; only the second draft is accepted
    Sequence(0, 0, 0),  # padded
)


class GroupOfPlanes(NamedTuple):
    """One group of a window: its planes, slots and tables, as in an engine."""

    planes: list[Tensor]
    slot_mapping: Tensor
    block_table: Tensor


@dataclass
class ShadowWindow:
    """All arguments of open_window and close_window, for random pages of some requests.

    Shadow pages are the last pages of the caches. Pages of requests are drawn from the others, so no page is in two
    tables. `token_slots[g]` are the original slots of all tokens.
    """

    sequences: tuple[Sequence, ...]
    groups: list[GroupOfPlanes]
    page_offsets: Tensor | None
    block_size: int
    num_states: int
    num_shadows: int
    held: bool = False
    seed: int = 0
    idx_dtype: torch.dtype = torch.int32
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, generator = self.sequences, torch.Generator().manual_seed(self.seed)
        starts, draft_starts = [0], [0]
        for sequence in s:
            starts.append(starts[-1] + sequence.given + sequence.drafts)
            draft_starts.append(draft_starts[-1] + sequence.drafts)
        rows = draft_starts[-1]
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
            "query_start_loc": int32(*starts), "draft_start_loc": int32(*draft_starts),
            "seq_lens": int32(*(sequence.length for sequence in s)), "row_slots": surrounded(row_slots),
            "shadow_blocks": surrounded(shadow[torch.randperm(len(shadow), generator=generator)].int().view(shape)),
            "saved_slots": surrounded(torch.full((num_groups, self.num_tokens + 5), 77)),
            "tail_pages": surrounded(torch.full((num_groups, len(s) + 1), 77, dtype=torch.int32)),
            "idx_mapping": surrounded(torch.tensor(states, dtype=self.idx_dtype)),
            "row_rejected": flags(*self.rejected(), 1, 1),
            "num_rejected": int32(*self.num_rejected(), 0), "num_accepted": int32(*[77] * (len(s) + 1)),
            "counters": int64(10, 20, 30, 40, 50),
        }  # fmt: skip
        if self.held:
            self.tensors["held_slots"] = surrounded(torch.full(shape, -1))

    def copy(self, device: str | None = None) -> ShadowWindow:
        """The same window with separate memory."""
        other = object.__new__(ShadowWindow)
        vars(other).update(twin(vars(self), device))
        return other

    def draft_tokens(self, starts: list[int]) -> list[int]:
        ends = zip(starts[1:], self.sequences, strict=True)
        return [token for end, s in ends for token in range(end - s.drafts, end)]

    def rejected(self) -> list[bool]:
        """Whether each draft of the batch was rejected."""
        kept = [range(s.accepted) if isinstance(s.accepted, int) else s.accepted for s in self.sequences]
        return [i not in of for s, of in zip(self.sequences, kept, strict=True) for i in range(s.drafts)]

    def num_rejected(self) -> list[int]:
        """Rejected drafts of each request. It exists only if the accepted drafts are a prefix."""
        return [s.drafts - (s.accepted if isinstance(s.accepted, int) else len(s.accepted)) for s in self.sequences]

    @property
    def planes(self) -> list[Tensor]:
        return [plane for group in self.groups for plane in group.planes]

    def open_arguments(self, redirects: bool = True) -> tuple[Any, ...]:
        t = self.tensors
        return (
            self.planes, [len(group.planes) for group in self.groups], t["query_start_loc"],
            t["draft_start_loc"], t["seq_lens"], t["row_slots"], t["shadow_blocks"], *self.tables(redirects),
            t["saved_slots"], t["tail_pages"], t["idx_mapping"], t.get("held_slots"), self.page_offsets,
        )  # fmt: skip

    def close_arguments(self, redirects: bool = True) -> tuple[Any, ...]:
        t = self.tensors
        return (
            self.planes, [len(group.planes) for group in self.groups], t["query_start_loc"],
            t["draft_start_loc"], t["row_rejected"], t["shadow_blocks"], t["saved_slots"], t["tail_pages"],
            *self.tables(redirects), t["idx_mapping"], t.get("held_slots"), self.page_offsets,
        )  # fmt: skip

    def counted_arguments(self, redirects: bool = True) -> tuple[Any, ...]:
        """Arguments of close_window_from_rejected."""
        counted = [self.tensors[name] for name in ("num_rejected", "row_rejected", "num_accepted", "counters")]
        arguments = self.close_arguments(redirects)
        return (*arguments[:4], *counted, *arguments[5:])

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
) -> ShadowWindow:
    """A window over planes of keys. Each group has as many as the shape has layers."""
    pages = make_amx_pages(shape, dtype, offset) if amx else make_pages(layout, shape, dtype, offset)
    most_drafts = max((s.drafts for s in sequences), default=0)
    num_shadows = num_shadows or (shape.block_size - 2 + max(most_drafts, 1)) // shape.block_size + 1
    tokens = sum(s.given + s.drafts for s in sequences)
    columns = max((-(-s.length // shape.block_size) for s in sequences), default=0) + 1
    made = []
    for g in range(groups):
        table = surrounded(torch.full((len(sequences) + 1, columns + 2), 99, dtype=torch.int32))
        slots = surrounded(torch.full((tokens + 3,), -1))
        # The groups share their memory: all have the same planes.
        made.append(GroupOfPlanes(pages.key_caches if g == 0 else list(pages.key_caches), slots, table[:, :columns]))
    return ShadowWindow(
        sequences, made, pages.key_offsets, shape.block_size, num_states, num_shadows, **options
    )  # fmt: skip


# ---------------------------------------------------------------- the expected result


def run_and_compare_with_oracle(window, device=None):
    """Run the ops and the oracle on copies, and compare all memory after each op. Return the results of open and
    close."""
    _both_ways(window, device, "close_window_from_rejected", "counted_arguments")
    return _both_ways(window, device, "close_window", "close_arguments")


def _both_ways(window, device, close, close_arguments):
    ours, theirs = window.copy(device), window.copy()
    for op, arguments in (("open_window", "open_arguments"), (close, close_arguments)):
        getattr(ops, op)(*getattr(ours, arguments)())
        getattr(oracle, op)(*getattr(theirs, arguments)())
        assert same_memory(state_of(ours), state_of(theirs)), op
    return ours


def state_of(window):
    tables = [(group.slot_mapping, group.block_table) for group in window.groups]
    return window.planes, tables, window.tensors


def rows_of(window, g, slots):
    """The rows of some slots in every plane of a group."""
    block_size = window.block_size
    return [
        [raw(plane)[slot // block_size, slot % block_size].clone() for slot in slots]
        for plane in window.groups[g].planes
    ]


def write_rows(window, g, slots):
    """Write as an external writer: a row of random bytes for each slot that is not negative."""
    for index, plane in enumerate(window.groups[g].planes):
        count = plane.shape[2] * plane.shape[3]
        for token, slot in enumerate(slots):
            if slot >= 0:
                row = random_bytes(count, plane.dtype, 1000 * index + token).view(plane.shape[2:])
                raw(plane)[slot // window.block_size, slot % window.block_size] = raw(row)


def seen_by_attention(window, g, q):
    """Every row of a request, read through its block table."""
    table = window.groups[g].block_table[q].tolist()
    length = window.sequences[q].length - window.sequences[q].without_slot
    slots = [table[p // window.block_size] * window.block_size + p % window.block_size for p in range(length)]
    return rows_of(window, g, slots)


def same_rows(a, b):
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def assert_keeps_the_promise(window):
    """Run open, a forward that writes to the given slots, and close. Compare it with a run that writes in place.

    Attention reads the same rows in both. Pages of requests change only at rows that stay. At the end the pages of
    requests equal those of a run without the rejected drafts, and tables and slots have their former values.
    """
    vanilla, never_saw = window.copy(), window.copy()
    rejected_tokens = [t for t, gone in zip(drafts_of(window), window.rejected(), strict=True) if gone]
    shadow = set(window.tensors["shadow_blocks"].flatten().tolist())
    ops.open_window(*window.open_arguments())
    for g, slots in enumerate(window.token_slots):
        write_rows(window, g, window.groups[g].slot_mapping[: len(slots)].tolist())
        write_rows(vanilla, g, slots)
        kept = [-1 if token in rejected_tokens else slot for token, slot in enumerate(slots)]
        write_rows(never_saw, g, kept)
    for g in range(len(window.groups)):
        for q in range(len(window.sequences)):
            assert same_rows(seen_by_attention(window, g, q), seen_by_attention(vanilla, g, q))
    real = [block for block in range(window.groups[0].planes[0].shape[0]) if block not in shadow]
    for plane, other in zip(window.planes, never_saw.planes, strict=True):
        # Before the commit, pages of requests may have changed only at tokens that stay.
        changed = (raw(plane)[real] != raw(other)[real]).flatten(2).any(-1)
        slots = {real[b] * window.block_size + n for b, n in changed.nonzero().tolist()}
        for g, group in enumerate(window.groups):
            assert not slots & {s for t, s in enumerate(window.token_slots[g]) if t in rejected_tokens}, group
    ops.close_window(*window.close_arguments())
    for plane, other in zip(window.planes, never_saw.planes, strict=True):
        assert torch.equal(raw(plane)[real], raw(other)[real])
    for group, other in zip(window.groups, never_saw.groups, strict=True):
        assert same_memory((group.slot_mapping, group.block_table), (other.slot_mapping, other.block_table))


def drafts_of(window):
    return window.draft_tokens(window.tensors["query_start_loc"].tolist())
