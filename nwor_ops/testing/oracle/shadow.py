"""The ops of family shadow in plain Python."""

from __future__ import annotations

from torch import Tensor

from nwor_ops.testing.layouts import read_row, write_row
from nwor_ops.testing.oracle.accept import drafts_of_requests, reject_by_counts


def _planes_of_groups(caches: list[Tensor], planes_per_group: list[int]) -> list[list[Tensor]]:
    planes = iter(caches)
    return [[next(planes) for _ in range(count)] for count in planes_per_group]


def _requests(query_start_loc, draft_start_loc, idx_mapping):
    """For each request: its index, its state, the end of its tokens, its given tokens, and the rows of its drafts."""
    for q, rows in enumerate(drafts_of_requests(draft_start_loc)):
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
                    row = read_row(plane, real_tail * block_size + offset, page_offsets)
                    write_row(plane, shadow_of[tail] * block_size + offset, row, page_offsets)
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
                        write_row(
                            plane, slot, read_row(plane, shadow * block_size + offset, page_offsets), page_offsets
                        )
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
    counters, *rest,
) -> None:  # fmt: skip
    reject_by_counts(num_rejected, draft_start_loc, row_rejected, num_accepted, counters)
    close_window(caches, planes_per_group, query_start_loc, draft_start_loc, row_rejected, *rest)
