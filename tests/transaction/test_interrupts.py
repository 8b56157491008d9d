"""Test KeyboardInterrupt at every line of the calls of a window, and the calls that can follow."""

from __future__ import annotations

import pytest
import torch
from decoding import STEPS, Engine
from faults import Interrupts, every_interrupt
from transactions import Transactions, distinct_slots, make_batch, one_thread  # noqa: F401

import nwor_ops
from nwor_ops.testing.raw_rows import raw
from nwor_ops.transaction.state import State

TWO_KINDS = ("packed", "latent")  # two groups, two launches


def consistent(manager) -> bool:
    stats = manager.stats()
    return stats.drafted == stats.accepted + stats.rejected


def tables_and_slots(engine, batch):
    return [tensor.clone() for of_groups in (engine.tables, batch.slots) for tensor in of_groups.values()]


def close_after(interrupt_again: int, manager) -> None:
    """Cancel what is open, with another signal on the way."""
    if manager.state is State.OPEN:
        with Interrupts(interrupt_again):
            manager.cancel()
    if manager.state is State.OPEN:
        manager.cancel()


@pytest.mark.parametrize("again", [10**6, 3, 11, 20, 28])
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_an_interrupted_begin_leaves_no_trace(mode, again):
    """Slots, tables, pages and later steps are as without the attempt, and every draft is counted once."""
    engine, untroubled = Engine(TWO_KINDS, mode), Engine(TWO_KINDS, mode)
    for one in (engine, untroubled):
        one.step(STEPS[0])
    cancelled = 0
    for interrupt in every_interrupt():
        batch = engine.batch(STEPS[1])
        before, windows = tables_and_slots(engine, batch), engine.manager.stats().windows
        with interrupt:
            engine.manager.begin(batch.window)
        if engine.manager.state is State.CLOSED:
            engine.assert_pages(untroubled)
        close_after(again, engine.manager)
        assert all(map(torch.equal, tables_and_slots(engine, batch), before))
        assert consistent(engine.manager)
        cancelled += engine.manager.stats().windows - windows
        assert engine.manager.stats().cancelled == cancelled
    for one in (engine, untroubled):
        for requests in STEPS[1:]:
            one.step(requests)
    engine.assert_pages(untroubled)
    assert consistent(engine.manager)


def outcome(end, batch):
    arguments = {
        "commit": (batch.draft_token_ids, batch.sampled_token_ids), "commit_rejected": (batch.num_rejected,),
        "settle": (batch.num_rejected,),
    }  # fmt: skip
    return arguments.get(end, ())


@pytest.mark.parametrize("then", ["itself", "cancel", "abandon"])
@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel", "abandon"])
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_an_interrupted_end_is_finished_by_another(mode, end, then):
    """Every draft is counted once, with the outcome of the call that finished."""
    then = end if then == "itself" else then
    engine, untroubled = Engine(TWO_KINDS, mode), Engine(TWO_KINDS, mode)
    for one in (engine, untroubled):
        one.step(STEPS[0])
    for interrupt in every_interrupt():
        batch, other = engine.batch(STEPS[1]), untroubled.batch(STEPS[1])
        for one, window in ((engine, batch), (untroubled, other)):
            one.manager.begin(window.window)
            one.forward(window)
        finished_by = end
        with interrupt:
            getattr(engine.manager, end)(*outcome(end, batch))
        for another in (Interrupts(interrupt.place % 30), Interrupts(10**6)):
            if engine.manager.state is State.OPEN:
                finished_by = then
                with another:
                    getattr(engine.manager, then)(*outcome(then, batch))
        getattr(untroubled.manager, finished_by)(*outcome(finished_by, other))
        assert engine.manager.stats() == untroubled.manager.stats()
        assert all(map(torch.equal, tables_and_slots(engine, batch), tables_and_slots(untroubled, other)))
        if then == end:
            engine.assert_pages(untroubled)


class Deferring(Transactions):
    """Two windows, of which the first is deferred, and the second is to be ended."""

    def __init__(self):
        super().__init__(["packed"], windows=3)
        counts = [sum(part.given + part.drafts for part in requests) for requests in STEPS[1:3]]
        slots = distinct_slots(self.groups, sum(counts))
        self.first, self.second = (
            make_batch(requests, {group: own[start : start + count] for group, own in slots.items()})
            for requests, start, count in zip(STEPS[1:3], (0, counts[0]), counts, strict=True)
        )

    def start(self, defer_second):
        """Begin both windows. Return the handles of the deferred ones."""
        handles = []
        for batch in (self.first, self.second):
            self.manager.begin(batch.window)
            self.forward(batch, [])
            if batch is self.first or defer_second:
                handles.append(self.manager.defer())
        return handles

    def pages(self):
        return [raw(plane.view).clone() for cache in self.caches.values() for plane in cache.planes]


@pytest.mark.parametrize(
    ("end", "then"),
    [
        *(("defer", then) for then in ("defer", "cancel", "abandon")),
        *((end, then) for end in ("cancel", "abandon") for then in ("cancel", "abandon")),
        *(("settle", then) for then in ("settle", "cancel_deferred", "forget")),
        *((end, then) for end in ("cancel_deferred", "forget") for then in ("cancel_deferred", "forget")),
        ("undo", "undo"),
    ],
)
def test_an_interrupted_call_of_deferred_windows(end, then):
    engine, untroubled = Deferring(), Deferring()
    of_open_window = end in ("defer", "cancel", "abandon")

    def call(one, name, handles):
        arguments = () if of_open_window else (handles[1], *outcome(name, one.second))
        getattr(one.manager, name)(*arguments, *([[0, 2]] if name == "undo" else []))

    for interrupt in every_interrupt():
        of_engine, of_untroubled = (one.start(not of_open_window) for one in (engine, untroubled))
        manager, finished_by, waiting = engine.manager, end, engine.manager.in_flight
        with interrupt:
            call(engine, end, of_engine)
        for another in (Interrupts(interrupt.place % 30), Interrupts(10**6)):
            if manager.state is State.OPEN if of_open_window else manager.in_flight == waiting:
                finished_by = then
                with another:
                    call(engine, then, of_engine)
        call(untroubled, finished_by, of_untroubled)
        for one in (engine, untroubled):
            for left in [*one.manager._deferred.values()]:
                one.manager.settle(left, (one.second if left.section else one.first).num_rejected)
        assert manager.stats() == untroubled.manager.stats()
        if then == end:
            assert all(map(torch.equal, engine.pages(), untroubled.pages()))


def test_an_interrupted_begin_while_another_window_is_deferred():
    engine = Deferring()
    for interrupt in every_interrupt():
        engine.manager.begin(engine.first.window)
        engine.forward(engine.first, [])
        waiting = engine.manager.defer()
        with interrupt:
            engine.manager.begin(engine.second.window)
        close_after(interrupt.place % 30, engine.manager)
        engine.manager.settle(waiting, engine.first.num_rejected)
        assert consistent(engine.manager)


def staging_buffer():
    buffer = nwor_ops.StagingBuffer(max_num_tokens=8, max_num_rows=8, device="cpu")
    buffer.register_layer("layers.0", nwor_ops.LayerCache.packed(torch.zeros(4, 2, 1, 8)))
    buffer.allocate()
    return buffer


@pytest.mark.parametrize("end", ["begin", "commit", "reject"])
@pytest.mark.parametrize("then", ["commit", "reject"])
def test_an_interrupted_call_of_a_staging_buffer(end, then):
    """Every window and every row are counted once."""
    troubled, untroubled = staging_buffer(), staging_buffer()
    accepted = {"commit": [torch.tensor([True, False, True])], "reject": []}

    def begin(buffer):
        buffer.begin(torch.tensor([2, 3, 5]))

    for interrupt in every_interrupt():
        begin(untroubled)
        with interrupt if end == "begin" else Interrupts(10**6):
            begin(troubled)
        if troubled.state is State.CLOSED:
            begin(troubled)
        for buffer in (troubled, untroubled):
            buffer.stage("layers.0", torch.ones(3, 1, 4), torch.ones(3, 1, 4))
        finished_by = then
        if end != "begin":
            finished_by = end
            with interrupt:
                getattr(troubled, end)(*accepted[end])
        for another in (Interrupts(interrupt.place % 20), Interrupts(10**6)):
            if troubled.state is State.OPEN:
                if then == "commit" and (finished_by == "reject" or troubled._after_reject is not None):
                    finished_by = "reject"  # a reject that has begun is not turned into a commit
                    troubled.reject()
                    break
                finished_by = then
                with another:
                    getattr(troubled, then)(*accepted[then])
        getattr(untroubled, finished_by)(*accepted[finished_by])
        assert troubled.stats() == untroubled.stats()
