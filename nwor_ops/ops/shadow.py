"""Family ``shadow``: shadow paging. Drafts are written to shadow pages, and only accepted rows reach a request's pages.

:func:`open_window` redirects slots and block-table entries of this step in place. Those of pages that drafts touch then
name shadow pages. :func:`close_window` copies the accepted rows to their slots and restores tables and slots. Writers
and attention need no change.

Letters are as in :mod:`nwor_ops.ops`. In addition: S request states, P shadow pages of each state, M pages in a row of
a block table, L planes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor_ops.ops.registry import op

__all__ = [
    "close_window",
    "close_window_from_rejected",
    "open_window",
]

# Maximum number of groups in one call of `open_window` or `close_window` (kMostWindowGroups in csrc/shadow.h).
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

    The *tail page* of a request with drafts is the page of its first draft. The tokens of this step from the start of
    the tail page on are redirected, page by page. These are the drafts and the tokens before them in the same page.
    Afterwards their slots in ``slot_mappings`` and their entries in ``block_tables`` name shadow pages.

    The tail page may also hold committed rows, from before this step's tokens. They are copied to its shadow page.
    Attention reads the same rows through the redirected table as it would without it. Writes of redirected tokens do
    not touch a page that the request owns. Page number p of a sequence is shadowed by
    ``shadow_blocks[g, state, p % P]``.

    Call it after :func:`plan_window`, and call :func:`close_window` after sampling.

    Args:
        caches: planes ``[B, N, H, W]`` of one geometry, those of group 0 first; **mutated** in shadow pages only.
            Layers of another geometry take another call, with empty ``slot_mappings`` and ``block_tables``.
        planes_per_group: number of ``caches`` of each of G groups; at most 16 groups. Groups share neither slots nor
            tables. A page of one group is never a page of another, even if they share memory.
        query_start_loc: as in :func:`plan_window`.
        draft_start_loc: int32 ``[Q + 1]``, contiguous: written by :func:`plan_window`.
        seq_lens: int32 ``[>= Q]``, contiguous: length of each sequence, including this step's tokens and drafts. The
            last token of request q is at position ``seq_lens[q] - 1``.
        row_slots: int64 ``[G, R]``, contiguous: the slots of the drafts, written by :func:`plan_window`.
        shadow_blocks: int32 ``[G, S, P]``, contiguous: the shadow pages of each request state. P pages must hold the
            tail page and the drafts: ``(N - 1 + drafts - 1) // N + 1``.
        slot_mappings: G tensors int64 ``[>= tokens]``, contiguous; **mutated** at the redirected tokens. Empty = only
            copy rows.
        block_tables: G tensors int32 ``[>= Q, M]``, contiguous along a row; **mutated** at the redirected pages. Entry
            ``[q, p]`` is page p of request q. As many as ``slot_mappings``. It must agree with the slots; see below.
        saved_slots: int64 ``[G, >= tokens]``, contiguous; **mutated** if ``slot_mappings`` are given. If a request has
            drafts, each of its tokens from its tail page on gets its former slot here. A token that was not redirected
            gets -1.
        tail_pages: int32 ``[G, >= Q]``, contiguous; **mutated** if ``slot_mappings`` are given. Index of each request's
            tail page in its sequence. It is -1 for a request that is not redirected.
        idx_mapping: int32 or int64 ``[>= Q]``, contiguous, or None. The state of each request. It is negative for
            padded rows. With None the state of request q is q.
        held_slots: int64 ``[G, S, P]``, contiguous, or None; **mutated**. The rows that each shadow page holds already.
            The value is the slot of the last row of the real page up to which it has all rows; -1 = none. Such rows are
            not copied again, so a request that stays in its page needs no copy. See below.
        page_offsets: as in :func:`log_slots`.
        plane_table: as in :func:`restore_slots`.

    ``held_slots`` needs request states that stay with their requests (``idx_mapping``). The op sets it to -1 for states
    of requests without drafts, which is how it detects that a state has a new request. Fill it with -1 in these cases:

    - before the first call;
    - after a window that was opened and never closed;
    - in a step without a call;
    - for a state whose new request has drafts in its first step.

    A request is inconsistent if its first draft has no slot, or a slot at another offset in its page than its position
    says. It is also inconsistent if it has too few pages, or if a state, token, page or block is out of range. The CPU
    raises before anything is written. CUDA does not redirect such a request: its drafts go to its own pages, as they
    would without this library, and debug mode raises. A request whose drafts all have no slot is not redirected.

    Slots and block tables must agree. If token t of request q is at position x of its sequence,
    ``block_tables[g][q, x // N]`` must be ``slot_mappings[g][t] // N``. This is not checked. Only slots are saved, and
    :func:`close_window` sets each redirected entry to ``slot // N``, whatever it was before.

    Example:
        >>> import torch
        >>> def int32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> cache = torch.zeros(4, 2, 1, 4)  # pages 2 and 3 are shadow pages
        >>> query_start_loc, draft_start_loc, seq_lens = int32(0, 2), int32(0, 1), int32(2)
        >>> slot_mapping, block_table = torch.tensor([0, 1]), int32(0, 1).view(1, 2)
        >>> row_slots, shadow_blocks = torch.tensor([[1]]), int32(2, 3).view(1, 1, 2)
        >>> saved_slots, tail_pages = torch.full((1, 2), -1), int32(-1).view(1, 1)
        >>> nwor_ops.open_window(
        ...     [cache], [1], query_start_loc, draft_start_loc, seq_lens, row_slots, shadow_blocks,
        ...     [slot_mapping], [block_table], saved_slots, tail_pages,
        ... )
        >>> slot_mapping.tolist(), block_table.tolist()
        ([4, 5], [[2, 1]])
        >>> cache.view(8, 4)[slot_mapping] = 1.0  # a writer follows the redirected slots
        >>> rejected = torch.tensor([True])
        >>> nwor_ops.close_window(
        ...     [cache], [1], query_start_loc, draft_start_loc, rejected, shadow_blocks,
        ...     saved_slots, tail_pages, [slot_mapping], [block_table],
        ... )
        >>> slot_mapping.tolist(), block_table.tolist(), cache.view(8, 4)[:2, 0].tolist()
        ([0, 1], [[0, 1]], [1.0, 0.0])
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
    """Copy the accepted rows to their slots and restore slots and tables, with one launch. See :func:`open_window`.

    The rows of redirected tokens are copied from their shadow pages to their own slots, in every plane. These are the
    drafts that were not rejected, and all tokens of the step that are not drafts. A rejected row stays in its shadow
    page.

    Args:
        caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, idx_mapping, page_offsets,
            plane_table: with the values of the :func:`open_window` call. ``caches`` are **mutated** at the slots of
            copied rows, nowhere else.
        row_rejected: bool ``[R]``, contiguous: which drafts were rejected, in any pattern, as written by
            :func:`reject_rows`. All True cancels the window.
        saved_slots, tail_pages: as written by :func:`open_window`.
        slot_mappings, block_tables: as redirected by :func:`open_window`; **mutated**: they get their former values.
            Empty = only copy rows.
        held_slots: as in :func:`open_window`; **mutated** if ``slot_mappings`` are given, for each request with drafts.
            Its shadow pages hold the rows up to the first rejected one. Pages that this window did not use get -1.

    Example:
        >>> import torch
        >>> def int32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> cache = torch.zeros(3, 2, 1, 4)  # page 2 is a shadow page
        >>> cache[2] = 1.0  # its rows: the request's token, and its draft
        >>> query_start_loc, draft_start_loc, shadow_blocks = int32(0, 2), int32(0, 1), int32(2).view(1, 1, 1)
        >>> saved_slots, tail_pages = torch.tensor([[0, 1]]), int32(0).view(1, 1)  # as open_window leaves them
        >>> slot_mapping, block_table = torch.tensor([4, 5]), int32(2, 1).view(1, 2)
        >>> nwor_ops.close_window(
        ...     [cache], [1], query_start_loc, draft_start_loc, torch.tensor([True]), shadow_blocks,
        ...     saved_slots, tail_pages, [slot_mapping], [block_table],
        ... )
        >>> slot_mapping.tolist(), block_table.tolist(), cache[0, :, 0, 0].tolist()  # the draft was rejected
        ([0, 1], [[0, 1]], [1.0, 0.0])
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
    """Find the rejected rows from their numbers, as :func:`reject_rows` does from tokens, and close the window in the
    same launch.

    Args:
        num_rejected: int32 ``[>= Q]``: number of rejected drafts of each request.
        row_rejected, num_accepted, counters: as in :func:`reject_rows`; **mutated**. They must not share memory with
            the other tensors of the window.
        caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, saved_slots, tail_pages,
            slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, plane_table: as in :func:`close_window`.

    Example:
        >>> import torch
        >>> def int32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> cache = torch.zeros(3, 2, 1, 4)  # page 2 is a shadow page
        >>> cache[2] = 1.0  # its rows: the request's token, and its draft
        >>> query_start_loc, draft_start_loc, shadow_blocks = int32(0, 2), int32(0, 1), int32(2).view(1, 1, 1)
        >>> saved_slots, tail_pages = torch.tensor([[0, 1]]), int32(0).view(1, 1)  # as open_window leaves them
        >>> slot_mapping, block_table = torch.tensor([4, 5]), int32(2, 1).view(1, 2)
        >>> row_rejected, num_accepted = torch.zeros(1, dtype=torch.bool), int32(0)
        >>> counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64)
        >>> nwor_ops.close_window_from_rejected(
        ...     [cache], [1], query_start_loc, draft_start_loc, int32(0), row_rejected, num_accepted, counters,
        ...     shadow_blocks, saved_slots, tail_pages, [slot_mapping], [block_table],
        ... )
        >>> slot_mapping.tolist(), num_accepted.tolist(), cache[0, :, 0, 0].tolist()  # the draft was accepted
        ([0, 1], [1], [1.0, 1.0])
    """
