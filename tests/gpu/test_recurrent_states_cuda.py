"""RecurrentStates on CUDA: layers in one graph with changed data, and no call that waits for the device."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from no_sync import no_waits
from recurrent_states import CHUNK, CHUNK_KINDS, KINDS, Decoding

TOKENS = 20


def test_a_wait_is_found(device):
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=device).item()


@pytest.mark.parametrize("chunk", [0, CHUNK])
def test_nothing_waits_and_layers_are_replayed(device, chunk):
    """Captured once. Every replay has other requests, lengths and slots, and other tokens that stay."""
    kinds = CHUNK_KINDS if chunk else KINDS
    decoding = Decoding(kinds, max_requests=5, num_slots=8, chunk=chunk, device=device)
    states, kinds = decoding.states, decoding.kinds
    slots = [1, 2, 3, 4]
    decoding.start(*slots)
    inputs = {name: decoding.inputs(name, TOKENS) for name in kinds}
    decoding.begin([1], [2])  # warm-up, of which nothing stays
    for name in kinds:
        decoding.verify(name, inputs[name])
    states.cancel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = {name: decoding.verify(name, inputs[name]) for name in kinds}

    for step in range(40):
        order = [slot for slot in slots if decoding.draw(0, 4)] + [-1]
        lengths = [decoding.draw(0, decoding.max_window) for _ in order]
        windows = {slot: length for slot, length in zip(order, lengths, strict=True) if slot > 0 and length}
        stay = {slot: decoding.draw(1, length) for slot, length in windows.items()}
        fresh = {name: decoding.inputs(name, TOKENS) for name in kinds}
        state_slots = decoding.tensor(order, torch.int64)
        starts = decoding.tensor([0, *accumulate(lengths)])
        num_kept = decoding.tensor(stay.get(slot, -7) for slot in order)
        folded = decoding.tensor([1, 3])
        cancelled = step % 7 == 6
        with no_waits():
            states.begin(state_slots, starts)
            for name in kinds:
                for part, tensor in inputs[name].items():
                    tensor.copy_(fresh[name][part])
            graph.replay()
            states.cancel() if cancelled else states.commit(num_kept)
        own = list(range(sum(lengths[:-1])))
        for name, layer in decoding.every_state.items():
            mine = {part: tensor[own] for part, tensor in fresh[name].items()}
            assert torch.equal(outs[name][own], layer.verify(list(windows), list(windows.values()), mine))
            assert not outs[name][len(own) :].any()
            if not cancelled:
                layer.commit(stay)
        if cancelled and not chunk:
            decoding.assert_folded(*windows)
        if step % 5 == 0:
            with no_waits():
                states.fold(folded)
            decoding.assert_folded(1, 3)
            for layer in decoding.every_state.values():
                for slot in (1, 3):
                    layer.begin_chunk(slot)
    sources, targets, gone = (decoding.tensor(some) for some in ([1, 2], [5, 6], [4]))
    with no_waits():
        states.copy(sources, targets)
        states.reset(gone)
        states.fold(sources)
    for layer in decoding.every_state.values():
        layer.held |= {5: layer.held[1], 6: layer.held[2], 4: layer.zeros()}
    decoding.assert_folded(1, 2, 4, 5, 6)


def test_requests_with_other_tokens_are_skipped(device):
    """Slot 0, a slot without reset, and pending rows that another kernel would drop. Each is counted."""
    decoding = Decoding(["gdn"], max_requests=2, device=device)
    states = decoding.states
    decoding.start(1, 2)
    decoding.begin([1, 2], [2, 2], computed=[0, 0])
    decoding.forward()
    decoding.commit({1: 2, 2: 1})
    wrong = ([1, 0], [2, 0], None), ([1, 2], [2, 0], None), ([1, 2], [2, 1], [True, False])
    for count, (slots, computed, is_window) in enumerate(wrong, 1):
        decoding.begin(slots, [2, 2], is_window, computed)
        assert states.plan[:, 0].tolist() == [1, 0]
        assert states.skipped_requests() == count
        states.cancel()
    decoding.begin([1, 2], [2, 2], computed=[2, 1])
    assert states.plan[:, 0].tolist() == [1, 2]
