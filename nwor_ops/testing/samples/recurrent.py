"""Sample calls of the family recurrent: windows of some requests, a fold of what is pending, and folds of blocks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from nwor_ops.testing.layouts import random_bytes
from nwor_ops.testing.samples.dice import FLOATS, POISON, Call, Calls, Dice
from nwor_ops.testing.samples.undo import WINDOW

# Sums in another order differ in their last bits, and CUDA rounds reapplied rows in another way. A dtype with fewer
# bits may round to an adjacent number, and later tokens start from it. A wrong row or state differs much more.
EPSILONS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
CHUNK = 16


def tolerances_of(dtype: torch.dtype, state_dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    absolute = 2e-4 if state_dtype == torch.float32 else 5e-2
    of_state, of_out, of_record = ((4 * EPSILONS[of], absolute) for of in (state_dtype, dtype, torch.float32))
    return {
        "state": of_state, "states": of_state, "all_states": of_state, "record_updates": of_record,
        "record_norms": of_record, "record_decays": of_record, "out": (of_out[0], max(absolute, 4 * EPSILONS[dtype])),
    }  # fmt: skip


def paged(dice: Dice, slots: int, parts: list[Tensor]) -> list[Tensor]:
    """Return the tensors ``[slots, ...]`` as views of pages of random bytes, one page for each slot."""
    starts, end = [], 16 + dice.choice((0, 0, 4, 8))
    for part in parts:
        end += -end % part.element_size()
        starts.append(end)
        end += part[0].nbytes + dice.choice((0, 8, 48))
    end += -end % 16
    storage, views = random_bytes(slots * end, torch.uint8, 1).untyped_storage(), []
    for start, part in zip(starts, parts, strict=True):
        strides = (end // part.element_size(), *part.stride()[1:])
        view = torch.empty(0, dtype=part.dtype).set_(storage, start // part.element_size(), part.shape, strides)
        views.append(view.copy_(part))
    return views


def window(dice: Dice) -> Calls[None]:
    most, slots, chunk = dice.size(5, 1), dice.requests(4) + 1, CHUNK if dice.maybe(0.3) else 0
    key_heads, groups = dice.choice(((1, 1), (1, 3), (2, 1), (2, 2)))
    heads, dtype, state_dtype = key_heads * groups, dice.choice(FLOATS), dice.choice((torch.float32, torch.bfloat16))
    widths = dice.choice(((64, 64), (64, 128), (128, 64), (96, 64), (96, 192)))
    per_channel, gates = dice.maybe(0.3) and not chunk, dice.choice(("softplus", "softplus", "bounded", "given"))
    if chunk:
        widths, dtype, key_heads, heads = (128, 128), torch.bfloat16, 1, 1 + key_heads % 2
    dk, dv = widths
    channels = (dk,) if per_channel else ()
    halves, rows = (1, CHUNK - 1 + 2 * most) if chunk else (2, most)
    layer = [
        dice.normal(slots, heads, dv, dk, dtype=state_dtype, factor=0.3),
        dice.normal(slots, halves, rows, key_heads, dk, dtype=dtype),
        (dice.normal(slots, halves, rows, key_heads).abs() + 0.1) * dk**-0.5,
        torch.sigmoid(dice.normal(slots, halves, rows, heads, *channels)),
        dice.normal(slots, rows, heads, dv, factor=0.3),
    ]
    # Folds of several layers need the memory of each tensor apart.
    layer = paged(dice, slots, layer) if dice.maybe(0.3) else [dice.placed(part) for part in layer]
    layer.append(dice.int64([POISON]))
    norm, bound = dice.maybe(), -5.0 if gates == "bounded" else None
    weights: list[Any] = [dice.strided(dice.normal(heads, factor=0.5)), dice.strided(dice.normal(heads, *channels))]
    pending = [[dice.number(most), dice.number(rows - 1 if chunk else 1)] for _ in range(slots)]
    if chunk:  # half of the slots lack one row of a chunk, so that windows store
        pending = [[*half, dice.choice((CHUNK - 1, dice.number(CHUNK - 1)))] for half in pending]
    cursors, window_id = dice.placed(torch.tensor(pending, dtype=torch.int32)), dice.int64([WINDOW])
    tolerances = tolerances_of(dtype, state_dtype)
    for _ in range(5 if chunk else 2):
        count = dice.requests(slots - 1)
        lengths, tokens = dice.numbers(count, most), count * most + dice.size(2)
        chosen = dice.data.sample(range(1, slots), count)
        kept = [dice.number(max(1, int(cursors[slot, 0])), 1) for slot in chosen]
        chosen = [slot if dice.chance(0.9) else dice.number(0, -2) for slot in chosen]
        is_window = dice.flags([dice.chance(0.9) for _ in range(count)]) if dice.maybe(0.3) else None
        starts = dice.int32([*accumulate(lengths, initial=0)])
        plan, cursors, window_id, *_ = yield Call("plan_recurrent_window", (
            dice.poisoned(count + 1, 4), cursors, window_id, dice.ids(chosen), starts, dice.int32(kept), most,
            is_window, dice.int64([7]) if dice.maybe() else None, chunk,
        ))  # fmt: skip
        value = (tokens, heads, dv)
        a, b = dice.normal(tokens, heads, *channels, dtype=dtype), dice.normal(tokens, heads, dtype=dtype)
        if gates == "given":
            a, b, weights = -a.float().exp(), b.float().sigmoid(), [None, None]
        normalises = dice.maybe(0.8)
        keys = dice.normal(tokens, key_heads, dk, dtype=dtype, factor=1.0 if normalises else dk**-0.5)
        after = yield Call("gated_delta_verify", (
            dice.poisoned(*value, dtype=dtype), *layer,
            dice.placed(dice.normal(tokens, key_heads, dk, dtype=dtype)), dice.placed(keys),
            dice.placed(dice.normal(*value, dtype=dtype)), dice.strided(a), dice.strided(b), *weights, plan, window_id,
            starts, dk**-0.5, 1.0, 20.0, normalises, dice.placed(dice.normal(*value, dtype=dtype)) if norm else None,
            dice.strided(dice.normal(dv).abs()) if norm else None, 1e-5, dice.choice(("silu", "sigmoid")),
            dice.placed(dice.bytes(*value, dk, dtype=state_dtype)) if dice.maybe() else None,
            dice.maybe() and gates != "given", bound, chunk,
        ), tolerances)  # fmt: skip
        layer = list(after[1:7])
    yield from _fold(dice, layer, cursors, most, chunk, tolerances)
    yield from _blocks(dice, bool(chunk))


def _fold(
    dice: Dice, layer: list[Tensor], cursors: Tensor, most: int, chunk: int, tolerances: dict[str, tuple[float, float]]
) -> Calls[None]:
    """Fold pending rows in place, or into another slot."""
    slots = dice.data.sample(range(1, len(cursors)), len(cursors) - 1)
    sources = [slots[0] if i == 1 and dice.chance(0.3) else slot for i, slot in enumerate(slots)]
    if sources != slots:  # the source of a copy is no target
        slots[0] = sources[0] = -1 if dice.chance() else 0
        sources[1] = sources[1] if sources[1] > 0 else 0
    plan, *_ = yield Call("plan_recurrent_fold", (
        dice.poisoned(len(cursors), 4), cursors, dice.ids(sources), dice.ids(slots),
        dice.int32(dice.numbers(len(slots), most, -1)), dice.maybe(),
    ))  # fmt: skip
    marks = dice.int64([WINDOW + dice.number(9)]) if dice.maybe() else None
    yield Call("gated_delta_fold", (*([part] for part in layer), plan, marks, chunk), tolerances)


def _blocks(dice: Dice, ring: bool) -> Calls[None]:
    """Requests at the ends of their blocks, before or after a step. Each has two blocks of each of some groups."""
    states, size, after, groups = dice.size(4, 1), dice.size(5, 1), dice.maybe(), dice.size(3, 1)
    total = 2 * groups * states
    blocks = torch.tensor(dice.data.sample(range(1, total + 1), total), dtype=torch.int32).view(groups, states, 2)
    pending = dice.number(5)  # in each block, or none
    rows = [dice.choice((0, pending)) for _ in range(total + 1)]
    cursors = [[number, dice.number(1), *([dice.number(3)] if ring else [])] for number in rows]
    source, target, computed = (dice.int32(dice.numbers(states, most, -1)) for most in (1, 1, 2 * size))
    kept = dice.int32(dice.numbers(states, max(1, pending), 1))
    yield Call("plan_recurrent_block_fold", (
        dice.poisoned(groups * states + dice.size(2), 4), dice.placed(torch.tensor(cursors, dtype=torch.int32)),
        [dice.placed(table) for table in blocks], dice.ids(dice.data.sample(range(-1, states), states)), source, kept,
        None if after else target, computed if after else None, size if after else 0,
        ring and not after and dice.maybe(), dice.int64([7]) if dice.maybe() else None,
    ))  # fmt: skip
