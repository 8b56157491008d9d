"""The self-test of family ``recurrent``: two windows of a request and a fold, in numbers that are exact anywhere.

It runs with records of two halves, and with a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.testing.comparison import difference

SLOTS, SLOT, RECORD_ROWS, RING_ROWS, WIDTH = 3, 2, 2, 3, 64
NONE = (0, 0, 0, 0)


class _Layer:
    """One head of each kind. Every key is a unit vector, nothing decays, and beta is 1.

    A token therefore stores its value in one column of the state, and a query reads a sum of columns.
    """

    def __init__(self, device: torch.device, ring_rows: int) -> None:
        self.device, self.ring_rows = device, ring_rows
        halves, rows = (1, ring_rows + RECORD_ROWS) if ring_rows else (2, RECORD_ROWS)
        self.state = self.zeros(SLOTS, 1, WIDTH, WIDTH)
        self.keys = self.zeros(SLOTS, halves, rows, 1, WIDTH, dtype=torch.bfloat16)
        self.norms, self.decays = self.zeros(SLOTS, halves, rows, 1), self.zeros(SLOTS, halves, rows, 1)
        self.updates = self.zeros(SLOTS, rows, 1, WIDTH)
        self.layer_window, self.window_id = self.zeros(1, dtype=torch.int64), self.zeros(1, dtype=torch.int64)
        self.plan = self.zeros(2, 4, dtype=torch.int32)
        self.cursors = self.zeros(SLOTS, 3 if ring_rows else 2, dtype=torch.int32)
        self.units = torch.eye(WIDTH, dtype=torch.bfloat16, device=device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def value(self, *tokens: int) -> Tensor:
        """Return the sum of the tokens' values."""
        return sum((torch.arange(WIDTH, device=self.device) + 16.0 * token for token in tokens), self.zeros(WIDTH))

    def holds(self, *tokens: int) -> Tensor:
        """Return the state [dv, dk] of these tokens only."""
        state = self.zeros(WIDTH, WIDTH)
        for token in tokens:
            state[:, token] = self.value(token)
        return state

    def only(self, cursor: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the cursors if only this slot has rows."""
        return tuple(cursor if slot == SLOT else (0,) * len(cursor) for slot in range(SLOTS))

    def window_of(
        self,
        tokens: tuple[int, ...],
        num_kept: int,
        plan: tuple[int, ...],
        cursor: tuple[int, ...],
        kept: tuple[int, ...],
        stored: tuple[int, ...],
    ) -> Iterator[str | None]:
        """Plan and run a window that starts with the tokens `kept`, and yield each op's problem.

        Token n has the n-th unit vector as its key, and its query reads every column up to n. Afterwards the state
        holds the tokens `stored`.
        """
        number = self.layer_window + 1
        starts = self.int32(0, len(tokens))
        ops.plan_recurrent_window(
            self.plan, self.cursors, self.window_id, self.int32(SLOT), starts, self.int32(num_kept), RECORD_ROWS,
            ring_rows=self.ring_rows,
        )  # fmt: skip
        yield difference(
            plan=(self.plan, (plan, NONE)),
            cursors=(self.cursors, self.only(cursor)),
            window_id=(self.window_id, number),
        )
        values = torch.stack([self.value(token) for token in tokens])
        rows, large = list(tokens), torch.full((len(tokens), 1), 200.0, device=self.device)
        out = torch.zeros_like(values, dtype=torch.bfloat16)[:, None]
        every, state = self.zeros(len(tokens), 1, WIDTH, WIDTH), torch.zeros_like(self.state)
        before = [tensor.clone() for tensor in (self.keys, self.norms, self.decays, self.updates)]
        ops.gated_delta_verify(
            out, self.state, self.keys, self.norms, self.decays, self.updates, self.layer_window,
            torch.ones_like(self.units).tril()[rows][:, None], self.units[rows][:, None], values.bfloat16()[:, None],
            -large, large, self.zeros(1), self.zeros(1), self.plan, self.window_id, starts, 1.0, use_qk_l2norm=False,
            all_states=every, ring_rows=self.ring_rows,
        )  # fmt: skip
        state[SLOT, 0] = self.holds(*stored)
        keys, norms, decays, updates = before
        for i, token in enumerate(tokens):
            half, row = (0, (plan[2] + plan[1] + i) % self.updates.shape[1]) if self.ring_rows else (1 - plan[2], i)
            keys[SLOT, half, row, 0] = self.units[token]
            norms[SLOT, half, row] = decays[SLOT, half, row] = 1
            updates[SLOT, row, 0] = values[i]
        seen = [(*kept, *tokens[: i + 1]) for i in range(len(tokens))]
        yield difference(
            out=(out[:, 0], torch.stack([self.value(*before) for before in seen])),
            state=(self.state, state),
            record_keys=(self.keys, keys),
            record_norms=(self.norms, norms),
            record_decays=(self.decays, decays),
            record_updates=(self.updates, updates),
            layer_window=(self.layer_window, number),
            all_states=(every[:, 0], torch.stack([self.holds(*before) for before in seen])),
        )

    def fold(self, kept: tuple[int, ...], rows: int, cursor: tuple[int, ...]) -> Iterator[str | None]:
        slots, state = self.int32(SLOT), torch.zeros_like(self.state)
        ops.plan_recurrent_fold(self.plan, self.cursors, slots, slots, self.int32(RECORD_ROWS))
        yield difference(
            plan=(self.plan, ((SLOT, rows, cursor[1], SLOT), NONE)), cursors=(self.cursors, self.only(cursor))
        )
        number = torch.full_like(self.layer_window, 7)
        ops.gated_delta_fold(
            [self.state],
            [self.keys],
            [self.norms],
            [self.decays],
            [self.updates],
            [self.layer_window],
            self.plan,
            number,
        )
        state[SLOT, 0] = self.holds(*kept)
        yield difference(folded=(self.state, state), marked=(self.layer_window, (7,)))


def _problems(device: torch.device) -> Iterator[str | None]:
    """Run a window of tokens 0 and 1, of which the first is kept, then a window of token 2, which is kept too.

    With a ring, the third window stores the state, and the fourth one records over the end of the ring.
    """
    halves = _Layer(device, 0)
    yield from halves.window_of((0, 1), 0, plan=(SLOT, 0, 0, SLOT), cursor=(2, 1), kept=(), stored=())
    yield from halves.window_of((2,), 1, plan=(SLOT, 1, 1, SLOT), cursor=(1, 0), kept=(0,), stored=(0,))
    yield from halves.fold((0, 2), rows=1, cursor=(0, 0))
    ring, four = _Layer(device, RING_ROWS), (0, 2, 3, 4)
    yield from ring.window_of((0, 1), 0, plan=(SLOT, 0, 0, 0), cursor=(2, 0, 0), kept=(), stored=())
    yield from ring.window_of((2,), 1, plan=(SLOT, 1, 0, 0), cursor=(1, 0, 1), kept=(0,), stored=())
    yield from ring.window_of((3, 4), 1, plan=(SLOT, 2, 0, SLOT), cursor=(2, 2, 0), kept=(0, 2), stored=(0, 2))
    yield from ring.window_of((5, 6), 2, plan=(SLOT, 2, 2, SLOT), cursor=(2, 4, 0), kept=four, stored=four)
    yield from ring.fold((*four, 5, 6), rows=2, cursor=(0, 4, 0))


def recurrent_state(device: torch.device) -> str | None:
    return next(filter(None, _problems(device)), None)


def block_fold(device: torch.device) -> str | None:
    """Plan the fold of a window of three tokens, of which two belong to the first block. Then move on to the second."""

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    plan, cursors, tables = int32(*NONE).view(1, 4), int32(0, 0, 3, 1, 2, 0).view(3, 2), [int32(1, 2).view(1, 2)]
    request = first = int32(0)
    ops.plan_recurrent_block_fold(
        plan, cursors, tables, request, first, int32(3), num_computed_tokens=int32(17), block_size=16
    )
    problem = difference(plan=(plan, ((1, 2, 1, 1),)), cursors=(cursors, ((0, 0), (0, 1), (2, 0))))
    if problem is None:
        ops.plan_recurrent_block_fold(plan, cursors, tables, request, first, int32(1), target_columns=int32(1))
        problem = difference(plan=(plan, ((1, 0, 1, 2),)), cursors=(cursors, ((0, 0), (0, 1), (0, 0))))
    return problem


# Op: the self-test that calls it.
SELF_TESTS: dict[str, Callable[[torch.device], str | None]] = {
    **dict.fromkeys(
        ("plan_recurrent_window", "gated_delta_verify", "plan_recurrent_fold", "gated_delta_fold"), recurrent_state
    ),
    "plan_recurrent_block_fold": block_fold,
}
