"""Test windows that a CUDA graph begins (`plan_in_graph`, `begin_in_graph`), with the forward's writes in the graph."""

from __future__ import annotations

import pytest
import torch
from no_sync import no_waits_or_allocations

from nwor_ops import DraftCommitManager, LayerCache, Window, num_shadow_blocks, ops
from nwor_ops.transaction.state import State

REQUESTS, DRAFTS, LAYERS, HEADS, WIDTH = 8, 4, 4, 2, 64
TOKENS, BLOCKS, BLOCK_SIZE, COLUMNS = REQUESTS * (DRAFTS + 1), 40, 16, 5
SHADOWS = num_shadow_blocks(REQUESTS, DRAFTS, BLOCK_SIZE)
GROUPS = ("full", "sliding")


@pytest.fixture(params=["cow", "stage", "stage with states"])
def mode(request):
    return request.param


class Engine:
    """Layers in two groups, whose forward is a CUDA graph with a begin at its head.

    ``expected`` has a copy of each cache. Only rows of kept tokens are written there. The graph also copies the pages
    of each request to ``seen``, as its tables name them after the writes.
    """

    def __init__(self, device, mode, seed=0):
        self.random, self.device = torch.Generator().manual_seed(seed), device
        self.is_stage = mode != "cow"
        self.manager = DraftCommitManager(
            max_num_tokens=TOKENS, max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * DRAFTS, device=device,
            mode=mode.split()[0], max_drafts_per_request=DRAFTS,
        )  # fmt: skip
        shape = (BLOCKS + SHADOWS, BLOCK_SIZE, HEADS, 2 * WIDTH)  # the last pages are the shadow pages
        self.caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        self.expected = [cache.clone() for cache in self.caches]
        for number, cache in enumerate(self.caches):
            self.manager.register_layer(f"{number}", LayerCache.packed(cache), self.group(number))
        self.manager.allocate()
        self.slots = {group: torch.full((TOKENS,), -1, device=device) for group in GROUPS}
        self.tables = {group: torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32, device=device) for group in GROUPS}
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(REQUESTS, dtype=torch.int32, device=device)
        self.states = torch.full((REQUESTS,), -1, device=device) if mode == "stage with states" else None
        self.enabled = torch.zeros(1, dtype=torch.bool, device=device)
        self.rows = torch.randn(LAYERS, 2, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
        self.seen = [cache.new_zeros(REQUESTS, COLUMNS, *shape[1:]) for cache in self.caches]
        self.counts = dict.fromkeys(ops.COUNTERS, 0)
        self.lengths, self.graph = [], torch.cuda.CUDAGraph()
        self.load()
        self.plan()  # load the kernels
        self.manager.begin(self.window)
        self.forward()
        self.manager.commit_rejected(self.num_rejected)
        self.keep(self.kept)
        with torch.cuda.graph(self.graph):
            self.plan()
            self.forward()

    def plan(self):
        of_stage = (self.seq_lens, self.tables, self.states) if self.is_stage else ()
        self.manager.plan_in_graph(self.starts, self.slots, self.enabled, *of_stage)

    def forward(self):
        for number, (cache, seen) in enumerate(zip(self.caches, self.seen, strict=True)):
            group = self.group(number)
            self.manager.write(f"{number}", *self.rows[number], self.slots[group])
            torch.index_select(cache, 0, self.tables[group].flatten(), out=seen.flatten(0, 1))

    @staticmethod
    def group(number):
        return GROUPS[number % 2]

    def draw(self, low, high):
        return int(torch.randint(low, high + 1, (1,), generator=self.random))

    def load(self, more=0):
        """Fill the engine's tensors with a step of other requests, or with the next step of the same ones.

        Each request has `more` tokens beyond its drafts and one.
        """
        longest = COLUMNS * BLOCK_SIZE - DRAFTS - 1 - more
        if not self.lengths or max(self.lengths) > longest or self.draw(0, 2) == 0:
            self.manager.forget_shadow_pages()  # the pages have other owners
            self.count = self.draw(1, REQUESTS)
            self.lengths = [self.draw(0, 40) for _ in range(self.count)]
            self.of_requests = torch.randperm(REQUESTS, generator=self.random)[: self.count]
            self.pages = {group: torch.randperm(BLOCKS, generator=self.random).view(REQUESTS, -1) for group in GROUPS}
        self.drafts = [self.draw(0, DRAFTS - more) for _ in range(self.count)]
        self.rejected = [self.draw(0, drafts) for drafts in self.drafts]
        tokens = [1 + more + drafts for drafts in self.drafts]
        starts = torch.tensor([0, *tokens]).cumsum(0)
        self.total = int(starts[-1])
        self.starts.fill_(self.total)[: self.count + 1] = starts.to(self.device, torch.int32)
        self.ends = [length + n for length, n in zip(self.lengths, tokens, strict=True)]
        self.seq_lens.fill_(0)[: self.count] = torch.tensor(self.ends, dtype=torch.int32)
        if self.states is not None:
            self.states.fill_(-1)[: self.count] = self.of_requests
        self.kept, at = [], 0
        for length, rejected in zip(tokens, self.rejected, strict=True):
            self.kept += range(at, at + length - rejected)
            at += length
        self.own = {}  # the slots of each request's tokens, from the first of its sequence
        for group, pages in self.pages.items():
            slots = [pages[q, torch.arange(end) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(end) % BLOCK_SIZE
                     for q, end in enumerate(self.ends)]  # fmt: skip
            self.own[group] = slots
            of_step = torch.cat([own[length:] for own, length in zip(slots, self.lengths, strict=True)])
            self.slots[group].fill_(-1)[: self.total] = of_step
            self.tables[group].zero_()[: self.count] = pages[: self.count].int()
        self.rows.copy_(torch.randn(self.rows.shape, generator=self.random))
        logits = torch.tensor([0, *(drafts + 1 for drafts in self.drafts)]).cumsum(0).to(self.device, torch.int32)
        self.num_rejected = torch.tensor(self.rejected, dtype=torch.int32, device=self.device)
        self.window = Window(
            self.starts, logits, self.slots, sum(self.drafts), num_bonus_tokens=1, leading_zero=True,
            seq_lens=self.seq_lens, block_tables=self.tables, request_states=self.states,
        )  # fmt: skip
        self.before = self.tables_and_slots()

    def tables_and_slots(self):
        return [own.clone() for of in (self.slots, self.tables) for own in of.values()]

    def run(self, in_graph):
        """Begin the window, replay the forward, and commit."""
        if in_graph:
            self.manager.begin_in_graph(self.window, self.count)
        else:
            self.manager.begin(self.window)
        self.enabled.fill_(in_graph)
        self.graph.replay()
        self.manager.commit_rejected(self.num_rejected)

    def keep(self, tokens, windows=1, rejected=None):
        """Expect these tokens in the caches, and the counts of the window."""
        self.check_seen()
        for number, cache in enumerate(self.expected):
            rows = torch.cat(tuple(self.rows[number]), -1)[tokens]
            cache.view(-1, HEADS, 2 * WIDTH)[self.before[number % 2][tokens]] = rows
        kept = set(tokens)
        for q, (first, end) in enumerate(zip(self.starts.tolist(), self.starts.tolist()[1:], strict=False)):
            if q < self.count:
                self.lengths[q] += sum(token in kept for token in range(first, end))
        rejected = sum(self.rejected) if rejected is None else rejected
        self.counts["windows"] += windows
        self.counts["drafted"] += windows * sum(self.drafts)
        self.counts["rejected"] += windows * rejected
        self.counts["accepted"] += windows * (sum(self.drafts) - rejected)

    def check_seen(self):
        """Attention reads the committed rows of each request, and then all rows of this step."""
        for number, (seen, expected) in enumerate(zip(self.seen, self.expected, strict=True)):
            written = expected.view(-1, HEADS, 2 * WIDTH).clone()
            written[self.before[number % 2][: self.total]] = torch.cat(tuple(self.rows[number]), -1)[: self.total]
            for q, slots in enumerate(self.own[self.group(number)]):
                assert torch.equal(seen[q].flatten(0, 1)[: len(slots)], written[slots.to(self.device)])

    def check(self):
        for cache, expected in zip(self.caches, self.expected, strict=True):
            assert torch.equal(cache[:BLOCKS].view(torch.int16), expected[:BLOCKS].view(torch.int16))
        assert self.manager.buffers.counters.tolist() == list(self.counts.values())
        assert all(torch.equal(*pair) for pair in zip(self.tables_and_slots(), self.before, strict=True))


def test_begins_in_a_graph_and_called_ones(device, mode):
    """Random batches from one graph: with a begin of the graph, with a called one, and without a window."""
    engine = Engine(device, mode)
    for number in range(300):
        way = engine.draw(0, 3)
        engine.load(more=engine.draw(0, 1) if way == 2 else 0)
        if way == 3:
            engine.manager.forget_shadow_pages()
            engine.enabled.fill_(False)
            engine.graph.replay()  # as in a dummy run: it writes, and begins nothing
            engine.keep(list(range(engine.total)), windows=0)
        else:
            engine.run(in_graph=way < 2)
            engine.keep(engine.kept)
        if number % 10 == 0:
            engine.check()
    engine.check()
    assert engine.counts["rejected"] > 100


def test_the_host_neither_waits_nor_allocates(device, mode):
    """Begin launches nothing. The graph and the commit are all that a step launches."""
    engine = Engine(device, mode)
    for _ in range(3):
        engine.load()
        engine.run(True)
        engine.keep(engine.kept)
    engine.load()
    with no_waits_or_allocations():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.manager.begin_in_graph(engine.window, engine.count)
        engine.graph.replay()
        engine.manager.commit_rejected(engine.num_rejected)
    assert not [event for event in profile.events() if event.name.startswith(("nwor::", "aten::", "cuda"))]
    engine.keep(engine.kept)
    engine.check()


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("end", ["cancel", "abandon"])
def test_a_step_that_fails(device, mode, end, replayed):
    """Only the device knows whether the replay has begun the window. The log has rows of the window before, and the
    shadow pages its slots."""
    engine = Engine(device, mode)
    for _ in range(3):
        engine.load()
        engine.run(True)
        engine.keep(engine.kept)
    while not sum(engine.drafts) > sum(engine.rejected) > 0:
        engine.load()
        engine.run(True)
        engine.keep(engine.kept)
    engine.load()
    while not sum(engine.drafts):
        engine.load()
    engine.manager.begin_in_graph(engine.window, engine.count)
    if replayed:
        engine.graph.replay()
    getattr(engine.manager, end)()
    engine.manager.forget_shadow_pages()
    assert engine.manager.state is State.CLOSED
    first = engine.starts[: engine.count].tolist()
    if replayed and end == "cancel":
        engine.keep(first, rejected=sum(engine.drafts))
    elif replayed:
        engine.keep(list(range(engine.total)), rejected=0)
        engine.counts["accepted"] -= sum(engine.drafts)
    engine.check()
    for _ in range(20):
        engine.load()
        engine.run(True)
        engine.keep(engine.kept)
    engine.check()


def test_an_invalid_batch_is_not_planned(device, mode):
    """A request without tokens that is not at the end. The kernel reports it, and no row is logged, restored or
    redirected."""
    engine = Engine(device, mode)
    engine.load()
    engine.run(True)
    engine.keep(engine.kept)
    engine.load()
    engine.starts.copy_(torch.tensor([0, 3, 3, 6, 6, 6, 6, 6, 6]))
    engine.enabled.fill_(True)
    before = engine.manager.buffers.counters.clone()
    engine.graph.replay()
    engine.enabled.fill_(False)
    changed = (engine.manager.buffers.counters - before).tolist()
    assert dict(zip(ops.COUNTERS, changed, strict=True)) == dict.fromkeys(ops.COUNTERS, 0) | {"overflowed": 1}
    assert engine.manager.buffers.log_rows.eq(-1).all()
    assert engine.manager.buffers.row_slots.eq(-1).all()
    assert all(torch.equal(*pair) for pair in zip(engine.tables_and_slots(), engine.before, strict=True))
