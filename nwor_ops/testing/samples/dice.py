"""Random choices of a window of sample calls, and tensors with foreign memory around them."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nwor_ops.testing.layouts import random_bytes, raw, surrounded

POISON = 77  # the former contents of outputs
FLOATS = (torch.float16, torch.bfloat16)
IDS = (torch.int32, torch.int64)
COUNTED = (10, 20, 30, 40, 50)  # the former contents of counters

Tolerances = Mapping[str, tuple[float, float]]
Choice = TypeVar("Choice")
Result = TypeVar("Result")


class Call(NamedTuple):
    """A call of an op, on the CPU. ``tolerances``: those of :func:`compare_with_oracle`."""

    op: str
    arguments: tuple[Any, ...]
    tolerances: Tolerances | None = None


Calls = Generator[Call, tuple[Any, ...], Result]


class Dice:
    """The random choices of one window.

    They are of two kinds. Sizes, dtypes, layouts and options depend on ``seed`` only, as a captured graph fixes them.
    What tensors hold also depends on ``data_seed``. So windows of one seed and several data seeds replay each other.
    For this reason the number of choices of the first kind must not depend on the second kind.

    Args:
        family: the family of the window.
        seed: the same seed gives the same window.
        data_seed: the same window with other contents.
        num_requests: number of requests of the window; None = a few.
    """

    def __init__(self, family: str, seed: int, data_seed: int = 0, num_requests: int | None = None) -> None:
        self._num_requests = num_requests
        self._host = random.Random(f"{family} {seed}")
        self.data = random.Random(f"{family} {seed} {data_seed}")

    # ------------------------------------------------------------ sizes, dtypes, layouts, options

    def size(self, most: int, least: int = 0) -> int:
        return self._host.randint(least, most)

    def requests(self, most: int) -> int:
        return self.size(most) if self._num_requests is None else self._num_requests

    def choice(self, values: Sequence[Choice]) -> Choice:
        return self._host.choice(values)

    def maybe(self, probability: float = 0.5) -> bool:
        return self._host.random() < probability

    # ------------------------------------------------------------ what tensors hold

    def number(self, most: int, least: int = 0) -> int:
        return self.data.randint(least, most)

    def numbers(self, count: int, most: int, least: int = 0) -> list[int]:
        return [self.number(most, least) for _ in range(count)]

    def chance(self, probability: float = 0.5) -> bool:
        return self.data.random() < probability

    # ------------------------------------------------------------ tensors inside foreign memory

    def placed(self, content: Tensor) -> Tensor:
        """Return a contiguous copy at any alignment."""
        return surrounded(content, self.choice((64, 64, 37, 66, 68)))

    def strided(self, content: Tensor) -> Tensor:
        """Return a copy with any strides."""
        kind, bits = self.choice(("placed", "spaced", "backwards", "gaps")), raw(content)
        if kind == "spaced":
            return surrounded(torch.stack([bits, bits], -1))[..., 0].view(content.dtype)
        if kind == "backwards":
            order = tuple(reversed(range(content.dim())))
            return surrounded(bits.permute(order).contiguous()).permute(order).view(content.dtype)
        if kind == "gaps" and content.dim():
            return surrounded(torch.cat([bits, bits[..., :1]], -1))[..., : content.shape[-1]].view(content.dtype)
        return self.placed(content)

    def int32(self, values: Sequence[int]) -> Tensor:
        return self.placed(torch.tensor(values, dtype=torch.int32))

    def int64(self, values: Sequence[int]) -> Tensor:
        return self.placed(torch.tensor(values, dtype=torch.int64))

    def ids(self, values: Sequence[int]) -> Tensor:
        """Return ids of either width and any stride."""
        return self.strided(torch.tensor(values, dtype=self.choice(IDS)))

    def flags(self, values: Sequence[bool]) -> Tensor:
        return self.placed(torch.tensor(values, dtype=torch.bool))

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.placed(torch.full(shape, POISON, dtype=dtype))

    def poisoned_ids(self, *shape: int) -> Tensor:
        return self.strided(torch.full(shape, POISON, dtype=self.choice(IDS)))

    def table(self, rows: int, columns: int) -> Tensor:
        values = torch.tensor(self.numbers(rows * columns, 10**6), dtype=torch.int32)
        return self.placed(values.view(rows, columns))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.data.getrandbits(40))
        return (torch.randn(shape, generator=generator) * factor).to(dtype)

    def bytes(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return random_bytes(torch.Size(shape).numel(), dtype, self.data.getrandbits(40)).view(shape)


# ---------------------------------------------------------------- a batch of requests


class Request(NamedTuple):
    """One request of a step: tokens that are not drafts, drafts, and how many of these are accepted."""

    given: int
    drafts: int
    accepted: int


class Batch(NamedTuple):
    """Random requests, and what an engine gives to the ops for them. Padded requests have no tokens."""

    requests: list[Request]
    num_tokens: int  # and more: room for any requests of this size
    num_drafts: int
    query_start_loc: Tensor
    draft_start_loc: Tensor
    draft_token_ids: Tensor
    sampled_token_ids: Tensor
    num_rejected: Tensor


def make_requests(dice: Dice, count: int, most_given: int, most_drafts: int) -> list[Request]:
    """Return real requests, then padded ones."""
    real, requests = dice.number(count), []
    for request in range(count):
        drafts = dice.number(most_drafts) if request < real else 0
        given = dice.number(most_given, 0 if drafts else 1) if request < real else 0
        requests.append(Request(given, drafts, dice.number(drafts)))
    return requests


def make_batch(dice: Dice, most_requests: int = 5, most_drafts: int = 4, most_given: int = 4) -> Batch:
    count, dtypes, wide = dice.requests(most_requests), (dice.choice(IDS), dice.choice(IDS)), dice.maybe(0.2)
    base = 2**40 if wide and dtypes == (torch.int64, torch.int64) else 0
    requests = make_requests(dice, count, most_given, most_drafts)
    few, ids, rows, rejected = dice.chance(0.3), [], [], []
    for request in requests:
        drafted = [base + dice.number(2 if few else 999) for _ in range(request.drafts)]
        last = base + dice.number(2 if few else 999)  # the bonus token, or the replacement of a draft
        if request.accepted < request.drafts and not few:  # the low 32 bits may be equal
            last = drafted[request.accepted] - (base or 1)
        sampled = [*drafted[: request.accepted], last]
        rows.append(sampled + [-1] * (most_drafts + 1 - len(sampled)))
        ids += drafted
        rejected.append(dice.number(9, -9) if dice.chance(0.1) else request.drafts - request.accepted)
    num_drafts = count * most_drafts + dice.size(2)
    ids += [5] * (num_drafts - len(ids))
    columns = most_drafts + dice.size(1)
    start = dice.number(1)
    return Batch(
        requests,
        count * (most_given + most_drafts) + 1,
        num_drafts,
        dice.int32([*accumulate((request.given + request.drafts for request in requests), initial=start)]),
        dice.int32([*accumulate((request.drafts for request in requests), initial=0)]),
        dice.placed(torch.tensor(ids, dtype=dtypes[0])),
        dice.strided(torch.tensor(rows, dtype=dtypes[1]).view(count, most_drafts + 1)[:, :columns]),
        dice.int32([*rejected, 7]),
    )
