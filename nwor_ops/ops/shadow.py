"""Family ``shadow``: this step's rows go to spare pages, and only accepted ones to pages that a request owns.

:func:`open_window` redirects, in place, this step's slots and block-table entries of the pages that drafts touch to
spare pages, and :func:`close_window` copies what was accepted to where it belongs and puts tables and slots back.
Writers and attention need not know.

Letters as in :mod:`nwor_ops.ops`; further S request states, P shadow pages of each, M pages in a row of a block table,
L planes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor_ops.ops.registry import op

# Groups of one call of `open_window` or `close_window` (kMostWindowGroups in csrc/shadow.h).
MOST_GROUPS = 16


@op(mutates=("caches", "slot_mappings", "block_tables", "saved_slots", "tail_pages", "held_slots"))
def open_window(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    draft_start_loc: Tensor,
    seq_lens: Tensor,
    row_slots: Tensor,
    shadow_blocks: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    saved_slots: Tensor,
    tail_pages: Tensor,
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    plane_table: Tensor | None = None,
) -> None:
    """Redirect a window to shadow pages: one launch for all layers and all groups of one geometry.

    For each request with drafts the *tail page* is the page of its first draft. The tokens of this step from the
    start of the tail page on (drafts, and the tokens before them that lie in the same page) are redirected, page by
    page: their slots in ``slot_mappings`` and the entries of ``block_tables`` name shadow pages afterwards. The rows
    of the tail page before this step's tokens, which are committed, are copied to its shadow page, so attention sees
    in the redirected table what it would have seen, and every write of this step goes past the pages the request
    owns. Page number p of a sequence is shadowed by ``shadow_blocks[g, state, p % P]``.

    Call it after :func:`plan_window`, and :func:`close_window` after sampling.

    Args:
        caches: planes ``[B, N, H, W]`` of one geometry, those of group 0 first; **mutated** in shadow pages only.
            Layers of another geometry take another call, with empty ``slot_mappings`` and ``block_tables``.
        planes_per_group: how many of ``caches`` belong to each of G groups, at most 16. Groups share neither slots nor
            tables, and a page of one is never a page of another, even where they share memory.
        query_start_loc: as in :func:`plan_window`.
        draft_start_loc: int32 ``[Q + 1]``, contiguous: what :func:`plan_window` gave.
        seq_lens: int32 ``[>= Q]``, contiguous: length of each sequence, this step's tokens and drafts included. The
            last token of request q is at position ``seq_lens[q] - 1``.
        row_slots: int64 ``[G, R]``, contiguous: what :func:`plan_window` gave: the slots of the drafts.
        shadow_blocks: int32 ``[G, S, P]``, contiguous: the shadow pages of each request state. P pages must be enough
            for the tail page and the drafts: ``(N - 1 + drafts - 1) // N + 1``.
        slot_mappings: G tensors int64 ``[>= tokens]``, contiguous; **mutated** at the redirected tokens. Or empty, to
            copy rows only.
        block_tables: G tensors int32 ``[>= Q, M]``, contiguous along a row; **mutated** at the redirected pages. Entry
            ``[q, p]`` is page p of request q. As many as ``slot_mappings``.
        saved_slots: int64 ``[G, >= tokens]``, contiguous; **mutated** where ``slot_mappings`` are given: the former
            slot of each token of a request with drafts from its tail page on, -1 where it was not redirected.
        tail_pages: int32 ``[G, >= Q]``, contiguous; **mutated** likewise: number of each request's tail page in its
            sequence, -1 for a request that is not redirected.
        idx_mapping: int32 or int64 ``[>= Q]``, contiguous, or None: the state of each request, negative in padded
            rows. None = the state of request q is q.
        held_slots: int64 ``[G, S, P]``, contiguous, or None; **mutated**: -1 for the states of requests without
            drafts. What a shadow page holds already: the slot of the last row of the real page of which it has that
            row and all before it; -1 = nothing. Such rows are not copied again: while a request stays in its page,
            none is. Fill it with -1 at first, after a window that was opened and never closed, and in a step without
            a call. It needs request states that stay (``idx_mapping``). A request without drafts is what tells that a
            state has changed hands; for a new one that has drafts at once fill its state's with -1 before.
        page_offsets: as in :func:`log_slots`.
        plane_table: as in :func:`restore_slots`.

    A request whose numbers do not agree (a first draft without a slot, or whose place in its page is not that of its
    position; fewer pages than it needs; a state, token, page or block outside its buffer) is a ValueError or IndexError
    on the CPU, before anything is written. On CUDA it is not redirected, so its drafts go to its own pages as they
    would without this library, and debug mode raises. Requests none of whose drafts has a slot are not redirected.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`stage_kv`; and as said above.
    """


@op(mutates=("caches", "slot_mappings", "block_tables", "held_slots"))
def close_window(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    draft_start_loc: Tensor,
    row_rejected: Tensor,
    shadow_blocks: Tensor,
    saved_slots: Tensor,
    tail_pages: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    plane_table: Tensor | None = None,
) -> None:
    """Copy what was accepted to where it belongs, and put slots and tables back: one launch, as :func:`open_window`.

    The rows of redirected tokens go from their shadow pages to their own slots, in every plane: drafts that were not
    rejected, and all tokens of the step that are no drafts. A rejected row stays in its shadow page.

    Args:
        caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, idx_mapping, page_offsets,
            plane_table: with the values that :func:`open_window` had; ``caches`` are **mutated** at the slots of the
            rows copied, nowhere else.
        row_rejected: bool ``[R]``, contiguous: which drafts were rejected, what :func:`reject_rows` gave. Any pattern.
            All true cancels the window.
        saved_slots, tail_pages: what :func:`open_window` saved.
        slot_mappings, block_tables: what :func:`open_window` changed; **mutated**: what it found there is there again.
            Or empty, to copy rows only.
        held_slots: as there; **mutated** where ``slot_mappings`` are given: what the shadow pages of each request with
            drafts hold now: rows up to the first that was rejected; -1 for its pages that this window did not use.

    Raises:
        As :func:`open_window`.
    """


@op(mutates=("caches", "row_rejected", "num_accepted", "counters", "slot_mappings", "block_tables", "held_slots"))
def close_window_from_rejected(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    draft_start_loc: Tensor,
    num_rejected: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    shadow_blocks: Tensor,
    saved_slots: Tensor,
    tail_pages: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    plane_table: Tensor | None = None,
) -> None:
    """:func:`reject_rows_from_rejected`, then :func:`close_window` with what it rejected, in one launch.

    Args:
        num_rejected: int32 ``[>= Q]``: how many drafts of each request were rejected.
        row_rejected, num_accepted, counters: as in :func:`reject_rows`; **mutated**, and share no memory with the
            window's other tensors.
        caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, saved_slots, tail_pages,
            slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, plane_table: as in
            :func:`close_window`.

    Raises:
        As :func:`close_window` and :func:`reject_rows`, before anything is written.
    """
