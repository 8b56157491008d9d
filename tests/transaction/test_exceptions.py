"""Test the promise after an exception: `cancel()` restores the bytes, and the manager can be used again.

The exception is a KeyboardInterrupt at a random line of the library, or an error of a launch.
"""

from __future__ import annotations

import pytest
import torch
from decoding import STEPS, Engine
from faults import Interrupts, Lost, fail_at
from hypothesis import given
from hypothesis import strategies as st
from transactions import one_thread  # noqa: F401

import nwor_ops
from nwor_ops.transaction.protocol import State

TWO_KINDS = ("packed", "latent")  # two groups, two launches
PLACES = st.integers(0, 70)  # lines of the library


def outcome_of(batch, end):
    ids = (batch.draft_token_ids, batch.sampled_token_ids)
    return {"commit": ids, "commit_rejected": (batch.num_rejected,)}.get(end, ())


def tables_and_slots(engine, batch):
    return [tensor.clone() for of_groups in (engine.tables, batch.slots) for tensor in of_groups.values()]


@given(st.data())
def test_cancel_after_any_exception(data):
    """In stage, a commit may have copied accepted drafts. They are past the end of their requests."""
    mode, binds = data.draw(st.sampled_from(["cow", "stage"])), data.draw(st.booleans())
    end = data.draw(st.sampled_from(["forward", "commit", "commit_rejected", "abandon"]))
    engine, untroubled = (Engine(TWO_KINDS, mode, binds=binds) for _ in range(2))
    for one in (engine, untroubled):
        one.step(STEPS[0])
    batch, other = engine.batch(STEPS[1]), untroubled.batch(STEPS[1])
    before = tables_and_slots(engine, batch)
    with Interrupts(data.draw(PLACES)):
        engine.manager.begin(batch.window)
        engine.forward(batch)
        with Interrupts(data.draw(PLACES)) if end != "forward" else Interrupts(10**6):
            getattr(engine.manager, end, lambda: None)(*outcome_of(batch, end))
    if engine.manager.state is State.CLOSED:  # nothing was interrupted
        return
    with Interrupts(data.draw(PLACES)):
        engine.manager.cancel()
    engine.manager.cancel()
    untroubled.manager.begin(other.window)
    untroubled.forward(other)
    untroubled.manager.cancel()
    assert all(map(torch.equal, tables_and_slots(engine, batch), before))
    for name, cache in engine.caches.items():
        slots = batch.slots[engine.group_of[name]].tolist()
        # A layer may not have been written.
        tokens = range(batch.num_tokens) if mode == "stage" else set(range(batch.num_tokens)) - set(batch.drafted)
        for plane, expected in zip(cache.planes, untroubled.caches[name].planes, strict=True):
            assert engine.slots_that_differ(plane.view, expected.view) <= {slots[token] for token in tokens}
    stats = engine.manager.stats()
    assert stats.drafted == stats.accepted + stats.rejected
    for one in (engine, untroubled):
        one.random.manual_seed(1)
        for requests in STEPS[1:]:  # they write to every slot of the cancelled drafts
            one.step(requests)
    engine.assert_pages(untroubled)


@pytest.mark.parametrize("then", ["cancel", "abandon"])
@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
def test_commit_that_fails_between_two_launches(end, then):
    """The first launch has counted the outcome. The last one finds a slot out of range."""
    engine, untroubled = Engine(TWO_KINDS, "cow"), Engine(TWO_KINDS, "cow")
    batches = []
    for one in (engine, untroubled):
        one.step(STEPS[0])
        batches.append(one.batch(STEPS[1]))
        one.manager.begin(batches[-1].window)
        one.forward(batches[-1])
    last = engine.manager.buffers.row_slots[1]
    slots = last.clone()
    last.fill_(10**6)
    with pytest.raises(IndexError, match=r"^restore_slots: row_slots"):
        getattr(engine.manager, end)(*outcome_of(batches[0], end))
    last.copy_(slots)
    for one in (engine, untroubled):
        getattr(one.manager, then)()
    assert engine.manager.stats() == untroubled.manager.stats()
    if then == "cancel":  # abandon keeps what it finds
        engine.assert_pages(untroubled)


def staging_buffer():
    buffer = nwor_ops.StagingBuffer(max_num_tokens=8, max_num_rows=8, device="cpu")
    for name in "ab":
        buffer.register_layer(name, nwor_ops.LayerCache.packed(torch.zeros(4, 2, 1, 8)))
    buffer.allocate()
    return buffer


@given(place=PLACES, launch=st.integers(0, 3))
def test_reject_after_any_exception(place, launch):
    """Every window and every row of a staging buffer are counted once."""
    buffer = staging_buffer()
    for _ in range(2):
        buffer.begin(torch.tensor([2, 3, 5]))
        for name in "ab":
            buffer.stage(name, torch.ones(3, 1, 4), torch.ones(3, 1, 4))
        try:
            with Interrupts(place), fail_at(launch):
                buffer.commit(torch.tensor([True, False, True]))
        except Lost:
            pass
        if buffer.state is State.OPEN:
            buffer.reject()
    stats = buffer.stats()
    assert (stats.windows, stats.staged, stats.committed + stats.rejected) == (2, 6, 6)
