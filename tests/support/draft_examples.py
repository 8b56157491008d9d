"""Calls of the family drafter whose results are computed by hand: every output starts with 77s."""

from __future__ import annotations

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
) -> tuple[Any, ...]:
    tokens = max(starts) + 1
    return (
        int32(*range(100, 100 + tokens)), int64(*range(1000, 1000 + tokens)), int32(*starts),
        int32(*range(10, 10 + len(states))), int32(*states), int32(*sampled), int32(*rejected),
        int64(*range(500, 505)), int32(*range(600, 605)), poisoned(capacity), poisoned(capacity, dtype=torch.int64),
        poisoned(7), poisoned(6), poisoned(6, dtype=torch.int64), poisoned(1, dtype=torch.int64),
    )  # fmt: skip


def decode(positions: tuple[int, ...] = (7, 30, 31, POISON, POISON, POISON), advance: bool = True) -> tuple[Any, ...]:
    buffer = len(positions)
    return (
        surrounded(torch.arange(12).view(4, 3) + 200), int32(10, 32, 33, 99), int32(2, 0, 1, 99),
        poisoned(buffer + 2), int64(*positions), poisoned(buffer + 1), poisoned(buffer), 32, int64(3, 0, 2, PADDED),
        int64(*range(2**33, 2**33 + buffer)), advance,
    )  # fmt: skip


def update(
    step: int = 1, states: tuple[int, ...] = (3, 0, 2, PADDED), width: int = 24, rows: int = 4
) -> tuple[Any, ...]:
    lengths = torch.tensor([9, 31, 32] + [0] * (rows - 3))[:rows]
    return (
        int64(*range(300, 300 + rows)), int64(step), poisoned(rows + 1, 3, dtype=torch.int64),
        poisoned(rows + 1), surrounded(lengths - 1), surrounded(lengths.int()), 3, 32, int32(*states),
        numbers(rows, width, dtype=torch.bfloat16), numbers(rows + 1, width, dtype=torch.bfloat16, seed=1),
        int64(*range(2**33, 2**33 + rows)), True,
    )  # fmt: skip


def slots(
    starts: tuple[int, ...] = (0, 4, 5, 9, 9),
    states: tuple[int, ...] = (3, 0, 2, PADDED),
    block_sizes: tuple[int, ...] = (4,),
    capacity: int = 12,
    first_position: int = 2,
    **context_parallel: Any,
) -> tuple[Any, ...]:
    tables = [
        surrounded(torch.arange(30, dtype=torch.int32).view(5, 6) * (g + 1) + 50) for g in range(len(block_sizes))
    ]
    tokens = max(starts) + 1
    return (
        int32(*states), int32(*starts), int64(*range(first_position, first_position + tokens)), tables,
        list(block_sizes), poisoned(len(block_sizes), capacity, dtype=torch.int64), *context_parallel.values(),
    )  # fmt: skip


def eagle(positions: tuple[int, ...] = (2, 3, 30, 31, 40, -1)) -> tuple[Any, ...]:
    rows = len(positions)
    return (
        int64(*positions), surrounded(torch.arange(rows * 7, dtype=torch.int32).view(rows, 7) + 50),
        int32(*(position + 1 for position in positions), *[POISON] * 3),
        poisoned(rows + 1, dtype=torch.int64), poisoned(rows + 3, dtype=torch.int64), 4, 32,
    )  # fmt: skip


def padded_inputs(discarded: tuple[int, ...] = (0, 0, 0, 0, 0)) -> tuple[Any, ...]:
    return (
        int32(3, 3, 6, 9, 9), int32(2, 1, 4, 0, 5), int32(0, 4, 5, 9, 13, 13), poisoned(7), poisoned(7),
        flags(*discarded),
    )  # fmt: skip


def next_token() -> tuple[Any, ...]:
    sampled = torch.tensor([(5, 6, -1), (-1, -1, -1), (7, 99, -1), (5, 6, 7), (-1, 8, -9)], dtype=torch.int32)
    return surrounded(sampled), flags(0, 0, 0, 1, 0), int32(*range(400, 405)), poisoned(7), poisoned(7), 50


def sample(
    rows: int = 5,
    vocab: int = 40,
    temperatures: tuple[float, ...] = (1.0, 0.0, 0.7, 2.5, 0.0, 1.0),
    states: tuple[int, ...] | None = (3, 1, PADDED, 0, 5),
    steps: tuple[int, ...] = (1, 0, 2, 1, 1),
) -> tuple[Any, ...]:
    states = tuple(range(rows)) if states is None else states
    logits = surrounded(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)))
    count = len(temperatures)
    return (
        logits, int32(*states), surrounded(torch.tensor(temperatures)),
        int64(*(-(2**62) + 7**state for state in range(count))), int64(*range(2**33, 2**33 + rows)), int64(*steps),
        poisoned(rows + 1, 3, dtype=torch.int64), numbers(count, 3, vocab + 2, seed=9),
    )  # fmt: skip


def expand(
    num_new: int = 3, shift: bool = True, max_model_len: int | None = None, mapping: bool = True
) -> tuple[Any, ...]:
    return (
        int32(*range(100, 110)), int64(*range(1000, 1010)), int32(0, 4, 5, 9, -5), int32(2, 0, 1, 99),
        int64(*range(500, 506)), poisoned(24), poisoned(24, dtype=torch.int64), surrounded(torch.arange(24) % 2 == 0),
        flags(*[1] * 24), poisoned(4 * num_new + 1), num_new, 11, 12, shift, max_model_len, int64(3, 0, 2, PADDED),
        poisoned(11) if mapping else None,
    )  # fmt: skip


def extend(first_position: int = 20) -> tuple[Any, ...]:
    return (
        int32(0, 4, 5, 9, -5), int32(10, 32, 31, 99), int64(*range(first_position, first_position + 16)),
        surrounded(torch.arange(16) % 5 == 3), surrounded(torch.arange(32, dtype=torch.int32).view(4, 8) + 50),
        poisoned(7), poisoned(6), poisoned(16, dtype=torch.int64), 4, 32, 1, int32(3, 0, 2, PADDED),
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
    used: int = 0b10010001,
    hand: int = 3,
) -> tuple[Any, ...]:
    """A set in which row r has token 7 * r + 3."""
    tokens = (torch.arange(rows) * 7 + 3) % vocab
    row_of_token = torch.full((vocab,), -1, dtype=torch.int32)
    row_of_token[tokens] = torch.arange(rows, dtype=torch.int32)
    head = numbers(vocab, 25, dtype=torch.bfloat16)[:, :24]
    return (
        int64(*sampled), head, surrounded(tokens), surrounded(row_of_token), surrounded(head[tokens]),
        int32(used, POISON, POISON), int32(hand, POISON, POISON), int64(100, 7),
        None if prompt is None else int32(*prompt), 0,
    )  # fmt: skip
