"""An engine in miniature, for either mode of the manager: requests with page tables, step by step."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from no_sync import guard
from transactions import KINDS, Request, make_batch, put_rows

from nwor_ops import DraftCommitManager, Layout, num_shadow_blocks
from nwor_ops.testing.layouts import random_bytes, raw

REQUESTS, DRAFTS, TOKENS = 4, 4, 40
ALL = tuple(KINDS)


class Engine:
    """Requests with page tables over layers of some kinds; next to them the pages as they should be.

    Every group has its own kind of pages. A request gets pages in any order, but no shadow pages. A step advances every
    request by its given and accepted tokens.

    With `binds` all batches have their slots in the same tensors, which the manager binds once.
    """

    def __init__(
        self, kinds=ALL, mode="stage", with_states=False, seed=0, pages=24, num_bonus_tokens=0, leading_zero=False,
        binds=False,
    ):  # fmt: skip
        self.random, self.num_bonus_tokens = torch.Generator().manual_seed(seed), num_bonus_tokens
        self.leading_zero = leading_zero
        self.manager = DraftCommitManager(
            max_num_tokens=TOKENS, max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * DRAFTS, device="cpu",
            mode=mode, max_drafts_per_request=DRAFTS if mode == "stage" else None,
        )  # fmt: skip
        self.caches, self.group_of, self.block_sizes = {}, {}, {}
        for number, kind in enumerate(kinds):
            group, construct, layout, shape, dtype = KINDS[kind]
            self.block_sizes[group] = shape.block_size
            blocks = pages * 16 // shape.block_size + REQUESTS * (DRAFTS + 1)
            for index, cache in enumerate(construct(layout, shape._replace(blocks=blocks), dtype, number)):
                name = f"{kind}.{index}"
                self.caches[name], self.group_of[name] = cache, group
                self.manager.register_layer(name, cache, group)
        self.manager.allocate()
        self.shadows = num_shadow_blocks(REQUESTS, DRAFTS, min(self.block_sizes.values()))
        self.tables = {}
        for group in self.block_sizes:
            usable = self.blocks_of(group) - self.shadows
            order = torch.randperm(usable, generator=self.random)
            columns = usable // REQUESTS
            self.tables[group] = order[: columns * REQUESTS].int().view(REQUESTS, columns)
        self.states = torch.randperm(REQUESTS, generator=self.random).int() if with_states else None
        self.lengths = [0] * REQUESTS
        self.slots = {group: torch.full((TOKENS,), -1) for group in self.block_sizes} if binds else {}
        self.layout = None

    def blocks_of(self, group):
        return next(c.planes[0].view.shape[0] for n, c in self.caches.items() if self.group_of[n] == group)

    def batch(self, requests, padding=2):
        slots = {}
        for group, block_size in self.block_sizes.items():
            table = self.tables[group]
            slots[group] = [
                int(table[q, p // block_size]) * block_size + p % block_size
                for q, r in enumerate(requests)
                for p in range(self.lengths[q], self.lengths[q] + r.given + r.drafts)
            ] + [-1] * padding
        batch = make_batch(requests, slots)
        for group, own in self.slots.items():
            own.fill_(-1)[: len(slots[group])] = batch.slots[group]
            batch.slots[group] = own
        lengths = [self.lengths[q] + r.given + r.drafts for q, r in enumerate(requests)]
        bonus = self.num_bonus_tokens * torch.arange(1, len(requests) + 1, dtype=torch.int32)
        counts = batch.window.cu_num_draft_tokens + bonus
        layout = Layout(batch.slots, self.tables, self.num_bonus_tokens, self.leading_zero, self.states is not None)
        batch.window = batch.window._replace(
            cu_num_draft_tokens=torch.nn.functional.pad(counts, (1, 0)) if self.leading_zero else counts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32), request_states=self.states,
        )  # fmt: skip
        if not self.slots or self._is_new(layout):
            self.manager.bind(layout)
        return batch

    def _is_new(self, layout):
        """Whether the layout has other tensors than the last one."""
        last, self.layout = self.layout, layout
        if last is None or last[2:] != layout[2:]:
            return True
        pairs = [(old[group], new[group]) for old, new in zip(last[:2], layout[:2], strict=True) for group in new]
        return any(old is not new for old, new in pairs)

    def reorder(self, order):
        """Move every request and its data to another row of the batch, in other tensors."""
        self.slots = {group: slots.clone() for group, slots in self.slots.items()}
        self.tables = {group: table[order] for group, table in self.tables.items()}
        self.lengths = [self.lengths[q] for q in order]
        if self.states is not None:
            self.states = self.states[order]

    def forward(self, batch, layers=None):
        """Write random rows in every layer, or in some of them."""
        for name in self.caches if layers is None else layers:
            cache, slots = self.caches[name], batch.slots[self.group_of[name]]
            rows = tuple(
                random_bytes(
                    len(slots) * plane.view.shape[2] * plane.view.shape[3], plane.view.dtype,
                    int(torch.randint(0, 9999, (1,), generator=self.random)),
                ).view(len(slots), *plane.view.shape[2:])
                for plane in cache.planes
            )  # fmt: skip
            if cache.writable:
                self.manager.write(name, *cache.key_value(rows), slots)
            else:
                self.manager.log(name, slots)
                put_rows(cache.planes, rows, slots.tolist())

    def step(self, requests, end="commit"):
        """One window, watched: at its end slots and tables are as they were before."""
        batch = self.batch(requests)
        own = {group: slots.tolist() for group, slots in batch.slots.items()}
        tables = {group: table.clone() for group, table in self.tables.items()}
        committed = self.committed_rows()
        with guard():
            self.manager.begin(batch.window)
        before = {name: self.bytes_of(name) for name in self.caches}
        self.forward(batch)
        self.assert_no_draft_is_in_a_page(before, batch, own)
        for seen, rows in zip(self.committed_rows(), committed, strict=True):
            assert torch.equal(seen, rows)  # what attention reads, by tables that may be redirected
        if end == "commit":
            with guard():
                self.manager.commit(batch.draft_token_ids, batch.sampled_token_ids)
        elif end == "commit_rejected":
            with guard():
                self.manager.commit_rejected(batch.num_rejected)
        else:
            getattr(self.manager, end)()
        for group in self.block_sizes:
            assert batch.slots[group].tolist() == own[group]
            assert torch.equal(self.tables[group], tables[group])
        for q, r in enumerate(requests):
            kept = {"cancel": 0, "abandon": r.drafts}.get(end, r.accepted)
            self.lengths[q] += r.given + kept

    def committed_rows(self):
        """Of every request in every plane, found by the block tables as they are."""
        rows = []
        for name, cache in self.caches.items():
            group, size = self.group_of[name], self.block_sizes[self.group_of[name]]
            positions = [torch.arange(length) for length in self.lengths]
            blocks = torch.cat([self.tables[group][q, p // size] for q, p in enumerate(positions)]).long()
            offsets = torch.cat(positions) % size
            rows += [raw(p.view)[blocks, offsets] for p in cache.planes if p.page_offsets is None]
        return rows

    def bytes_of(self, name):
        return [raw(plane.view).clone() for plane in self.caches[name].planes]

    def assert_no_draft_is_in_a_page(self, before, batch, own):
        """After the forward, real pages changed at most at given tokens."""
        if self.manager.mode != "stage":
            return
        for name, cache in self.caches.items():
            group = self.group_of[name]
            for plane, old in zip(cache.planes, before[name], strict=True):
                if plane.page_offsets is not None:
                    continue
                drafts = {own[group][t] for t in batch.drafted}
                assert not self.slots_that_differ(plane.view, old) & drafts

    def slots_that_differ(self, view, other):
        """Of real pages."""
        real = view.shape[0] - self.shadows
        differ = (raw(view)[:real] != raw(other)[:real]).flatten(2).any(-1)
        return {b * view.shape[1] + n for b, n in differ.nonzero().tolist()}

    def assert_pages(self, other, names=None):
        """Real pages, of all layers or some, hold the same as those of another engine."""
        for name in self.caches if names is None else names:
            cache = self.caches[name]
            real = self.blocks_of(self.group_of[name]) - self.shadows
            for plane, expected in zip(cache.planes, other.caches[name].planes, strict=True):
                views = [p.view[:real] for p in (plane, expected)]
                if plane.page_offsets is not None:  # strides say nothing of the order in a page: whole pages
                    size, start = real * plane.view.stride(0), cache.planes[0].view.storage_offset()
                    views = [p.view.as_strided((size,), (1,), start) for p in (plane, expected)]
                assert torch.equal(*map(raw, views)), name


STEPS = (
    (Request(5), Request(9), Request(3), Request(7)),
    (Request(1, 4, 2), Request(1), Request(1, 3, 0), Request(1, 2, 2)),
    (Request(1, 4, 4), Request(1, 4, 0), Request(1, 1, 1), Request(0)),
    (Request(2, 3, 1), Request(1, 4, 3), Request(1, 4, 4), Request(4, 2, 0)),
)


@contextmanager
def refusal(kinds=ALL, with_states=False):
    """Yield an engine after two steps, and its next batch, which the caller lets it refuse.

    Slots, tables and pages must then be as they were, and the next steps run.
    """
    engine, untouched = (Engine(kinds, "stage", with_states, binds=True) for _ in range(2))
    for requests in STEPS[:2]:
        for one in (engine, untouched):
            one.step(requests)
    batch = engine.batch(STEPS[2])
    before = [(tensor, tensor.clone()) for of in (batch.slots, engine.tables) for tensor in of.values()]
    yield engine, batch
    assert all(torch.equal(tensor, old) for tensor, old in before)
    engine.assert_pages(untouched)
    for requests in STEPS[2:]:
        for one in (engine, untouched):
            one.step(requests)
        engine.assert_pages(untouched)
