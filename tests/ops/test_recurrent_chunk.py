"""The chunk form of the recurrent ops: states at the ends of chunks, and small errors against float64.

The kernel runs on the CPU.
"""

from __future__ import annotations

import random

import pytest
import samples_recurrent as samples
import torch
from recurrent_chunk import error_of, exact_run
from samples_recurrent import Heads
from tensors import int32, int64

from nwor_ops import ops
from nwor_ops.testing.oracle import recurrent as oracle

CHUNK, WINDOW = 16, 8
HEADS = Heads(1, 2, 128, 128)
STATE_DTYPES = (torch.float32, torch.bfloat16)
SCALE = HEADS.key_width**-0.5


def inputs_of(tokens: int, heads: Heads = HEADS, seed: int = 0) -> samples.Inputs:
    return samples.packed_inputs(tokens, heads, torch.float32, seed=seed)


def rows_of(inputs: samples.Inputs, positions: list[int]) -> samples.Inputs:
    """Return the inputs of these tokens."""
    return inputs._replace(**{name: getattr(inputs, name)[positions] for name in ("q", "k", "v", "a", "b")})


class Stream:
    """A request in slot 1 that reads tokens in windows."""

    def __init__(self, state_dtype: torch.dtype, heads: Heads = HEADS, *, module=ops) -> None:
        self.layer = samples.make_layer(
            heads, 4, WINDOW, state_dtype, torch.float32, chunk=CHUNK, one_page=False
        )  # fmt: skip
        self.heads, self.module = heads, module
        self.plan, self.cursors = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
        self.window, self.kept = int64(0), 0

    def read(self, inputs: samples.Inputs, kept: int, all_states: torch.Tensor | None = None) -> torch.Tensor:
        """Run a window and return its outputs. `kept` of its tokens stay."""
        tokens = inputs.q.shape[0]
        starts = int32(0, tokens)
        self.module.plan_recurrent_window(
            self.plan, self.cursors, self.window, int32(1), starts, int32(self.kept), WINDOW, None, None, CHUNK
        )
        out = torch.zeros(tokens, self.heads.value_heads, self.heads.value_width)
        self.module.gated_delta_verify(
            out, *self.layer.tensors, *inputs, self.plan, self.window, starts, SCALE, all_states=all_states,
            chunk=CHUNK,
        )  # fmt: skip
        self.kept = kept
        return out

    def read_all(self, inputs: samples.Inputs, cuts: list[tuple[int, int]], end: int) -> torch.Tensor:
        """Read `end` tokens in windows of (tokens, tokens that stay). Rejected tokens are others than the text's."""
        outputs, position, total = [], 0, inputs.q.shape[0]
        for tokens, kept in cuts:
            kept = min(kept, end - position)
            wrong = [(7 * position + i) % total for i in range(tokens - kept)]
            outputs.append(self.read(rows_of(inputs, [*range(position, position + kept), *wrong]), kept)[:kept])
            position += kept
            if position == end:
                break
        return torch.cat(outputs)

    def folded(self, target: int) -> torch.Tensor:
        """Fold the accepted rows into a slot and return its state. The rows stay pending in slot 1."""
        plan = torch.zeros(1, 4, dtype=torch.int32)
        self.module.plan_recurrent_fold(plan, self.cursors, int32(1), int32(target), int32(self.kept), True)
        self.module.gated_delta_fold(*[[tensor] for tensor in self.layer.tensors], plan, chunk=CHUNK)
        return self.layer.state[target]


def exact_outputs(initial: torch.Tensor, inputs: samples.Inputs, rounds_to: torch.dtype | None = None) -> torch.Tensor:
    return exact_run(initial, inputs, SCALE, rounds_to)[0]


def random_cuts(seed: int, tokens: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    sizes = [draw.randint(1, WINDOW) for _ in range(tokens)]
    return [(size, draw.randint(1, size)) for size in sizes]


# ---------------------------------------------------------------- plans


def test_plan_by_hand():
    """Windows of eight: the third finds a whole chunk, folds 16 rows and leaves the others pending."""
    plan, cursors, window = torch.zeros(1, 4).int(), torch.zeros(2, 3).int(), int64(0)
    shown = []
    for kept in (0, 7, 8, 8, 5, 8):
        arguments = (plan, cursors, window, int32(1), int32(0, 8), int32(kept), 8, None, None, CHUNK)
        twin = [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        ops.plan_recurrent_window(*arguments)
        oracle.plan_recurrent_window(*twin)
        assert torch.equal(plan, twin[0])
        assert torch.equal(cursors, twin[1])
        shown.append((plan[0].tolist(), cursors[1].tolist()))
    assert shown == [
        ([1, 0, 0, 0], [8, 0, 0]),
        ([1, 7, 0, 0], [8, 0, 7]),
        ([1, 15, 0, 0], [8, 0, 15]),
        ([1, 23, 0, 1], [8, 16, 7]),
        ([1, 12, 16, 0], [8, 16, 12]),
        ([1, 20, 16, 1], [8, 1, 4]),
    ]


def test_a_cursor_past_its_chunk():
    arguments = (torch.zeros(1, 4).int(), torch.tensor([[0, 0, 0], [2, 0, 16]]).int(), int64(0), int32(1), int32(0, 2))
    with pytest.raises(ValueError, match=r"cursors.*15.*16"):
        ops.plan_recurrent_window(*arguments, int32(1), 8, None, None, CHUNK)


def test_most_tokens_of_a_window():
    with pytest.raises(ValueError, match="plan_recurrent_window: record_rows must be at most 8 with chunk, got 9"):
        ops.plan_recurrent_window(
            torch.zeros(1, 4).int(), torch.zeros(2, 3).int(), int64(0), int32(1), int32(0, 1), int32(0), 9, chunk=CHUNK
        )


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_states_across_a_boundary(state_dtype):
    """A window crosses the end of a chunk and stores nothing. The next one stores the bits that it had there.

    Both give the state after each of their tokens.
    """
    inputs, stream = inputs_of(24), Stream(state_dtype)
    before = stream.layer.state[1].clone()
    stream.read(rows_of(inputs, list(range(8))), 8)
    stream.read(rows_of(inputs, list(range(8, 13))), 5)
    states = torch.zeros(8, *HEADS_STATE, dtype=state_dtype)
    stream.read(rows_of(inputs, list(range(13, 21))), 8, states)
    assert torch.equal(stream.layer.state[1], before)
    assert torch.equal(stream.folded(2), states[7])
    later = torch.zeros(3, *HEADS_STATE, dtype=state_dtype)
    stream.read(rows_of(inputs, [21, 22, 23]), 2, later)
    assert torch.equal(stream.layer.state[1], states[2])  # of token 15
    assert torch.equal(stream.folded(2), later[1])


HEADS_STATE = (HEADS.value_heads, HEADS.value_width, HEADS.key_width)


# ---------------------------------------------------------------- errors


def test_error_of_bfloat16_states():
    """A state is rounded once in 16 tokens. A scheme that rounds it after each token has the larger error."""
    inputs, stream = inputs_of(512), Stream(torch.bfloat16)
    initial = stream.layer.state[1].clone()
    expected = exact_outputs(initial, inputs)
    error = error_of(stream.read_all(inputs, random_cuts(1, 512), 512), expected)
    assert error < error_of(exact_outputs(initial, inputs, torch.bfloat16), expected)


def test_no_drift():
    """After 100,000 tokens of slow decay the error is that of the first ones."""
    heads, total, part = Heads(1, 1, 128, 128), 100_000, 2_000
    inputs = inputs_of(total, heads)._replace(A_log=torch.full((1,), -6.0))
    stream = Stream(torch.float32, heads)
    expected = exact_outputs(stream.layer.state[1], inputs)
    windows = range(0, total, WINDOW)
    outputs = torch.cat([stream.read(rows_of(inputs, slice(i, i + WINDOW)), WINDOW) for i in windows])
    assert error_of(outputs[:part], expected[:part]) < 2e-6
    assert error_of(outputs[-part:], expected[-part:]) < 2e-6


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ((1, 15, 0, 1), "plan must have at least 16 rows to store with chunk, got 15 in row 0"),
        ((1, 16, 0, 0), "plan must store a state with 16 rows or more with chunk, got 16 in row 0"),
        ((1, 16, 0, 2), "plan must store in the slot 1 that it reads with chunk, got 2 in row 0"),
    ],
)
def test_plans_that_split_a_chunk(row, sentence):
    stream, inputs = Stream(torch.float32), inputs_of(1)
    before = stream.layer.state.clone()
    plan, out = torch.tensor([row]).int(), torch.zeros(1, HEADS.value_heads, HEADS.value_width)
    with pytest.raises(ValueError, match=f"gated_delta_verify: {sentence}"):
        ops.gated_delta_verify(out, *stream.layer.tensors, *inputs, plan, int64(1), int32(0, 1), SCALE, chunk=CHUNK)
    assert torch.equal(stream.layer.state[1:], before[1:])


@pytest.mark.parametrize(
    ("heads", "per_channel", "sentence"),
    [
        (Heads(1, 2, 64, 128), False, "state must be of value_width 128 and key_width 128 with chunk"),
        (Heads(1, 2, 128, 64), False, "state must be of value_width 128 and key_width 128 with chunk"),
        (HEADS, True, "record_decays must be of one decay per head with chunk"),
    ],
)
def test_layers_without_a_chunk_form(heads, per_channel, sentence):
    layer = samples.make_layer(heads, 4, WINDOW, dtype=torch.float32, per_channel=per_channel, chunk=CHUNK)
    inputs = samples.packed_inputs(1, heads, torch.float32, per_channel)
    plan, out = torch.zeros(1, 4).int(), torch.zeros(1, heads.value_heads, heads.value_width)
    with pytest.raises(ValueError, match=f"gated_delta_verify: {sentence}"):
        ops.gated_delta_verify(out, *layer.tensors, *inputs, plan, int64(1), int32(0, 1), SCALE, chunk=CHUNK)
    with pytest.raises(ValueError, match=f"gated_delta_fold: {sentence}".replace("state ", r"states\[0\] ", 1)
                       .replace("record_decays ", r"record_decays\[0\] ", 1)):  # fmt: skip
        ops.gated_delta_fold(*[[tensor] for tensor in layer.tensors], plan, chunk=CHUNK)


@pytest.mark.parametrize("rows", [15, 18])
def test_record_of_another_size(rows):
    layer = samples.make_layer(HEADS, 4, WINDOW, dtype=torch.float32, chunk=CHUNK, one_page=False)
    tensors = [layer.state, *(t[:, :, :rows].contiguous() for t in layer.tensors[1:4]),
               layer.record_updates[:, :rows].contiguous(), layer.layer_window]  # fmt: skip
    with pytest.raises(ValueError, match=r"record_keys\[0\] must be of 15 rows and two for each token of a window"):
        ops.gated_delta_fold(*[[tensor] for tensor in tensors], torch.zeros(1, 4).int(), chunk=CHUNK)


def test_chunks_and_halves_have_other_records():
    halves, chunks = (samples.fold(1, HEADS, one_page=False, chunk=chunk) for chunk in (0, CHUNK))
    for arguments, chunk, wanted in ((halves, CHUNK, 1), (chunks, 0, 2)):
        with pytest.raises(ValueError, match=rf"record_keys\[0\] must be \[5, {wanted}, record_rows"):
            ops.gated_delta_fold(*arguments[:7], chunk=chunk)
