"""The manager driven at random, against a model that is one dictionary per layer: slot -> bytes.

An engine in miniature: requests come, prefill in chunks, decode with and without drafts, grow over block
boundaries, finish and leave their blocks to others. Windows end in every way, at every point: after all
layers wrote, after some (the forward raised), after none. Whenever no window is open, the caches are the
model, byte for byte, and the sentinel everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from layouts import memory
from transactions import Batch, Transactions, make_batch, one_thread, put_rows  # noqa: F401
from transactions import Request as Part

import nwor_ops.manager
from nwor_ops import ops
from nwor_ops.manager import State

LAYER_KINDS = ("packed", "one_backing", "split", "latent", "amx")  # four groups, of 4 to 16 slots a block
SENTINEL = 0xA5
MAX_REQUESTS, MAX_DRAFTS, MAX_LENGTH = 4, 4, 28
MAX_LOG_ROWS = 10  # fewer than MAX_REQUESTS * MAX_DRAFTS: some batches do not fit


@dataclass(eq=False)
class Request:
    waiting: int  # tokens known but not yet cached: the prompt, later the last sampled token
    length: int = 0  # tokens cached
    blocks: dict[str, list[int]] = field(default_factory=dict)  # per group


@dataclass
class OpenWindow:
    batch: Batch
    parts: list[tuple[Request, Part]]
    written: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # per layer, the rows


class Engine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.transactions = Transactions(LAYER_KINDS, max_draft_tokens=MAX_LOG_ROWS, max_num_tokens=64)
        self.manager = self.transactions.manager
        self.caches = self.transactions.caches
        self.views = [[plane.view for plane in cache.planes] for cache in self.caches.values()]
        self.block_size, self.free = {}, {}
        for name, group in self.transactions.group_of.items():
            num_blocks, self.block_size[group] = self.caches[name].planes[0].view.shape[:2]
            self.free[group] = list(range(num_blocks))
        self.fill_with_sentinel([self.views, self.transactions.expected])
        self.model: dict[str, dict[int, tuple[torch.Tensor, ...]]] = {name: {} for name in self.caches}
        self.requests: list[Request] = []
        self.window: OpenWindow | None = None
        self.counts = dict.fromkeys([*ops.COUNTERS, "cancelled", "abandoned"], 0)

    def fill_with_sentinel(self, tensors) -> None:
        if isinstance(tensors, torch.Tensor):
            tensors.untyped_storage().fill_(SENTINEL)
        elif isinstance(tensors, dict):
            self.fill_with_sentinel([[plane.view for plane in planes] for planes in tensors.values()])
        else:
            for each in tensors:
                self.fill_with_sentinel(each)

    def closed(self) -> bool:
        return self.window is None

    def opened(self) -> bool:
        return self.window is not None

    # ------------------------------------------------------------ requests

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(prompt=st.integers(1, 9))
    def new_request(self, prompt: int) -> None:
        self.requests.append(Request(prompt, blocks={group: [] for group in self.free}))

    @precondition(lambda self: self.closed() and self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Its blocks go to the front, to be reused at once, with what they hold."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        for group, blocks in request.blocks.items():
            self.free[group] = blocks + self.free[group]

    def slots_of(self, request: Request, group: str, count: int) -> list[int]:
        """The next `count` slots of a request; -1 where no block is left."""
        size, blocks, free = self.block_size[group], request.blocks[group], self.free[group]
        slots = []
        for position in range(request.length, request.length + count):
            if position // size == len(blocks) and free:
                blocks.append(free.pop(0))
            has_block = position // size < len(blocks)
            slots.append(blocks[position // size] * size + position % size if has_block else -1)
        return slots

    # ------------------------------------------------------------ the transaction

    @precondition(lambda self: self.closed())
    @rule(data=st.data(), known=st.booleans(), padded_requests=st.integers(0, 2), padding=st.integers(0, 3))
    def begin(self, data: st.DataObject, known: bool, padded_requests: int, padding: int) -> None:
        parts = []
        for request in self.requests:
            if not data.draw(st.booleans() if len(self.requests) > 2 else st.just(True), "scheduled"):
                continue
            given = data.draw(st.sampled_from([request.waiting, request.waiting // 2 or 1]), "given")
            room = max(0, min(MAX_DRAFTS, MAX_LENGTH - request.length - given))
            decodes = given == request.waiting
            drafts = data.draw(st.sampled_from(range(room, -1, -1)), "drafts") if decodes else 0
            accepted = data.draw(st.sampled_from(range(drafts + 1)), "accepted")
            parts.append((request, Part(given, drafts, accepted)))
        if sum(part.drafts for _, part in parts) > MAX_LOG_ROWS:
            self.refused(parts)
            return
        slots = {
            group: [s for request, part in parts for s in self.slots_of(request, group, part.given + part.drafts)]
            + [-1] * padding
            for group in self.free
        }
        batch = make_batch([part for _, part in parts] + [Part(0)] * padded_requests, slots, known)
        self.manager.begin(batch.window)
        self.window = OpenWindow(batch, parts)
        self.counts["windows"] += 1
        self.counts["drafted"] += len(batch.drafted)

    def refused(self, parts: list[tuple[Request, Part]]) -> None:
        """More drafts than rows, which only the op finds: no window, nothing changed."""
        count = sum(part.given + part.drafts for _, part in parts)
        slots = {group: [-1] * count for group in self.free}
        batch = make_batch([part for _, part in parts], slots, num_draft_tokens_known=False)
        with pytest.raises(ValueError, match="row_slots"):
            self.manager.begin(batch.window)

    @precondition(lambda self: self.opened() and len(self.window.written) < len(self.caches))
    @rule(num_layers=st.sampled_from([99, 99, 99, 1, 4]), cut=st.integers(0, 12))
    def write(self, num_layers: int, cut: int) -> None:
        """The next layers, each in two micro-batches."""
        assert self.window is not None
        batch = self.window.batch
        missing = [name for name in self.caches if name not in self.window.written]
        for name in missing[:num_layers]:
            slots = batch.slots[self.transactions.group_of[name]]
            rows = self.transactions.rows(name, len(slots))
            for part in (slice(0, min(cut, len(slots))), slice(min(cut, len(slots)), len(slots))):
                some = tuple(plane_rows[part] for plane_rows in rows)
                self.transactions.write(name, some, slots[part], token_offset=part.start)
            self.window.written[name] = rows

    @precondition(lambda self: self.opened())
    @rule()
    def second_begin(self) -> None:
        with pytest.raises(RuntimeError, match="begin: the manager must be between windows"):
            self.manager.begin(self.window.batch.window)

    def forward_is_done(self) -> bool:
        return self.opened() and len(self.window.written) == len(self.caches)

    @precondition(forward_is_done)
    @rule()
    def commit(self) -> None:
        self.manager.commit(self.window.batch.draft_token_ids, self.window.batch.sampled_token_ids)
        self.sampled()

    @precondition(forward_is_done)
    @rule()
    def commit_rejected(self) -> None:
        self.manager.commit_rejected(self.window.batch.num_rejected)
        self.sampled()

    def sampled(self) -> None:
        batch = self.window.batch
        self.counts["accepted"] += len(batch.drafted) - len(batch.rejected)
        self.counts["rejected"] += len(batch.rejected)
        self.advance()
        self.close(lost=batch.rejected)

    @precondition(lambda self: self.opened())
    @rule(undo=st.sampled_from([True, True, False]))
    def stop(self, undo: bool) -> None:
        """The forward, or what follows it, raised: before, between or after the layers."""
        batch = self.window.batch
        if undo:
            self.manager.cancel()
            self.counts["rejected"] += len(batch.drafted)
            self.counts["cancelled"] += 1
            self.close(lost=batch.drafted)  # the requests stay where they were
            return
        self.manager.abandon()
        self.counts["abandoned"] += 1
        if self.forward_is_done():
            self.advance()
        self.close(lost=[])

    def advance(self) -> None:
        for request, part in self.window.parts:
            request.length += part.given + part.accepted
            request.waiting = request.waiting - part.given or 1  # the token just sampled

    def close(self, lost: list[int]) -> None:
        for name, rows in self.window.written.items():
            slots = self.window.batch.slots[self.transactions.group_of[name]].tolist()
            for token, slot in enumerate(slots):
                if slot >= 0 and token not in lost:
                    self.model[name][slot] = tuple(plane_rows[token] for plane_rows in rows)
        self.window = None

    # ------------------------------------------------------------ what always holds

    @invariant()
    def caches_are_the_model(self) -> None:
        if self.opened():
            assert self.manager.state is State.OPEN
            return
        assert self.manager.state is State.CLOSED
        self.fill_with_sentinel(self.transactions.expected)
        for name, rows_of_slots in self.model.items():
            if rows_of_slots:
                rows = [torch.stack(plane_rows) for plane_rows in zip(*rows_of_slots.values(), strict=True)]
                put_rows(self.transactions.expected[name], rows, list(rows_of_slots))
        self.transactions.assert_as_expected()
        assert self.manager.stats().as_dict() == self.counts


MACHINE_SETTINGS = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=60)

TestEngine = Engine.TestCase
TestEngine.settings = MACHINE_SETTINGS


def without_row_windows(restore):
    return lambda caches, log, slots, rejected, offsets, window, windows, *rest: restore(
        caches, log, slots, rejected, offsets, None, None, *rest
    )


def without_last_layer(restore):
    def restore_others(caches, log, slots, rejected, offsets, window, windows, num_rows, table):
        layers = max(1, len(table) - 1)
        restore(
            caches, log[:layers], slots, rejected, offsets, window, windows[:layers], num_rows, table[:layers]
        )  # fmt: skip

    return restore_others


def without_page_offsets(restore):
    return lambda caches, log, slots, rejected, offsets, *rest: restore(caches, log, slots, rejected, None, *rest)


@pytest.mark.parametrize("break_restore", [without_row_windows, without_last_layer, without_page_offsets])
def test_the_machine_finds_a_broken_restore(break_restore, monkeypatch):
    monkeypatch.setattr(nwor_ops.manager.ops, "restore_slots", break_restore(ops.restore_slots))
    with pytest.raises(AssertionError, match="not what they would be"):
        run_state_machine_as_test(
            Engine, settings=settings(MACHINE_SETTINGS, report_multiple_bugs=False, phases=[Phase.generate])
        )


def test_memory_is_compared():
    """The comparison covers the bytes around the planes."""
    machine = Engine()
    machine.start()
    total = sum(len(part) for part in memory(machine.views))
    planes = sum(view.numel() * view.element_size() for views in machine.views for view in views)
    assert total > planes
