"""A state machine over :class:`nwor_ops.InFlightManager`: windows are begun, deferred and ended in any order.

Any call may be refused for its arguments, and any launch may fail. Whenever no window is open or deferred, the caches
hold the kept rows only, byte for byte. The counters are consistent after every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from faults import Lost, fail_at
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from state_machines import Counted
from transactions import NUM_SLOTS, Batch, Request, Transactions, make_batch

from nwor_ops.transaction.in_flight import Deferred
from nwor_ops.transaction.manager import State

WINDOWS = 3
FAULTS = st.sampled_from([99, 99, 99, 0, 1, 2])
REQUESTS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 3)).flatmap(
        lambda sizes: st.builds(Request, st.just(sizes[0]), st.just(sizes[1]), st.integers(0, sizes[1]))
    ),
    min_size=1,
    max_size=3,
)


@dataclass(eq=False, repr=False)
class InFlightWindow:
    batch: Batch
    slots: dict[str, list[int]]
    written: dict[str, tuple[torch.Tensor, ...]]
    deferred: Deferred | None = None
    undone: frozenset[int] = frozenset()  # tokens


class DeferringEngine(Counted):
    @initialize()
    def start(self) -> None:
        self.transactions = Transactions(["packed", "latent"], windows=WINDOWS)
        self.manager = self.transactions.manager
        self.free = {group: list(range(NUM_SLOTS)) for group in self.transactions.groups}
        self.open: InFlightWindow | None = None
        self.deferred: list[InFlightWindow] = []
        self.counts = dict.fromkeys(["windows", "drafted", "accepted", "rejected", "cancelled", "abandoned"], 0)

    def is_free(self) -> bool:
        return self.open is None and len(self.deferred) < WINDOWS

    @precondition(is_free)
    @rule(requests=REQUESTS, reached=st.sampled_from([99, 99, 99, 0, 1]))
    def begin(self, requests: list[Request], reached: int) -> None:
        count = sum(request.given + request.drafts for request in requests)
        slots = {group: [free.pop(0) for _ in range(count)] for group, free in self.free.items()}
        batch = make_batch(requests, slots)
        self.manager.begin(batch.window)
        written = {}
        for name in list(self.transactions.caches)[:reached]:
            written[name] = self.transactions.rows(name, count)
            self.transactions.write(name, written[name], batch.slots[self.transactions.group_of[name]])
        self.open = InFlightWindow(batch, slots, written)
        self.counts["windows"] += 1
        self.counts["drafted"] += len(batch.drafted)

    @precondition(lambda self: self.open is None and len(self.deferred) == WINDOWS)
    @rule()
    def begin_too_many(self) -> None:
        with pytest.raises(RuntimeError, match="all 3 windows of the undo log are deferred"):
            self.manager.begin(self.deferred[0].batch.window)

    @precondition(lambda self: self.open)
    @rule()
    def defer(self) -> None:
        self.open.deferred = self.manager.defer()
        self.deferred.append(self.open)
        self.open = None

    @precondition(lambda self: self.open)
    @rule(fault=FAULTS, undo=st.booleans())
    def end_open(self, fault: int, undo: bool) -> None:
        """A call that fails is repeated."""
        for at in (fault, 99):
            try:
                with fail_at(at):
                    (self.manager.cancel if undo else self.manager.abandon)()
                break
            except Lost:
                assert self.manager.state is State.OPEN
        window, self.open = self.open, None
        self.end(window, "cancelled" if undo else "abandoned")

    @precondition(lambda self: self.deferred)
    @rule(data=st.data())
    def refused_settle(self, data: st.DataObject) -> None:
        """The counts have another dtype. The window is still deferred."""
        window = data.draw(st.sampled_from(self.deferred))
        with pytest.raises(TypeError, match="num_rejected must have dtype"):
            self.manager.settle(window.deferred, window.batch.num_rejected.long())

    @precondition(lambda self: self.deferred)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        """Requests end before their outcome arrives."""
        window = data.draw(st.sampled_from(self.deferred))
        starts = window.batch.window.query_start_loc.tolist()
        requests = data.draw(st.sets(st.integers(0, len(starts) - 2), max_size=2))
        self.manager.undo(window.deferred, requests)
        tokens = {token for request in requests for token in range(starts[request], starts[request + 1])}
        window.undone |= tokens & set(window.batch.drafted)

    @precondition(lambda self: self.deferred)
    @rule(data=st.data(), fault=FAULTS, end=st.sampled_from(["settle", "settle", "cancel_deferred", "forget"]))
    def end_deferred(self, data: st.DataObject, fault: int, end: str) -> None:
        """A settle that fails is repeated, or the window is cancelled. Another call that fails is repeated."""
        window = data.draw(st.sampled_from(self.deferred))
        for at in (fault, 99):
            try:
                with fail_at(at):
                    arguments = (window.batch.num_rejected,) if end == "settle" else ()
                    getattr(self.manager, end)(window.deferred, *arguments)
                break
            except Lost:
                end = data.draw(st.sampled_from(["settle", "cancel_deferred"])) if end == "settle" else end
        self.deferred.remove(window)
        self.end(window, {"settle": "", "cancel_deferred": "cancelled", "forget": "abandoned"}[end])

    def end(self, window: InFlightWindow, end: str) -> None:
        batch = window.batch
        lost = {"": batch.rejected, "cancelled": batch.drafted, "abandoned": []}[end]
        for name, rows in window.written.items():
            slots = batch.slots[self.transactions.group_of[name]]
            self.transactions.expect(name, rows, slots, {*lost, *window.undone})
        for group, slots in window.slots.items():
            self.free[group] += slots
        self.counts["rejected"] += len(lost)
        if end:
            self.counts[end] += 1
        if not end:
            self.counts["accepted"] += len(batch.drafted) - len(lost)

    @invariant()
    def caches_and_counts_are_right(self) -> None:
        if not self.open and not self.deferred:
            self.transactions.assert_as_expected()
        assert self.manager.stats().as_dict() == self.counts | {"overflowed": 0}

    def teardown(self) -> None:
        if self.open:
            self.end_open(99, True)
        for window in self.deferred:
            self.manager.settle(window.deferred, window.batch.num_rejected)
            self.end(window, "")
        self.deferred.clear()
        self.caches_and_counts_are_right()
