"""Test a manager with a bound layout: its calls, and windows and layouts that it refuses."""

from __future__ import annotations

import re

import pytest
import torch
from decoding import STEPS, Engine, refusal
from torch.utils._python_dispatch import TorchDispatchMode
from transactions import one_thread  # noqa: F401

from nwor_ops import DraftCommitManager, LayerCache, Layout
from nwor_ops.transaction.protocol import State

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


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
@pytest.mark.parametrize("mode", MODES)
def test_one_call_for_each_end(mode, end):
    engine = Engine(TWO_KINDS, mode, binds=True)
    for requests in STEPS[1:]:
        batch = engine.batch(requests)
        outcome = (batch.draft_token_ids, batch.sampled_token_ids) if end == "commit" else (batch.num_rejected,)
        with Calls() as begin:
            engine.manager.begin(batch.window)
        engine.forward(batch)
        with Calls() as commit:
            getattr(engine.manager, end)(*outcome)
        engine.lengths = [n + r.given + r.accepted for n, r in zip(engine.lengths, requests, strict=True)]
        assert begin.names == ["_begin_redirected_bound" if mode == "stage" else "_begin_bound"]
        assert commit.names == ["_commit_tokens_bound" if end == "commit" else "_commit_bound"]


@pytest.mark.parametrize("wrong", [None, [0, 3, 6], 3], ids=repr)
@pytest.mark.parametrize("mode", MODES)
def test_arguments_that_are_not_tensors(mode, wrong):
    """The bound calls would say which C function failed, or nothing."""
    engine = Engine(TWO_KINDS, mode, binds=True)
    manager, batch = engine.manager, engine.batch(STEPS[1])
    later = ["seq_lens", *([] if wrong is None else ["request_states"])] if mode == "stage" else []
    for name in ("query_start_loc", "cu_num_draft_tokens", *later):
        with pytest.raises(TypeError, match=rf"^begin: {name} must be a tensor, got {re.escape(repr(wrong))}"):
            manager.begin(batch.window._replace(**{name: wrong}))
        assert manager.state is State.CLOSED
    with pytest.raises(TypeError, match=r"^begin: window must be a Window, got "):
        manager.begin(wrong)
    with pytest.raises(ValueError, match=r"begin: window must have 0 to .* drafts .max_draft_tokens., got 1.5"):
        manager.begin(batch.window._replace(num_draft_tokens=1.5))
    manager.begin(batch.window)
    engine.forward(batch)
    for name in ("draft_token_ids", "sampled_token_ids"):
        outcome = {part: getattr(batch, part) for part in ("draft_token_ids", "sampled_token_ids")}
        with pytest.raises(TypeError, match=f"^commit: {name} must be a tensor, got "):
            manager.commit(**outcome | {name: wrong})
        manager.cancel()
        manager.begin(batch.window)
        engine.forward(batch)
    with pytest.raises(TypeError, match=r"^commit_rejected: num_rejected must be a tensor"):
        manager.commit_rejected(wrong)
    manager.cancel()
    assert manager.stats().accepted == 0


@pytest.mark.parametrize("wrong", [lambda t: t.to(torch.complex64), lambda t: t.to("meta"), lambda t: t.to_sparse()])
def test_odd_tensors_are_named(wrong):
    """The CPU reads these tensors before the op checks them."""
    engine = Engine(TWO_KINDS, "cow", binds=True)
    batch = engine.batch(STEPS[1])
    for name, commit in (
        ("draft_token_ids", lambda: engine.manager.commit(wrong(batch.draft_token_ids), batch.sampled_token_ids)),
        ("num_rejected", lambda: engine.manager.commit_rejected(wrong(batch.num_rejected))),
    ):
        engine.manager.begin(batch.window)
        engine.forward(batch)
        with pytest.raises(TypeError, match=rf"^\w+: {name} must (have dtype|be on device cpu|be a dense tensor)"):
            commit()
        engine.manager.cancel()


def test_layout_needs_data():
    manager = DraftCommitManager(max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="meta")
    manager.register_layer("a", LayerCache.packed(torch.zeros(4, 2, 1, 8, device="meta")))
    manager.allocate()
    with pytest.raises(TypeError, match=r"^bind: device of the manager must hold data, got meta"):
        manager.bind(Layout({"default": torch.zeros(8, dtype=torch.int64, device="meta")}))


WRONG_WINDOWS = {
    "lengths": ({"seq_lens": lambda t: t.long()}, TypeError, "open_window: seq_lens must have dtype torch.int32"),
    "starts": ({"query_start_loc": lambda t: t[:3]}, ValueError, r"plan_window: query_start_loc must be \[num_requ"),
    "counts": ({"cu_num_draft_tokens": lambda t: t + 9}, ValueError, "plan_window: cu_num_draft_tokens must"),
    "a negative number": ({"num_draft_tokens": lambda t: -1}, ValueError, "begin: window must have 0 to 16 drafts"),
    "states": ({"request_states": lambda t: t.float()}, TypeError, "open_window: idx_mapping must have dtype"),
    "no states": ({"request_states": lambda t: None}, ValueError, "open_window: idx_mapping must be given exactly if"),
    "a state": ({"request_states": lambda t: t + 9}, IndexError, r"open_window: idx_mapping must be in \[0, 4\)"),
    "a position": ({"seq_lens": lambda t: t + 1}, ValueError, "open_window: row_slots must have the offset"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_WINDOWS)
def test_refused_window_changes_nothing(case):
    """If a row of `open_window` is invalid, the window has been planned, and counts as cancelled."""
    wrong, error, sentence = WRONG_WINDOWS[case]
    with refusal(TWO_KINDS, with_states=True) as (engine, batch):
        fields = {name: change(getattr(batch.window, name)) for name, change in wrong.items()}
        with pytest.raises(error, match=f"^{sentence}"):
            engine.manager.begin(batch.window._replace(**fields))
        assert engine.manager.stats().cancelled == (case in ("a state", "a position"))
        assert engine.manager.state is State.CLOSED


@pytest.mark.parametrize("move", [lambda t: t.resize_(200), lambda t: t.resize_(3), lambda t: t.set_(t.clone())])
@pytest.mark.parametrize("mode", MODES)
def test_moved_mapping_is_refused(mode, move):
    engine = Engine(TWO_KINDS, mode, binds=True)
    engine.step(STEPS[0])
    batch = engine.batch(STEPS[1])
    before = {name: engine.bytes_of(name) for name in engine.caches}
    move(next(iter(batch.slots.values())))
    with pytest.raises(ValueError, match=r"^plan_window: a bound tensor must not move or change its length"):
        engine.manager.begin(batch.window)
    assert engine.manager.state is State.CLOSED
    assert engine.manager.stats().windows == 1
    assert all((a == b).all() for name in before for a, b in zip(before[name], engine.bytes_of(name), strict=True))


def test_layouts_that_are_refused():
    engine = Engine(TWO_KINDS, "stage")
    batch = engine.batch(STEPS[0])
    slots, tables = batch.slots, engine.tables
    for layout, error, sentence in (
        (slots, TypeError, "bind: layout must be a Layout, got {"),
        (Layout(slots["full"]), TypeError, "bind: slot_mappings must be a mapping from groups to tensors, got torch"),
        (Layout({}), ValueError, r"bind: slot_mappings must have a tensor .* for \['full', 'mla'\]"),
        (Layout(slots), ValueError, "bind: block_tables must have a tensor for each group"),
        (Layout(slots, {"full": tables["full"]}), ValueError, r"bind: block_tables .*, got none for \['mla'\]"),
        (Layout({g: own.int() for g, own in slots.items()}, tables), TypeError, "plan_window: slot_mappings"),
        (Layout(slots, {g: own.long() for g, own in tables.items()}), TypeError, "open_window: block_tables"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{sentence}"):
            engine.manager.bind(layout)
    engine.step(STEPS[0])
