"""Test windows that a graph begins: the same bytes and counts as with a begin that is called.

A recorded call of `plan_decode_window` stands for the CUDA graph. tests/gpu/test_graph_begin_cuda.py has real ones.
"""

from __future__ import annotations

import pytest
import torch
from decoding import ALL, REQUESTS, TOKENS, Engine
from faults import every_interrupt
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


class GraphEngine(Engine):
    """An engine whose decodes begin in a graph."""

    def __init__(self, kinds=ALL):
        super().__init__(kinds, "cow", binds=True, num_bonus_tokens=1, leading_zero=True)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.enabled = torch.zeros(1, dtype=torch.bool)
        self.graph = RecordedGraph()
        with self.graph:
            self.manager.plan_in_graph(self.starts, self.slots, self.enabled)
        assert self.graph.names == ["plan_decode_window"]

    def real(self, requests):
        """The number of requests without padded ones."""
        return len(requests) - requests.count(PADDED)

    def open(self, requests, replays=True):
        """Open a window, and replay the graph. Return the batch."""
        batch, count = self.batch(requests), self.real(requests)
        self.starts.copy_(batch.window.query_start_loc)
        drafts = sum(request.drafts for request in requests)
        window = batch.window._replace(
            query_start_loc=self.starts, num_draft_tokens=drafts,
            cu_num_draft_tokens=batch.window.cu_num_draft_tokens[: count + 1],
        )  # fmt: skip
        self.manager.begin_in_graph(window, count)
        self.enabled.fill_(replays)
        self.graph.replay()
        return batch

    def decode(self, requests, end="commit_rejected"):
        batch, count = self.open(requests), self.real(requests)
        self.forward(batch)
        ids = (batch.draft_token_ids, batch.sampled_token_ids[:count])
        arguments = {"commit": ids, "commit_rejected": (batch.num_rejected[:count],)}.get(end, ())
        getattr(self.manager, end)(*arguments)
        for q, r in enumerate(requests):
            self.lengths[q] += r.given + {"cancel": 0, "abandon": r.drafts}.get(end, r.accepted)


def pair(kinds=ALL):
    """An engine whose decodes begin in a graph, and one that calls begin. Both have served the prompts."""
    engines = GraphEngine(kinds), Engine(kinds, "cow")
    for engine in engines:
        engine.step(PROMPTS)
    return engines


def assert_same(ours, plain):
    ours.assert_pages(plain)
    assert ours.manager.stats() == plain.manager.stats()


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel", "abandon"])
def test_the_same_pages_and_counts(end):
    ours, plain = pair()
    for requests in (*DECODES, DECODES[0]):
        ours.decode(requests, end)
        plain.step(requests, end)
        assert_same(ours, plain)
        count = ours.real(requests)
        accepted = [engine.manager.buffers.num_accepted[:count].tolist() for engine in (ours, plain)]
        assert accepted[0] == accepted[1]
    assert ours.manager.stats().windows == 6


def test_steps_whose_begin_is_called_in_between():
    """A called begin and a graph may alternate, with other numbers of requests. The flag is off for a called begin."""
    ours, plain = pair()
    for number, requests in enumerate((*DECODES, *DECODES)):
        if number % 2:
            ours.decode(requests)
        else:
            ours.enabled.fill_(False)
            ours.step(requests, "commit_rejected")
            ours.starts.copy_(torch.tensor([0, 5, 10, 12, 12]))
            ours.graph.replay()  # changes nothing
        plain.step(requests, "commit_rejected")
        assert_same(ours, plain)


def test_one_call_for_each_commit():
    engine = GraphEngine(TWO_KINDS)
    engine.step(PROMPTS)
    made = []
    for requests in (*DECODES, DECODES[0]):
        batch = engine.open(requests)
        engine.forward(batch)
        with Calls() as calls:
            engine.manager.commit_rejected(batch.num_rejected[: engine.real(requests)])
        made.append(calls.names[-1])
    assert made[0] in ("restore_slots", "_commit_bound")
    assert made[1:] == ["_commit_bound"] * 4


def test_nothing_is_launched_by_the_host():
    engine = GraphEngine(TWO_KINDS)
    for _ in range(3):
        engine.decode(DECODES[0])
    batch = engine.batch(DECODES[0])
    with Calls() as calls:
        engine.manager.begin_in_graph(batch.window, REQUESTS)
    assert calls.names == []


@pytest.mark.parametrize("end", ["cancel", "abandon"])
def test_a_window_whose_replay_failed(end):
    """The log has the rows of the window before, and row_rejected its outcome. None of them is restored again."""
    ours, plain = pair()
    ours.decode(DECODES[0])
    plain.step(DECODES[0], "commit_rejected")
    lengths = list(ours.lengths)
    ours.forward(ours.open(DECODES[1], replays=False), [])
    getattr(ours.manager, end)()
    assert ours.manager.state is State.CLOSED
    ours.assert_pages(plain)
    counts = ours.manager.stats(), plain.manager.stats()
    assert counts[0].rejected == counts[1].rejected
    assert counts[0].accepted == counts[1].accepted
    assert counts[0].cancelled == 0
    ours.lengths = lengths
    ours.decode(DECODES[1])
    plain.step(DECODES[1], "commit_rejected")
    ours.assert_pages(plain)


def test_a_cancel_that_failed_is_finished(monkeypatch):
    """Its second call does not take the window for one that was never planned."""
    ours, plain = pair()
    batch = ours.open(DECODES[1])
    ours.forward(batch)
    close = ours.manager.recovery.close
    with monkeypatch.context() as patch:
        patch.setattr(ours.manager.recovery, "close", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours.manager.cancel()
    assert ours.manager.recovery.close == close
    ours.manager.cancel()
    for q in range(REQUESTS):
        ours.lengths[q] += 1
    plain.step(DECODES[1], "cancel")
    assert_same(ours, plain)


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel"])
def test_an_interrupted_end(end):
    """A cancel after it undoes what is still open. Every draft is counted once."""
    ours, plain = pair(TWO_KINDS)
    lengths = list(ours.lengths)
    for interrupt in every_interrupt():
        ours.lengths = list(lengths)
        batch = ours.open(DECODES[1])
        ours.forward(batch)
        outcome = {"commit": (batch.draft_token_ids, batch.sampled_token_ids), "commit_rejected": (batch.num_rejected,)}
        with interrupt:
            getattr(ours.manager, end)(*outcome.get(end, ()))
        done = "cancel" if ours.manager.state is State.OPEN else end
        if ours.manager.state is State.OPEN:
            ours.manager.cancel()
        plain.lengths = list(lengths)
        plain.step(DECODES[1], done)
        ours.assert_pages(plain)
        stats = ours.manager.stats()
        assert (stats.drafted, stats.drafted - stats.accepted) == (plain.manager.stats().drafted, stats.rejected)
    assert ours.manager.stats().accepted > 0 or end == "cancel"


def test_what_is_refused():
    engine = GraphEngine(TWO_KINDS)
    batch = engine.batch([Request(1, 2, 0)] * REQUESTS)
    with pytest.raises(ValueError, match=r"begin: window must have at most 16 drafts .*, got 99"):
        engine.manager.begin_in_graph(batch.window._replace(num_draft_tokens=99), REQUESTS)
    engine.manager.begin_in_graph(batch.window, REQUESTS)
    for call in (
        lambda: engine.manager.begin_in_graph(batch.window, REQUESTS),
        lambda: engine.manager.plan_in_graph(engine.starts, engine.slots, engine.enabled),
    ):
        with pytest.raises(RuntimeError, match="must be between windows, it is inside a window"):
            call()
    limits = {"max_num_tokens": TOKENS, "max_num_requests": REQUESTS, "max_draft_tokens": 4, "device": "cpu"}
    for manager, named in (
        (DraftCommitManager(mode="stage", max_drafts_per_request=4, **limits), "DraftCommitManager in mode stage"),
        (InFlightManager(windows=2, **limits), "InFlightManager in mode cow"),
    ):
        for method in ("begin_in_graph", "plan_in_graph"):
            arguments = (batch.window, 1) if method == "begin_in_graph" else (engine.starts, {}, engine.enabled)
            with pytest.raises(RuntimeError, match=f"{method}: the manager must be a .* in mode cow, got {named}"):
                getattr(manager, method)(*arguments)
