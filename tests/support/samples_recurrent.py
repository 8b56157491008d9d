"""Sample calls of every recurrent op. States and records are in pages of random bytes, as in an engine."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

import torch
from tensors import flags, int32, int64
from torch import Tensor

from nwor_ops.testing.layouts import random_bytes, surrounded

POISON = 77


class Heads(NamedTuple):
    """Sizes of a layer."""

    key_heads: int = 1
    value_heads: int = 2
    key_width: int = 64
    value_width: int = 64


HEADS = Heads()


@dataclasses.dataclass
class Layer:
    """States and records of one layer: views of one storage whose other bytes are random."""

    state: Tensor
    record_keys: Tensor
    record_norms: Tensor
    record_decays: Tensor
    record_updates: Tensor
    layer_window: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The records in the order of the ops."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * factor).to(dtype)


Part = tuple[tuple[int, ...], torch.dtype]


def paged(slots: int, parts: list[Part], gap: int, shift: int, seed: int) -> list[Tensor]:
    """Return a tensor [slots, *shape] for each part, as views of pages of random bytes that hold the parts in order.

    The first part starts `shift` bytes after a multiple of 16. Each other part starts at least `gap` bytes after the
    previous one.
    """
    starts, end = [], 16 + shift
    for shape, dtype in parts:
        end += -end % dtype.itemsize
        starts.append(end)
        end += torch.Size(shape).numel() * dtype.itemsize + gap
    end += -end % 16
    storage = random_bytes(slots * end, torch.uint8, seed).untyped_storage()
    return [
        torch.empty(0, dtype=dtype).set_(
            storage, start // dtype.itemsize, (slots, *shape), (end // dtype.itemsize, *strides_of(shape))
        )
        for start, (shape, dtype) in zip(starts, parts, strict=True)
    ]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def make_layer(
    heads: Heads = HEADS,
    slots: int = 5,
    rows: int = 3,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    per_channel: bool = False,
    gap: int = 48,
    shift: int = 0,
    one_page: bool = True,
    seed: int = 0,
    chunk: int = 0,
) -> Layer:
    """Create a layer whose slots hold finite states, and records with rows in both halves. Slot 0 keeps random bytes.

    With `one_page`, state and records of a slot share a page, as in an engine. Otherwise each has a separate page.
    """
    channels = (heads.key_width,) if per_channel else ()
    halves, rows = (1, chunk - 1 + 2 * rows) if chunk else (2, rows)
    parts: list[Part] = [
        ((heads.value_heads, heads.value_width, heads.key_width), state_dtype),
        ((halves, rows, heads.key_heads, heads.key_width), dtype),
        ((halves, rows, heads.key_heads), torch.float32),
        ((halves, rows, heads.value_heads, *channels), torch.float32),
        ((rows, heads.value_heads, heads.value_width), torch.float32),
    ]
    pages = [parts] if one_page else [[part] for part in parts]
    state, keys, norms, decays, updates = (view for page in pages for view in paged(slots, page, gap, shift, seed))
    for i, tensor in enumerate((state, keys, updates)):
        tensor[1:] = drawn(*tensor[1:].shape, seed=seed + 10 + i, factor=0.3)
    norms[1:] = drawn(*norms[1:].shape, seed=seed + 13).abs() + 0.1
    decays[1:] = torch.sigmoid(drawn(*decays[1:].shape, seed=seed + 14))
    return Layer(state, keys, norms, decays, updates, layer_window=int64(POISON))


class Inputs(NamedTuple):
    """The inputs of one window of a layer, in the order of the op."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


def packed_inputs(
    tokens: int, heads: Heads = HEADS, dtype: torch.dtype = torch.bfloat16, per_channel: bool = False, seed: int = 0
) -> Inputs:
    """Return inputs as a projection leaves them: q, k and v are views of one tensor, a and b of another."""
    sizes = (heads.key_heads * heads.key_width,) * 2 + (heads.value_heads * heads.value_width,)
    packed = surrounded(drawn(tokens, sum(sizes), seed=seed + 20, dtype=dtype))
    q, k, v = packed.split(sizes, -1)
    channels = heads.key_width if per_channel else 1
    a, b = surrounded(drawn(tokens, heads.value_heads * (channels + 1), seed=seed + 21, dtype=dtype)).split(
        (heads.value_heads * channels, heads.value_heads), -1
    )
    channel_shape = (heads.value_heads, channels) if per_channel else (heads.value_heads,)
    return Inputs(
        q.unflatten(-1, (heads.key_heads, -1)),
        k.unflatten(-1, (heads.key_heads, -1)),
        v.unflatten(-1, (heads.value_heads, -1)),
        a.unflatten(-1, channel_shape) if per_channel else a,
        b,
        surrounded(drawn(heads.value_heads, seed=seed + 22, factor=0.5)),
        surrounded(drawn(*channel_shape, seed=seed + 23, dtype=dtype)),
    )


class Planned(NamedTuple):
    """A request of a window: its slot, its tokens, and the rows to reapply."""

    slot: int
    tokens: int
    rows: int = 0
    half: int = 0


# Requests with a pending window, padding, no tokens, nothing pending, and a full record.
REQUESTS = (Planned(2, 3, 2, 1), Planned(0, 2), Planned(4, 0), Planned(3, 1), Planned(1, 2, 3))


def plan_of(requests: tuple[Planned, ...]) -> Tensor:
    rows = [(r.slot, r.rows, r.half, r.slot) if r.slot > 0 and r.tokens else (0, 0, 0, 0) for r in requests]
    return surrounded(torch.tensor([*rows, (0, 0, 0, 0)], dtype=torch.int32).view(-1, 4))


def starts_of(requests: tuple[Planned, ...]) -> Tensor:
    return int32(0, *torch.tensor([r.tokens for r in requests], dtype=torch.int64).cumsum(0).tolist())


def verify(
    heads: Heads = HEADS,
    requests: tuple[Planned, ...] = REQUESTS,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    per_channel: bool = False,
    norm: str | None = None,
    all_states: bool = False,
    use_qk_l2norm: bool = True,
    rows: int = 3,
    extra_tokens: int = 2,
    gap: int = 48,
    shift: int = 0,
    one_page: bool = True,
    seed: int = 0,
    allow_neg_eigval: bool = False,
    gate_lower_bound: float | None = None,
    given_gates: bool = False,
    slots: int = 5,
    chunk: int = 0,
) -> tuple[Any, ...]:
    """Return a window of a layer.

    `norm` is the activation of the gate. The last `extra_tokens` belong to no request. With `given_gates`, `a` and `b`
    hold logarithms of decays and betas, and there is no `A_log`.
    """
    tokens = sum(request.tokens for request in requests) + extra_tokens
    layer = make_layer(heads, slots, rows, state_dtype, dtype, per_channel, gap, shift, one_page, seed, chunk)
    inputs = packed_inputs(tokens, heads, dtype, per_channel, seed)
    if not use_qk_l2norm:  # with keys of any length the state would overflow
        inputs = inputs._replace(k=surrounded(inputs.k * heads.key_width**-0.5))
    if given_gates:
        g, beta = surrounded(-inputs.a.float().exp()), surrounded(inputs.b.float().sigmoid())
        inputs = inputs._replace(a=g, b=beta, A_log=None, dt_bias=None)
    value = (tokens, heads.value_heads, heads.value_width)
    arguments = (
        surrounded(torch.full(value, float(POISON), dtype=dtype)), *layer.tensors, *inputs, plan_of(requests),
        int64(2**33 + 5), starts_of(requests), heads.key_width**-0.5, 1.0, 20.0, use_qk_l2norm,
    )  # fmt: skip
    gate = surrounded(drawn(*value, seed=seed + 30, dtype=dtype)) if norm else None
    weight = surrounded(drawn(heads.value_width, seed=seed + 31).abs()) if norm else None
    every = torch.full((*value, heads.key_width), float(POISON), dtype=state_dtype) if all_states else None
    every = None if every is None else surrounded(every, edge=64)
    return (*arguments, gate, weight, 1e-5, norm or "silu", every, allow_neg_eigval, gate_lower_bound, chunk)


FOLDS = ((2, 2, 1, 2), (0, 0, 0, 0), (1, 0, 0, 3), (4, 3, 0, 4))  # in place, nothing, a copy, all rows


def fold(
    layers: int = 2,
    heads: Heads = HEADS,
    folds: tuple[tuple[int, ...], ...] = FOLDS,
    state_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.bfloat16,
    per_channel: bool = False,
    ran: tuple[int, ...] | None = None,
    gap: int = 48,
    shift: int = 0,
    one_page: bool = True,
    chunk: int = 0,
    rows: int = 3,
) -> tuple[Any, ...]:
    """Return a fold. `ran`: the layers that ran in a cancelled window; None = a fold without a window."""
    made = [
        make_layer(heads, 5, rows, state_dtype, dtype, per_channel, gap, shift, one_page, seed, chunk)
        for seed in range(layers)
    ]
    for index in ran or ():
        made[index].layer_window.fill_(2**33 + 5)
    lists = tuple(list(tensors) for tensors in zip(*(layer.tensors for layer in made), strict=True))
    plan = surrounded(torch.tensor(folds, dtype=torch.int32).view(-1, 4))
    if chunk:
        return (*lists, plan, None if ran is None else int64(2**33 + 5), chunk)
    return (*lists, plan) if ran is None else (*lists, plan, int64(2**33 + 5))


def cursors_of(*cursors: tuple[int, ...]) -> Tensor:
    return surrounded(torch.tensor(cursors, dtype=torch.int32).view(-1, len(cursors[0])))


def poisoned_plan(rows: int) -> Tensor:
    return surrounded(torch.full((rows, 4), POISON, dtype=torch.int32))


CURSORS: tuple[tuple[int, ...], ...] = ((0, 0), (3, 0), (2, 1), (0, 1), (1, 0), (0, 0))


def window(
    slots: tuple[int, ...] = (2, 0, 4, 3, 1, 5),
    starts: tuple[int, ...] = (0, 3, 5, 5, 6, 9, 10),
    num_kept: tuple[int, ...] = (2, 99, 99, 99, 3, 99),
    cursors: tuple[tuple[int, ...], ...] = CURSORS,
    record_rows: int = 3,
    num_skipped: int | None = None,
    chunk: int = 0,
) -> tuple[Any, ...]:
    """Return a plan of `REQUESTS` and a prefill."""
    return (
        poisoned_plan(8), cursors_of(*cursors), int64(2**33 + 5), int32(*slots), int32(*starts), int32(*num_kept),
        record_rows, flags(1, 1, 1, 1, 1, 0), None if num_skipped is None else int64(num_skipped), chunk,
    )  # fmt: skip


def fold_plan(
    sources: tuple[int, ...] = (2, 0, 1, 3, 5),
    targets: tuple[int, ...] = (2, 1, 4, 3, -1),
    num_rows: tuple[int, ...] = (9, 1, 2, 1, 1),
    cursors: tuple[tuple[int, ...], ...] = CURSORS,
    keep_source: bool = False,
) -> tuple[Any, ...]:
    """Return a plan of folds: more rows than are pending, padding, a copy, nothing pending, padding."""
    return poisoned_plan(6), cursors_of(*cursors), int32(*sources), int32(*targets), int32(*num_rows), keep_source


# Two groups of three requests with three blocks each, and a row without a request.
BLOCKS = (((1, 2, 3), (4, 5, 0), (6, 7, 8), (0, 0, 0)), ((9, 10, 11), (12, 13, 0), (14, 15, 16), (0, 0, 0)))
BLOCK_SIZE = 4
# The columns of a step: the first request moves on by a block, the second stays, the third moves on by two.
MOVES = {"source_columns": (0, 1, 0, -1), "target_columns": (1, 1, 2, 0), "num_kept": (2, 1, 2, 1)}
# The first request fills its second block with one of two tokens, and the third one its own block with all three.
FULL_BLOCKS = {"source_columns": (2, 1, 1, 0), "num_computed_tokens": (9, 6, 8, 2), "num_kept": (2, 1, 3, 1)}


def block_fold(
    columns: dict[str, tuple[int, ...]],
    tables: tuple[tuple[tuple[int, ...], ...], ...] = BLOCKS,
    requests: tuple[int, ...] = (2, 0, -1, 1, 3),
    ring: bool = False,
    moves_rows: bool = False,
    block_size: int = BLOCK_SIZE,
    num_skipped: int | None = None,
) -> tuple[Any, ...]:
    """Return a plan of folds between blocks. The rows of the tables have gaps, and lie between sentinels."""
    dice = random.Random(len(requests))
    cursors = [[dice.choice((0, 3)), dice.randint(0, 1), *([dice.randint(0, 4)] if ring else [])] for _ in range(17)]
    filled = [columns.get(name) for name in ("source_columns", "num_kept", "target_columns", "num_computed_tokens")]
    width = len(tables[0][0]) if tables[0] else 0
    wide = [torch.tensor([[*row, POISON] for row in table], dtype=torch.int32).view(-1, width + 1) for table in tables]
    return (
        poisoned_plan(len(tables) * len(requests) + 2), cursors_of(*cursors),
        [surrounded(table)[:, :-1] for table in wide], int32(*requests),
        *(None if values is None else int32(*values) for values in filled),
        0 if "target_columns" in columns else block_size, moves_rows,
        *(() if num_skipped is None else (int64(num_skipped),)),
    )  # fmt: skip
