"""The ops of family staging in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops.testing.layouts import raw, read_row, write_row
from nwor_ops.testing.oracle.undo import write_kv


def stage_kv(key, value, stage_rows, staged_key, staged_value, window_id=None, row_windows=None) -> None:
    for token, row in enumerate(stage_rows.tolist()):
        if row < 0:
            continue
        raw(staged_key)[row] = raw(key)[token]
        raw(staged_value)[row] = raw(value)[token]
        if row_windows is not None:
            row_windows[row] = window_id[0]


def _accepted(row_accepted: Tensor, num_rows: int, row_requests: Tensor | None, row_positions: Tensor | None):
    """The accepted rows."""
    if row_requests is None or row_positions is None:
        return {row for row in range(num_rows) if row_accepted[row]}
    lengths = row_accepted.tolist()
    rows = enumerate(zip(row_requests.tolist(), row_positions.tolist(), strict=True))
    return {row for row, (q, place) in rows if 0 <= q < len(lengths) and 0 <= place < lengths[q]}


def accept_staged(
    row_accepted, row_slots, window_id, row_windows, num_slots, row_committed, counters,
    row_requests=None, row_positions=None,
) -> None:  # fmt: skip
    accepted = _accepted(row_accepted, len(row_slots), row_requests, row_positions)
    wanted = {row for row in accepted if 0 <= row < len(row_slots) and row_slots[row] >= 0}
    layers = [{row for row, window in enumerate(of.tolist()) if window == window_id[0]} for of in row_windows]
    complete = all(wanted <= staged for staged in layers) and all(row_slots[row] < num_slots for row in wanted)
    committed = wanted if complete else set()
    for row in range(len(row_slots)):
        row_committed[row] = row in committed
    staged = set().union(*layers)
    new = [1, len(staged), sum(map(len, layers)), len(committed), len(staged) - len(committed), 0 if complete else 1]
    counters[: len(new)] += torch.tensor(new)


def commit_staged(
    staged_key, staged_value, row_slots, row_accepted, key_cache, value_cache, k_scale, v_scale, kv_cache_dtype,
    row_requests=None, row_positions=None,
) -> None:  # fmt: skip
    accepted = _accepted(row_accepted, len(row_slots), row_requests, row_positions)
    slots = torch.tensor([int(slot) if row in accepted else -1 for row, slot in enumerate(row_slots)])
    write_kv(staged_key, staged_value, key_cache, value_cache, slots, k_scale, v_scale, kv_cache_dtype)


def move_slots(caches, src_slots, dst_slots, page_offsets=None) -> None:
    moves = [move for move in zip(src_slots.tolist(), dst_slots.tolist(), strict=True) if min(move) >= 0]
    for cache in caches:
        rows = [read_row(cache, source, page_offsets) for source, _ in moves]
        for (_, destination), row in zip(moves, rows, strict=True):
            write_row(cache, destination, row, page_offsets)
