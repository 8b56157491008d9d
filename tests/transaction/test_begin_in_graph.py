"""Test windows that a graph begins: the same bytes and counts as with a begin that is called.

A recorded call of `plan_decode_window`, with those of `open_window`, stands for the CUDA graph.
tests/gpu/test_graph_begin_cuda.py has real ones.
"""

from __future__ import annotations

import random

import pytest
import torch
from decoding import ALL, DRAFTS, REQUESTS, TOKENS, Engine
from faults import every_interrupt
from no_sync import guard
from op_calls import Calls, RecordedGraph
from transactions import Request, one_thread  # noqa: F401

from nwor_ops import DraftCommitManager, InFlightManager
from nwor_ops.transaction.state import State

TWO_KINDS = ("packed", "latent")  # two groups, two launches
PROMPTS = [Request(5), Request(9), Request(3), Request(7)]
PADDED = Request(0)
# Each request has one token that is not a draft. The last two decode with fewer requests.
DECODES = (
    [Request(1, 4, 2), Request(1), Request(1, 3, 0), Request(1, 2, 2)],
    [Request(1, 4, 4), Request(1, 4, 0), Request(1, 1, 1), Request(1, 4, 3)],
    [Request(1, 2, 1), Request(1, 4, 0), PADDED, PADDED],
    [Request(1, 3, 1), PADDED, PADDED, PADDED],
)
WAYS = {  # the mode, and whether requests have states
    "cow": {"mode": "cow"},
    "stage": {"mode": "stage"},
    "stage with states": {"mode": "stage", "with_states": True},
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


class GraphEngine(Engine):
    """An engine whose decodes begin in a graph."""

    def __init__(self, way, kinds=ALL):
        super().__init__(kinds, **way, binds=True, num_bonus_tokens=1, leading_zero=True)
        self.starts, self.enabled = torch.zeros(REQUESTS + 1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool)
        self.of_stage, self.in_graph, self.replays = {}, False, True
        if way["mode"] == "stage":
            self.of_stage["seq_lens"] = torch.zeros(REQUESTS, dtype=torch.int32)
            self.of_stage["block_tables"] = self.tables
            if "with_states" in way:
                self.of_stage["request_states"] = torch.full((REQUESTS,), -1)
        self.graph = RecordedGraph()
        with self.graph:
            self.manager.plan_in_graph(self.starts, self.slots, self.enabled, **self.of_stage)
        opens = ["open_window"] * (self.manager.recovery.launches_per_window // 2) if self.of_stage else []
        assert self.graph.names == ["plan_decode_window", *opens]

    def real(self, requests):
        """The number of requests without padded ones."""
        return len(requests) - requests.count(PADDED)

    def prepared(self, requests):
        """The batch of a graph, with its window in the tensors of the graph."""
        batch, count = self.batch(requests), self.real(requests)
        self.starts.copy_(batch.window.query_start_loc)
        if self.of_stage:
            self.of_stage["seq_lens"].fill_(0)[:count] = batch.window.seq_lens[:count]
        if "request_states" in self.of_stage:
            self.of_stage["request_states"].fill_(-1)[:count] = self.states[:count]
        batch.window = batch.window._replace(
            query_start_loc=self.starts, num_draft_tokens=sum(request.drafts for request in requests),
            cu_num_draft_tokens=batch.window.cu_num_draft_tokens[: count + 1], **self.of_stage,
        )  # fmt: skip
        return batch

    def replay(self, replays=True):
        self.enabled.fill_(replays)
        self.graph.replay()

    def open(self, requests, replays=True):
        """Open a window, and replay the graph. Return the batch."""
        batch = self.prepared(requests)
        self.manager.begin_in_graph(batch.window, self.real(requests))
        self.replay(replays)
        return batch

    def begin(self, batch):
        if not self.in_graph:
            super().begin(batch)
            return
        window = self.prepared(self.in_graph).window
        with guard():
            self.manager.begin_in_graph(window, self.real(self.in_graph))
        self.replay()

    def decode(self, requests, end="commit_rejected"):
        """A step as Engine.step, whose window the graph begins."""
        self.in_graph = requests
        self.step(requests, end)
        self.in_graph = False


def pair(way, kinds=ALL):
    """An engine whose decodes begin in a graph, and one that calls begin. Both have served the prompts."""
    engines = GraphEngine(way, kinds), Engine(kinds, **way)
    for engine in engines:
        engine.step(PROMPTS)
    return engines


def assert_same(ours, plain):
    ours.assert_pages(plain)
    assert ours.manager.stats() == plain.manager.stats()


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel", "abandon"])
def test_the_same_pages_and_counts(way, end):
    ours, plain = pair(way)
    for requests in (*DECODES, DECODES[0]):
        ours.decode(requests, end)
        plain.step(requests, end)
        assert_same(ours, plain)
        count = ours.real(requests)
        accepted = [engine.manager.buffers.num_accepted[:count].tolist() for engine in (ours, plain)]
        assert accepted[0] == accepted[1]
    assert ours.manager.stats().windows == 6


def test_steps_whose_begin_is_called_in_between(way):
    """A called begin and a graph may alternate, with other numbers of requests. The flag is off for a called begin."""
    ours, plain = pair(way)
    for number, requests in enumerate((*DECODES, *DECODES)):
        if number % 2:
            ours.decode(requests)
        else:
            batch = ours.batch(requests)
            ours.manager.begin(batch.window)
            ours.starts.copy_(torch.tensor([0, 5, 10, 12, 12]))
            ours.replay(False)  # changes nothing
            ours.forward(batch)
            ours.manager.commit_rejected(batch.num_rejected)
            for q, request in enumerate(requests):
                ours.lengths[q] += request.given + request.accepted
        plain.step(requests, "commit_rejected")
        assert_same(ours, plain)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(way, seed):
    """Steps with a called begin, with prompts, without a window, in a graph, and windows that end early."""
    dice, (ours, plain) = random.Random(seed), pair(way)
    for _ in range(25):
        drafts = [dice.randint(0, DRAFTS) for _ in range(dice.randint(1, REQUESTS))]
        requests = [Request(1, n, dice.randint(0, n)) for n in drafts] + [PADDED] * (REQUESTS - len(drafts))
        called = dice.choice(("called", "prompt", "in graph", "in graph", "without"))
        if max(ours.lengths) > 60:
            break
        if called == "prompt":
            requests[0] = Request(dice.randint(2, 4), drafts[0], requests[0].accepted)
        end = dice.choice(("commit", "commit_rejected", "commit_rejected", "cancel"))
        if called == "in graph" and sum(drafts) > 0:
            ours.decode(requests, end)
        elif called == "without":
            for engine in (ours, plain):
                engine.manager.forget_shadow_pages()
            continue
        else:
            ours.step(requests, end)
        plain.step(requests, end)
        assert_same(ours, plain)


def test_one_call_for_each_commit(way):
    engine = GraphEngine(way, TWO_KINDS)
    engine.step(PROMPTS)
    made = []
    for requests in (*DECODES, DECODES[0]):
        batch = engine.open(requests)
        engine.forward(batch)
        with Calls() as calls:
            engine.manager.commit_rejected(batch.num_rejected[: engine.real(requests)])
        made.append(calls.names[-1])
    assert made[0] in ("restore_slots", "close_window", "close_window_from_rejected", "_commit_bound")
    assert made[1:] == ["_commit_bound"] * 4


def test_nothing_is_launched_by_the_host(way):
    engine = GraphEngine(way, TWO_KINDS)
    for _ in range(3):
        engine.decode(DECODES[0])
    batch = engine.prepared(DECODES[0])
    with Calls() as calls:
        engine.manager.begin_in_graph(batch.window, REQUESTS)
        engine.manager.refresh_shadow_pages()
    assert calls.names == []


def test_rows_that_are_loaded_before_the_replay(way):
    """The replay copies them to the pages that attention reads, and refresh_shadow_pages need not."""
    ours, _ = pair(way, TWO_KINDS)
    ours.decode(DECODES[0])
    batch = ours.prepared(DECODES[1])
    ours.manager.forget_shadow_pages()  # as for requests that are new
    ours.manager.begin_in_graph(batch.window, REQUESTS)
    for cache in ours.caches.values():
        for plane in cache.planes:
            plane.view[: plane.view.shape[0] - ours.shadows].view(torch.uint8).add_(1)
    loaded = ours.committed_rows()
    ours.manager.refresh_shadow_pages()
    ours.replay()
    for seen, rows in zip(ours.committed_rows(), loaded, strict=True):
        assert torch.equal(seen, rows)
    ours.forward(batch)
    ours.manager.commit_rejected(batch.num_rejected)


@pytest.mark.parametrize("end", ["cancel", "abandon"])
def test_a_window_whose_replay_failed(way, end):
    """The log has the rows of the window before, row_rejected its outcome, and saved_slots its slots. None of them is
    restored again."""
    ours, plain = pair(way)
    ours.decode(DECODES[0])
    plain.step(DECODES[0], "commit_rejected")
    tables = {group: table.clone() for group, table in ours.tables.items()}
    batch = ours.open(DECODES[1], replays=False)
    slots = {group: own.clone() for group, own in batch.slots.items()}
    before = {name: ours.bytes_of(name) for name in ours.caches}
    ours.forward(batch, [])
    getattr(ours.manager, end)()
    assert ours.manager.state is State.CLOSED
    for group, own in slots.items():
        assert torch.equal(batch.slots[group], own)
        assert torch.equal(ours.tables[group], tables[group])
    for name, planes in before.items():
        assert all(torch.equal(*both) for both in zip(ours.bytes_of(name), planes, strict=True))
    ours.assert_pages(plain)
    assert ours.manager.stats() == plain.manager.stats()
    ours.decode(DECODES[1])
    plain.step(DECODES[1], "commit_rejected")
    assert_same(ours, plain)


@pytest.mark.parametrize("end", ["cancel", "abandon"])
def test_an_end_that_failed_is_finished(way, end, monkeypatch):
    """Its second call does not take the window for one that was never planned."""
    ours, plain = pair(way)
    batch = ours.open(DECODES[1])
    ours.forward(batch)
    recovery = ours.manager.recovery
    with monkeypatch.context() as patch:
        for name in ("close", "close_keeping_all"):
            patch.setattr(recovery, name, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(ours.manager, end)()
    getattr(ours.manager, end)()
    for q, request in enumerate(DECODES[1]):
        ours.lengths[q] += 1 + (request.drafts if end == "abandon" else 0)
    plain.step(DECODES[1], end)
    assert_same(ours, plain)


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel"])
def test_an_interrupted_end(way, end):
    """Mode "cow": a cancel after it undoes what is still open. Mode "stage": the same call finishes it. Every draft is
    counted once."""
    ours, plain = pair(way, TWO_KINDS)
    lengths = list(ours.lengths)
    for interrupt in every_interrupt():
        ours.lengths = list(lengths)
        batch = ours.open(DECODES[1])
        ours.forward(batch)
        outcome = {"commit": (batch.draft_token_ids, batch.sampled_token_ids), "commit_rejected": (batch.num_rejected,)}
        with interrupt:
            getattr(ours.manager, end)(*outcome.get(end, ()))
        done = end
        if ours.manager.state is State.OPEN:
            done = end if ours.of_stage else "cancel"
            getattr(ours.manager, done)(*outcome.get(done, ()))
        plain.lengths = list(lengths)
        plain.step(DECODES[1], done)
        ours.assert_pages(plain)
        stats = ours.manager.stats()
        assert (stats.drafted, stats.drafted - stats.accepted) == (plain.manager.stats().drafted, stats.rejected)
    assert ours.manager.stats().accepted > 0 or end == "cancel"


def test_what_is_refused(way):
    engine = GraphEngine(way, TWO_KINDS)
    batch = engine.prepared([Request(1, 2, 0)] * REQUESTS)
    with pytest.raises(ValueError, match=r"begin: window must have at most 16 drafts .*, got 99"):
        engine.manager.begin_in_graph(batch.window._replace(num_draft_tokens=99), REQUESTS)
    engine.manager.begin_in_graph(batch.window, REQUESTS)
    for call in (
        lambda: engine.manager.begin_in_graph(batch.window, REQUESTS),
        lambda: engine.manager.plan_in_graph(engine.starts, engine.slots, engine.enabled, **engine.of_stage),
    ):
        with pytest.raises(RuntimeError, match="must be between windows, it is inside a window"):
            call()
    limits = {"max_num_tokens": TOKENS, "max_num_requests": REQUESTS, "max_draft_tokens": 4, "device": "cpu"}
    in_flight = InFlightManager(windows=2, **limits)
    for call in (
        lambda: in_flight.begin_in_graph(batch.window, 1),
        lambda: in_flight.plan_in_graph(engine.starts, {}, engine.enabled),
    ):
        with pytest.raises(RuntimeError, match="_in_graph: the manager must be a DraftCommitManager, got InFlightM"):
            call()
    new = DraftCommitManager(**limits)
    with pytest.raises(RuntimeError, match="the manager must be between windows, it is registering layers"):
        new.begin_in_graph(batch.window, 1)


REFUSED_PLANS = {
    "no slots": ({"slot_mappings": {}}, "slot_mappings must have a tensor for each group, got none for"),
    "no lengths": ({"seq_lens": None}, 'seq_lens must be a tensor in mode "stage", got None'),
    "no tables": ({"block_tables": None}, "block_tables must have a tensor for each group, got none for"),
    "too many requests": (
        {"query_start_loc": torch.zeros(REQUESTS + 2, dtype=torch.int32)},
        r"query_start_loc must have at most 4 requests .max_num_requests., got 5",
    ),
}


@pytest.mark.parametrize("case", REFUSED_PLANS)
def test_a_plan_that_is_refused(case):
    engine = GraphEngine(WAYS["stage"], TWO_KINDS)
    replaced, sentence = REFUSED_PLANS[case]
    given = {"query_start_loc": engine.starts, "slot_mappings": engine.slots, "enabled": engine.enabled}
    with pytest.raises(ValueError, match=f"^plan_in_graph: {sentence}"):
        engine.manager.plan_in_graph(**(given | engine.of_stage | replaced))


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "request_states", "block_tables", "slot_mappings"])
def test_another_tensor_than_that_of_the_graph(name):
    """The replay would redirect other tables than the commit restores. Nothing is opened."""
    engine = GraphEngine(WAYS["stage with states"], TWO_KINDS)
    for _ in range(3):
        engine.decode(DECODES[0])
    window = engine.prepared(DECODES[0]).window
    given = getattr(window, name)
    copied = given.clone() if isinstance(given, torch.Tensor) else {group: own.clone() for group, own in given.items()}
    if name in ("query_start_loc", "seq_lens"):
        engine.manager._bound_in_graph = None  # they may be other views in each step, so only this case compares them
    with pytest.raises(ValueError, match=rf"^begin_in_graph: window.{name}.* must be the tensor that plan_in_graph"):
        engine.manager.begin_in_graph(window._replace(**{name: copied}), REQUESTS)
    assert engine.manager.state is State.CLOSED
    engine.decode(DECODES[0])


def test_a_graph_is_needed():
    engine = Engine(TWO_KINDS, "stage")
    with pytest.raises(RuntimeError, match=r"^begin_in_graph: no graph begins windows; capture plan_in_graph"):
        engine.manager.begin_in_graph(engine.batch(DECODES[0]).window, REQUESTS)
