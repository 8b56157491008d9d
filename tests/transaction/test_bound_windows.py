"""Test windows that share slot mappings and tables: the manager binds the calls of begin and commit.

The comparison is with an engine whose windows have new tensors, so that each call passes and checks all arguments.
"""

from __future__ import annotations

import pytest
import torch
from decoding import ALL, REQUESTS, STEPS, Engine, batch_copies, require_unchanged
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transactions import Request, one_thread  # noqa: F401

import nwor_ops.transaction.manager
from nwor_ops.transaction.state import State

MODES = ("cow", "stage")
TWO_KINDS = ("packed", "latent")  # two groups, two launches


class Calls(TorchDispatchMode):
    """Records the names of our ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "nwor":
            self.names.append(func._schema.name.removeprefix("nwor::"))
        return func(*args, **(kwargs or {}))


def pair(kinds=ALL, mode="stage", with_states=False, **options):
    """An engine that binds, and one that does not."""
    return (Engine(kinds, mode, with_states, binds=binds, **options) for binds in (True, False))


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel", "abandon"])
@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_pages_and_counts(mode, with_states, end):
    bound, plain = pair(ALL, mode, with_states, num_bonus_tokens=1, leading_zero=True)
    for requests in STEPS:
        for engine in (bound, plain):
            engine.step(requests, end)
        bound.assert_pages(plain)
        assert bound.manager.buffers.num_accepted.tolist() == plain.manager.buffers.num_accepted.tolist()
    assert bound.manager.stats() == plain.manager.stats()


@given(st.data())
def test_any_steps(data):
    mode, with_states = data.draw(st.sampled_from(MODES)), data.draw(st.booleans())
    kinds = data.draw(st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True))
    bound, plain = pair(kinds, mode, with_states)
    for _ in range(data.draw(st.integers(2, 5))):
        requests = []
        for _ in range(REQUESTS):
            drafts = data.draw(st.integers(0, 4))
            requests.append(
                Request(data.draw(st.integers(0 if drafts else 1, 3)), drafts, data.draw(st.integers(0, drafts)))
            )
        end = data.draw(st.sampled_from(["commit", "commit_rejected", "commit_rejected", "cancel", "abandon"]))
        for engine in (bound, plain):
            engine.step(requests, end)
        bound.assert_pages(plain)
    assert bound.manager.stats() == plain.manager.stats()


def outcome(batch, end):
    """The arguments of an end of a window."""
    ids = (batch.draft_token_ids, batch.sampled_token_ids)
    return {"commit": ids, "commit_rejected": (batch.num_rejected,)}.get(end, ())


def calls_of(engine, requests, end):
    """The ops of begin and of a commit."""
    batch = engine.batch(requests)
    with Calls() as begin:
        engine.manager.begin(batch.window)
    engine.forward(batch)
    with Calls() as commit:
        getattr(engine.manager, end)(*outcome(batch, end))
    engine.lengths = [n + r.given + r.accepted for n, r in zip(engine.lengths, requests, strict=True)]
    return begin.names, commit.names


UNBOUND = {
    ("cow", "begin"): ["plan_window"],
    ("cow", "commit_rejected"): ["restore_slots_from_rejected", "restore_slots"],
    ("cow", "commit"): ["reject_rows", "restore_slots", "restore_slots"],
    ("stage", "begin"): ["plan_window", "open_window", "open_window"],
    ("stage", "commit_rejected"): ["close_window_from_rejected", "close_window"],
    ("stage", "commit"): ["reject_rows", "close_window", "close_window"],
}


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
@pytest.mark.parametrize("mode", MODES)
def test_one_call_for_each_end(mode, end):
    """The second window with the same tensors binds. Each later one makes two calls."""
    begin, commit = UNBOUND[mode, "begin"], UNBOUND[mode, end]
    bound = "_commit_tokens_bound" if end == "commit" else "_commit_bound"
    begun = "_begin_redirected_bound" if mode == "stage" else "_begin_bound"
    engine = Engine(TWO_KINDS, mode, binds=True)
    assert calls_of(engine, STEPS[1], end) == (begin, commit)
    binding = [f"_bind_{name}" for name in begin], [f"_bind_{name}" for name in commit]
    first = [bound] if end == "commit" else commit
    assert calls_of(engine, STEPS[2], end) == ([*binding[0], begun], [*binding[1], *first])
    for requests in STEPS[1:]:
        assert calls_of(engine, requests, end) == ([begun], [bound])


def test_a_bound_commit_looks_at_the_log_rows_of_its_window_only(monkeypatch):
    engine, _ = bound_engine("cow")
    numbers = []

    def commit_bound(num_rejected, commit):
        numbers.append(engine.manager._bound.num_rows[0])
        return original(num_rejected, commit)

    original = nwor_ops.transaction.manager.commit_bound
    monkeypatch.setattr(nwor_ops.transaction.manager, "commit_bound", commit_bound)
    engine.step(STEPS[2], "commit_rejected")
    assert numbers == [sum(request.drafts for request in STEPS[2])]


def test_other_tensors_are_bound_again():
    """A window with another tensor, other states or more requests does not run calls that were bound before."""
    engine = Engine(TWO_KINDS, "stage", with_states=True, binds=True)
    for requests in STEPS[:3]:
        engine.step(requests)
    first = engine.manager._bound
    assert first is not None
    for name in ("slots", "tables"):
        setattr(engine, name, {group: tensor.clone() for group, tensor in getattr(engine, name).items()})
        engine.step(STEPS[1])
        assert engine.manager._bound is None
        engine.step(STEPS[1])
        assert engine.manager._bound not in (None, first)
    states, engine.states = engine.states, None
    engine.manager.forget_shadow_pages()
    engine.step(STEPS[1])
    assert not engine.manager._bound.has_states
    engine.states = states


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cancelled", [(), (1, 4)])
def test_more_requests_are_bound_again(mode, cancelled):
    """The calls of a window serve windows of as many requests or fewer. Commit is not bound to fewer than begin."""
    bound, plain = pair(TWO_KINDS, mode)
    seen = []
    for number, count in enumerate((1, 1, 2, 1, 4, 3, 4, 2, 4)):
        requests = [Request(1, 2, 1) if q < count else Request(0) for q in range(REQUESTS)]
        for engine in (bound, plain):
            engine.lengths = [n or 3 for n in engine.lengths]
            batch = engine.batch(requests)
            window = batch.window._replace(
                cu_num_draft_tokens=batch.window.cu_num_draft_tokens[:count],
                query_start_loc=batch.window.query_start_loc[: count + 1],
            )
            engine.manager.begin(window)
            engine.forward(batch)
            if number in cancelled:
                engine.manager.cancel()
            else:
                engine.manager.commit_rejected(batch.num_rejected[:count])
        seen.append(bound.manager._bound and bound.manager._bound.most_requests)
        bound.assert_pages(plain)
    assert seen == [None, 1, 2, 2, 4, 4, 4, 4, 4]
    assert bound.manager._bound.commit is not None
    assert bound.manager.stats() == plain.manager.stats()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_requests(mode):
    engine = Engine(TWO_KINDS, mode, binds=True)
    for requests in STEPS[:3]:
        engine.step(requests)
    batch = engine.batch([Request(0)] * REQUESTS)
    window = batch.window._replace(
        cu_num_draft_tokens=batch.window.cu_num_draft_tokens[:0], query_start_loc=batch.window.query_start_loc[:1]
    )
    engine.manager.begin(window)
    engine.manager.commit_rejected(batch.num_rejected)
    assert engine.manager.stats().windows == 4


def test_a_failure_to_bind_is_not_repeated(monkeypatch):
    """For example, if the library has no such op. Windows go on without it."""
    tried = []

    def fail(op, *arguments, **named):
        tried.append(op)
        raise NotImplementedError(op)

    monkeypatch.setattr(nwor_ops.transaction.manager, "bind", fail)
    engine, plain = pair(TWO_KINDS, "stage")
    for requests in STEPS:
        for one in (engine, plain):
            one.step(requests)
        engine.assert_pages(plain)
    assert tried == ["plan_window"]


# ---------------------------------------------------------------- errors


def bound_engine(mode, with_states=False, end="commit_rejected"):
    """After the steps of STEPS[:2], and a repeated first one. Begin and commit are bound."""
    engine, untouched = pair(TWO_KINDS, mode, with_states)
    for requests in (STEPS[0], *STEPS[:2]):
        for one in (engine, untouched):
            one.step(requests, end)
    bound = engine.manager._bound
    assert bound is not None
    assert (bound.commit_tokens if end == "commit" else bound.commit) is not None
    return engine, untouched


WRONG_WINDOWS = {
    "no lengths": ({"seq_lens": lambda t: None}, ValueError, r'begin: window must have seq_lens .*, got no seq_lens$'),
    "lengths": ({"seq_lens": lambda t: t.long()}, TypeError, r"begin: window\.seq_lens must have dtype torch.int32"),
    "starts": ({"query_start_loc": lambda t: t[:3]}, ValueError, r"begin: window\.query_start_loc must have one dim"),
    "no starts": ({"query_start_loc": lambda t: None}, TypeError, r"begin: window\.query_start_loc must be a tensor"),
    "counts": ({"cu_num_draft_tokens": lambda t: t + 9}, ValueError, r"begin: window must have at most 16 drafts"),
    "number": ({"num_draft_tokens": lambda t: 17}, ValueError, r"begin: window must have at most 16 drafts"),
    "states": ({"request_states": lambda t: t.float()}, TypeError, r"begin: window\.request_states must have dtype"),
    "a state": ({"request_states": lambda t: t + 9}, IndexError, r"open_window: idx_mapping must be in \[0, 4\)"),
    "a position": ({"seq_lens": lambda t: t + 1}, ValueError, r"open_window: row_slots must have the offset"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_WINDOWS)
def test_a_window_that_is_refused_changes_nothing(case):
    """The sentences are those of calls that are not bound. If a row of `open_window` is invalid, the window has been
    planned, and counts as cancelled."""
    wrong, error, sentence = WRONG_WINDOWS[case]
    engine, untouched = bound_engine("stage", with_states=True)
    batch = engine.batch(STEPS[2])
    slots, tables = batch_copies(engine, batch)
    fields = {name: change(getattr(batch.window, name)) for name, change in wrong.items()}
    with pytest.raises(error, match=f"^{sentence}"):
        engine.manager.begin(batch.window._replace(**fields))
    assert engine.manager.stats().cancelled == sentence.startswith("open_window")
    assert engine.manager.state is State.CLOSED
    require_unchanged(engine, untouched, batch, slots, tables)


@pytest.mark.parametrize("mode", MODES)
def test_a_mapping_that_was_resized_is_refused(mode):
    engine, _ = bound_engine(mode)
    batch = engine.batch(STEPS[2])
    next(iter(batch.slots.values())).resize_(200)
    with pytest.raises(ValueError, match=r"begin: window must have at most 40 tokens"):
        engine.manager.begin(batch.window)
    assert engine.manager.state is State.CLOSED
    assert engine.manager.stats().windows == 3


@pytest.mark.parametrize("wrong", ["dtype", "two", "none"])
@pytest.mark.parametrize(
    ("mode", "end", "sentence"),
    [("cow", "commit", "draft_token_ids"), ("stage", "commit", "draft_token_ids"),
     ("stage", "commit_rejected", "num_rejected must ")],
)  # fmt: skip
def test_a_commit_that_is_refused_can_be_repeated(mode, end, sentence, wrong):
    engine, untouched = bound_engine(mode, end=end)
    for one in (engine, untouched):
        batch = one.batch(STEPS[2])
        one.manager.begin(batch.window)
        one.forward(batch)
        commit, (first, *others) = getattr(one.manager, end), outcome(batch, end)
        if one is engine:
            other_dtype = torch.int64 if first.dtype is torch.int32 else torch.float32
            bad = {"dtype": first.to(other_dtype), "two": first[:2], "none": None}[wrong]
            with pytest.raises((ValueError, TypeError), match=sentence):
                commit(bad, *others)
            assert one.manager.state is State.OPEN
        commit(first, *others)
    engine.assert_pages(untouched)
    assert engine.manager.stats() == untouched.manager.stats()


@pytest.mark.parametrize("then", ["commit", "commit_rejected", "cancel", "abandon"])
@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
def test_a_commit_that_fails_between_two_launches(end, then):
    """The first launch has determined the outcome. The last one finds a slot out of range."""
    engine, untouched = bound_engine("cow", end=end)
    batches = []
    for one in (engine, untouched):
        batches.append(one.batch(STEPS[2]))
        one.manager.begin(batches[-1].window)
        one.forward(batches[-1])
    last = engine.manager.buffers.row_slots[1]
    slots = last.clone()
    last.fill_(10**6)
    with pytest.raises(IndexError, match=r"^restore_slots: row_slots"):
        getattr(engine.manager, end)(*outcome(batches[0], end))
    assert engine.manager.state is State.OPEN
    last.copy_(slots)
    for one, batch in zip((engine, untouched), batches, strict=True):
        getattr(one.manager, then)(*outcome(batch, then))
    assert engine.manager.stats() == untouched.manager.stats()
    if then != "abandon":  # it keeps what it finds
        engine.assert_pages(untouched)
