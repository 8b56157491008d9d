"""The draft vocabulary on a GPU: the bytes of the CPU at the sizes of real models, in graphs, without a wait."""

from __future__ import annotations

import math

import draft_examples as samples
import pytest
import torch
from no_sync import no_waits
from oracle_checks import assert_same_as_cpu
from tensors import numbers

from nwor_ops import DraftVocabulary, ops
from nwor_ops.testing.layouts import random_bytes, surrounded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pair(vocab, rows, device, width=2, first=0):
    """The same vocabulary on the CPU and on the GPU."""
    head = random_bytes(vocab * width, torch.bfloat16).view(vocab, width)
    return [DraftVocabulary(h, rows, first_token=first) for h in (head, head.to(device))]


def assert_equal(cpu, gpu):
    for name, tensor in cpu.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), gpu.tensors()[name].cpu().view(torch.uint8)), name


def token_list(vocab, length, step, seed):
    """Draw tokens like those of a text (small ids are common), far apart, or with padding."""
    random = torch.Generator().manual_seed(1000 * seed + step)
    if step % 3 == 0:
        return torch.randint(-1, vocab + 1, (length,), generator=random)
    uniform = torch.rand(length, generator=random, dtype=torch.float64)
    tokens = (vocab**uniform).long().clamp(max=vocab - 1)
    return torch.where(torch.rand(length, generator=random) < 0.2, -1, tokens)


SIZES = [
    (1, 1), (40, 1), (40, 2), (40, 40), (5000, 31), (5000, 32), (5000, 33), (5000, 5000), (40_000, 33_000),
    (151_643, 8192), (248_320, 32_768), (248_320, 248_320),
]  # fmt: skip


@pytest.mark.parametrize("prompt", [0, 1, 700, 8191, 8192, 8193, 20_000])
@pytest.mark.parametrize(("vocab", "rows"), SIZES)
def test_updates_equal_those_of_cpu(device, vocab, rows, prompt):
    cpu, gpu = pair(vocab, rows, device, first=vocab % 7)
    for step in range(9):
        sampled = token_list(vocab, (0, 1, 64, 512)[step % 4], step, 1) + cpu.first_token
        listed = (token_list(vocab, prompt, step, 2) + cpu.first_token).int() if step % 2 else None
        cpu.update(sampled, listed)
        ours = sampled.to(device), None if listed is None else listed.to(device)
        with no_waits():
            gpu.update(*ours)
        assert_equal(cpu, gpu)


@pytest.mark.parametrize("width", [1, 7, 8, 24, 2048, 4096, 5120])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_copied_rows(device, dtype, width):
    """Rows on and off 16-byte boundaries, of a head with longer rows."""
    for spare in (0, 1, 16):
        head = random_bytes(100 * (width + spare), dtype).view(100, width + spare)[:, :width]
        arguments = list(samples.vocabulary((99, 98, 3, 50), None, vocab=100)[:9])
        arguments[1], arguments[4] = head, random_bytes(8 * width, dtype).view(8, width)
        for weight in (arguments[4], surrounded(arguments[4])):
            arguments[4] = weight
            assert_same_as_cpu("update_draft_vocabulary", tuple(arguments), device)


def test_replayed_steps(device):
    """One graph of an update and a draft, replayed for 200 steps with other tokens."""
    cpu, gpu = pair(50_000, 4096, device, width=16)
    cpu.head.copy_(numbers(50_000, 16, dtype=torch.bfloat16))
    gpu.head.copy_(cpu.head)
    cpu.reload()
    gpu.reload()
    sampled = torch.full((64,), -1, device=device)
    prompt, hidden = torch.full((8192,), -1, device=device), torch.randn(16, 16, device=device).bfloat16()
    out = torch.empty(16, 50_000, dtype=torch.bfloat16, device=device)

    def step():
        gpu.update(sampled, prompt)
        logits = gpu.logits(hidden)
        values, tokens = gpu.best(hidden)
        return logits, values, tokens, gpu.expand_logits(logits, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, values, tokens, _ = step()
    for number in range(200):
        listed = token_list(50_000, 64, number, 3), token_list(50_000, 8192 if number % 8 == 0 else 0, number, 4)
        sampled.copy_(listed[0])
        prompt.fill_(-1)
        prompt[: len(listed[1])] = listed[1].to(device)
        with no_waits():
            graph.replay()
        cpu.update(*listed)
        assert_equal(cpu, gpu)
        expected = torch.empty(16, dtype=torch.int64), torch.empty(16)
        ops.argmax_draft_tokens(logits.cpu(), cpu.token_ids, *expected)
        assert torch.equal(tokens.cpu(), expected[0])
        assert torch.equal(values.cpu(), expected[1])
        full = torch.full((16, 50_000), -math.inf, dtype=torch.bfloat16)
        full[:, cpu.token_ids] = logits.cpu()
        assert torch.equal(out.cpu(), full)


@pytest.mark.parametrize("columns", [1, 255, 4096, 8193, 32_768, 32_769, 65_536, 100_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_equals_that_of_cpu(device, dtype, columns):
    """Flat logits with many ties, one maximum, masked and NaN rows; any stride and alignment."""
    random = torch.Generator().manual_seed(columns)
    ids = torch.randperm(2 * columns, generator=random)[:columns] + 2**30
    logits = torch.randn(9, columns, generator=random).to(dtype)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3], logits[4] = -math.inf, math.nan
    logits[5] = torch.where(torch.rand(columns, generator=random) < 0.5, math.nan, logits[5])
    logits[6, -1] = math.inf
    logits[7] = torch.where(torch.rand(columns, generator=random) < 0.001, logits[7], -math.inf)
    for view in (logits, surrounded(logits), surrounded(logits.T.contiguous()).T):
        arguments = (
            view, ids, samples.poisoned(9, dtype=torch.int64), samples.poisoned(9, dtype=torch.float32),
        )  # fmt: skip
        assert_same_as_cpu("argmax_draft_tokens", arguments, device)


@pytest.mark.parametrize("rows", [1, 8, 9, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_logits_equal_those_of_cpu(device, dtype, rows):
    cpu, _ = pair(30_011, 4096, device)
    cpu.update(token_list(30_011, 3000, 1, 5))
    logits = random_bytes(rows * 4096, dtype).view(rows, 4096)
    out = samples.poisoned(rows, 30_016, dtype=dtype)
    assert_same_as_cpu("expand_draft_logits", (logits, cpu.row_of_token, out), device)
