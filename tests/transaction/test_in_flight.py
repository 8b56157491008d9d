"""Test deferred windows. The state machine of deferring_machine.py draws their order, their ends and their failures."""

from __future__ import annotations

import itertools

import pytest
import torch
from faults import Lost, fail_at
from transactions import KINDS, Batch, Request, Transactions, distinct_slots, make_batch, one_thread  # noqa: F401

from nwor_ops.transaction.in_flight import Deferred, InFlightManager
from nwor_ops.transaction.protocol import State

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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_outcomes_arrive_in_any_order(order: tuple[int, ...]) -> None:
    layers = InFlight(windows=3)
    for seed in range(3):  # the sections of the log are reused
        batches = layers.batches(FIRST, SECOND, THIRD, seed=seed)
        deferred = [layers.run(batch) for batch in batches]
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


def test_a_graph_replayed_between_windows_logs_nothing() -> None:
    """It is replayed in a step without drafts, outside any window. Captured code uses the log rows that it finds."""
    layers = InFlight(["packed"], windows=2)
    first, plain = layers.batches(FIRST, (Request(8),))
    waiting = layers.run(first)
    manager = layers.manager
    for name in layers.caches:
        slots = plain.slots[layers.group_of[name]]
        rows = layers.rows(name, len(slots))
        manager._state = State.OPEN  # a replay does not look at the state
        layers.write(name, rows, slots)
        manager._state = State.CLOSED
        layers.expect(name, rows, slots, [])
    manager.settle(waiting, first.num_rejected)
    layers.assert_as_expected()


def test_settle_is_refused_after_cancel_has_begun() -> None:
    """Accepted drafts are undone in some layers already. A settle would keep them in the others."""
    layers = InFlight(windows=2)
    first, _ = layers.batches(FIRST, SECOND)
    manager, deferred = layers.manager, layers.run(first, lost=first.drafted)
    with fail_at(1), pytest.raises(Lost):
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
    layers.manager.cancel()  # does nothing
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
