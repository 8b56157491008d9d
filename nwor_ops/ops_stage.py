"""Family ``stage``: rejected rows never reach a page that a request owns.

Schemas and documented wrappers, as in :mod:`nwor_ops.ops`, which re-exports them. There are two ways to stage:

*A staging buffer.* :func:`stage_kv` puts a window's keys and values into rows of a side buffer, attention reads them
there, and after sampling :func:`accept_staged` and :func:`commit_staged` scatter the accepted ones into the cache.
For engines whose attention can read fresh keys and values, and for those that verify token trees: the slots of a
commit may be new ones, so that an accepted path lands in consecutive slots. A tree that was written to the cache at
once is compacted there by :func:`move_slots`.

*Shadow pages.* :func:`open_window` redirects, in place, this step's slots and block-table entries of the pages that
drafts touch to spare pages, and :func:`close_window` copies what was accepted to where it belongs and puts tables and
slots back. Writers and attention need not know.

Letters as in :mod:`nwor_ops.ops`; further S request states, P shadow pages of each, M pages in a row of a block table,
L planes. A *staging row* is a row of a staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor_ops.ops import call, declare

SCHEMAS = {
    "stage_kv": """(Tensor key, Tensor value, Tensor stage_rows, Tensor(a!) staged_key, Tensor(b!) staged_value,
        Tensor? window_id=None, Tensor(c!)? row_windows=None) -> ()""",
    "accept_staged": """(Tensor row_accepted, Tensor row_slots, Tensor window_id, Tensor row_windows, int num_slots,
        Tensor(a!) row_committed, Tensor(b!) counters, Tensor? row_requests=None,
        Tensor? row_positions=None) -> ()""",
    "commit_staged": """(Tensor staged_key, Tensor staged_value, Tensor row_slots, Tensor row_accepted,
        Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor k_scale, Tensor v_scale, str kv_cache_dtype,
        Tensor? row_requests=None, Tensor? row_positions=None) -> ()""",
    "move_slots": """(Tensor(a!)[] caches, Tensor src_slots, Tensor dst_slots, Tensor? page_offsets=None) -> ()""",
    "open_window": """(Tensor(a!)[] caches, int[] planes_per_group, Tensor query_start_loc,
        Tensor cu_num_draft_tokens, Tensor seq_lens, Tensor row_slots, Tensor shadow_blocks,
        Tensor(b!)[] slot_mappings, Tensor(c!)[] block_tables, Tensor(d!) saved_slots, Tensor(e!) tail_pages,
        Tensor? idx_mapping=None, Tensor(f!)? held_slots=None, Tensor? page_offsets=None,
        int num_bonus_tokens=0, Tensor? plane_table=None, bool leading_zero=False) -> ()""",
    "close_window": """(Tensor(a!)[] caches, int[] planes_per_group, Tensor query_start_loc,
        Tensor cu_num_draft_tokens, Tensor row_rejected, Tensor shadow_blocks, Tensor saved_slots,
        Tensor tail_pages, Tensor(b!)[] slot_mappings, Tensor(c!)[] block_tables, Tensor? idx_mapping=None,
        Tensor(d!)? held_slots=None, Tensor? page_offsets=None, int num_bonus_tokens=0,
        Tensor? plane_table=None, bool leading_zero=False) -> ()""",
    "close_window_from_rejected": """(Tensor(a!)[] caches, int[] planes_per_group, Tensor query_start_loc,
        Tensor cu_num_draft_tokens, Tensor num_rejected, Tensor(b!) row_rejected, Tensor(c!) num_accepted,
        Tensor(d!) counters, Tensor shadow_blocks, Tensor saved_slots, Tensor tail_pages,
        Tensor(e!)[] slot_mappings, Tensor(f!)[] block_tables, Tensor? idx_mapping=None,
        Tensor(g!)? held_slots=None, Tensor? page_offsets=None, int num_bonus_tokens=0,
        Tensor? plane_table=None, bool leading_zero=False) -> ()""",
}

# Layout of the `counters` tensor of `accept_staged`, int64 [len(STAGE_COUNTERS)], which only ever grows.
STAGE_COUNTERS = ("windows", "staged", "stage_operations", "committed", "rejected", "incomplete")

# Groups of one call of `open_window` or `close_window` (kMostWindowGroups in csrc/stage.h).
MOST_GROUPS = 16

__all__ = [
    "STAGE_COUNTERS",
    "accept_staged",
    "close_window",
    "close_window_from_rejected",
    "commit_staged",
    "move_slots",
    "open_window",
    "stage_kv",
]

declare(SCHEMAS)


def stage_kv(
    key: Tensor,
    value: Tensor,
    stage_rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    """Copy keys and values of this window to rows of a staging buffer: raw bytes, quantised only at commit.

    Args:
        key: ``[>= T, H, Dk]``, float32, float16 or bfloat16, any strides. Only the first T rows are read.
        value: ``[>= T, H, Dv]``, dtype of ``key``, any strides.
        stage_rows: int32 ``[T]``, contiguous: staging row of each token, in any order; negative = not staged. Rows of
            one call must be distinct. One such tensor serves every layer of a window.
        staged_key: ``[R, H, Dk]``, dtype of ``key``, any strides; **mutated** at the rows named, nowhere else.
        staged_value: ``[R, H, Dv]``, likewise.
        window_id: int64 ``[1]`` or None: the number of the open window.
        row_windows: int64 ``[R]``, contiguous, or None (both or neither); **mutated**: ``window_id`` at every row
            staged, which tells :func:`accept_staged` what this layer has staged in this window.

    Raises:
        ValueError: a shape, a stride, or memory that a source and a buffer, or the two buffers, share.
        TypeError: a dtype or device.
        IndexError: on the CPU, a row >= R; nothing is written. On CUDA such a token is skipped, and with
            ``VLLM_NWOR_DEBUG_SYNC=1`` the call raises after it.
        RuntimeError: a tensor requires a gradient, or the library for this device is missing.

    All tensors are on one device.
    """
    call(
        "stage_kv", key, value, stage_rows, staged_key, staged_value, window_id, row_windows,
    )  # fmt: skip


def accept_staged(
    row_accepted: Tensor,
    row_slots: Tensor,
    window_id: Tensor,
    row_windows: Tensor,
    num_slots: int,
    row_committed: Tensor,
    counters: Tensor,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
) -> None:
    """Decide on the device which staged rows are committed: the accepted ones of every layer, or none at all.

    A row is *wanted* if it was accepted and has a slot. If every layer has staged every wanted row in this window and
    every slot lies inside the caches, the wanted rows are committed. Else the window is rejected as a whole: after a
    forward that stopped half-way, or skipped a layer, no layer gets a row that another lacks.

    Args:
        row_accepted: bool ``[R]``, contiguous: any pattern. Or int32 ``[Q]``, contiguous, with ``row_requests`` and
            ``row_positions``: how many rows of each request were accepted.
        row_slots: int64 ``[R]``, contiguous: where each row is to go, negative = nowhere.
        window_id: int64 ``[1]``: the number of the open window.
        row_windows: int64 ``[L, R]``, contiguous: the window in which each of L layers last staged each row.
        num_slots: slots of the smallest of the caches.
        row_committed: bool ``[R]``, contiguous; **mutated**: which rows :func:`commit_staged` shall write.
        counters: int64 ``[len(STAGE_COUNTERS)]``, contiguous; **mutated**, each grows: ``windows`` by one, ``staged``
            by the rows that some layer staged in this window, ``stage_operations`` by the pairs of layer and row
            staged, ``committed`` by the rows committed, ``rejected`` by the other staged rows, ``incomplete`` by one
            if the window was rejected as a whole.
        row_requests: int32 ``[R]``, contiguous, or None: request of each row, negative = none.
        row_positions: int32 ``[R]``, contiguous, or None: place of each row among those of its request, from 0.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`stage_kv`.
    """
    call(
        "accept_staged", row_accepted, row_slots, window_id, row_windows, num_slots,
        row_committed, counters, row_requests, row_positions,
    )  # fmt: skip


def commit_staged(
    staged_key: Tensor,
    staged_value: Tensor,
    row_slots: Tensor,
    row_accepted: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
) -> None:
    """Write the accepted rows of a staging buffer into one layer's cache, quantised exactly as :func:`write_kv` does.

    Args:
        staged_key: ``[>= R, H, Dk]``, float32, float16 or bfloat16, any strides.
        staged_value: ``[>= R, H, Dv]``, dtype of ``staged_key``.
        row_slots: int64 ``[R]``, contiguous: the slot of each row, negative = none. They need not be the slots the
            tokens were drafted for. Those of accepted rows must be distinct.
        row_accepted: bool ``[R]``, contiguous: any pattern. Or int32 ``[Q]``, contiguous, with ``row_requests`` and
            ``row_positions``: how many rows of each request were accepted.
        key_cache: ``[B, N, H, Dk]``, any strides; **mutated** at the slots of accepted rows, nowhere else.
        value_cache: ``[B, N, H, Dv]``, likewise.
        k_scale, v_scale, kv_cache_dtype: as in :func:`write_kv`; scales per token are ``[>= R, 1]``, one for each row.
        row_requests, row_positions: as in :func:`accept_staged`.

    Raises:
        As :func:`write_kv`; the IndexError is for the slot of an accepted row.
    """
    call(
        "commit_staged", staged_key, staged_value, row_slots, row_accepted, key_cache,
        value_cache, k_scale, v_scale, kv_cache_dtype, row_requests, row_positions,
    )  # fmt: skip


def move_slots(caches: list[Tensor], src_slots: Tensor, dst_slots: Tensor, page_offsets: Tensor | None = None) -> None:
    """Move rows inside the caches, in every layer: one launch. All moves happen at once.

    A slot may be the source of some moves and the destination of another: each destination then holds what its source
    held before the call, as if all sources had been read before the first was written. So the accepted path of a
    token tree is compacted in place.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides and dtype), none of them twice;
            **mutated** at the destinations, nowhere else. The dtype may be any of 1, 2, 4 or 8 bytes; bytes are not
            interpreted.
        src_slots: int64 ``[C]``, contiguous.
        dst_slots: int64 ``[C]``, contiguous. Destinations must be distinct. A move with a negative source or
            destination is left out.
        page_offsets: as in :func:`log_slots`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`stage_kv`.
        IndexError: on the CPU, a source or destination >= B * N; nothing is written. On CUDA the move is left out and
            reported in debug mode.
    """
    call("move_slots", caches, src_slots, dst_slots, page_offsets)


def open_window(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
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
    num_bonus_tokens: int = 0,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    """Redirect a window to shadow pages: one launch for all layers and all groups of one geometry.

    For each request with drafts the *tail page* is the page of its first draft. The tokens of this step from the
    start of the tail page on (drafts, and the tokens before them that lie in the same page) are redirected, page by
    page: their slots in ``slot_mappings`` and the entries of ``block_tables`` name shadow pages afterwards. The rows
    of the tail page before this step's tokens, which are committed, are copied to its shadow page, so attention sees
    in the redirected table what it would have seen, and every write of this step goes past the pages the request
    owns. Page number p of a sequence is shadowed by ``shadow_blocks[g, state, p % P]``.

    Call it after :func:`plan_window` with the same arguments, and :func:`close_window` after sampling.

    Args:
        caches: planes ``[B, N, H, W]`` of one geometry, those of group 0 first; **mutated** in shadow pages only.
            Layers of another geometry take another call, with empty ``slot_mappings`` and ``block_tables``.
        planes_per_group: how many of ``caches`` belong to each of G groups. Groups share neither slots nor tables, and
            a page of one is never a page of another, even where they share memory.
        query_start_loc, cu_num_draft_tokens, num_bonus_tokens, leading_zero: as in :func:`plan_window`.
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
            none is. Fill it with -1 at first, and after a window that was opened and never closed. It needs request
            states that stay (``idx_mapping``) and a call in every step, since a request without drafts is what
            tells that a state has changed hands: a new request first runs its prompt.
        page_offsets: as in :func:`log_slots`.
        plane_table: as in :func:`restore_slots`.

    A request whose numbers do not agree (a first draft without a slot, or whose place in its page is not that of its
    position; fewer pages than it needs; a state, token, page or block outside its buffer) is a ValueError or IndexError
    on the CPU, before anything is written. On CUDA it is not redirected, so its drafts go to its own pages as they
    would without this library, and debug mode raises. Requests none of whose drafts has a slot are not redirected.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`stage_kv`; and as said above.
    """
    call(
        "open_window", caches, planes_per_group, query_start_loc, cu_num_draft_tokens,
        seq_lens, row_slots, shadow_blocks, slot_mappings, block_tables, saved_slots, tail_pages, idx_mapping,
        held_slots, page_offsets, num_bonus_tokens, plane_table, leading_zero,
    )  # fmt: skip


def close_window(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    shadow_blocks: Tensor,
    saved_slots: Tensor,
    tail_pages: Tensor,
    slot_mappings: list[Tensor],
    block_tables: list[Tensor],
    idx_mapping: Tensor | None = None,
    held_slots: Tensor | None = None,
    page_offsets: Tensor | None = None,
    num_bonus_tokens: int = 0,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    """Copy what was accepted to where it belongs, and put slots and tables back: one launch, as :func:`open_window`.

    The rows of redirected tokens go from their shadow pages to their own slots, in every plane: drafts that were not
    rejected, and all tokens of the step that are no drafts. A rejected row stays in its shadow page.

    Args:
        caches, planes_per_group, query_start_loc, cu_num_draft_tokens, shadow_blocks, idx_mapping, page_offsets,
            num_bonus_tokens, plane_table, leading_zero: with the values that :func:`open_window` had; ``caches`` are
            **mutated** at the slots of the rows copied, nowhere else.
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
    call(
        "close_window", caches, planes_per_group, query_start_loc, cu_num_draft_tokens,
        row_rejected, shadow_blocks, saved_slots, tail_pages, slot_mappings, block_tables, idx_mapping, held_slots,
        page_offsets, num_bonus_tokens, plane_table, leading_zero,
    )  # fmt: skip


def close_window_from_rejected(
    caches: list[Tensor],
    planes_per_group: Sequence[int],
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
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
    num_bonus_tokens: int = 0,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    """:func:`reject_rows_from_rejected`, then :func:`close_window` with what it rejected, in one launch.

    Args:
        num_rejected: int32 ``[>= Q]``: how many drafts of each request were rejected.
        row_rejected, num_accepted, counters: as in :func:`reject_rows`; **mutated**, and share no memory with the
            window's other tensors.
        caches, planes_per_group, query_start_loc, cu_num_draft_tokens, shadow_blocks, saved_slots, tail_pages,
            slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, num_bonus_tokens,
            plane_table, leading_zero: as in :func:`close_window`.

    Raises:
        As :func:`close_window` and :func:`reject_rows`, before anything is written.

    On CUDA nothing is raised for a window of more than R drafts, which was never planned: where tables were redirected
    for it all the same, the counts decide which rows are copied, not the flags.
    """
    call(
        "close_window_from_rejected", caches, planes_per_group,
        query_start_loc, cu_num_draft_tokens, num_rejected, row_rejected, num_accepted, counters, shadow_blocks,
        saved_slots, tail_pages, slot_mappings, block_tables, idx_mapping, held_slots, page_offsets,
        num_bonus_tokens, plane_table, leading_zero,
    )  # fmt: skip
