"""RecurrentStates in the chunk form: random windows, cancels and copies against one token at a time."""

from __future__ import annotations

import random

import pytest
import torch
from samples_recurrent import Heads, packed_inputs
from tensors import int32

from nwor_ops import RecurrentCache, RecurrentStates

HEADS, WINDOW, LAYERS = Heads(1, 2, 128, 128), 4, ("first", "second")


def new_cache(**options) -> RecurrentCache:
    sizes = {
        "num_slots": 4, "max_window": WINDOW, "num_key_heads": HEADS.key_heads, "num_value_heads": HEADS.value_heads,
        "key_size": HEADS.key_width, "value_size": HEADS.value_width, "chunk": 16,
    }  # fmt: skip
    return RecurrentCache.new(**(sizes | options))


class Reader:
    """Two layers that read one text in slot 1."""

    def __init__(self, state_dtype: torch.dtype) -> None:
        self.states = RecurrentStates(max_num_requests=2, device="cpu")
        self.texts = {name: packed_inputs(160, HEADS, seed=seed) for seed, name in enumerate(LAYERS)}
        for name in LAYERS:
            self.states.register_layer(name, new_cache(state_dtype=state_dtype))
        self.states.allocate()
        self.position = 0

    def begin(self, tokens: int) -> None:
        self.states.begin(int32(1), int32(0, tokens))

    def verify(self, name: str, positions: list[int]) -> torch.Tensor:
        text = self.texts[name]
        return self.states.verify(
            name, *(tensor[positions] for tensor in text[:5]), A_log=text.A_log, dt_bias=text.dt_bias,
            scale=HEADS.key_width**-0.5,
        )  # fmt: skip

    def read(self, tokens: int, kept: int) -> torch.Tensor:
        """Read a window whose last tokens are rejected, and return the outputs of the accepted ones."""
        positions = [*range(self.position, self.position + kept), *range(tokens - kept)]
        self.begin(tokens)
        found = torch.stack([self.verify(name, positions)[:kept] for name in LAYERS])
        self.states.commit(int32(kept))
        self.position += kept
        return found

    def copied(self) -> torch.Tensor:
        """Copy slot 1 to slot 2, and return the states there."""
        self.states.copy(int32(1), int32(2))
        return torch.stack([layer.cache.state[2] for layer in self.states._layers.values()])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_keep_all_bits(state_dtype, seed):
    draw, reader, alone = random.Random(seed), Reader(state_dtype), Reader(state_dtype)
    outputs, states = [], []
    for _ in range(120):
        outputs.append(alone.read(1, 1)[:, 0])
        states.append(alone.copied())
    cancelled = 0
    while reader.position < 110:
        tokens = draw.randint(1, WINDOW)
        action = draw.choice(("read", "read", "read", "cancel"))
        if action == "cancel":  # after any number of layers; the accepted rows of the last window go with it
            before = reader.states.num_kept[1].item() if reader.states.cursors.table[1, 0] else 0
            reader.begin(tokens)
            for name in LAYERS[: draw.randint(0, 2)]:
                reader.verify(name, list(range(reader.position, reader.position + tokens)))
            reader.states.cancel()
            cancelled += before > 0
        else:
            kept, begin = draw.randint(1, tokens), reader.position
            found = reader.read(tokens, kept)
            assert torch.equal(found, torch.stack(outputs[begin : begin + kept], 1))
        if reader.position:
            assert torch.equal(reader.copied(), states[reader.position - 1]), action
    assert cancelled


def test_a_fold_starts_a_chunk():
    """After a fold the next chunk has 16 tokens. The state is that of a copy."""
    reader = Reader(torch.bfloat16)
    for _ in range(5):
        reader.read(4, 4)
    before = reader.copied()
    reader.states.fold(int32(1))
    assert torch.equal(before, torch.stack([layer.cache.state[1] for layer in reader.states._layers.values()]))
    for _ in range(4):
        reader.read(4, 4)
    assert torch.equal(before, torch.stack([layer.cache.state[1] for layer in reader.states._layers.values()]))
    reader.read(1, 1)
    after = torch.stack([layer.cache.state[1] for layer in reader.states._layers.values()])
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chunk": 8}, "chunk must be 0 or 16, got 8"),
        ({"max_window": 9}, "max_window must be at most 8 with chunk 16, got 9"),
        ({"per_channel": True}, "per_channel must be False with chunk 16, got True"),
        ({"key_size": 64}, r"state must be \[S, HV, 128, 128\] with chunk 16, got heads of \[128, 64\]"),
    ],
)
def test_refused_caches(options, sentence):
    with pytest.raises(ValueError, match=f"RecurrentCache: {sentence}"):
        new_cache(**options)


def test_layers_have_one_chunk():
    states = RecurrentStates(max_num_requests=2, device="cpu")
    states.register_layer("first", new_cache())
    with pytest.raises(ValueError, match="must have the chunk of the layers before, 16, got 0"):
        states.register_layer("second", new_cache(chunk=0))
