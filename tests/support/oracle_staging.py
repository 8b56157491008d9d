"""The ops of the families staging and shadow in plain Python; `oracle` exports them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "accept_staged",
    "close_window",
    "close_window_from_rejected",
    "commit_staged",
    "move_slots",
    "open_window",
    "stage_kv",
]


def _oracle():
    """Import the other half of the oracle late, because it imports this module."""
    import oracle

    return oracle


def stage_kv(key, value, stage_rows, staged_key, staged_value, window_id=None, row_windows=None) -> None:
    raw = _oracle().raw
    for token, row in enumerate(stage_rows.tolist()):
        if row < 0:
            continue
        raw(staged_key)[row] = raw(key)[token]
        raw(staged_value)[row] = raw(value)[token]
        if row_windows is not None:
            row_windows[row] = window_id[0]


def _accepted(row_accepted: Tensor, num_rows: int, row_requests: Tensor | None, row_positions: Tensor | None):
    """The accepted rows."""
    if row_requests is None:
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
    _oracle().write_kv(staged_key, staged_value, key_cache, value_cache, slots, k_scale, v_scale, kv_cache_dtype)


def _read(cache: Tensor, slot: int, page_offsets: Tensor | None) -> Tensor:
    """A copy of one slot of a plane: integers [H, W]."""
    block, offset = divmod(slot, cache.shape[1])
    if page_offsets is None:
        return _oracle().raw(cache)[block, offset].clone()
    _, _, heads, width = cache.shape
    rows = [
        [int(_oracle()._element_view(cache, block, offset, h, w, page_offsets)[0]) for w in range(width)]
        for h in range(heads)
    ]
    return torch.tensor(rows).view(heads, width)


def _write(cache: Tensor, slot: int, row: Tensor, page_offsets: Tensor | None) -> None:
    block, offset = divmod(slot, cache.shape[1])
    if page_offsets is None:
        _oracle().raw(cache)[block, offset] = row
        return
    for h in range(cache.shape[2]):
        for w in range(cache.shape[3]):
            _oracle()._element_view(cache, block, offset, h, w, page_offsets)[0] = row[h, w]


def move_slots(caches, src_slots, dst_slots, page_offsets=None) -> None:
    moves = [move for move in zip(src_slots.tolist(), dst_slots.tolist(), strict=True) if min(move) >= 0]
    for cache in caches:
        rows = [_read(cache, source, page_offsets) for source, _ in moves]
        for (_, destination), row in zip(moves, rows, strict=True):
            _write(cache, destination, row, page_offsets)


# ---------------------------------------------------------------- shadow pages


def _planes_of_groups(caches: list[Tensor], planes_per_group: list[int]) -> list[list[Tensor]]:
    planes = iter(caches)
    return [[next(planes) for _ in range(count)] for count in planes_per_group]


def _requests(query_start_loc, draft_start_loc, idx_mapping):
    """For each request: its index, its state, the end of its tokens, its given tokens, and the rows of its drafts."""
    for q, rows in enumerate(_oracle().drafts_of_requests(draft_start_loc)):
        state = q if idx_mapping is None else int(idx_mapping[q])
        start, end = int(query_start_loc[q]), int(query_start_loc[q + 1])
        yield q, state, end, end - start - len(rows), rows


def open_window(
    caches, planes_per_group, query_start_loc, draft_start_loc, seq_lens, row_slots, shadow_blocks,
    slot_mappings, block_tables, saved_slots, tail_pages, idx_mapping=None, held_slots=None, page_offsets=None,
) -> None:  # fmt: skip
    block_size, num_shadows = caches[0].shape[1], shadow_blocks.shape[2]
    for g, planes in enumerate(_planes_of_groups(caches, planes_per_group)):
        for q, state, end, given, rows in _requests(query_start_loc, draft_start_loc, idx_mapping):
            if slot_mappings:
                tail_pages[g, q] = -1
            if not rows:
                if slot_mappings and held_slots is not None and state >= 0:
                    held_slots[g, state] = -1
                continue
            if row_slots[g, rows[0]] < 0:
                continue
            length = int(seq_lens[q])
            tail = (length - len(rows)) // block_size
            real_tail = int(row_slots[g, rows[0]]) // block_size
            shadow_of = {
                page: int(shadow_blocks[g, state, page % num_shadows])
                for page in range(tail, (length - 1) // block_size + 1)
            }
            # The committed rows of the tail page, which are before this step's tokens.
            first_position = max(length - len(rows) - given, tail * block_size)
            held = -1 if held_slots is None else int(held_slots[g, state, tail % num_shadows])
            for offset in range(first_position - tail * block_size):
                if held >= 0 and held // block_size == real_tail and offset <= held % block_size:
                    continue
                for plane in planes:
                    row = _read(plane, real_tail * block_size + offset, page_offsets)
                    _write(plane, shadow_of[tail] * block_size + offset, row, page_offsets)
            if not slot_mappings:
                continue
            tail_pages[g, q] = tail
            for position in range(first_position, length):
                token = end - (length - position)
                saved_slots[g, token] = max(-1, int(slot_mappings[g][token]))
                if slot_mappings[g][token] >= 0:
                    page, offset = divmod(position, block_size)
                    slot_mappings[g][token] = shadow_of[page] * block_size + offset
                    block_tables[g][q, page] = shadow_of[page]


def close_window(
    caches, planes_per_group, query_start_loc, draft_start_loc, row_rejected, shadow_blocks, saved_slots,
    tail_pages, slot_mappings, block_tables, idx_mapping=None, held_slots=None, page_offsets=None,
) -> None:  # fmt: skip
    block_size, num_shadows = caches[0].shape[1], shadow_blocks.shape[2]
    for g, planes in enumerate(_planes_of_groups(caches, planes_per_group)):
        for q, state, end, given, rows in _requests(query_start_loc, draft_start_loc, idx_mapping):
            if not rows:
                continue
            if slot_mappings and held_slots is not None:
                held_slots[g, state] = -1
            if tail_pages[g, q] < 0:
                continue
            tail, first_draft = int(tail_pages[g, q]), end - len(rows)
            draft_offset = int(saved_slots[g, first_draft]) % block_size
            given_in_tail = min(given, draft_offset)
            committed = draft_offset - given_in_tail
            held = {}  # page: the last of its valid rows
            if committed:
                held[tail] = int(saved_slots[g, first_draft]) - draft_offset + committed - 1
            all_kept = True
            for token in range(first_draft - given_in_tail, end):
                draft = token - first_draft
                kept = draft < 0 or not row_rejected[rows[draft]]
                slot = int(saved_slots[g, token])
                all_kept = all_kept and kept and slot >= 0
                if slot < 0:
                    continue
                page, offset = divmod(tail * block_size + draft_offset + draft, block_size)
                shadow = int(shadow_blocks[g, state, page % num_shadows])
                if kept:
                    for plane in planes:
                        _write(plane, slot, _read(plane, shadow * block_size + offset, page_offsets), page_offsets)
                if all_kept:
                    held[page] = slot
                if slot_mappings:
                    slot_mappings[g][token] = slot
                    block_tables[g][q, page] = slot // block_size
            if slot_mappings and held_slots is not None:
                for page, slot in held.items():
                    held_slots[g, state, page % num_shadows] = slot


def close_window_from_rejected(
    caches, planes_per_group, query_start_loc, draft_start_loc, num_rejected, row_rejected, num_accepted,
    counters, shadow_blocks, saved_slots, tail_pages, slot_mappings, block_tables, idx_mapping=None,
    held_slots=None, page_offsets=None,
) -> None:  # fmt: skip
    _oracle().reject_rows_from_rejected(num_rejected, draft_start_loc, row_rejected, num_accepted, counters)
    close_window(
        caches, planes_per_group, query_start_loc, draft_start_loc, row_rejected, shadow_blocks, saved_slots,
        tail_pages, slot_mappings, block_tables, idx_mapping, held_slots, page_offsets,
    )  # fmt: skip
