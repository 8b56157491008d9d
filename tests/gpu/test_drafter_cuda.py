"""Family drafter on a GPU, in addition to its cases in ops/: draws that equal the CPU's, and captured ops and loops.

Graphs are replayed on changed data, and nothing waits for the device.
"""

from __future__ import annotations

import math

import pytest
import torch
from draft_examples import poisoned
from tensors import int64

from nwor_ops import ops
from nwor_ops.testing.layouts import same_memory, surrounded, twin

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# ---------------------------------------------------------------- gumbel_sample: bit-identical draws


def same_as_cpu(op, arguments, device):
    """Run an op on the CPU and on a copy on the GPU, compare every byte of all memory, and return the GPU copy.

    It is used for vocabularies for which the oracle is slow. Other tests compare the CPU kernels with the oracle.
    """
    theirs, ours = twin(arguments), twin(arguments, device)
    getattr(ops, op)(*theirs)
    getattr(ops, op)(*ours)
    assert same_memory(ours, theirs), op
    return ours


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
def test_draws_are_the_cpu_s(device, dtype, vocab, temperature):
    rows = 6 if vocab > 10_000 else 17
    for scale in (0.0, 1.0, 12.0):  # equal logits, flat logits, one very large logit
        same_as_cpu("gumbel_sample", sampling(random_logits(rows, vocab, dtype, scale), temperature, vocab), device)


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-6, 1e6, 1e30, 3e38, 1e-39])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_temperatures(device, dtype, temperature):
    for scale in (1e-3, 1.0, 1e4):
        same_as_cpu("gumbel_sample", sampling(random_logits(9, 9001, dtype, scale), temperature), device)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_no_numbers(device, dtype, temperature):
    """Logits that are mostly masked, NaN except for a few, all of one kind, and +inf."""
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
    ours = same_as_cpu("gumbel_sample", sampling(logits, temperature), device)
    drawn = [ours[6][row, row % 3].item() for row in range(10)]
    assert drawn[4] == drawn[5] == drawn[7] == 0
    assert drawn[9] == 19_999
    assert few[0, drawn[0]]
    assert few[2, drawn[2]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_and_cache_of_any_placement(device, dtype):
    """Rows that start off a 16-byte boundary, odd vocabularies, transposed logits, and padded caches."""
    for vocab in (640, 641, 9000):
        logits = random_logits(5, vocab, dtype)
        for offset in (0, 1, 3, 8):
            shifted = torch.zeros(5 * vocab + offset, dtype=dtype)[offset:].view(5, vocab).copy_(logits)
            same_as_cpu("gumbel_sample", sampling(shifted, 0.8, cache=True), device)
        transposed = surrounded(logits.T.contiguous()).T
        same_as_cpu("gumbel_sample", sampling(transposed, 0.8, cache=True, states=(4, -1, 0, 2, 1)), device)
        for spare in (0, 1, 8):
            arguments = list(sampling(logits, 0.0, states=(4, -1, 0, 2, 1)))
            arguments[7] = surrounded(torch.zeros(5, 3, vocab + spare, dtype=dtype))
            same_as_cpu("gumbel_sample", tuple(arguments), device)
            aligned = torch.zeros(5, 3, vocab + spare, dtype=dtype)
            same_as_cpu("gumbel_sample", (*arguments[:7], aligned), device)


# ---------------------------------------------------------------- capture, then replay on other data


def capture(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("own_workspace", [True, False])
def test_replayed_draws(device, own_workspace):
    """A large vocabulary, so that blocks combine in the workspace, and a hundred replays with different logits."""
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
    """Steps 1 to K - 1 of a drafter whose model is an embedding, in buffers that never move."""

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
    """Batches of 8 to 0 real rows run through one graph. The slots and lengths of every step are compared."""
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


def test_compiled_whole(device):
    """fullgraph=True: one step of the loop in one graph, with every mutation kept."""
    eager, compiled = Loop(device), Loop(device)
    for loop in (eager, compiled):
        loop.load(3, 5, 0.0)
    eager.run()
    with torch.no_grad():
        torch.compile(compiled.run, fullgraph=True)()
    # Inductor may fuse the model's arithmetic in another way. The results of the ops on indices are exact.
    for name in ("positions", "lengths", "starts", "seen_slots", "seen_lengths", "sample_positions"):
        assert torch.equal(getattr(eager, name), getattr(compiled, name)), name
