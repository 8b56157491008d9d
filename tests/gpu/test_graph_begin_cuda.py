"""Test windows that a CUDA graph begins (`plan_in_graph`, `begin_in_graph`), with the forward's writes in the graph."""

from __future__ import annotations

import pytest
import torch
from no_sync import no_waits_or_allocations

from nwor_ops import DraftCommitManager, LayerCache, Window, ops
from nwor_ops.transaction.state import State

REQUESTS, DRAFTS, LAYERS, HEADS, WIDTH = 8, 4, 4, 2, 64
TOKENS, BLOCKS, BLOCK_SIZE = REQUESTS * (DRAFTS + 1), 32, 16
GROUPS = ("full", "sliding")


class Engine:
    """Layers in two groups, whose forward is a CUDA graph with a begin at its head.

    ``expected`` has a copy of each cache. Only rows of kept tokens are written there.
    """

    def __init__(self, device, seed=0):
        self.random, self.device = torch.Generator().manual_seed(seed), device
        self.manager = DraftCommitManager(
            max_num_tokens=TOKENS, max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * DRAFTS, device=device
        )
        shape = (BLOCKS, BLOCK_SIZE, HEADS, 2 * WIDTH)
        self.caches = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
        self.expected = [cache.clone() for cache in self.caches]
        for number, cache in enumerate(self.caches):
            self.manager.register_layer(f"{number}", LayerCache.packed(cache), self.group(number))
        self.manager.allocate()
        self.slots = {group: torch.full((TOKENS,), -1, device=device) for group in GROUPS}
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
        self.enabled = torch.zeros(1, dtype=torch.bool, device=device)
        self.rows = torch.randn(LAYERS, 2, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
        self.counts = dict.fromkeys(ops.COUNTERS, 0)
        self.graph = torch.cuda.CUDAGraph()
        self.load()
        self.manager.plan_in_graph(self.starts, self.slots, self.enabled)  # load the kernels
        self.manager.begin(self.window)
        self.forward()
        self.manager.commit_rejected(self.num_rejected)
        self.keep(self.kept)
        with torch.cuda.graph(self.graph):
            self.manager.plan_in_graph(self.starts, self.slots, self.enabled)
            self.forward()

    def forward(self):
        for number in range(LAYERS):
            self.manager.write(f"{number}", *self.rows[number], self.slots[self.group(number)])

    @staticmethod
    def group(number):
        return GROUPS[number % 2]

    def draw(self, low, high):
        return int(torch.randint(low, high + 1, (1,), generator=self.random))

    def load(self, more=0):
        """Fill the engine's tensors with another batch. Each request has `more` tokens beyond its drafts and one."""
        count = self.draw(1, REQUESTS if not more else REQUESTS // 2)
        self.drafts = [self.draw(0, DRAFTS - more) for _ in range(count)]
        self.rejected = [self.draw(0, drafts) for drafts in self.drafts]
        tokens = [1 + more + drafts for drafts in self.drafts]
        starts = torch.tensor([0, *tokens]).cumsum(0)
        self.total, self.count = int(starts[-1]), count
        self.starts.fill_(self.total)[: count + 1] = starts.to(self.device, torch.int32)
        self.kept, at = [], 0
        for length, rejected in zip(tokens, self.rejected, strict=True):
            self.kept += range(at, at + length - rejected)
            at += length
        for own in self.slots.values():
            order = torch.randperm(BLOCKS * BLOCK_SIZE, generator=self.random)[: self.total]
            own.fill_(-1)[: self.total] = order.to(self.device)
        self.rows.copy_(torch.randn(self.rows.shape, generator=self.random))
        logits = torch.tensor([0, *(drafts + 1 for drafts in self.drafts)]).cumsum(0).to(self.device, torch.int32)
        self.num_rejected = torch.tensor(self.rejected, dtype=torch.int32, device=self.device)
        self.window = Window(self.starts, logits, self.slots, sum(self.drafts), num_bonus_tokens=1, leading_zero=True)

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
        for number, cache in enumerate(self.expected):
            rows = torch.cat(tuple(self.rows[number]), -1)[tokens]
            cache.view(-1, HEADS, 2 * WIDTH)[self.slots[self.group(number)][tokens]] = rows
        rejected = sum(self.rejected) if rejected is None else rejected
        self.counts["windows"] += windows
        self.counts["drafted"] += windows * sum(self.drafts)
        self.counts["rejected"] += windows * rejected
        self.counts["accepted"] += windows * (sum(self.drafts) - rejected)

    def check(self):
        for cache, expected in zip(self.caches, self.expected, strict=True):
            assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))
        assert self.manager.buffers.counters.tolist() == list(self.counts.values())


def test_begins_in_a_graph_and_called_ones(device):
    """Random batches from one graph: with a begin of the graph, with a called one, and without a window."""
    engine = Engine(device)
    for number in range(300):
        way = engine.draw(0, 3)
        engine.load(more=engine.draw(0, 1) if way == 2 else 0)
        if way == 3:
            engine.enabled.fill_(False)
            engine.graph.replay()  # as in a dummy run: it writes, and plans nothing
            engine.keep(list(range(engine.total)), windows=0)
        else:
            engine.run(in_graph=way < 2)
            engine.keep(engine.kept)
        if number % 10 == 0:
            engine.check()
    engine.check()
    assert engine.counts["rejected"] > 100


def test_the_host_neither_waits_nor_allocates(device):
    """Begin launches nothing. The graph and the commit are all that a step launches."""
    engine = Engine(device)
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
def test_a_step_that_fails(device, end, replayed):
    """Only the device knows whether the replay has planned the window. The log has rows of the window before."""
    engine = Engine(device)
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


def test_an_invalid_batch_is_not_planned(device):
    """A request without tokens that is not at the end. The kernel reports it, and no row is logged or restored."""
    engine = Engine(device)
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
