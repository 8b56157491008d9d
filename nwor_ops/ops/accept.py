"""Family ``accept``: which tokens of a step are drafts, and which of them were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_ops.ops.registry import op

# Layout of the `counters` tensor, int64 [len(COUNTERS)], which only ever grows.
COUNTERS = ("windows", "drafted", "accepted", "rejected", "overflowed")


def _new_mask(draft_start_loc: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """What the ops that return a mask return."""
    accepted = draft_start_loc.new_empty(num_draft_tokens, dtype=torch.bool)
    return accepted, draft_start_loc.new_empty(draft_start_loc.shape[0] - 1, dtype=torch.int32)


@op(mutates=("log_rows", "row_slots", "row_requests", "row_positions", "counters", "draft_start_loc"))
def plan_window(
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    slot_mappings: Sequence[Tensor],
    log_rows: Tensor,
    row_slots: Tensor,
    row_requests: Tensor,
    row_positions: Tensor,
    counters: Tensor,
    draft_start_loc: Tensor,
    token_offset: int | None = None,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    """Work out, on the device, which tokens of this step are drafts and where each is logged.

    The drafts of request q are the last ``n = cu_num_draft_tokens[q] - cu_num_draft_tokens[q - 1]``
    of its tokens, ``[query_start_loc[q + 1] - n, query_start_loc[q + 1])``: vLLM's order in both
    of its model runners. Draft number r of the batch, counted through all requests, gets log row r,
    so row r is also entry r of vLLM's flat ``draft_token_ids``. Prompt and target tokens, padded
    tokens and padded requests (a repeated last value in both cumulative arrays) get no row.

    Every element of every output is written, so nothing of an earlier window survives.

    Args:
        query_start_loc: int32 ``[>= Q + 1]``, contiguous. First token of each request, then the end.
        cu_num_draft_tokens: int32 ``[Q]``, contiguous. Drafts up to and including each request.
        slot_mappings: G tensors int64 ``[T]``, contiguous: this step's slots, one per group; on CUDA at most 128.
        log_rows: int32 ``[>= T]``, contiguous; **mutated**: log row of each token, else -1.
        row_slots: int64 ``[G, R]``, contiguous; **mutated**: slot of each log row per group, else -1.
        row_requests: int32 ``[R]``, contiguous; **mutated**: request of each log row, else -1.
        row_positions: int32 ``[R]``, contiguous; **mutated**: place of the draft among the drafts of
            its request, from 0, else -1.
        counters: int64 ``[len(COUNTERS)]``; **mutated**: ``windows`` and ``drafted`` grow, or
            ``overflowed`` if the window was not planned.
        draft_start_loc: int32 ``[>= Q + 1]``, contiguous; **mutated**: the first log row of each request, then the
            number of drafts, which is repeated to the end: an index pointer of the drafts, whatever the engine
            counts. The other ops of a window take it. Micro-batches of one batch write the same.
        token_offset: None = a whole batch. Else a micro-batch: the first T tokens of ``slot_mappings``
            and ``log_rows`` are the tokens ``[token_offset, token_offset + T)`` of the batch, and rows of
            drafts outside it keep slot -1.
        num_bonus_tokens: how many tokens beside its drafts ``cu_num_draft_tokens`` counts for each request,
            padded ones too: 1 where an engine counts logits, as vLLM's ``cu_num_logits``. The drafts of
            request q are then ``num_bonus_tokens`` fewer than the difference above.
        leading_zero: whether ``cu_num_draft_tokens`` is ``[Q + 1]`` and begins with a 0 before the first request's
            count, as vLLM's ``cu_num_logits`` and other index pointers do. The 0 is not looked at on CUDA.

    Raises:
        ValueError: a shape, stride or overlap; on the CPU also more than R drafts, a cumulative array
            that decreases, more drafts than tokens in a request, or tokens beyond T (of a whole
            batch); nothing is written. On CUDA such a window is left unplanned as a whole (every
            row -1, no request has a draft in ``draft_start_loc``, counted in ``overflowed``) and raises in debug mode.
        TypeError: a dtype or device.
    """


@op(mutates=(), results=("accepted", "num_accepted"))
def acceptance_mask(
    draft_token_ids: Tensor, sampled_token_ids: Tensor, draft_start_loc: Tensor
) -> tuple[Tensor, Tensor]:
    """Which drafts were accepted, from what the target sampled; on the device, no sync.

    Draft j of request q counts as accepted if every draft of q up to and including j equals the
    token sampled in its place (a negative one equals nothing), and the sampler went on after it:
    ``sampled_token_ids[q, j + 1]`` is not negative (where that column exists). The second condition
    tells an accepted draft from a rejected one whose replacement happens to be the same token, which
    vLLM's synthetic rejection sampler can produce.

    Args:
        draft_token_ids: int32 or int64 ``[P]``, contiguous: the drafts of all requests in order.
        sampled_token_ids: int32 or int64 ``[>= Q, >= most drafts]``, any strides; negative = no token
            (vLLM's ``RejectionSampler`` writes -1).
        draft_start_loc: int32 ``[Q + 1]``, contiguous: number of the first draft of each request, then the number of
            drafts, which is <= P; what :func:`plan_window` gives. It begins with 0.

    Returns:
        ``accepted``, bool ``[P]`` (False past the last draft), and ``num_accepted``, int32 ``[Q]``.

    Raises:
        ValueError, TypeError: as above; on the CPU also for a ``draft_start_loc`` that does not begin with 0, decreases
            or counts more drafts than there are. On CUDA that changes only the results, and raises in debug mode.
    """
    return _new_mask(draft_start_loc, draft_token_ids.shape[0])


@op(mutates=(), results=("accepted", "num_accepted"))
def acceptance_mask_from_rejected(
    num_rejected: Tensor, draft_start_loc: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """:func:`acceptance_mask` for runners that already know how many drafts were rejected.

    Args:
        num_rejected: int32 ``[>= Q]``, contiguous: the last so many drafts of each request were
            rejected; clamped to [0, its drafts].
        draft_start_loc: as in :func:`acceptance_mask`.
        num_draft_tokens: P, the length of the mask (a host integer below 2^31, an upper bound of the drafts).

    Returns:
        ``accepted``, bool ``[P]``, and ``num_accepted``, int32 ``[Q]``.
    """
    return _new_mask(draft_start_loc, num_draft_tokens)


@op(mutates=("row_rejected", "num_accepted", "counters"))
def reject_rows(
    draft_token_ids: Tensor,
    sampled_token_ids: Tensor,
    draft_start_loc: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
) -> None:
    """:func:`acceptance_mask` into a window's own buffers, as :func:`restore_slots` wants it.

    Nothing is allocated, so it fits between begin and commit.

    Args:
        draft_token_ids, sampled_token_ids, draft_start_loc: as in :func:`acceptance_mask`.
        row_rejected: bool ``[R]``, contiguous; **mutated**, every element: True for a rejected draft.
        num_accepted: int32 ``[>= Q]``, contiguous; **mutated**, every element; 0 past Q.
        counters: int64 ``[len(COUNTERS)]``; **mutated**: ``accepted`` and ``rejected`` grow.

    Raises:
        ValueError, TypeError: as :func:`acceptance_mask`; ValueError on the CPU also for more than R drafts.

    A window that :func:`plan_window` refused has no drafts: every row is False and nothing is counted.
    """


@op(mutates=("row_rejected", "num_accepted", "counters"))
def reject_rows_from_rejected(
    num_rejected: Tensor,
    draft_start_loc: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
) -> None:
    """:func:`reject_rows` for runners that already know ``num_rejected``, int32 ``[>= Q]``."""
