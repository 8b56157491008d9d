"""DraftVocabulary: by hand, in random calls, compiled, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from state_machines import run_machine
from vocabulary_machine import MACHINE_SETTINGS, Machine

from nwor_ops import DraftVocabulary


def head_of(tokens, width=4, dtype=torch.float32):
    """Row t has t + 1 in column t % width: hidden state e_d prefers the largest token of column d."""
    rows = torch.arange(tokens)
    head = torch.zeros(tokens, width, dtype=dtype)
    head[rows, rows % width] = (rows + 1).to(dtype)
    return head


def test_set_follows_tokens(device):
    head = head_of(12).to(device)
    vocabulary = DraftVocabulary(head, rows=6)
    assert vocabulary.coverage() is None
    hidden = torch.eye(4, device=device)
    assert vocabulary.draft(hidden).tolist() == [4, 5, 2, 3]
    vocabulary.update(torch.tensor([10, 2, -1], device=device), torch.tensor([11], device=device))
    assert vocabulary.token_ids.tolist() == [11, 10, 2, 3, 4, 5]
    assert vocabulary.draft(hidden).tolist() == [4, 5, 10, 11]
    assert vocabulary.coverage() == 0.5
    values, tokens = vocabulary.best(hidden)
    assert values.tolist() == [5, 6, 11, 12]
    assert tokens.tolist() == [4, 5, 10, 11]
    logits = vocabulary.logits(hidden)
    assert torch.equal(logits, hidden @ head[vocabulary.token_ids].T)
    full = vocabulary.expand_logits(logits, torch.empty(4, 12, device=device))
    outside = [token for token in range(12) if token not in vocabulary.token_ids.tolist()]
    assert (full[:, outside] == -math.inf).all()
    assert torch.equal(full[:, vocabulary.token_ids], logits)


def test_parts_of_a_head(device):
    """Two ranks see the same tokens and each takes those of its part."""
    head = head_of(16).to(device)
    parts = [DraftVocabulary(head[first : first + 8], 4, first_token=first) for first in (0, 8)]
    for part in parts:
        part.update(torch.tensor([7, 15, 14, 6, -1], device=device))
    assert [part.token_ids.tolist() for part in parts] == [[7, 6, 2, 3], [15, 14, 10, 11]]
    assert [part.counters.tolist() for part in parts] == [[2, 2], [2, 2]]
    values, tokens = zip(*(part.best(torch.eye(4, device=device)[3:]) for part in parts), strict=True)
    assert (torch.cat(values).tolist(), torch.cat(tokens).tolist()) == ([8.0, 16.0], [7, 15])


def test_reload_and_reset():
    vocabulary = DraftVocabulary(head_of(12), rows=6)
    vocabulary.update(torch.tensor([10, 11]))
    address, tokens = vocabulary.weight.data_ptr(), vocabulary.token_ids.clone()
    vocabulary.head.mul_(2)
    vocabulary.reload()
    assert torch.equal(vocabulary.weight, 2 * head_of(12)[tokens])
    vocabulary.reload(head_of(12))
    assert torch.equal(vocabulary.weight, head_of(12)[tokens])
    for tensor in vocabulary.tensors().values():
        tensor.fill_(99)
    vocabulary.reset()
    fresh = DraftVocabulary(head_of(12), rows=6).tensors()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in vocabulary.tensors().items())
    assert vocabulary.weight.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_step(device, dtype):
    """Update and draft in one graph, with changed tokens."""
    vocabulary = DraftVocabulary(head_of(40, dtype=dtype).to(device), rows=8)
    eager = DraftVocabulary(head_of(40, dtype=dtype).to(device), rows=8)
    hidden = torch.eye(4, device=device, dtype=dtype)

    def step(which, tokens, prompt):
        which.update(tokens, prompt)
        drafts = which.draft(hidden)
        return drafts, which.expand_logits(which.logits(hidden), torch.empty(4, 40, device=device, dtype=dtype))

    compiled = torch.compile(lambda tokens, prompt: step(vocabulary, tokens, prompt), fullgraph=True)
    for seed in range(4):
        tokens, prompt = torch.randint(-1, 40, (2, 6), generator=torch.Generator().manual_seed(seed)).to(device)
        for ours, theirs in zip(compiled(tokens, prompt), step(eager, tokens, prompt), strict=True):
            assert torch.equal(ours, theirs)  # each product has one term that is not zero


HEAD = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("head", "rows", "error", "sentence"),
    [
        (HEAD, 9, ValueError, "rows must be at most 8, the rows of head, got 9"),
        (HEAD, 0, ValueError, "rows must be at least 1, got 0"),
        (HEAD, 2.0, TypeError, "rows must be an integer, got 2.0"),
        (HEAD[0], 1, ValueError, "head must have 2 dimensions"),
        (HEAD[:0], 1, ValueError, "head must have 2 dimensions, the first of at least 1"),
        (HEAD.T, 1, ValueError, "head must have contiguous rows, got strides"),
        (HEAD.to(torch.float8_e4m3fn), 1, TypeError, "head must have dtype torch.float32 or torch.float16 or"),
        (HEAD.clone().requires_grad_(), 1, RuntimeError, "head must not require a gradient; pass head.detach"),
        ([[1.0]], 1, TypeError, "head must be a tensor"),
    ],
)
def test_refused(head, rows, error, sentence):
    with pytest.raises(error, match=f"^DraftVocabulary: {sentence}"):
        DraftVocabulary(head, rows)


def test_refused_in_methods():
    vocabulary = DraftVocabulary(HEAD, 4, first_token=2**31 - 8)
    for call, error, sentence in (
        (lambda: vocabulary.reload(HEAD[:6]), ValueError, r"head must stay torch.float32 \[8, 4\] on cpu, got"),
        (lambda: vocabulary.draft([1.0]), TypeError, "hidden must be a tensor, got"),
        (lambda: vocabulary.draft(HEAD[0]), ValueError, "hidden must have 2 dimensions"),
        (lambda: vocabulary.best(HEAD[:, :3]), ValueError, r"hidden must be \[R, 4\], got torch.float32 \[8, 3\]"),
        (
            lambda: vocabulary.expand_logits(torch.zeros(2, 8), torch.zeros(2, 8)),
            ValueError,
            r"logits must be \[R, 4\]",
        ),
        (lambda: DraftVocabulary(HEAD, 4, first_token=2**31 - 7), ValueError, "first_token must be at most 2147483640"),
    ):
        with pytest.raises(error, match=f"^DraftVocabulary: {sentence}"):
            call()


@pytest.mark.state_machine
def test_random_updates(machine_seed, request):
    run_machine(Machine, MACHINE_SETTINGS, machine_seed, request)
