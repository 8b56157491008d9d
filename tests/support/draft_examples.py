"""Calls of the family drafter whose results are computed by hand: every output starts with 77s."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensors import flags, int32, int64, numbers
from torch import Tensor

from nwor_ops.testing.layouts import surrounded

POISON = 77
PADDED = -1


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return surrounded(torch.full(shape, POISON, dtype=dtype))


def prefill(
    starts: tuple[int, ...] = (0, 4, 5, 9, -5),  # row 3 is padded: its start is never read
    states: tuple[int, ...] = (3, 0, 2, PADDED),
    rejected: tuple[int, ...] = (2, 0, 1, 99),
    sampled: tuple[int, ...] = (2, 0, 3, 99),
    capacity: int = 12,
    rows: int = 6,
    num_states: int = 5,
) -> tuple[Any, ...]:
    tokens = max(starts) + 1
    return (
        int32(*range(100, 100 + tokens)), int64(*range(1000, 1000 + tokens)), int32(*starts),
        int32(*range(10, 10 + len(states))), int32(*states), int32(*sampled), int32(*rejected),
        int64(*range(500, 500 + num_states)), int32(*range(600, 600 + num_states)),
        poisoned(capacity), poisoned(capacity, dtype=torch.int64), poisoned(rows + 1), poisoned(rows),
        poisoned(rows, dtype=torch.int64), poisoned(1, dtype=torch.int64),
    )  # fmt: skip


def decode(
    positions: tuple[int, ...] = (7, 30, 31, POISON, POISON, POISON),
    seq_lens: tuple[int, ...] = (10, 32, 33, 99),
    rejected: tuple[int, ...] = (2, 0, 1, 99),
    states: tuple[int, ...] | None = (3, 0, 2, PADDED),
    max_model_len: int = 32,
    advance: bool = True,
) -> tuple[Any, ...]:
    rows, buffer = len(seq_lens), len(positions)
    return (
        surrounded(torch.arange(rows * 3).view(rows, 3) + 200), int32(*seq_lens), int32(*rejected),
        poisoned(buffer + 2), int64(*positions), poisoned(buffer + 1), poisoned(buffer), max_model_len,
        None if states is None else int64(*states), int64(*range(2**33, 2**33 + buffer)), advance,
    )  # fmt: skip


def update(
    step: int = 1,
    num_steps: int = 3,
    states: tuple[int, ...] | None = (3, 0, 2, PADDED),
    dtype: torch.dtype = torch.bfloat16,
    width: int = 24,
    rows: int = 4,
    max_model_len: int = 32,
    advance: bool = True,
) -> tuple[Any, ...]:
    lengths = torch.tensor([9, 31, 32] + [0] * (rows - 3))[:rows]
    return (
        int64(*range(300, 300 + rows)), int64(step), poisoned(rows + 1, num_steps, dtype=torch.int64),
        poisoned(rows + 1), surrounded(lengths - 1), surrounded(lengths.int()), num_steps, max_model_len,
        None if states is None else int32(*states), numbers(rows, width, dtype=dtype),
        numbers(rows + 1, width, dtype=dtype, seed=1), int64(*range(2**33, 2**33 + rows)), advance,
    )  # fmt: skip


def slots(
    starts: tuple[int, ...] = (0, 4, 5, 9, 9),
    states: tuple[int, ...] = (3, 0, 2, PADDED),
    block_sizes: tuple[int, ...] = (4,),
    capacity: int = 12,
    columns: int = 6,
    num_states: int = 5,
    first_position: int = 2,
    **context_parallel: Any,
) -> tuple[Any, ...]:
    tables = [
        surrounded(torch.arange(num_states * columns, dtype=torch.int32).view(num_states, columns) * (g + 1) + 50)
        for g in range(len(block_sizes))
    ]
    tokens = max(starts) + 1
    return (
        int32(*states), int32(*starts), int64(*range(first_position, first_position + tokens)), tables,
        list(block_sizes), poisoned(len(block_sizes), capacity, dtype=torch.int64), *context_parallel.values(),
    )  # fmt: skip


def eagle(
    positions: tuple[int, ...] = (2, 3, 30, 31, 40, -1), columns: int = 7, padded: int = 3, max_model_len: int = 32
) -> tuple[Any, ...]:
    rows = len(positions)
    return (
        int64(*positions), surrounded(torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) + 50),
        int32(*(position + 1 for position in positions), *[POISON] * padded),
        poisoned(rows + 1, dtype=torch.int64), poisoned(rows + padded, dtype=torch.int64), 4, max_model_len,
    )  # fmt: skip


def padded_inputs(
    cu: tuple[int, ...] = (3, 3, 6, 9, 9),
    valid: tuple[int, ...] = (2, 1, 4, 0, 5),
    starts: tuple[int, ...] = (0, 4, 5, 9, 13, 13),
    discarded: tuple[int, ...] | None = (0, 0, 0, 0, 0),
    padded: int = 2,
) -> tuple[Any, ...]:
    rows = len(cu) + padded
    return (
        int32(*cu), int32(*valid), int32(*starts), poisoned(rows), poisoned(rows),
        None if discarded is None else flags(*discarded),
    )  # fmt: skip


def next_token(
    sampled: tuple[tuple[int, ...], ...] = ((5, 6, -1), (-1, -1, -1), (7, 99, -1), (5, 6, 7), (-1, 8, -9)),
    discarded: tuple[int, ...] = (0, 0, 0, 1, 0),
    padded: int = 2,
    dtype: torch.dtype = torch.int32,
) -> tuple[Any, ...]:
    rows = len(sampled)
    return (
        surrounded(torch.tensor(sampled, dtype=dtype).view(rows, len(sampled[0]) if sampled else 3)), flags(*discarded),
        int32(*range(400, 400 + rows)), poisoned(rows + padded), poisoned(rows + padded), 50,
    )  # fmt: skip


def sample(
    rows: int = 5,
    vocab: int = 40,
    dtype: torch.dtype = torch.float32,
    temperatures: tuple[float, ...] = (1.0, 0.0, 0.7, 2.5, 0.0, 1.0),
    states: tuple[int, ...] | None = (3, 1, PADDED, 0, 5),
    steps: tuple[int, ...] = (1, 0, 2, 1, 1),
    matrix: bool = True,
    cache: bool = True,
    spare: int = 2,
) -> tuple[Any, ...]:
    states = tuple(range(rows)) if states is None else states
    logits = surrounded(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).to(dtype))
    count = len(temperatures)
    return (
        logits, int32(*states), surrounded(torch.tensor(temperatures)),
        int64(*(-(2**62) + 7**state for state in range(count))), int64(*range(2**33, 2**33 + rows)), int64(*steps),
        poisoned(rows + 1, 3, dtype=torch.int64) if matrix else poisoned(rows + 1, dtype=torch.int64),
        numbers(count, 3, vocab + spare, dtype=dtype, seed=9) if cache else None,
    )  # fmt: skip


def expand(
    starts: tuple[int, ...] = (0, 4, 5, 9, -5),
    states: tuple[int, ...] | None = (3, 0, 2, PADDED),
    rejected: tuple[int, ...] = (2, 0, 1, 99),
    num_new: int = 3,
    shift: bool = True,
    max_model_len: int | None = None,
    mapping: bool = True,
    capacity: int = 24,
) -> tuple[Any, ...]:
    tokens, rows = max(starts) + 1, len(rejected)
    return (
        int32(*range(100, 100 + tokens)), int64(*range(1000, 1000 + tokens)), int32(*starts), int32(*rejected),
        int64(*range(500, 506)), poisoned(capacity), poisoned(capacity, dtype=torch.int64),
        surrounded(torch.arange(capacity) % 2 == 0), flags(*[1] * capacity), poisoned(rows * num_new + 1),
        num_new, 11, 12, shift, max_model_len, None if states is None else int64(*states),
        poisoned(tokens + 1) if mapping else None,
    )  # fmt: skip


def extend(
    starts: tuple[int, ...] = (0, 4, 5, 9, -5),
    states: tuple[int, ...] | None = (3, 0, 2, PADDED),
    seq_lens: tuple[int, ...] = (10, 32, 31, 99),
    growth: int = 1,
    first_position: int = 20,
    capacity: int = 16,
    columns: int = 8,
    max_model_len: int = 32,
) -> tuple[Any, ...]:
    rows = len(seq_lens)
    positions = [first_position + token for token in range(capacity)]
    return (
        int32(*starts), int32(*seq_lens), int64(*positions), surrounded(torch.arange(capacity) % 5 == 3),
        surrounded(torch.arange(rows * columns, dtype=torch.int32).view(rows, columns) + 50),
        poisoned(rows + 3), poisoned(rows + 2), poisoned(capacity, dtype=torch.int64), 4, max_model_len, growth,
        None if states is None else int32(*states),
    )  # fmt: skip


def local_lens(
    lengths: tuple[int, ...] = (0, 1, 7, 8, 9, 100), size: int = 4, rank: int = 1, interleave: int = 2
) -> tuple[Any, ...]:
    return int32(*lengths), poisoned(len(lengths) + 2), size, rank, interleave


def vocabulary(
    sampled: tuple[int, ...] = (3, 9, PADDED, 9),
    prompt: tuple[int, ...] | None = (17, 12, 17, 10, 40, 24),
    vocab: int = 40,
    rows: int = 8,
    width: int = 24,
    dtype: torch.dtype = torch.bfloat16,
    used: int = 0b10010001,
    hand: int = 3,
    first: int = 0,
) -> tuple[Any, ...]:
    """A set in which row r has token 7 * r + 3."""
    tokens = (torch.arange(rows) * 7 + 3) % vocab
    row_of_token = torch.full((vocab,), -1, dtype=torch.int32)
    row_of_token[tokens] = torch.arange(rows, dtype=torch.int32)
    words = [(used >> word * 32 & 2**32 - 1) - (used >> word * 32 + 31 & 1) * 2**32 for word in range(-(-rows // 32))]
    head = numbers(vocab, width + 1, dtype=dtype)[:, :width]
    return (
        int64(*sampled), head, surrounded(tokens + first), surrounded(row_of_token), surrounded(head[tokens]),
        int32(*words, POISON, POISON), int32(hand, POISON, POISON), int64(100, 7),
        None if prompt is None else int32(*prompt), first,
    )  # fmt: skip


def argmax(
    rows: int = 3, columns: int = 50, dtype: torch.dtype = torch.float32, values: bool = True
) -> tuple[Any, ...]:
    """Each row has its largest logit several times. The last row has only -inf."""
    logits = numbers(rows, columns + 1, dtype=dtype)[:, :columns]
    logits[:, [0, columns // 2, columns - 1]] = 2.0**15
    logits[-1:] = -math.inf
    ids = 7 * torch.arange(columns + 1) % 997
    return (
        logits, surrounded(ids), poisoned(rows + 1, dtype=torch.int64),
        poisoned(rows, dtype=torch.float32) if values else None,
    )  # fmt: skip


def expanded(rows: int = 2, dtype: torch.dtype = torch.float32, columns: int = 43) -> tuple[Any, ...]:
    return numbers(rows, 8, dtype=dtype, seed=3), vocabulary()[3], poisoned(rows, columns, dtype=dtype)
