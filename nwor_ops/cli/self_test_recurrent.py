"""The self-test of family ``recurrent``: two windows of a request and a fold, in numbers that are exact anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.testing.comparison import difference

SLOTS, SLOT, RECORD_ROWS, WIDTH = 3, 2, 2, 64
NONE = (0, 0, 0, 0)


class _Layer:
    """One head of each kind. Every key is a unit vector, nothing decays, and beta is 1.

    A token therefore stores its value in one column of the state, and a query reads a sum of columns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.state = self.zeros(SLOTS, 1, WIDTH, WIDTH)
        self.keys = self.zeros(SLOTS, 2, RECORD_ROWS, 1, WIDTH, dtype=torch.bfloat16)
        self.norms, self.decays = self.zeros(SLOTS, 2, RECORD_ROWS, 1), self.zeros(SLOTS, 2, RECORD_ROWS, 1)
        self.updates = self.zeros(SLOTS, RECORD_ROWS, 1, WIDTH)
        self.layer_window, self.window_id = self.zeros(1, dtype=torch.int64), self.zeros(1, dtype=torch.int64)
        self.plan = self.zeros(2, 4, dtype=torch.int32)
        self.cursors = self.zeros(SLOTS, 2, dtype=torch.int32)
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

    def window_of(
        self, tokens: tuple[int, ...], num_kept: int, plan: tuple[int, ...], half: int, kept: tuple[int, ...]
    ) -> Iterator[str | None]:
        """Plan and run a window that starts with the tokens `kept`, and yield each op's problem.

        Token n has the n-th unit vector as its key, and its query reads every column up to n.
        """
        number = self.layer_window + 1
        starts = self.int32(0, len(tokens))
        ops.plan_recurrent_window(
            self.plan, self.cursors, self.window_id, self.int32(SLOT), starts, self.int32(num_kept), RECORD_ROWS
        )
        yield difference(
            plan=(self.plan, (plan, NONE)),
            cursors=(self.cursors, ((0, 0), (0, 0), (len(tokens), half))),
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
            all_states=every,
        )  # fmt: skip
        state[SLOT, 0] = self.holds(*kept)
        keys, norms, decays, updates = before
        keys[SLOT, half, : len(tokens), 0] = self.units[rows]
        norms[SLOT, half, : len(tokens)] = decays[SLOT, half, : len(tokens)] = 1
        updates[SLOT, : len(tokens), 0] = values
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

    def fold(self, kept: tuple[int, ...], half: int) -> Iterator[str | None]:
        slots, state = self.int32(SLOT), torch.zeros_like(self.state)
        ops.plan_recurrent_fold(self.plan, self.cursors, slots, slots, self.int32(RECORD_ROWS))
        yield difference(
            plan=(self.plan, ((SLOT, 1, half, SLOT), NONE)), cursors=(self.cursors, ((0, 0), (0, 0), (0, half)))
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
    """Run a window of tokens 0 and 1, of which the first is kept, then a window of token 2, which is kept too."""
    layer = _Layer(device)
    yield from layer.window_of((0, 1), num_kept=0, plan=(SLOT, 0, 0, SLOT), half=1, kept=())
    yield from layer.window_of((2,), num_kept=1, plan=(SLOT, 1, 1, SLOT), half=0, kept=(0,))
    yield from layer.fold(kept=(0, 2), half=0)


def recurrent_state(device: torch.device) -> str | None:
    return next(filter(None, _problems(device)), None)


# Op: the self-test that calls it.
SELF_TESTS: dict[str, Callable[[torch.device], str | None]] = dict.fromkeys(
    ("plan_recurrent_window", "gated_delta_verify", "plan_recurrent_fold", "gated_delta_fold"), recurrent_state
)
