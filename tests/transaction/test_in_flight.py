"""Test deferred windows: each leaves only the accepted rows, byte for byte."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from faults import Lost, fail_at, raising_after_launch
from torch.utils._python_dispatch import TorchDispatchMode
from transactions import KINDS, Batch, Request, Transactions, distinct_slots, make_batch, one_thread  # noqa: F401

import nwor_ops.transaction.manager
from nwor_ops.transaction.in_flight import Deferred, InFlightManager

FIRST = (Request(3), Request(1, 4, 2), Request(1, 3, 0))
SECOND = (Request(1, 2, 2), Request(2, 3, 1))
THIRD = (Request(1, 4, 0), Request(1, 1, 1))


class InFlight(Transactions):
    """Batches with distinct slots, as an engine has for batches that are in progress together."""

    manager: InFlightManager

    def batches(self, *all_requests: tuple[Request, ...], seed: int = 0) -> list[Batch]:
        counts = [sum(request.given + request.drafts for request in requests) for requests in all_requests]
        slots = distinct_slots(self.groups, sum(counts), seed=seed)
        ends = list(itertools.accumulate(counts))
        return [
            make_batch(requests, {group: own[end - count : end] for group, own in slots.items()})
            for requests, count, end in zip(all_requests, counts, ends, strict=True)
        ]

    def run(self, batch: Batch, lost: list[int] | None = None) -> Deferred:
        self.manager.begin(batch.window)
        self.forward(batch, batch.rejected if lost is None else lost)
        return self.manager.defer()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_outcomes_arrive_in_any_order(order: tuple[int, ...]) -> None:
    layers = InFlight(windows=3)
    for seed in range(3):  # the sections of the log are reused
        batches = layers.batches(FIRST, SECOND, THIRD, seed=seed)
        deferred = [layers.run(batch) for batch in batches]
        assert layers.manager.in_flight == 3
        assert not layers.is_as_expected(), "rejected drafts stay until settle"
        for place in order:
            layers.manager.settle(deferred[place], batches[place].num_rejected)
        layers.assert_as_expected()
    stats = layers.manager.stats()
    assert (stats.windows, stats.drafted, stats.accepted) == (9, 3 * (7 + 5 + 5), 3 * (2 + 3 + 1))
    assert stats.rejected == stats.drafted - stats.accepted


def test_reassigned_slots_keep_their_new_rows() -> None:
    """A request ends while its window is deferred. Its drafts are undone, other rows take their slots, and settle keeps
    these rows."""
    layers = InFlight(windows=2)
    [batch] = layers.batches(FIRST)
    tokens = [token for token in batch.drafted if token < 8]  # slots of request 1
    deferred = layers.run(batch, lost=sorted({*batch.rejected, *tokens}))
    layers.manager.undo(deferred, [1])
    group_slots = {group: slots[tokens] for group, slots in batch.slots.items()}
    other = make_batch([Request(len(tokens))], {group: slots.tolist() for group, slots in group_slots.items()})
    second = layers.run(other)
    layers.manager.settle(deferred, batch.num_rejected)
    layers.manager.settle(second, other.num_rejected)
    layers.assert_as_expected()
    assert layers.manager.stats().accepted == 2, "the outcome is counted, whatever happened to the rows"


class Calls(TorchDispatchMode):
    """Count the torch operations that run. Each is a launch or a view."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_all_ended_requests_are_undone_together() -> None:
    counts = []
    for requests in ([1], [0, 1, 2]):
        layers = InFlight(windows=2)
        _, batch = layers.batches(SECOND, FIRST)
        starts = batch.window.query_start_loc.tolist()
        of_them = {token for request in requests for token in range(starts[request], starts[request + 1])}
        deferred = layers.run(batch, lost=sorted({*batch.rejected, *(of_them & {*batch.drafted})}))
        with Calls() as calls:
            layers.manager.undo(deferred, requests)
        counts.append(calls.count)
        layers.manager.settle(deferred, batch.num_rejected)
        layers.assert_as_expected()
    assert counts[0] == counts[1]


def test_a_graph_replayed_between_windows_logs_nothing() -> None:
    """It is replayed in a step without drafts, outside any window. Captured code uses the log rows that it finds."""
    layers = InFlight(["packed"], windows=2)
    first, plain = layers.batches(FIRST, (Request(8),))
    waiting = layers.run(first)
    manager = layers.manager
    for name, cache in layers.caches.items():
        slots = plain.slots[layers.group_of[name]]
        rows = layers.rows(name, len(slots))
        layer, one = manager._layers[name], torch.ones(1)
        manager.recovery.write(layer, manager.buffers.log_rows, *cache.key_value(rows), slots, one, one, "auto")
        layers.expect(name, rows, slots, [])
    manager.settle(waiting, first.num_rejected)
    layers.assert_as_expected()


@pytest.mark.parametrize("when", ["open", "deferred"])
def test_a_cancelled_window_does_not_change_the_others(when: str) -> None:
    layers = InFlight(windows=2)
    first, second = layers.batches(FIRST, SECOND)
    waiting = layers.run(first)
    if when == "open":
        layers.manager.begin(second.window)
        layers.forward(second, second.drafted)
        layers.manager.cancel()
    else:
        layers.manager.cancel_deferred(layers.run(second, lost=second.drafted))
    layers.manager.settle(waiting, first.num_rejected)
    layers.assert_as_expected()
    assert layers.manager.stats().cancelled == 1
    assert layers.manager.stats().rejected == len(first.rejected) + len(second.drafted)


@pytest.mark.parametrize("when", ["open", "deferred"])
@pytest.mark.parametrize("then", ["cancel", "keep"])
def test_a_failed_cancel_is_finished_by_another_one(when: str, then: str) -> None:
    """Or the window is forgotten. It then takes no section of the log, and every draft is counted once."""
    layers = InFlight(windows=2)
    first, second = layers.batches(FIRST, SECOND)
    waiting = layers.run(first)
    manager, lost = layers.manager, second.drafted if then == "cancel" else []
    manager.begin(second.window)
    layers.forward(second, lost)
    if when == "open":
        ends = {"cancel": manager.cancel, "keep": manager.abandon}
    else:
        deferred = manager.defer()
        ends = {"cancel": partial(manager.cancel_deferred, deferred), "keep": partial(manager.forget, deferred)}
    with fail_at(0, lasting=True), pytest.raises(Lost):
        ends["cancel"]()
    with pytest.raises(RuntimeError, match="defer: "):  # the sampled tokens of an open window are unknown
        manager.defer()
    ends[then]()
    assert manager.in_flight == 1
    manager.settle(waiting, first.num_rejected)
    layers.assert_as_expected()
    stats = manager.stats()
    assert (stats.cancelled, stats.abandoned) == ((1, 0) if then == "cancel" else (0, 1))
    assert stats.rejected == len(first.rejected) + len(lost)


@pytest.mark.parametrize("then", ["settle", "cancel_deferred", "forget"])
def test_a_failed_settle_counts_no_draft_twice(then: str) -> None:
    """Its outcome is kept. Another settle with any arguments finishes it, or cancel and forget uncount it."""
    layers = InFlight(windows=2)
    first, second = layers.batches(FIRST, SECOND)
    waiting = layers.run(first)
    lost = {"settle": second.rejected, "cancel_deferred": second.drafted, "forget": []}[then]
    manager, deferred = layers.manager, layers.run(second, lost)
    for launch in (1, 0) if then == "settle" else (1,):  # 0: the undo launches
        with fail_at(launch, lasting=True), pytest.raises(Lost):
            manager.settle(deferred, second.num_rejected)
    assert manager.in_flight == 2
    end = getattr(manager, then)
    end(deferred, torch.zeros_like(second.num_rejected)) if then == "settle" else end(deferred)
    manager.settle(waiting, first.num_rejected)
    layers.assert_as_expected()
    stats, counted = manager.stats(), [] if then == "forget" else second.drafted
    assert stats.rejected == len(first.rejected) + len(lost)
    assert stats.accepted == len(first.drafted) - len(first.rejected) + len(counted) - len(lost)


def test_a_settle_that_raises_after_its_launch_counts_no_draft_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA in debug mode a call can raise after its launch."""
    monkeypatch.setattr(nwor_ops.transaction.manager, "raises_after_launches", lambda counters: True)
    layers = InFlight(windows=2)
    first, _ = layers.batches(FIRST, SECOND)
    deferred = layers.run(first)
    with raising_after_launch(IndexError), pytest.raises(IndexError, match="reject_rows_from_rejected: found after"):
        layers.manager.settle(deferred, first.num_rejected)
    layers.manager.settle(deferred, torch.zeros_like(first.num_rejected))
    layers.assert_as_expected()
    assert layers.manager.stats().rejected == len(first.rejected)


@pytest.mark.parametrize("outcome_known", [False, True])
def test_settle_is_refused_after_cancel_deferred_has_begun(outcome_known: bool) -> None:
    """Accepted drafts are undone in some layers already. A settle would keep them in the others."""
    layers = InFlight(windows=2)
    first, _ = layers.batches(FIRST, SECOND)
    manager, deferred = layers.manager, layers.run(first, lost=first.drafted)
    if outcome_known:
        with fail_at(1, lasting=True), pytest.raises(Lost):
            manager.settle(deferred, first.num_rejected)
    with fail_at(1, lasting=True), pytest.raises(Lost):
        manager.cancel_deferred(deferred)
    with pytest.raises(
        RuntimeError, match=r"settle: cancel_deferred\(\) has begun for this window; call cancel_deferred\(\) again"
    ):
        manager.settle(deferred, first.num_rejected)
    manager.cancel_deferred(deferred)
    layers.assert_as_expected()
    assert (manager.stats().rejected, manager.stats().accepted) == (len(first.drafted), 0)
    [again] = layers.batches(FIRST, seed=1)  # in the same section
    manager.settle(layers.run(again), again.num_rejected)
    layers.assert_as_expected()


def test_an_abandoned_window_keeps_its_rows() -> None:
    """Its drafts count neither as accepted nor as rejected, also if a later window is cancelled."""
    layers = InFlight(windows=2)
    first, second, third, fourth = layers.batches(FIRST, SECOND, THIRD, SECOND)
    waiting = layers.run(first)
    for batch in (second, third):
        layers.manager.begin(batch.window)
        layers.forward(batch, [])
        layers.manager.abandon()
    layers.manager.settle(waiting, first.num_rejected)
    layers.manager.begin(fourth.window)
    layers.forward(fourth, fourth.drafted)
    layers.manager.cancel()
    layers.assert_as_expected()
    stats = layers.manager.stats()
    assert (stats.abandoned, stats.accepted) == (2, len(first.drafted) - len(first.rejected))
    assert stats.rejected == len(first.rejected) + len(fourth.drafted)


def test_a_failed_abandon_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(manager: InFlightManager) -> None:
        raise Lost("planted")

    layers = InFlight(windows=2)
    [batch] = layers.batches(FIRST)
    layers.manager.begin(batch.window)
    layers.forward(batch, [])
    with monkeypatch.context() as patch:
        patch.setattr(InFlightManager, "_stop_logging", fails)
        with pytest.raises(Lost):
            layers.manager.abandon()
    with pytest.raises(RuntimeError, match=r"^defer: abandon\(\) has begun for the open window; call abandon\(\)"):
        layers.manager.defer()
    layers.manager.abandon()
    layers.assert_as_expected()
    assert (layers.manager.stats().abandoned, layers.manager.stats().rejected) == (1, 0)


@pytest.mark.parametrize("end", ["cancel_deferred", "forget"])
def test_a_deferred_window_ends_while_another_is_open(end: str) -> None:
    """The drafts of the open window are counted once, when its outcome arrives."""
    layers = InFlight(windows=2)
    first, second = layers.batches(FIRST, SECOND)
    lost = first.drafted if end == "cancel_deferred" else []
    deferred = layers.run(first, lost)
    layers.manager.begin(second.window)
    getattr(layers.manager, end)(deferred)
    layers.forward(second, second.rejected)
    layers.manager.settle(layers.manager.defer(), second.num_rejected)
    layers.assert_as_expected()
    stats = layers.manager.stats()
    assert stats.rejected == len(lost) + len(second.rejected)
    assert stats.accepted == len(second.drafted) - len(second.rejected)


def test_begin_is_refused_if_the_log_is_full() -> None:
    layers = InFlight(["packed"], windows=2)
    first, second, third = layers.batches(FIRST, SECOND, THIRD)
    waiting = [layers.run(batch) for batch in (first, second)]
    with pytest.raises(RuntimeError, match=r"all 2 windows of the undo log are deferred; call settle\(\), "):
        layers.manager.begin(third.window)
    layers.manager.settle(waiting[0], first.num_rejected)
    last = layers.run(third)
    layers.manager.settle(last, third.num_rejected)
    layers.manager.settle(waiting[1], second.num_rejected)
    layers.assert_as_expected()


@pytest.mark.parametrize("end", ["settle", "cancel_deferred", "cancel"])
def test_any_free_section_of_the_log_is_used(end: str) -> None:
    """A window that has ended frees its section for another one, whichever earlier windows are still deferred."""
    layers = InFlight(["packed"], windows=2)
    first, second, third = layers.batches(FIRST, SECOND, THIRD)
    waiting = layers.run(first)
    if end == "cancel":
        layers.manager.begin(second.window)
        layers.forward(second, second.drafted)
        layers.manager.cancel()
    elif end == "settle":
        layers.manager.settle(layers.run(second), second.num_rejected)
    else:
        layers.manager.cancel_deferred(layers.run(second, lost=second.drafted))
    last = layers.run(third)
    layers.manager.settle(last, third.num_rejected)
    layers.manager.settle(waiting, first.num_rejected)
    layers.assert_as_expected()


def test_the_protocol_is_enforced() -> None:
    layers = InFlight(["packed"], windows=2)
    first, _ = layers.batches(FIRST, SECOND)
    with pytest.raises(RuntimeError, match="defer: the manager must be inside a window"):
        layers.manager.defer()
    deferred = layers.run(first)
    with pytest.raises(TypeError, match="num_rejected must have dtype"):
        layers.manager.settle(deferred, first.num_rejected.float())
    for request in (-1, len(FIRST)):
        with pytest.raises(ValueError, match=f"undo: requests must be at (least 0|most 2), got {request}"):
            layers.manager.undo(deferred, [0, request])
    layers.manager.settle(deferred, first.num_rejected)
    for name, rest in (("settle", [first.num_rejected]), ("undo", [[0]]), ("cancel_deferred", []), ("forget", [])):
        with pytest.raises(RuntimeError, match=f"^{name}: this window is not deferred"):
            getattr(layers.manager, name)(deferred, *rest)
    with pytest.raises(RuntimeError, match=r"^cancel: .*; call begin\(\) first"):
        layers.manager.cancel()
    with pytest.raises(TypeError, match=r"settle: deferred must be what defer\(\) returned, got 3"):
        layers.manager.settle(3, first.num_rejected)  # type: ignore[arg-type]
    for commit in (
        lambda: layers.manager.commit(first.draft_token_ids, first.sampled_token_ids),
        lambda: layers.manager.commit_rejected(first.num_rejected),
    ):
        with pytest.raises(RuntimeError, match=r"call defer\(\), then settle\(\)"):
            commit()


def test_mode_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="InFlightManager: mode must be cow, got 'stage'"):
        InFlightManager(
            windows=2, max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="cpu", mode="stage",
            max_drafts_per_request=2,
        )  # fmt: skip


def test_the_log_has_rows_for_every_window() -> None:
    one, three = Transactions(KINDS, windows=1), Transactions(KINDS, windows=3)
    assert three.manager.log_bytes == 3 * one.manager.log_bytes
    assert three.manager.max_draft_tokens == one.manager.max_draft_tokens
    assert torch.equal(three.manager.buffers.log_rows, one.manager.buffers.log_rows)
