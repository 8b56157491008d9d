"""Mode "stage" of the manager: the same calls as "cow", the same caches after them, and nothing in between."""

from __future__ import annotations

from typing import NamedTuple

import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import random_bytes
from samples import numbers
from test_no_sync import guard
from transactions import KINDS, make_batch, one_thread, put_rows  # noqa: F401

import nwor_ops
import nwor_ops.transaction.manager
from nwor_ops import DraftCommitManager, num_shadow_blocks
from nwor_ops.ops import COUNTERS

REQUESTS, DRAFTS, TOKENS = 4, 4, 40
ALL = tuple(KINDS)


class Decoding(NamedTuple):
    """One request's part of a step."""

    given: int
    drafts: int = 0
    accepted: int = 0


class Engine:
    """Requests with page tables over layers of some kinds; beside them the pages as they should be.

    Every group has pages of its own kind; a request's pages are picked in any order from those that are no shadow
    pages. A step advances every request by its given and accepted tokens.
    """

    def __init__(
        self, kinds=ALL, mode="stage", with_states=False, seed=0, pages=24, num_bonus_tokens=0, leading_zero=False
    ):
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
        lengths = [self.lengths[q] + r.given + r.drafts for q, r in enumerate(requests)]
        bonus = self.num_bonus_tokens * torch.arange(1, len(requests) + 1, dtype=torch.int32)
        counts = batch.window.cu_num_draft_tokens + bonus
        batch.window = batch.window._replace(
            cu_num_draft_tokens=torch.nn.functional.pad(counts, (1, 0)) if self.leading_zero else counts,
            num_bonus_tokens=self.num_bonus_tokens, leading_zero=self.leading_zero,
            seq_lens=torch.tensor(lengths, dtype=torch.int32), block_tables=self.tables, request_states=self.states,
        )  # fmt: skip
        return batch

    def reorder(self, order):
        """The requests, with all that is theirs, take other rows of the batch."""
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
            rows += [oracle.raw(p.view)[blocks, offsets] for p in cache.planes if p.page_offsets is None]
        return rows

    def bytes_of(self, name):
        return [oracle.raw(plane.view).clone() for plane in self.caches[name].planes]

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
        differ = (oracle.raw(view)[:real] != oracle.raw(other)[:real]).flatten(2).any(-1)
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
                assert torch.equal(*map(oracle.raw, views)), name


STEPS = (
    (Decoding(5), Decoding(9), Decoding(3), Decoding(7)),
    (Decoding(1, 4, 2), Decoding(1), Decoding(1, 3, 0), Decoding(1, 2, 2)),
    (Decoding(1, 4, 4), Decoding(1, 4, 0), Decoding(1, 1, 1), Decoding(0)),
    (Decoding(2, 3, 1), Decoding(1, 4, 3), Decoding(1, 4, 4), Decoding(4, 2, 0)),
)


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel"])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in ALL), ALL], ids="+".join)
def test_both_modes_leave_the_same_pages(kinds, end, with_states):
    stage, cow = Engine(kinds, "stage", with_states), Engine(kinds, "cow", with_states)
    for requests in STEPS:
        stage.step(requests, end)
        cow.step(requests, end)
        stage.assert_pages(cow)
        assert stage.manager.buffers.num_accepted.tolist() == cow.manager.buffers.num_accepted.tolist()
    assert stage.manager.stats() == cow.manager.stats()
    assert stage.manager.stats().rejected > 0


@pytest.mark.parametrize("with_states", [False, True])
def test_requests_in_other_rows(with_states):
    """A row of the batch is no request: what its shadow page holds may be another's."""
    stage, cow = Engine(mode="stage", with_states=with_states), Engine(mode="cow", with_states=with_states)
    for requests, order in zip(STEPS, ([0, 1, 2, 3], [2, 3, 1, 0], [1, 0, 3, 2], [3, 2, 0, 1]), strict=True):
        for engine in (stage, cow):
            engine.step(requests)
            engine.reorder(order)
            engine.step([Decoding(1, 3, 1)] * REQUESTS)
        stage.assert_pages(cow)


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_counts_of_logits(mode):
    """num_bonus_tokens and leading_zero, as vLLM's cu_num_logits: the same as counts of drafts."""
    stage, cow = Engine(mode=mode, num_bonus_tokens=1, leading_zero=True), Engine(mode="cow")
    for requests in STEPS:
        for engine in (stage, cow):
            engine.step(requests)
        stage.assert_pages(cow)
    assert stage.manager.stats() == cow.manager.stats()


def test_write_takes_format_and_scales():
    """As in cow: quantised by the scales given, key and value by their own."""
    pages = []
    for mode in ("cow", "stage"):
        cache = torch.zeros(12, 4, 2, 16, dtype=torch.uint8)
        manager = DraftCommitManager(
            max_num_tokens=8, max_num_requests=1, max_draft_tokens=4, device="cpu", mode=mode, max_drafts_per_request=4
        )
        manager.register_layer("one", nwor_ops.LayerCache.packed(cache))
        manager.allocate()
        batch = make_batch((Decoding(2, 3, 1),), {"default": [5, 6, 7, 8, 9]})
        window = batch.window._replace(
            seq_lens=torch.tensor([7], dtype=torch.int32),
            block_tables={"default": torch.tensor([[0, 1, 2]], dtype=torch.int32)},
        )
        window.slot_mappings["default"].copy_(torch.tensor([2, 3, 4, 5, 6]))
        manager.begin(window)
        key, value = numbers(5, 2, 8, seed=1), numbers(5, 2, 8, seed=2)
        scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.125])}
        manager.write("one", key, value, window.slot_mappings["default"], kv_cache_dtype="fp8_e4m3", **scales)
        manager.commit(batch.draft_token_ids, batch.sampled_token_ids)
        pages.append(cache[:6])
    assert pages[0].any()
    assert torch.equal(*pages)


@pytest.mark.parametrize("with_states", [False, True])
def test_abandon_keeps_every_row(with_states):
    """As if the library were not there: the same as a cow window that is abandoned."""
    stage, cow = Engine(mode="stage", with_states=with_states), Engine(mode="cow", with_states=with_states)
    for requests in STEPS:
        for engine in (stage, cow):
            engine.step(requests, "abandon")
        stage.assert_pages(cow)
    assert stage.manager.stats().abandoned == len(STEPS)


@given(st.data())
def test_any_steps(data):
    kinds = data.draw(st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True))
    with_states, seed = data.draw(st.booleans()), data.draw(st.integers(0, 99))
    stage, cow = (Engine(kinds, mode, with_states, seed) for mode in ("stage", "cow"))
    for _ in range(data.draw(st.integers(1, 4))):
        requests = []
        for _ in range(REQUESTS):
            drafts = data.draw(st.integers(0, DRAFTS))
            requests.append(Decoding(data.draw(st.integers(1, 4)), drafts, data.draw(st.integers(0, drafts))))
        end = data.draw(st.sampled_from(["commit", "commit_rejected", "cancel", "abandon"]))
        for engine in (stage, cow):
            engine.step(requests, end)
        stage.assert_pages(cow)


def test_a_forward_that_stopped_half_way_is_cancelled():
    """Layers that were never reached have nothing to lose: tables and pages are as before."""
    engine, untouched = Engine(), Engine()
    for one in (engine, untouched):
        one.step(STEPS[0])
    before = {group: table.clone() for group, table in engine.tables.items()}
    batch = engine.batch((Decoding(0, 4),) * REQUESTS)
    slots = {group: s.clone() for group, s in batch.slots.items()}
    engine.manager.begin(batch.window)
    engine.forward(batch, layers=list(engine.caches)[:3])
    engine.manager.cancel()
    engine.assert_pages(untouched)
    assert all(torch.equal(engine.tables[group], before[group]) for group in before)
    assert all(torch.equal(batch.slots[group], slots[group]) for group in slots)
    assert engine.manager.stats().rejected == REQUESTS * DRAFTS


@pytest.mark.parametrize("with_states", [False, True])
def test_a_step_that_stopped_half_way_is_repeated(with_states):
    """With given tokens: the layers reached are as in cow, the others but for the slots of these tokens, which are not
    read. The same step again then leaves the same pages everywhere."""
    stage, cow = Engine(mode="stage", with_states=with_states), Engine(mode="cow", with_states=with_states)
    reached = list(stage.caches)[:3]
    for requests in STEPS[:2]:
        for one in (stage, cow):
            one.step(requests)
    for one in (stage, cow):
        batch = one.batch(STEPS[2])
        one.manager.begin(batch.window)
        one.forward(batch, layers=reached)
        one.manager.cancel()
    given = set(range(batch.num_tokens)) - set(batch.drafted)
    stage.assert_pages(cow, reached)
    for name in set(stage.caches) - set(reached):
        slots = {int(batch.slots[stage.group_of[name]][token]) for token in given}
        for plane, other in zip(stage.caches[name].planes, cow.caches[name].planes, strict=True):
            if plane.page_offsets is None:
                assert stage.slots_that_differ(plane.view, other.view) <= slots
    for requests in STEPS[2:]:
        for one in (stage, cow):
            one.step(requests)
        stage.assert_pages(cow)


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
def test_a_commit_that_fails_can_be_cancelled(monkeypatch, end):
    engine = Engine(("packed", "one_backing"))  # two launches: the first one judges, the second one fails
    engine.step(STEPS[0])
    batch = engine.batch(STEPS[1])
    engine.manager.begin(batch.window)
    engine.forward(batch)
    real = nwor_ops.transaction.manager.ops.close_window
    monkeypatch.setattr(
        nwor_ops.transaction.shadow_pages.ops, "close_window", lambda *a: (_ for _ in ()).throw(RuntimeError("lost"))
    )
    outcome = (batch.draft_token_ids, batch.sampled_token_ids) if end == "commit" else (batch.num_rejected,)
    with pytest.raises(RuntimeError, match="lost"):
        getattr(engine.manager, end)(*outcome)
    monkeypatch.setattr(nwor_ops.transaction.shadow_pages.ops, "close_window", real)
    engine.manager.cancel()
    stats = engine.manager.stats()
    assert (stats.accepted, stats.rejected, stats.cancelled) == (0, stats.drafted, 1)


def test_a_window_that_cannot_be_opened_changes_nothing():
    engine, untouched = Engine(), Engine()
    for one in (engine, untouched):
        one.step(STEPS[0])
    batch = engine.batch(STEPS[1])
    wrong = batch.window._replace(seq_lens=batch.window.seq_lens + 1)
    with pytest.raises(ValueError, match=r"^open_window: row_slots must name the place in a page"):
        engine.manager.begin(wrong)
    engine.assert_pages(untouched)
    stats = engine.manager.stats()
    assert (stats.drafted, stats.rejected, stats.cancelled) == (9, 9, 1)
    for one in (engine, untouched):
        one.step(STEPS[1])
    engine.assert_pages(untouched)


NARROW = {
    "a page without a column": (lambda table: table[:, :1], IndexError, "open_window: block_tables must have a column"),
    "another dtype": (
        lambda table: table.long(),
        TypeError,
        r"begin: window.block_tables\['mla'\] must have dtype torch.int32",
    ),
}


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("case", NARROW)
def test_a_window_that_cannot_be_opened_in_the_last_group_changes_nothing(case, with_states):
    """The launches of the groups before have redirected slots and tables by then."""
    narrow, error, sentence = NARROW[case]
    engine, untouched = (Engine(with_states=with_states) for _ in range(2))
    for requests in STEPS[:2]:
        for one in (engine, untouched):
            one.step(requests)
    batch, last = engine.batch(STEPS[2]), list(engine.tables)[-1]
    slots = {group: s.clone() for group, s in batch.slots.items()}
    tables = {group: table.clone() for group, table in engine.tables.items()}
    refused = engine.tables | {last: narrow(engine.tables[last])}
    with pytest.raises(error, match=f"^{sentence}"):
        engine.manager.begin(batch.window._replace(block_tables=refused))
    assert all(torch.equal(batch.slots[group], slots[group]) for group in slots)
    assert all(torch.equal(engine.tables[group], tables[group]) for group in tables)
    engine.assert_pages(untouched)
    for requests in STEPS[2:]:
        for one in (engine, untouched):
            one.step(requests)
        engine.assert_pages(untouched)


def test_what_staging_needs():
    engine = Engine()
    window = engine.batch(STEPS[0]).window
    for lacking in (("seq_lens",), ("block_tables",), ("seq_lens", "block_tables")):
        message = f'window must have seq_lens and block_tables in mode "stage", got no {" and no ".join(lacking)}$'
        with pytest.raises(ValueError, match=message):
            engine.manager.begin(window._replace(**dict.fromkeys(lacking)))
    with pytest.raises(ValueError, match=r"a table for each group, got none for \['mla'\]"):
        engine.manager.begin(window._replace(block_tables={k: v for k, v in engine.tables.items() if k != "mla"}))
    assert engine.manager.stats().windows == 0
    limits = {"max_num_tokens": 4, "max_num_requests": 4, "max_draft_tokens": 4, "device": "cpu"}
    for options, sentence in (
        ({"mode": "shadow"}, "mode must be one of cow, stage, got 'shadow'"),
        ({"mode": "stage"}, "max_drafts_per_request must be at least 1 .*, got None"),
        ({"mode": "stage", "max_drafts_per_request": 0}, "max_drafts_per_request must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            DraftCommitManager(**limits, **options)


def test_pages_must_be_there():
    for first, sentence in ((None, "from page -"), ({"full": 15}, "from page 15 on, it has 16 pages")):
        manager = DraftCommitManager(
            max_num_tokens=9, max_num_requests=9, max_draft_tokens=9, device="cpu", mode="stage",
            max_drafts_per_request=4, shadow_blocks=first,
        )  # fmt: skip
        _, construct, layout, shape, dtype = KINDS["packed"]
        manager.register_layer("one", construct(layout, shape, dtype, 0)[0], "full")
        with pytest.raises(ValueError, match=rf"group 'full' must have 18 shadow pages .*{sentence}"):
            manager.allocate()


def staged_manager(caches, shadow_blocks):
    """A layer in each group: 2 requests of up to 4 drafts, pages of 4, so 4 shadow pages."""
    manager = DraftCommitManager(
        max_num_tokens=9, max_num_requests=2, max_draft_tokens=8, device="cpu", mode="stage", max_drafts_per_request=4,
        shadow_blocks=shadow_blocks,
    )  # fmt: skip
    for group, cache in caches.items():
        manager.register_layer(f"layer of {group}", cache, group)
    return manager


def test_groups_that_share_memory_must_not_share_shadow_pages():
    """As in engines whose groups take pages from one pool. Unnoticed, each would write over the other's drafts."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    one, other = construct(layout, shape, dtype, 0)
    for blocks in (None, {"a": 9}, {"a": 3, "b": 6}):
        manager = staged_manager({"a": one, "b": one}, blocks)
        with pytest.raises(ValueError, match=r"^allocate: groups 'a' and 'b' share memory and must not share shadow "):
            manager.allocate()
    for caches, blocks in (({"a": one, "b": one}, {"a": 8}), ({"a": one, "b": other}, None)):
        staged_manager(caches, blocks).allocate()


def test_shadow_blocks_of_a_group_that_is_none():
    """A misspelt name would mean the last pages, which may be in use."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    manager = staged_manager({"full": construct(layout, shape, dtype, 0)[0]}, {"ful": 3})
    with pytest.raises(ValueError, match=r"^allocate: shadow_blocks must name groups of \['full'\], got \['ful'\]$"):
        manager.allocate()


def test_launches():
    """Four for one geometry; layers of another cost two more, whatever their number."""
    assert Engine(("one_backing",)).manager.launches_per_window == 4
    assert Engine(("packed", "one_backing")).manager.launches_per_window == 6
    assert Engine(("packed",)).manager.log_bytes == 0


def test_neighbouring_groups_of_one_geometry_share_a_launch():
    manager = DraftCommitManager(
        max_num_tokens=9, max_num_requests=2, max_draft_tokens=8, device="cpu", mode="stage", max_drafts_per_request=4,
        shadow_blocks={"a": 12, "b": 8, "c": 4},
    )  # fmt: skip
    _, construct, layout, shape, dtype = KINDS["packed"]
    for index, group in enumerate("abc"):
        for layer, cache in enumerate(construct(layout, shape, dtype, index)):
            manager.register_layer(f"{group}{layer}", cache, group)
    manager.allocate()
    assert manager.launches_per_window == 4
    assert [launch.planes_per_group for launch in manager.recovery.launches] == [[2, 2, 2]]
    assert manager.recovery.shadow_blocks[:, 0, 0].tolist() == [12, 8, 4]


def test_groups_that_are_no_neighbours_have_launches_of_their_own():
    """One call takes consecutive groups, and at most 16 of them; the first call of a group changes its tables."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    caches = {f"{n:02}": construct(layout, shape, dtype, n)[0] for n in range(17)}
    manager = staged_manager(caches, None)
    manager.allocate()
    assert [(x.groups, x.redirects) for x in manager.recovery.launches] == [(slice(0, 16), True), (slice(16, 17), True)]
    other = construct("packed_hnd", shape, dtype, 0)[0]
    manager = staged_manager({"a": caches["00"], "b": other, "c": caches["01"]}, None)
    manager.register_layer("another of c", construct("packed_hnd", shape, dtype, 1)[0], "c")
    manager.allocate()
    launches = [(x.groups, x.planes_per_group, x.redirects) for x in manager.recovery.launches]
    assert launches == [
        (slice(0, 1), [1], True), (slice(2, 3), [1], True), (slice(1, 2), [1], True), (slice(2, 3), [1], False),
    ]  # fmt: skip


def test_pages_of_a_request():
    """Drafts that begin in any row of a page, counted one by one."""
    for block_size in range(1, 33):
        for drafts in range(1, 21):
            touched = [{(first + i) // block_size for i in range(drafts)} for first in range(block_size)]
            assert num_shadow_blocks(3, drafts, block_size) == 3 * max(map(len, touched))


def test_counters_are_those_of_cow():
    engine = Engine()
    for requests in STEPS:
        engine.step(requests)
    drafted = sum(r.drafts for requests in STEPS for r in requests)
    accepted = sum(r.accepted for requests in STEPS for r in requests)
    expected = {"windows": 4, "drafted": drafted, "accepted": accepted, "rejected": drafted - accepted, "overflowed": 0}
    assert dict(zip(COUNTERS, engine.manager.buffers.counters.tolist(), strict=True)) == expected
