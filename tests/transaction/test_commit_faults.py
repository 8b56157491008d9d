"""Commits that fail on their way: at each launch of both modes, and what comes after."""

from __future__ import annotations

import pytest
import torch
from decoding import STEPS, Engine
from faults import Lost, fail_at, raising_behind
from transactions import one_thread  # noqa: F401

import nwor_ops.transaction.manager

KINDS = ("packed", "one_backing", "latent")  # three geometries in two groups


def outcome_of(batch, end):
    return (batch.draft_token_ids, batch.sampled_token_ids) if end == "commit" else (batch.num_rejected,)


def a_step(engine, requests=STEPS[1]):
    """A window whose forward is done."""
    engine.step(STEPS[0])
    batch = engine.batch(requests)
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
    """The same pages and counts as if nothing had failed; a failure in between changes nothing."""
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
def test_a_launch_that_raises_when_it_has_judged(monkeypatch, mode, end, error, then):
    """As on CUDA in debug mode, where an error of any kind comes behind the launch: every draft is counted once."""
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    getattr(untroubled.manager, then)(*(outcome_of(other, then) if then == "commit" else ()))
    monkeypatch.setattr(nwor_ops.transaction.manager, "raises_behind_launches", lambda counters: True)
    with raising_behind(error), pytest.raises(error):
        getattr(engine.manager, end)(*outcome_of(batch, end))
    if then == "commit":
        engine.manager.commit(*outcome_of(batch, "commit"))
        engine.assert_pages(untroubled)
    else:
        engine.manager.cancel()
    assert counts(engine) == counts(untroubled)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_verdict_stands(mode):
    """What another commit is given cannot change which rows stay: some of them are in their pages."""
    engine, untroubled = Engine(KINDS, mode), Engine(KINDS, mode)
    batch, other = a_step(engine), a_step(untroubled)
    untroubled.manager.commit_rejected(other.num_rejected)
    with fail_at(1, lasting=True), pytest.raises(Lost):
        engine.manager.commit_rejected(batch.num_rejected)
    engine.manager.commit_rejected(torch.zeros_like(batch.num_rejected))
    engine.assert_pages(untroubled)
    assert counts(engine) == counts(untroubled)


@pytest.mark.parametrize(("mode", "end", "launch"), CASES)
def test_cancel_of_half_a_commit(mode, end, launch):
    """Every draft counts as rejected. In cow every page is as if there had been none. In stage the layers of the
    launches made keep accepted drafts, at their slots, and nothing else; slots and tables are put back."""
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
    judging = 1 if end == "commit" else 0
    if mode == "cow" or launch <= judging:
        # One launch of commit_rejected judges and copies; where it failed nothing was copied.
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
    assert len(kept) == launch - judging


@pytest.mark.parametrize(("mode", "end", "launch"), CASES)
def test_abandon_of_half_a_commit(mode, end, launch):
    """Its drafts count as nothing; the accepted ones stay in every layer, in stage the rejected ones as well."""
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
    """An engine that fills its mappings anew before it commits: with other tensors a launch in the middle could be
    refused, and the tables that were redirected would stay so."""
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
