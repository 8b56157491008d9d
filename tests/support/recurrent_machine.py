"""A state machine of random calls to RecurrentStates, compared with a scheme that keeps the state after every token.

It is a small engine. Requests take a slot, and run prompts with another kernel or in windows. They decode with any
acceptance, skip steps, fork, are preempted and return. They finish and leave their slot as it is. Windows end by commit
or cancel, after any number of layers. Any launch may fail, before or after it ran. Then cancel follows. Whenever no
window is open, each slot's state with the accepted rows of its record applied is bit-identical to the state of the
other scheme. In the chunk form, that scheme runs each token alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from faults import Lost, fail_at
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from recurrent_states import CHUNK, CHUNK_KINDS, KINDS, Decoding
from state_machines import Counted

from nwor_ops.transaction.protocol import State

LAYER_KINDS = ("gdn", "small state", "kda")  # three launches a fold
NUM_SLOTS, MAX_REQUESTS = 6, 4
SPARE = NUM_SLOTS  # a slot that the test uses to copy and fold states of other slots


def mostly(*values):
    """Draw a value. The first one is the most likely, and examples shrink to it."""
    return st.sampled_from([values[0]] * (2 * len(values)) + list(values))


# The launch of a call that fails, counted from 0. No call has 99.
FAULTS = mostly(
    (99, "before", Lost),
    *itertools.product(range(4), ("before", "after"), (Lost, KeyboardInterrupt)),
)


class Engine(Counted):
    device = "cpu"

    @initialize(data=st.data(), in_pages=st.booleans(), chunk=st.sampled_from((0, 0, CHUNK)))
    def start(self, data: st.DataObject, in_pages: bool, chunk: int) -> None:
        some_kinds = st.just(LAYER_KINDS) | st.lists(st.sampled_from(tuple(KINDS)), min_size=1, max_size=3, unique=True)
        self.kinds = tuple(CHUNK_KINDS) if chunk else data.draw(some_kinds, "kinds")
        self.max_window = data.draw(mostly(3, 1, 8) if chunk else mostly(3, 1, 9, 32), "max_window")
        self.decoding = Decoding(
            self.kinds, chunk=chunk, num_slots=SPARE + 1, max_window=self.max_window, max_requests=MAX_REQUESTS,
            in_pages=in_pages, device=self.device,
        )  # fmt: skip
        self.states = self.decoding.states
        self.running: list[int] = []  # slots
        self.tokens: dict[int, int] = {}  # of each slot's state
        self.says_tokens = data.draw(st.booleans(), "num_computed_tokens")
        self.new_request(2)

    def free(self) -> list[int]:
        return [slot for slot in range(1, SPARE) if slot not in self.running]

    # ------------------------------------------------------------ requests

    def new_request(self, slot: int) -> None:
        self.decoding.start(slot)
        self.running.append(slot)
        self.tokens[slot] = 0

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.new_request(data.draw(st.sampled_from(self.free())))

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Finish or preempt a request. Its pending rows stay in the slot."""
        slot = data.draw(st.sampled_from(self.running))
        self.running.remove(slot)
        for layer in self.decoding.every_state.values():
            del layer.held[slot]

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        targets = data.draw(st.lists(st.sampled_from(self.free()), min_size=1, max_size=3, unique=True))
        sources = [data.draw(st.sampled_from(self.running)) for _ in targets]
        slots = self.decoding.tensor([*sources, 0, sources[0]]), self.decoding.tensor([*targets, sources[0], -1])
        self.fold_or_copy(data, self.states.copy, *slots)
        self.tokens |= {target: self.tokens[source] for source, target in zip(sources, targets, strict=True)}
        for layer in self.decoding.every_state.values():
            layer.held |= {target: layer.held[source] for source, target in zip(sources, targets, strict=True)}
            for target in targets:  # its chunk begins here, also if the slot once held the same state
                layer.begin_chunk(target)
        self.running += targets

    @rule(data=st.data())
    def fold(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(self.running), unique=True))
        self.fold_slots(data, slots)

    def fold_slots(self, data: st.DataObject, slots: list[int]) -> None:
        self.fold_or_copy(data, self.states.fold, self.decoding.tensor([*slots, 0]))
        self.decoding.assert_folded(*slots)
        for layer in self.decoding.every_state.values():
            for slot in slots:
                layer.begin_chunk(slot)

    # ------------------------------------------------------------ faults

    def fails(self, data: st.DataObject, call: Callable, *arguments: object) -> bool:
        """Run a call, a launch of which may fail. Return whether it has failed."""
        try:
            with fail_at(*data.draw(FAULTS, "fault")):
                call(*arguments)
            return False
        except (Lost, KeyboardInterrupt):
            return True

    def fold_or_copy(self, data: st.DataObject, call: Callable, *slots: torch.Tensor) -> None:
        if not self.fails(data, call, *slots):
            return
        if self.states.state is State.CLOSED:  # it has planned nothing
            call(*slots)
            return
        with pytest.raises(RuntimeError, match=r"commit: no window is open, but a fold has failed; call cancel"):
            self.states.commit(slots[0])
        self.cancel(data)  # it finishes the call

    def cancel(self, data: st.DataObject) -> None:
        if self.fails(data, self.states.cancel):
            self.states.cancel()

    # ------------------------------------------------------------ windows

    @rule(data=st.data(), reached=mostly(3, 2, 1, 0), may_commit=mostly(True, False))
    def step(self, data: st.DataObject, reached: int, may_commit: bool) -> None:
        """A window, in which the forward may stop before a layer."""
        slots, lengths, windows, failed = self.begin(data)
        if failed:
            if self.states.state is State.OPEN:
                self.cancel(data)
            return
        others = [slot for slot, opens in zip(slots, windows, strict=True) if not opens]
        for slot in others:  # a kernel for prompts
            for name, layer in self.decoding.every_state.items():
                state = self.decoding.state_of(slot, name)
                state.mul_(0.5).add_(1.0)
                layer.held[slot] = state.clone()
        self.decoding.forward(self.kinds[:reached])
        own = [
            (slot, n) for slot, n, opens in zip(slots, lengths, windows, strict=True) if slot > 0 and opens and n > 0
        ]
        if reached >= len(self.kinds) and may_commit:
            kept = {slot: data.draw(st.integers(1, n), "stay") for slot, n in own}
            self.decoding.commit(kept)
            self.tokens |= {slot: self.tokens[slot] + number for slot, number in kept.items()}
        else:
            self.cancel(data)
            if not self.states.chunk:
                self.decoding.assert_folded(*others, *(slot for slot, _ in own))

    def begin(self, data: st.DataObject) -> tuple[list[int], list[int], list[bool], bool]:
        slots = [slot for slot in self.running if data.draw(mostly(True, False), "scheduled")][: MAX_REQUESTS - 1]
        windows = [data.draw(mostly(True, False), "window") for _ in slots]
        in_a_window = st.sampled_from(range(self.max_window, -1, -1))
        lengths = [data.draw(in_a_window if opens else st.sampled_from([1, 9]), "length") for opens in windows]
        others = [slot for slot, opens in zip(slots, windows, strict=True) if not opens]
        place, padding = data.draw(mostly(len(slots), 0)), data.draw(st.integers(0, min(2, self.max_window)), "padding")
        for values, value in ((slots, -1), (lengths, padding), (windows, True)):
            values.insert(place, value)
        computed = [self.tokens.get(slot, 7) for slot in slots] if self.says_tokens else None
        if computed is not None:
            for row, slot in enumerate(slots):
                if slot in others:  # the other kernel goes on, or starts a new state
                    computed[row] = data.draw(mostly(computed[row], 0), "computed")
            if self.device == "cpu" and data.draw(mostly(False, True), "refused"):
                self.refused_begin(data, slots, lengths, windows, computed)
        self.fold_slots(data, others)
        failed = self.fails(data, self.decoding.begin, slots, lengths, windows if others else None, computed)
        if computed is not None and not failed:
            rows = [row for row, slot in enumerate(slots) if slot in others]
            self.tokens |= {slots[row]: computed[row] + lengths[row] for row in rows}
        return slots, lengths, windows, failed

    def refused_begin(self, data: st.DataObject, slots: list, lengths: list, windows: list, computed: list) -> None:
        """A slot has the state of other tokens, or rows that another kernel would drop."""
        rows = [row for row, slot in enumerate(slots) if slot > 0 and lengths[row]]
        if not rows:
            return
        row, wrong = data.draw(st.sampled_from(rows)), list(computed)
        if windows[row] or not wrong[row] or not self.states.cursors.table[slots[row], ::2].any():
            wrong[row] = self.tokens[slots[row]] + 1
        with pytest.raises(ValueError, match=r"^begin: (num_computed_tokens|is_window) must be .* for request \d"):
            self.decoding.begin(slots, lengths, windows, wrong)

    # ------------------------------------------------------------ what must hold

    def teardown(self) -> None:
        if hasattr(self, "decoding"):
            self.decoding.assert_no_other_bytes_written()

    @invariant()
    def every_slot_stands_for_what_the_other_scheme_holds(self) -> None:
        if not hasattr(self, "states"):
            return
        assert self.states.state is State.CLOSED
        for slot in self.running:
            pending = self.states.cursors.table[slot].clone()
            self.states.copy(self.decoding.tensor([slot]), self.decoding.tensor([SPARE]))
            assert torch.equal(self.states.cursors.table[slot], pending)
            for name, layer in self.decoding.every_state.items():
                held = layer.held[slot]
                assert torch.equal(self.decoding.state_of(SPARE, name), held), f"slot {slot} of {name}: another state"


MACHINE_SETTINGS = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=30)
