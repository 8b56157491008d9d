"""Family drafter on a GPU, in addition to its cases in ops/: draws that equal the CPU's, also in replayed graphs."""

from __future__ import annotations

import math

import pytest
import torch
from draft_examples import poisoned
from oracle_checks import assert_same_as_cpu
from tensors import int64

from nwor_ops import ops
from nwor_ops.testing.layouts import surrounded, twin

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# ---------------------------------------------------------------- gumbel_sample: bit-identical draws


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
        assert_same_as_cpu(
            "gumbel_sample", sampling(random_logits(rows, vocab, dtype, scale), temperature, vocab), device
        )


@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-6, 1e6, 1e30, 3e38, 1e-39])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_temperatures(device, dtype, temperature):
    for scale in (1e-3, 1.0, 1e4):
        assert_same_as_cpu("gumbel_sample", sampling(random_logits(9, 9001, dtype, scale), temperature), device)


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
    ours = assert_same_as_cpu("gumbel_sample", sampling(logits, temperature), device)
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
            assert_same_as_cpu("gumbel_sample", sampling(shifted, 0.8, cache=True), device)
        transposed = surrounded(logits.T.contiguous()).T
        assert_same_as_cpu("gumbel_sample", sampling(transposed, 0.8, cache=True, states=(4, -1, 0, 2, 1)), device)
        for spare in (0, 1, 8):
            arguments = list(sampling(logits, 0.0, states=(4, -1, 0, 2, 1)))
            arguments[7] = surrounded(torch.zeros(5, 3, vocab + spare, dtype=dtype))
            assert_same_as_cpu("gumbel_sample", tuple(arguments), device)
            aligned = torch.zeros(5, 3, vocab + spare, dtype=dtype)
            assert_same_as_cpu("gumbel_sample", (*arguments[:7], aligned), device)


@pytest.mark.parametrize("own_workspace", [True, False])
def test_replayed_draws(device, own_workspace):
    """A large vocabulary, so that blocks combine in the workspace, and a hundred replays with different logits."""
    rows, vocab = 16, 128_256
    buffers = twin(sampling(random_logits(rows, vocab, torch.bfloat16), 1.0), device)
    workspace = None if own_workspace else torch.zeros(2 * rows, dtype=torch.int64, device=device)
    ops.gumbel_sample(*buffers, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gumbel_sample(*buffers, workspace)
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
