"""A miniature engine that drives a manager with random steps, as a state machine with a model.

The model is one dictionary per layer, from slot to bytes.

Requests arrive, prefill in chunks, decode with and without drafts, and grow over block boundaries. They finish, and
others reuse their blocks. Windows end in every way and at every point: after all layers wrote, after some (the forward
raised), after none. Begin, commit, cancel and abandon may raise before or after their launches, also
KeyboardInterrupt. Then cancel or abandon follows, and may raise again.

Whenever no window is open, the caches equal the model byte for byte, with sentinels everywhere else, and the counters
are consistent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from faults import Lost, failing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from state_machines import Counted
from transactions import KINDS, Batch, Transactions, make_batch, put_rows
from transactions import Request as Part

from nwor_ops import Layout, ops
from nwor_ops.transaction.manager import State

PlaneOf = tuple[str, int]  # a layer and the index of one of its planes
LAYER_KINDS = tuple(KINDS)  # four groups, of 4 to 16 slots a block
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
    failed: str = ""  # the call that has raised
    moved: set[int] = field(default_factory=set)  # tokens that it undid in cow, or copied to their slots in stage


ERRORS = [(when, error) for when in ("before", "after") for error in (Lost, KeyboardInterrupt)]
FAULTS = st.sampled_from([("", Lost)] * 4 + ERRORS)


class Engine(Counted):
    mode, device = "cow", "cpu"
    layer_kinds = LAYER_KINDS

    @initialize(binds=st.booleans())
    def start(self, binds: bool) -> None:
        """With `binds` all windows have the same slot mappings and tables, which are bound once."""
        self.transactions = Transactions(
            self.layer_kinds, max_draft_tokens=MAX_LOG_ROWS, max_num_tokens=64, mode=self.mode,
            max_drafts_per_request=MAX_DRAFTS, device=self.device,
        )  # fmt: skip
        self.manager = self.transactions.manager
        self.caches = self.transactions.caches
        self.views = [[plane.view for plane in cache.planes] for cache in self.caches.values()]
        self.block_size, self.free = {}, {}
        for name, group in self.transactions.group_of.items():
            num_blocks, self.block_size[group] = self.caches[name].planes[0].view.shape[:2]
            self.free[group] = list(range(num_blocks - self.transactions.shadows))
        self.fill_with_sentinel([self.views, self.transactions.expected])
        self.model: dict[PlaneOf, dict[int, torch.Tensor]] = {
            (name, number): {} for name, cache in self.caches.items() for number in range(len(cache.planes))
        }
        self.requests: list[Request] = []
        self.window: OpenWindow | None = None
        self.slots: dict[str, torch.Tensor] = {}
        self.tables: dict[str, torch.Tensor] = {}
        if binds:
            tokens, rows = self.manager.max_num_tokens, self.manager.max_num_requests
            for group, size in self.block_size.items():
                self.slots[group] = torch.full((tokens,), -1, device=self.device)
                self.tables[group] = torch.zeros(rows, tokens // size + 2, dtype=torch.int32, device=self.device)
            self.manager.bind(Layout(self.slots, self.tables))
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
        """Its blocks go to the front of the free list, so they are reused immediately with their old data."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        for group, blocks in request.blocks.items():
            self.free[group] = blocks + self.free[group]

    def slots_of(self, request: Request, group: str, count: int) -> list[int]:
        """The next `count` slots of a request; -1 if no block is left."""
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
    @rule(
        data=st.data(), known=st.sampled_from(["exactly", "as a bound", "not"]), padded_requests=st.integers(0, 2),
        padding=st.integers(0, 3), fault=FAULTS,
    )  # fmt: skip
    def begin(self, data: st.DataObject, known: str, padded_requests: int, padding: int, fault: tuple) -> None:
        """The host knows the number of drafts exactly, only a bound, or not at all."""
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
        requests = [part for _, part in parts] + [Part(0)] * padded_requests
        batch = make_batch(requests, slots, known == "exactly").on(self.device)
        if known == "as a bound":
            batch.window = batch.window._replace(num_draft_tokens=MAX_LOG_ROWS)
        if self.slots:
            slots = {group: own + [-1] * (len(self.slots[group]) - len(own)) for group, own in slots.items()}
        for group, own in self.slots.items():
            batch.slots[group] = own.copy_(torch.tensor(slots[group]))
        tables = self.prepare(batch, parts, padded_requests)
        before = {group: table.clone() for group, table in tables.items()}
        try:
            with failing(*fault):
                self.manager.begin(batch.window)
        except fault[1]:
            self.not_begun(batch, slots, planned=fault[0] == "after")
            assert all(torch.equal(table, before[group]) for group, table in tables.items())
            return
        self.window = OpenWindow(batch, parts)
        self.counts["windows"] += 1
        self.counts["drafted"] += len(batch.drafted)

    def prepare(self, batch: Batch, parts: list[tuple[Request, Part]], padded_requests: int) -> dict[str, torch.Tensor]:
        """Set what mode "stage" needs in addition to slots, and bind the layout. Return the block tables."""
        lengths = [request.length + part.given + part.drafts for request, part in parts] + [0] * padded_requests
        tables: dict[str, torch.Tensor] = {}
        for group in self.free:
            table = torch.zeros(len(lengths), max([MAX_LENGTH, *lengths]) // self.block_size[group] + 2).int()
            for row, (request, _) in zip(table, parts, strict=False):
                row[: len(request.blocks[group])] = torch.tensor(request.blocks[group], dtype=torch.int32)
            tables[group] = table
        batch.window = batch.window._replace(seq_lens=torch.tensor(lengths, dtype=torch.int32).to(self.device))
        tables = {group: table.to(self.device) for group, table in tables.items()}
        if not self.tables:
            self.manager.bind(Layout(batch.slots, tables))
        for group, own in self.tables.items():
            own[: len(lengths), : tables[group].shape[1]] = tables[group]
        return self.tables or tables

    def not_begun(self, batch: Batch, slots, planned: bool) -> None:
        """Begin raised. Slots and tables are unchanged, and a window that was planned with drafts is cancelled."""
        self.manager.cancel()
        for group, own in batch.slots.items():
            assert own.tolist() == slots[group]
        self.counts["windows"] += planned
        self.counts["cancelled"] += planned and len(batch.drafted) > 0
        for name in ("drafted", "rejected"):
            self.counts[name] += planned * len(batch.drafted)

    def refused(self, parts: list[tuple[Request, Part]]) -> None:
        """There are more drafts than rows: no window, nothing changed. On the CPU the host need not know the number."""
        count = sum(part.given + part.drafts for _, part in parts)
        slots = {group: [-1] * count for group in self.free}
        known = self.device != "cpu"
        batch = make_batch([part for _, part in parts], slots, num_draft_tokens_known=known).on(self.device)
        self.prepare(batch, parts, 0)
        with pytest.raises(ValueError, match=r"must have 0 to 10 drafts|must have a row for each draft"):
            self.manager.begin(batch.window)

    def forward_goes_on(self) -> bool:
        window = self.window
        return window is not None and len(window.written) < len(self.caches) and not window.failed

    @precondition(forward_goes_on)
    @rule(num_layers=st.sampled_from([99, 99, 99, 1, 4]), cut=st.integers(0, 12))
    def write(self, num_layers: int, cut: int) -> None:
        """Write the next layers, each in two micro-batches."""
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

    def ends(self, end: str, arguments: tuple, fault: tuple, moved: set[int]) -> bool:
        """Call a method that ends a window, and that may raise. Return whether the window is closed."""
        try:
            with failing(*fault):
                getattr(self.manager, end)(*arguments)
            return True
        except fault[1]:
            assert self.manager.state is State.OPEN
        self.window.failed = end
        if fault[0] == "after":
            self.window.moved |= moved
        return False

    def may_commit(self) -> bool:
        return self.forward_is_done() and not self.window.failed

    @precondition(may_commit)
    @rule(fault=FAULTS, by_tokens=st.booleans())
    def commit(self, fault: tuple, by_tokens: bool) -> None:
        batch = self.window.batch
        kept = set(range(batch.num_tokens)) - set(batch.rejected)
        moved = kept if self.mode == "stage" else set(batch.rejected)
        if not self.ends(*self.commit_call(by_tokens), fault, moved):
            return
        self.counts["accepted"] += len(batch.drafted) - len(batch.rejected)
        accepted = [part.accepted for _, part in self.window.parts]
        missing = self.manager.max_num_requests - len(accepted)
        assert self.manager.buffers.num_accepted.tolist() == accepted + [0] * missing
        self.counts["rejected"] += len(batch.rejected)
        self.advance()
        self.close(kept=kept)

    def commit_call(self, by_tokens: bool) -> tuple[str, tuple]:
        batch = self.window.batch
        if by_tokens:
            return "commit", (batch.draft_token_ids, batch.sampled_token_ids)
        return "commit_rejected", (batch.num_rejected,)

    @precondition(lambda self: self.opened() and self.window.failed)
    @rule(by_tokens=st.booleans())
    def commit_too_late(self, by_tokens: bool) -> None:
        end, arguments = self.commit_call(by_tokens)
        with pytest.raises(RuntimeError, match=rf"^{end}: {self.window.failed}\(\) has failed for the open window"):
            getattr(self.manager, end)(*arguments)

    @precondition(lambda self: self.forward_is_done() and not self.window.failed)
    @rule(by_tokens=st.booleans())
    def refused_commit(self, by_tokens: bool) -> None:
        """Arguments of another dtype change nothing, but the window can only be cancelled or abandoned."""
        end, arguments = self.commit_call(by_tokens)
        with pytest.raises(TypeError, match="must have dtype"):
            getattr(self.manager, end)(*(tensor.double() for tensor in arguments))
        self.window.failed = end

    @precondition(lambda self: self.opened())
    @rule(undo=st.sampled_from([True, True, False]), fault=FAULTS)
    def stop(self, undo: bool, fault: tuple) -> None:
        """The forward or a later step raised: before, between or after the layers."""
        batch = self.window.batch
        every, given = set(range(batch.num_tokens)), set(range(batch.num_tokens)) - set(batch.drafted)
        stage = self.mode == "stage"
        if undo:
            if not self.ends("cancel", (), fault, given if stage else set(batch.drafted)):
                return
            self.counts["rejected"] += len(batch.drafted)
            self.counts["cancelled"] += 1
            self.close(kept=given)  # the requests stay where they were
            return
        if not self.ends("abandon", (), fault, every):  # it has no launch in cow
            return
        self.counts["abandoned"] += 1
        if self.forward_is_done():
            self.advance()
        self.close(kept=every)

    def advance(self) -> None:
        for request, part in self.window.parts:
            request.length += part.given + part.accepted
            request.waiting = request.waiting - part.given or 1  # the token just sampled

    def close(self, kept: set[int]) -> None:
        """Add the kept tokens to the model, and those that an earlier attempt copied. Remove those that it undid."""
        window = self.window
        stay = kept | window.moved if self.mode == "stage" else kept - window.moved
        for name, number in self.model:
            slots = window.batch.slots[self.transactions.group_of[name]].tolist()
            if name not in window.written:
                if self.mode == "stage":  # its shadow pages held stale rows
                    self.adopt(name, number, [slots[token] for token in stay if slots[token] >= 0])
                continue
            for token in stay:
                if slots[token] >= 0:
                    self.model[name, number][slots[token]] = window.written[name][number][token]
        self.window = None

    def adopt(self, name: str, number: int, slots: list[int]) -> None:
        """Accept whatever these slots hold now."""
        plane = self.caches[name].planes[number]
        rows = torch.zeros(len(slots), *plane.view.shape[2:], dtype=plane.view.dtype, device=self.device)
        order = torch.arange(len(slots), dtype=torch.int32, device=self.device)
        numbers = torch.tensor(slots, dtype=torch.int64, device=self.device)
        ops.log_slots(plane.view, numbers, order, rows, plane.page_offsets)
        self.model[name, number].update(zip(slots, rows.cpu(), strict=True))

    # ------------------------------------------------------------ invariants

    @invariant()
    def caches_are_the_model(self) -> None:
        if self.opened():
            assert self.manager.state is State.OPEN
            return
        assert self.manager.state is State.CLOSED
        self.fill_with_sentinel(self.transactions.expected)
        for (name, number), row_of_slot in self.model.items():
            if row_of_slot:
                plane = self.transactions.expected[name][number]
                put_rows([plane], [torch.stack(list(row_of_slot.values()))], list(row_of_slot))
        self.transactions.assert_as_expected()
        assert self.manager.stats().as_dict() == self.counts


class StagedEngine(Engine):
    """An engine with shadow pages instead of the log."""

    mode = "stage"


MACHINE_SETTINGS = settings(deadline=None, derandomize=True, max_examples=100, stateful_step_count=60)
