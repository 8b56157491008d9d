"""Test commits that fail at each launch, in both modes, and the calls that can follow."""

from __future__ import annotations

import pytest
import torch
from decoding import STEPS, Engine
from faults import Lost, fail_at, raising_after_launch
from transactions import one_thread  # noqa: F401

import nwor_ops.transaction.manager

KINDS = ("packed", "one_backing", "latent")  # three geometries in two groups


def outcome_of(batch, end):
    return (batch.draft_token_ids, batch.sampled_token_ids) if end == "commit" else (batch.num_rejected,)


def a_step(engine):
    """Open a window and write all its layers."""
    engine.step(STEPS[0])
    batch = engine.batch(STEPS[1])
    engine.manager.begin(batch.window)
    engine.forward(batch)
    return batch


def counts(engine):
    return engine.manager.stats().as_dict()


def launches_of(mode, end):
    engine = Engine(KINDS, mode)
    batch = a_step(engine)
    with fail_at(99, lasting=True) as made:
        getattr(engine.manager, end)(*outcome_of(batch, end))
    return made[0]


CASES = [
    (mode, end, launch)
    for mode, end in ((m, e) for m in ("cow", "stage") for e in ("commit", "commit_rejected"))
    for launch in range(4 if end == "commit" else 3)
]


def test_every_launch_is_among_the_cases():
    for mode in ("cow", "stage"):
        assert (launches_of(mode, "commit"), launches_of(mode, "commit_rejected")) == (4, 3)


@pytest.mark.parametrize(("mode", "end", "launch"), CASES)
@pytest.mark.parametrize("again", ["commit", "commit_rejected"])
def test_a_commit_that_failed_is_finished_by_another(mode, end, launch, again):
    """Pages and counts are the same as without a failure. A failure in between changes nothing."""
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    untroubled.manager.commit(*outcome_of(other, "commit"))
    for at in (launch, 0, 1):
        with fail_at(at, lasting=True), pytest.raises(Lost):
            getattr(engine.manager, end)(*outcome_of(batch, end))
        assert engine.manager.state is nwor_ops.transaction.manager.State.OPEN
    getattr(engine.manager, again)(*outcome_of(batch, again))
    engine.assert_pages(untroubled)
    assert counts(engine) == counts(untroubled)
    assert engine.manager.buffers.num_accepted.tolist() == untroubled.manager.buffers.num_accepted.tolist()
    for one in (engine, untroubled):
        one.lengths = [n + r.given + r.accepted for n, r in zip(one.lengths, STEPS[1], strict=True)]
        one.step(STEPS[2])
    engine.assert_pages(untroubled)


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
@pytest.mark.parametrize("error", [IndexError, ValueError])
@pytest.mark.parametrize("then", ["commit", "cancel"])
def test_a_launch_that_raises_after_the_outcome_is_known(monkeypatch, mode, end, error, then):
    """On CUDA in debug mode, any error is raised after the launch. Every draft is counted once."""
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    getattr(untroubled.manager, then)(*(outcome_of(other, then) if then == "commit" else ()))
    monkeypatch.setattr(nwor_ops.transaction.manager, "raises_after_launches", lambda counters: True)
    with raising_after_launch(error), pytest.raises(error):
        getattr(engine.manager, end)(*outcome_of(batch, end))
    if then == "commit":
        engine.manager.commit(*outcome_of(batch, "commit"))
        engine.assert_pages(untroubled)
    else:
        engine.manager.cancel()
    assert counts(engine) == counts(untroubled)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_the_first_outcome_is_kept(mode):
    """Arguments of a second commit cannot change which rows stay, because some of them are in their pages already."""
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    untroubled.manager.commit_rejected(other.num_rejected)
    with fail_at(1, lasting=True), pytest.raises(Lost):
        engine.manager.commit_rejected(batch.num_rejected)
    engine.manager.commit_rejected(torch.zeros_like(batch.num_rejected))
    engine.assert_pages(untroubled)
    assert counts(engine) == counts(untroubled)


@pytest.mark.parametrize(("mode", "end", "launch"), CASES)
def test_cancel_after_a_partial_commit(mode, end, launch):
    """Every draft counts as rejected.

    In cow every page is as if there had been no drafts. In stage the layers of the launches made keep accepted drafts
    at their slots, and nothing else. Slots and tables are restored.
    """
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    untroubled.manager.cancel()
    with fail_at(launch, lasting=True), pytest.raises(Lost):
        getattr(engine.manager, end)(*outcome_of(batch, end))
    with fail_at(0, lasting=True), pytest.raises(Lost):
        engine.manager.cancel()
    with pytest.raises(RuntimeError, match=r"^commit: cancel\(\) has begun for the open window"):
        engine.manager.commit(*outcome_of(batch, "commit"))
    engine.manager.cancel()
    assert counts(engine) == counts(untroubled)
    assert all(torch.equal(other.slots[group], slots) for group, slots in batch.slots.items())
    assert all(torch.equal(engine.tables[group], untroubled.tables[group]) for group in engine.tables)
    first_copy = 1 if end == "commit" else 0
    if mode == "cow" or launch <= first_copy:
        # One launch of commit_rejected determines the outcome and copies. If it failed, nothing was copied.
        engine.assert_pages(untroubled)
        return
    accepted = set(batch.drafted) - set(batch.rejected)
    kept = set()
    for name, cache in engine.caches.items():
        at_slots = {int(batch.slots[engine.group_of[name]][token]) for token in accepted}
        for plane, expected in zip(cache.planes, untroubled.caches[name].planes, strict=True):
            changed = engine.slots_that_differ(plane.view, expected.view)
            assert changed <= at_slots
            if changed:
                kept.add(name.split(".")[0])
    assert len(kept) == launch - first_copy


@pytest.mark.parametrize(("mode", "end", "launch"), CASES)
def test_abandon_after_a_partial_commit(mode, end, launch):
    """Its drafts are not counted. The accepted ones stay in every layer, and in stage the rejected ones too."""
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    untroubled.manager.abandon()
    with fail_at(launch, lasting=True), pytest.raises(Lost):
        getattr(engine.manager, end)(*outcome_of(batch, end))
    if mode == "stage":
        with fail_at(1, lasting=True), pytest.raises(Lost):
            engine.manager.abandon()
    engine.manager.abandon()
    assert counts(engine) == counts(untroubled)
    assert all(torch.equal(other.slots[group], slots) for group, slots in batch.slots.items())
    if mode == "stage":
        engine.assert_pages(untroubled)
        return
    rejected = {group: {int(batch.slots[group][token]) for token in batch.rejected} for group in batch.slots}
    for name, cache in engine.caches.items():
        for plane, expected in zip(cache.planes, untroubled.caches[name].planes, strict=True):
            assert engine.slots_that_differ(plane.view, expected.view) <= rejected[engine.group_of[name]]


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel", "abandon"])
def test_a_window_keeps_the_tensors_it_was_begun_with(end):
    """An engine refills its mappings before it commits.

    With other tensors a later launch could be refused, and the redirected tables would not be restored.
    """
    engine, untroubled = Engine(KINDS), Engine(KINDS)
    batches = []
    for one in (engine, untroubled):
        one.step(STEPS[0])
        batch = one.batch(STEPS[1])
        batch.window = batch.window._replace(block_tables=dict(one.tables), slot_mappings=dict(batch.slots))
        one.manager.begin(batch.window)
        one.forward(batch)
        batches.append(batch)
    window = batches[0].window
    for group in window.block_tables:
        window.block_tables[group] = window.block_tables[group].long()
        window.slot_mappings[group] = None
    for one, batch in zip((engine, untroubled), batches, strict=True):
        getattr(one.manager, end)(*(outcome_of(batch, end) if end.startswith("commit") else ()))
    engine.assert_pages(untroubled)
    assert all(torch.equal(engine.tables[group], untroubled.tables[group]) for group in engine.tables)
    assert all(torch.equal(batches[0].slots[group], slots) for group, slots in batches[1].slots.items())


@pytest.mark.parametrize("launch", range(len(KINDS)))
def test_cancel_after_a_partial_abandon(launch):
    """In stage, the layers of the launches made keep every draft, rejected or not: there is no log to undo them from.

    The other layers get none. In cow an abandon has no launches.
    """
    engine, untroubled = Engine(KINDS), Engine(KINDS)
    batch, other = a_step(engine), a_step(untroubled)
    untroubled.manager.cancel()
    with fail_at(launch, lasting=True), pytest.raises(Lost):
        engine.manager.abandon()
    engine.manager.cancel()
    assert counts(engine) == counts(untroubled)
    assert all(torch.equal(other.slots[group], slots) for group, slots in batch.slots.items())
    assert all(torch.equal(engine.tables[group], untroubled.tables[group]) for group in engine.tables)
    kept = set()
    for name, cache in engine.caches.items():
        drafts = {int(batch.slots[engine.group_of[name]][token]) for token in batch.drafted}
        for plane, expected in zip(cache.planes, untroubled.caches[name].planes, strict=True):
            changed = engine.slots_that_differ(plane.view, expected.view)
            assert changed in (set(), drafts)
            if changed:
                kept.add(name.split(".")[0])
    assert len(kept) == launch
