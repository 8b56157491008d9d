"""Family draft on a GPU: every op against the oracle or the CPU kernel, on all memory around; captured ops and a
captured loop on changed data; the same draws as the CPU to the bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import memory, same_memory, surrounded, twin
from samples import argument_names, flags, int32, int64, sample_inputs, with_arguments
from samples_drafter import (
    PADDED,
    batches,
    decode_arguments,
    eagle_arguments,
    expand_arguments,
    extend_arguments,
    local_lens_arguments,
    next_token_arguments,
    padded_inputs_arguments,
    poisoned,
    prefill_arguments,
    sample_arguments,
    slot_arguments,
    update_arguments,
)

from nwor_ops import ops
from nwor_ops.ops import registry

OPS = registry.family("drafter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("op", OPS)
def test_samples(same_as_oracle, op):
    for arguments in sample_inputs(op):
        same_as_oracle(op, arguments)


@pytest.fixture(scope="session")
def same_as_cpu(device):
    """Runs an op on the CPU and on a GPU twin, and compares every byte of all memory; returns the GPU twin.
    For shapes where the oracle is slow; the CPU kernels are compared with it elsewhere."""

    def compare(op, arguments):
        theirs, ours = twin(arguments), twin(arguments, device)
        getattr(ops, op)(*theirs)
        getattr(ops, op)(*ours)
        assert same_memory(ours, theirs), op
        return ours

    return compare


# ---------------------------------------------------------------- batches


@settings(max_examples=60)
@given(batches(), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_any_batch(same_as_oracle, batch, spare, num_new, shift):
    starts, states, rejected, _ = batch
    same_as_oracle(
        "prepare_prefill_inputs", prefill_arguments(*batch, capacity=max(starts) + spare, rows=len(states) + spare)
    )
    capacity = max(starts) + (num_new - shift) * len(states) + spare
    same_as_oracle(
        "copy_expand_inputs", expand_arguments(starts, states, rejected, num_new, shift, None, shift, capacity)
    )
    lengths = tuple(range(1, len(states) + 1))
    same_as_oracle(
        "extend_queries",
        extend_arguments(starts, states, lengths, num_new - shift, 0, capacity, 20),
    )
    clean = (*[start for start in starts if start >= 0], *[max(starts) for start in starts if start < 0])
    same_as_oracle("compute_slot_mappings", slot_arguments(clean, states, (4, 0, 8), max(starts) + spare, columns=20))


@pytest.mark.parametrize("requests", [255, 256, 257, 1500])
def test_many_requests(same_as_cpu, requests):
    """More rows than threads in a block, tokens over many blocks, a third of the rows padded."""
    random = torch.Generator().manual_seed(requests)
    real = requests * 2 // 3
    lengths = torch.randint(0, 9, (real,), generator=random)
    starts = (0, *lengths.cumsum(0).tolist(), *[-7] * (requests - real))
    states = (*torch.randperm(real, generator=random).tolist(), *[PADDED] * (requests - real))
    rejected = tuple(torch.randint(0, 4, (requests,), generator=random).tolist())
    tokens = max(starts)
    same_as_cpu(
        "prepare_prefill_inputs",
        prefill_arguments(starts, states, rejected, rejected, tokens + 77, requests + 9, real),
    )
    capacity = tokens + 2 * requests + 5
    expand = expand_arguments(starts, states, rejected, 3, True, None, True, capacity)
    expand = with_arguments("copy_expand_inputs", expand, next_token_ids=int64(*range(real)))
    same_as_cpu("copy_expand_inputs", expand)
    same_as_cpu("extend_queries", extend_arguments(starts, states, tuple(range(requests)), 2, 0, capacity, capacity))
    clean = tuple(start if start >= 0 else tokens for start in starts)
    slots = slot_arguments(clean, states, (4, 8), tokens + 99, tokens, real, size=2, rank=1, interleave=2)
    same_as_cpu("compute_slot_mappings", slots)
    rows = tuple(range(requests))
    decode = decode_arguments(rows, rows, rejected, states, max_model_len=requests // 2)
    same_as_cpu("prepare_decode_inputs", decode)
    same_as_cpu("eagle_step", eagle_arguments(rows, padded=30, max_model_len=requests // 2))
    cu = torch.randint(0, 5, (requests,), generator=random).cumsum(0)
    query_ends = (cu + torch.arange(1, requests + 1)).tolist()
    same_as_cpu(
        "prepare_inputs_padded", padded_inputs_arguments(tuple(cu.tolist()), rejected, (0, *query_ends), None, 99)
    )
    sampled = torch.randint(-1, 60, (requests, 5), generator=random).tolist()
    same_as_cpu("prepare_next_token_padded", next_token_arguments(sampled, rows, 50))
    same_as_cpu("dcp_local_seq_lens", local_lens_arguments(rows))


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 24, 33, 64, 4096, 4100])
def test_hidden_rows_of_any_width(same_as_cpu, width, dtype, step):
    """Vectors of 16 bytes and single elements, over several blocks; misaligned by the memory before them."""
    arguments = update_arguments(step, dtype=torch.float32, width=width, rows=5, states=(1, 2, 3, 0, PADDED))
    for offset in (0, 1, 8):
        hidden = torch.arange(5 * width + offset).to(dtype)[offset:].view(5, width)
        target = torch.zeros(5 * width + 16, dtype=dtype)[8 : 8 + 5 * width].view(5, width)
        same_as_cpu(
            "update_draft_inputs",
            with_arguments("update_draft_inputs", arguments, hidden_states=hidden, next_hidden_states=target),
        )
        strided = torch.zeros(5, 2 * width, dtype=dtype)[:, ::2]
        same_as_cpu(
            "update_draft_inputs",
            with_arguments("update_draft_inputs", arguments, hidden_states=hidden, next_hidden_states=strided),
        )


# ---------------------------------------------------------------- gumbel_sample: the CPU's draws, to the bit


def sampling(logits, temperature, seed=0, cache=False, states=None):
    rows, vocab = logits.shape
    random = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**62), 2**62, (2, rows), generator=random)
    return (
        logits, int64(*(range(rows) if states is None else states)), torch.full((rows,), temperature),
        keys[0].contiguous(), keys[1].contiguous(), int64(*(row % 3 for row in range(rows))),
        poisoned(rows, 3, dtype=torch.int64),
        torch.zeros(rows, 3, vocab, dtype=logits.dtype) if cache else None,
    )  # fmt: skip


def random_logits(rows, vocab, dtype, scale=2.0, seed=0):
    return (scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


VOCABULARIES = [1, 2, 7, 255, 4095, 4096, 4097, 8191, 8192, 8193, 32_003, 128_256]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_are_the_cpu_s(same_as_cpu, dtype, vocab, temperature):
    rows = 6 if vocab > 10_000 else 17
    for scale in (0.0, 1.0, 12.0):  # equal logits, flat ones, one that towers
        same_as_cpu("gumbel_sample", sampling(random_logits(rows, vocab, dtype, scale), temperature, vocab))


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-6, 1e6, 1e30, 3e38, 1e-39])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_temperatures(same_as_cpu, dtype, temperature):
    for scale in (1e-3, 1.0, 1e4):
        same_as_cpu("gumbel_sample", sampling(random_logits(9, 9001, dtype, scale), temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_no_numbers(same_as_cpu, dtype, temperature):
    """Mostly masked, NaN everywhere but in a few, all of one kind, and +inf."""
    logits = random_logits(10, 20_000, dtype)
    random = torch.Generator().manual_seed(3)
    few = torch.rand(logits.shape, generator=random) < 0.001
    logits[0:2] = torch.where(few[0:2], logits[0:2], -math.inf)
    logits[2:4] = torch.where(few[2:4], logits[2:4], math.nan)
    logits[4], logits[5] = -math.inf, math.nan
    logits[6] = torch.where(few[6], math.inf, logits[6])
    logits[7] = torch.where(few[7], math.nan, -math.inf)
    logits[8] = 0.0
    logits[8, 1::2] = -0.0
    logits[9, :19_999] = -math.inf
    ours = same_as_cpu("gumbel_sample", sampling(logits, temperature))
    drawn = [ours[6][row, row % 3].item() for row in range(10)]
    assert drawn[4] == drawn[5] == drawn[7] == 0
    assert drawn[9] == 19_999
    assert few[0, drawn[0]]
    assert few[2, drawn[2]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_and_cache_of_any_placement(same_as_cpu, dtype):
    """Rows that start off a 16-byte boundary, odd vocabularies, transposed logits, padded caches."""
    for vocab in (640, 641, 9000):
        logits = random_logits(5, vocab, dtype)
        for offset in (0, 1, 3, 8):
            shifted = torch.zeros(5 * vocab + offset, dtype=dtype)[offset:].view(5, vocab).copy_(logits)
            same_as_cpu("gumbel_sample", sampling(shifted, 0.8, cache=True))
        transposed = surrounded(logits.T.contiguous()).T
        same_as_cpu("gumbel_sample", sampling(transposed, 0.8, cache=True, states=(4, -1, 0, 2, 1)))
        for spare in (0, 1, 8):
            arguments = list(sampling(logits, 0.0, states=(4, -1, 0, 2, 1)))
            arguments[7] = surrounded(torch.zeros(5, 3, vocab + spare, dtype=dtype))
            same_as_cpu("gumbel_sample", tuple(arguments))
            aligned = torch.zeros(5, 3, vocab + spare, dtype=dtype)
            same_as_cpu("gumbel_sample", (*arguments[:7], aligned))


def test_workspace_serves_again_and_again(device):
    """Zero after every call; with it and without it the same tokens."""
    workspace = torch.zeros(200, dtype=torch.int64, device=device)
    for number in range(20):
        rows = 1 + 7 * number % 64
        arguments = twin(sampling(random_logits(rows, 40_000, torch.bfloat16, seed=number), 1.0, number), device)
        ops.gumbel_sample(*arguments)
        expected = arguments[6].clone()
        arguments[6].fill_(77)
        ops.gumbel_sample(*arguments, workspace)
        assert torch.equal(arguments[6], expected)
        assert not workspace.any()


def test_noise_is_that_of_the_pinned_test(device):
    """The tokens of `test_noise_is_pinned` in test_drafter.py."""
    sampled = torch.zeros(8, dtype=torch.int64, device=device)
    rows = torch.arange(8, device=device)
    ops.gumbel_sample(
        torch.zeros(8, 50_000, device=device), rows, torch.ones(8, device=device), rows, rows,
        torch.tensor(2, device=device), sampled,
    )  # fmt: skip
    assert sampled.tolist() == [35447, 21429, 17192, 33897, 3706, 3421, 1544, 45420]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_distribution(device, temperature):
    """A million draws of one distribution; chi-square with 9 degrees of freedom, upper 0.1 % point."""
    count = 1_000_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5, 0.0, 1.0], device=device)
    rows = torch.arange(count, device=device)
    sampled = torch.zeros(count, dtype=torch.int64, device=device)
    ops.gumbel_sample(
        logits.expand(count, -1), rows, torch.full((count,), temperature, device=device), rows * (2**20 + 1),
        torch.full_like(rows, 5), torch.tensor(1, device=device), sampled,
    )  # fmt: skip
    counts = torch.bincount(sampled, minlength=10).double()
    expected = torch.softmax(logits.double() / temperature, 0) * count
    assert ((counts - expected) ** 2 / expected).sum().item() < 27.9


def test_a_row_does_not_depend_on_its_company(device):
    logits = random_logits(7, 50_000, torch.bfloat16).to(device)
    seeds = torch.arange(7, device=device) * 11
    positions = torch.arange(7, device=device) + 2**35
    step = torch.tensor(3, device=device)

    def draw(order, padding=0):
        given = torch.cat([logits[order], torch.full((padding, 50_000), math.nan, device=device).bfloat16()])
        idx = torch.tensor([*order, *[-1] * padding], device=device)
        places = torch.cat([positions[order], positions[:padding]])
        sampled = torch.full((len(idx),), 77, dtype=torch.int64, device=device)
        ops.gumbel_sample(given, idx, torch.full((7,), 0.9, device=device), seeds, places, step, sampled)
        assert not sampled[len(order) :].any()
        return sampled[: len(order)].tolist()

    together = draw(range(7))
    assert [draw([row])[0] for row in range(7)] == together
    assert draw([3, 1, 6], padding=5) == [together[3], together[1], together[6]]


# ---------------------------------------------------------------- captured, then replayed on other data

OTHER_DATA = {
    "prepare_prefill_inputs": [
        prefill_arguments((0, 1, 9, -5, -9), (1, 4, PADDED, PADDED), (0, 3, 9, 9), (0, 1, 9, 9)),
        prefill_arguments((0, 2, 2, 5, 9), (1, 4, 2, 0), (2, 0, 1, 0), (1, 1, 0, 9)),
        prefill_arguments((0, 9, -1, -1, -1), (PADDED,) * 4),
    ],
    "prepare_decode_inputs": [
        decode_arguments(states=(1, PADDED, PADDED, PADDED)),
        decode_arguments(states=(1, 2, 3, 4), positions=(1, 2, 3, 4, 5, 6)),
    ],
    "update_draft_inputs": [
        update_arguments(step=0, states=(1, 2, PADDED, PADDED)),
        update_arguments(step=2, states=(1, 2, 3, 4)),
    ],
    "compute_slot_mappings": [
        slot_arguments((0, 1, 9, 9, 9), (4, 1, PADDED, PADDED)),
        slot_arguments((0, 2, 2, 5, 9), (PADDED, 1, 0, 2), first_position=5),
    ],
    "eagle_step": [eagle_arguments((31, 4, 5, -1, 9, 30))],
    "prepare_inputs_padded": [padded_inputs_arguments((1, 4, 4, 5, 5), (2, 1, 1, 1, 0), (0, 2, 6, 7, 9, 9))],
    "prepare_next_token_padded": [
        next_token_arguments(((1, -1, -1), (1, 2, 3), (-1, -1, -1), (4, -1, -1), (5, 6, 7)), (1, 0, 0, 0, 1))
    ],
    "gumbel_sample": [
        sample_arguments(states=(0, 2, 4, PADDED, PADDED), steps=(2, 2, 1, 1, 1)),
        sample_arguments(temperatures=(0.0, 0.5, 0.0, 0.0, 1.0, 9.0), states=(5, 4, 3, 2, 1)),
    ],
    "copy_expand_inputs": [
        expand_arguments((0, 1, 9, -5, -9), (1, 4, PADDED, PADDED), (0, 3, 9, 9)),
        expand_arguments((0, 2, 2, 5, 9), (1, 4, 2, 0), (2, 0, 1, 0)),
    ],
    "extend_queries": [
        extend_arguments((0, 1, 9, -5, -9), (1, 4, PADDED, PADDED), first_position=3),
        extend_arguments((0, 2, 2, 5, 9), (1, 4, 2, 0), (1, 2, 3, 40), first_position=17),
    ],
    "dcp_local_seq_lens": [local_lens_arguments((9, 3, 0, 77, 1, 2))],
}


def storages(arguments):
    tensors = [leaf for a in arguments for leaf in (a if isinstance(a, list) else [a])]
    return [t for t in tensors if isinstance(t, torch.Tensor)]


def load(buffers, data):
    """The bytes of other arguments into buffers that a graph has already seen."""
    for buffer, source in zip(storages(buffers), storages(data), strict=True):
        assert buffer.shape == source.shape
        assert buffer.stride() == source.stride()
        buffer.copy_(source)


def capture(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("op", OPS)
def test_replay_on_other_data(device, op):
    """Fewer and more real rows, another step, poisoned outputs: what the replay writes is what an eager call of
    the CPU does. The arguments are captured once, on the first sample."""
    first = sample_inputs(op)[0]
    buffers = twin(first, device)
    graph = capture(lambda: getattr(ops, op)(*buffers))
    for data in (*OTHER_DATA[op], first):
        load(buffers, data)
        graph.replay()
        expected = twin(data)
        getattr(ops, op)(*expected)
        for name, one, other in zip(argument_names(op), buffers, expected, strict=False):
            if isinstance(one, torch.Tensor):
                same = torch.equal(one.cpu().contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
                assert same, name


@pytest.mark.parametrize("own_workspace", [True, False])
def test_replayed_draws(device, own_workspace):
    """A large vocabulary: blocks that meet in the workspace, a hundred replays, each on other logits."""
    rows, vocab = 16, 128_256
    buffers = twin(sampling(random_logits(rows, vocab, torch.bfloat16), 1.0), device)
    workspace = None if own_workspace else torch.zeros(2 * rows, dtype=torch.int64, device=device)
    graph = capture(lambda: ops.gumbel_sample(*buffers, workspace))
    for number in range(100):
        buffers[0].normal_()
        buffers[4].add_(1)
        buffers[1].copy_(torch.tensor([*range(rows - number % 5), *[-1] * (number % 5)]))
        graph.replay()
        replayed = buffers[6].clone()
        ops.gumbel_sample(*buffers)
        assert torch.equal(buffers[6], replayed)
        if number % 20 == 0:
            expected = twin(buffers, "cpu")
            ops.gumbel_sample(*expected)
            assert torch.equal(replayed.cpu(), expected[6])


class Loop:
    """Steps 1 to K - 1 of a drafter whose model is an embedding; everything in buffers that never move."""

    ROWS, STEPS, VOCAB, MAX_LEN, BLOCK, WIDTH = 8, 5, 2000, 64, 4, 64

    def __init__(self, device):
        random = torch.Generator().manual_seed(0)
        rows = self.ROWS

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.embedding = torch.randn(self.VOCAB, self.WIDTH, generator=random).to(device)
        self.head = torch.randn(self.WIDTH, self.VOCAB, generator=random).to(device)
        self.table = torch.randperm(rows * 16, generator=random).int().view(rows, 16).to(device)
        self.idx, self.drafts, self.sampled = zeros(rows), zeros(rows, self.STEPS), zeros(rows)
        self.ids, self.lengths, self.starts = (zeros(n, dtype=torch.int32) for n in (rows, rows, rows + 1))
        self.positions, self.sample_positions, self.step = zeros(rows), zeros(rows), zeros(())
        self.target_lengths, self.rejected = zeros(rows, dtype=torch.int32), zeros(rows, dtype=torch.int32)
        self.hidden = zeros(rows, self.WIDTH, dtype=torch.float32)
        self.slots, self.workspace = zeros(1, rows), zeros(2 * rows)
        self.seen_slots, self.seen_lengths = zeros(self.STEPS, rows), zeros(self.STEPS, rows, dtype=torch.int32)
        self.temperature, self.seeds = torch.zeros(rows, device=device), zeros(rows)

    def load(self, batch, num_real, temperature):
        random = torch.Generator().manual_seed(batch)
        states = torch.randperm(self.ROWS, generator=random)
        states[num_real:] = -1
        lengths = torch.randint(3, self.MAX_LEN - 1, (self.ROWS,), generator=random)
        rejected = torch.randint(0, 3, (self.ROWS,), generator=random)
        self.idx.copy_(states)
        self.target_lengths.copy_(lengths)
        self.rejected.copy_(rejected)
        self.positions.copy_(lengths - 1 - rejected)
        self.sample_positions.copy_(lengths + 2**40)
        self.drafts.fill_(-9)
        self.drafts[:, 0] = torch.randint(0, self.VOCAB, (self.ROWS,), generator=random).to(self.drafts.device)
        self.hidden.copy_(torch.randn(self.ROWS, self.WIDTH, generator=random))
        self.temperature.fill_(temperature)
        self.seeds.copy_(torch.arange(self.ROWS) + batch)
        for poison in (self.ids, self.lengths, self.starts, self.slots, self.sampled):
            poison.fill_(55)

    def run(self):
        ops.prepare_decode_inputs(
            self.drafts, self.target_lengths, self.rejected, self.ids, self.positions, self.starts, self.lengths,
            self.MAX_LEN, self.idx, self.sample_positions,
        )  # fmt: skip
        for step in range(1, self.STEPS):
            self.step.fill_(step)
            ops.compute_slot_mappings(self.idx, self.starts, self.positions, [self.table], [self.BLOCK], self.slots)
            self.seen_slots[step].copy_(self.slots[0])
            self.seen_lengths[step].copy_(self.lengths)
            hidden = torch.tanh(self.hidden + self.embedding[self.ids] + self.positions[:, None] / 64)
            ops.gumbel_sample(
                hidden @ self.head, self.idx, self.temperature, self.seeds, self.sample_positions, self.step,
                self.sampled, None, self.workspace,
            )  # fmt: skip
            ops.update_draft_inputs(
                self.sampled, self.step, self.drafts, self.ids, self.positions, self.lengths, self.STEPS,
                self.MAX_LEN, self.idx, hidden, self.hidden, self.sample_positions,
            )  # fmt: skip

    def results(self):
        return [t.clone() for t in (self.drafts, self.positions, self.lengths, self.starts, self.seen_slots,
                                    self.seen_lengths, self.hidden, self.sample_positions)]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_captured_loop_is_the_eager_loop(device, temperature):
    """Batches of 8 to 0 real rows through one graph; every step's slots and lengths are looked at."""
    loop = Loop(device)
    loop.load(0, 8, temperature)
    graph = capture(loop.run)
    for batch, num_real in enumerate((8, 1, 5, 8, 0, 3)):
        loop.load(batch, num_real, temperature)
        loop.run()
        eager = loop.results()
        loop.load(batch, num_real, temperature)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(eager, loop.results(), strict=True))
        assert (loop.seen_slots[1:, num_real:] == -1).all()
        assert (loop.seen_slots[1:, :num_real] >= 0).all()
        assert (loop.seen_lengths[1:, num_real:] == 0).all()
        assert (loop.drafts[num_real:, 1:] == -9).all()
        if num_real:
            assert (loop.drafts[:num_real, 1:] >= 0).all()


def test_no_op_synchronises(device):
    calls = [(op, twin(arguments, device)) for op in OPS for arguments in sample_inputs(op)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op, arguments in calls:
            getattr(ops, op)(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- data that lies

LIES = {
    "starts that decrease": ("prepare_prefill_inputs", prefill_arguments((0, 4, 3, 9, 9))),
    "far too many tokens": ("prepare_prefill_inputs", prefill_arguments(starts=(0, 4, 5, 9, 9), capacity=6)),
    "an unknown state": ("prepare_prefill_inputs", prefill_arguments(states=(3, 2**31 - 1, 2, -1))),
    "a step past the columns": ("update_draft_inputs", update_arguments(step=3)),
    "a negative step": ("update_draft_inputs", update_arguments(step=-1)),
    "a state without blocks": ("compute_slot_mappings", slot_arguments(states=(3, 99, 2, -1))),
    "positions past the blocks": ("compute_slot_mappings", slot_arguments(first_position=10**6)),
    "negative positions": ("compute_slot_mappings", slot_arguments(first_position=-(10**6))),
    "an eagle before the start": ("eagle_step", eagle_arguments((3, -(2**30)))),
    "drafts that decrease": ("prepare_inputs_padded", padded_inputs_arguments((3, 2, 6, 9, 9))),
    "a state without a temperature": ("gumbel_sample", sample_arguments(states=(3, 10**6, -1, 0, 5))),
    "a step past the drafts": ("gumbel_sample", sample_arguments(steps=(1, 0, 10**6, 3, -1))),
    "no room to expand": ("copy_expand_inputs", expand_arguments(capacity=14)),
    "a bonus of no state": ("copy_expand_inputs", expand_arguments(states=(3, 10**6, 2, -1))),
    "positions past the table": ("extend_queries", extend_arguments(first_position=25, columns=1)),
}


@pytest.mark.parametrize("case", LIES)
def test_what_the_cpu_refuses_the_device_survives(device, case):
    """Nothing outside the outputs changes. (compute-sanitizer sees the reads: benchmarks/gpu_tests.py.)"""
    op, arguments = LIES[case]
    with pytest.raises((ValueError, IndexError)):
        getattr(ops, op)(*twin(arguments))
    ours = twin(arguments, device)
    getattr(ops, op)(*ours)
    torch.cuda.synchronize()
    schema = getattr(torch.ops.nwor, op).default._schema.arguments
    for declared, one, other in zip(schema, ours, twin(arguments), strict=False):
        if not isinstance(one, torch.Tensor):
            continue
        if declared.alias_info is None:
            assert same_memory([one], [other]), declared.name
        elif one.is_contiguous():  # the memory around it
            start, size = one.storage_offset() * one.element_size(), one.numel() * one.element_size()
            now, then = memory([one])[0], memory([other])[0]
            assert torch.equal(now[:start], then[:start]), declared.name
            assert torch.equal(now[start + size :], then[start + size :]), declared.name


DEBUG_MODE = """
import pytest
from layouts import twin
from test_drafter_cuda import LIES, OPS
from samples import sample_inputs
from nwor_ops import ops
for case, (op, arguments) in LIES.items():
    try:
        getattr(ops, op)(*twin(arguments))
        raise SystemExit("the CPU took " + case)
    except (ValueError, IndexError) as error:
        wanted = type(error)
    with pytest.raises(wanted, match="^" + op + ": "):
        getattr(ops, op)(*twin(arguments, "cuda"))
for op in OPS:
    for arguments in sample_inputs(op):
        getattr(ops, op)(*twin(arguments, "cuda"))
print("reported")
"""


def test_debug_mode_raises():
    path = os.pathsep.join([os.path.dirname(__file__), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", DEBUG_MODE], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": path, "VLLM_NWOR_DEBUG_SYNC": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "reported"


# ---------------------------------------------------------------- torch's view of the ops


@pytest.mark.parametrize("op", OPS)
def test_opcheck(device, op):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for arguments in sample_inputs(op, device):
        torch.library.opcheck(getattr(torch.ops.nwor, op).default, arguments, test_utils=utilities)


def test_compiled_whole(device):
    """fullgraph: a step of the loop in one graph, nothing of its mutations lost."""
    eager, compiled = Loop(device), Loop(device)
    for loop in (eager, compiled):
        loop.load(3, 5, 0.0)
    eager.run()
    with torch.no_grad():
        torch.compile(compiled.run, fullgraph=True)()
    # Inductor may fuse the model's arithmetic differently; what the ops make of indices is exact.
    for name in ("positions", "lengths", "starts", "seen_slots", "seen_lengths", "sample_positions"):
        assert torch.equal(getattr(eager, name), getattr(compiled, name)), name


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_left_on_the_cpu_is_refused(device, op):
    arguments = twin(sample_inputs(op)[0], device)
    for place, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            mixed = (*arguments[:place], argument.cpu(), *arguments[place + 1 :])
            with pytest.raises(TypeError, match=f"^{op}: .* must be on device "):
                getattr(ops, op)(*mixed)


def test_too_many_tables(device):
    arguments = slot_arguments(block_sizes=(4,) * 65)
    with pytest.raises(ValueError, match="block_tables must hold 1 to 64 tables, got 65"):
        ops.compute_slot_mappings(*twin(arguments, device))
    most = slot_arguments(block_sizes=(4,) * 64)
    ours, theirs = twin(most, device), twin(most)
    ops.compute_slot_mappings(*ours)
    ops.compute_slot_mappings(*theirs)
    assert same_memory(ours, theirs)


def test_some_tables_are_sharded(same_as_cpu):
    arguments = slot_arguments(block_sizes=(4, 8, 2), size=2, rank=0, interleave=2, sharded=flags(1, 0, 1))
    same_as_cpu("compute_slot_mappings", arguments)
    same_as_cpu("prepare_inputs_padded", (int32(2), int32(1), int32(0, 3), int32(9), int32(9)))
