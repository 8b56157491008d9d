"""Family ``accept``: which tokens of a step are drafts, and which drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_ops.ops.registry import op

__all__ = [
    "COUNTERS",
    "acceptance_mask",
    "acceptance_mask_from_rejected",
    "plan_window",
    "reject_rows",
]

# Layout of the `counters` tensor, int64 [len(COUNTERS)]. Ops only increment it.
COUNTERS = ("windows", "drafted", "accepted", "rejected", "overflowed")


def _new_mask(draft_start_loc: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """Allocate the results of the ops that return a mask."""
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
    """Find the drafts among the tokens of this step, on the device, and assign their log rows.

    The drafts of request q are its last ``n = cu_num_draft_tokens[q] - cu_num_draft_tokens[q - 1]`` tokens,
    ``[query_start_loc[q + 1] - n, query_start_loc[q + 1])``. This is the order of both vLLM model runners. Drafts are
    numbered through all requests of the batch. Draft r gets log row r, which is also entry r of ``draft_token_ids`` in
    vLLM. Prompt tokens, target tokens and padded tokens get no row. Padded requests repeat the last
    value in both cumulative arrays and get no row either.

    Every element of every output is written, so no value of an earlier window remains.

    Args:
        query_start_loc: int32 ``[>= Q + 1]``, contiguous. Index of the first token of each request, then the end.
        cu_num_draft_tokens: int32 ``[Q]``, contiguous. Cumulative number of drafts, including this request.
        slot_mappings: G tensors int64 ``[T]``, contiguous: the slots of this step, one tensor per group. On CUDA at
            most 128 groups.
        log_rows: int32 ``[>= T]``, contiguous; **mutated**: log row of each token; -1 = not a draft.
        row_slots: int64 ``[G, R]``, contiguous; **mutated**: slot of each log row per group; -1 = none.
        row_requests: int32 ``[R]``, contiguous; **mutated**: request of each log row; -1 = none.
        row_positions: int32 ``[R]``, contiguous; **mutated**: index of the draft among the drafts of its request, from
            0; -1 = none.
        counters: int64 ``[len(COUNTERS)]``; **mutated**: increments ``windows`` and ``drafted``, or ``overflowed`` if
            the window was not planned.
        draft_start_loc: int32 ``[>= Q + 1]``, contiguous; **mutated**: the first log row of each request. The number of
            drafts fills the rest. This index pointer counts only drafts, whatever the engine counts. The other ops of a
            window take it. Micro-batches of one batch write the same values.
        token_offset: None = a whole batch. Otherwise the call is for a micro-batch: the first T tokens of
            ``slot_mappings`` and ``log_rows`` are the tokens ``[token_offset, token_offset + T)`` of the batch. Rows of
            drafts outside it keep slot -1.
        num_bonus_tokens: number of tokens in ``cu_num_draft_tokens`` that are not drafts, per request, including padded
            ones. It is 1 for engines that count logits, such as vLLM's ``cu_num_logits``. The drafts of request q are
            ``num_bonus_tokens`` fewer than the difference above.
        leading_zero: whether ``cu_num_draft_tokens`` is ``[Q + 1]`` and begins with a 0 before the first request's
            count, as vLLM's ``cu_num_logits`` and other index pointers do. CUDA does not read the 0.

    Raises:
        ValueError: on the CPU, more than R drafts, a decreasing cumulative array, more drafts than tokens in a request,
            or tokens beyond T (in a whole batch). CUDA leaves such a window unplanned: every row is -1, no request has
            a draft in ``draft_start_loc``, and ``overflowed`` counts it.

    Example:
        >>> import torch
        >>> def filled(*shape, dtype=torch.int32):
        ...     return torch.full(shape, -1, dtype=dtype)
        >>> query_start_loc = torch.tensor([0, 3, 4], dtype=torch.int32)  # requests of 3 and 1 tokens
        >>> cu_num_draft_tokens = torch.tensor([2, 2], dtype=torch.int32)  # with 2 and 0 drafts
        >>> log_rows, row_slots = filled(4), filled(1, 2, dtype=torch.int64)
        >>> counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64)
        >>> draft_start_loc = filled(3)
        >>> nwor_ops.plan_window(
        ...     query_start_loc, cu_num_draft_tokens, [torch.tensor([8, 9, 10, 3])],
        ...     log_rows, row_slots, filled(2), filled(2), counters, draft_start_loc,
        ... )
        >>> log_rows.tolist(), row_slots.tolist(), draft_start_loc.tolist()
        ([-1, 0, 1, -1], [[9, 10]], [0, 2, 2])
    """


@op(mutates=(), results=("accepted", "num_accepted"))
def acceptance_mask(
    draft_token_ids: Tensor, sampled_token_ids: Tensor, draft_start_loc: Tensor
) -> tuple[Tensor, Tensor]:
    """Compare the drafts with the sampled tokens and return which were accepted. It runs on the device without a sync.

    Draft j of request q is accepted if two conditions hold:

    - Every draft of q up to and including j equals the token sampled at its position. A negative token equals nothing.
    - The sampler continued after it: ``sampled_token_ids[q, j + 1]`` is not negative, if that column exists.

    The second condition detects a rejected draft whose replacement is the same token. vLLM's synthetic rejection
    sampler can produce such a replacement.

    Args:
        draft_token_ids: int32 or int64 ``[P]``, contiguous: the drafts of all requests in order.
        sampled_token_ids: int32 or int64 ``[>= Q, >= most drafts]``, any strides; negative = no token (vLLM's
            ``RejectionSampler`` writes -1).
        draft_start_loc: int32 ``[Q + 1]``, contiguous: index of the first draft of each request, then the number of
            drafts, which is at most P. It begins with 0. :func:`plan_window` writes it.

    Returns:
        ``accepted``, bool ``[P]`` (False after the last draft), and ``num_accepted``, int32 ``[Q]``: number of accepted
            drafts of each request.

    Raises:
        ValueError: on the CPU, a ``draft_start_loc`` that does not begin with 0, decreases or counts more drafts than
            there are. Also a request with more drafts than ``sampled_token_ids`` has columns. On CUDA such values
            change only the results, and drafts without a column are rejected.

    Example:
        >>> import torch
        >>> drafts = torch.tensor([5, 6, 7])  # two drafts of the first request, one of the second
        >>> sampled = torch.tensor([[5, 9, -1], [7, 8, -1]])
        >>> starts = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> accepted, num_accepted = nwor_ops.acceptance_mask(drafts, sampled, starts)
        >>> accepted.tolist(), num_accepted.tolist()
        ([True, False, True], [1, 1])
    """
    return _new_mask(draft_start_loc, draft_token_ids.shape[0])


@op(mutates=(), results=("accepted", "num_accepted"))
def acceptance_mask_from_rejected(
    num_rejected: Tensor, draft_start_loc: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`acceptance_mask` for runners that know how many drafts were rejected.

    Args:
        num_rejected: int32 ``[>= Q]``, contiguous: number of rejected drafts of each request. Its last drafts are the
            rejected ones. Values are clamped to [0, number of drafts].
        draft_start_loc: as in :func:`acceptance_mask`.
        num_draft_tokens: P, the length of the mask: a host integer below 2^31, an upper bound of the number of drafts.

    Returns:
        ``accepted``, bool ``[P]``, and ``num_accepted``, int32 ``[Q]``.

    Example:
        >>> import torch
        >>> counts, starts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> accepted, num_accepted = nwor_ops.acceptance_mask_from_rejected(counts, starts, 3)
        >>> accepted.tolist(), num_accepted.tolist()
        ([True, False, True], [1, 1])
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
    """Write the result of :func:`acceptance_mask` into the buffers of a window, as :func:`restore_slots` takes it.

    It allocates nothing, so it can run between begin and commit.

    Args:
        draft_token_ids, sampled_token_ids, draft_start_loc: as in :func:`acceptance_mask`.
        row_rejected: bool ``[R]``, contiguous; **mutated**, every element: True for a rejected draft.
        num_accepted: int32 ``[>= Q]``, contiguous; **mutated**, every element; 0 after the first Q.
        counters: int64 ``[len(COUNTERS)]``; **mutated**: increments ``accepted`` and ``rejected``.

    A window that :func:`plan_window` did not plan has no drafts: every row is False and nothing is counted.

    Example:
        >>> import torch
        >>> row_rejected = torch.zeros(4, dtype=torch.bool)
        >>> num_accepted = torch.zeros(1, dtype=torch.int32)
        >>> counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64)
        >>> starts = torch.tensor([0, 2], dtype=torch.int32)
        >>> nwor_ops.reject_rows(
        ...     torch.tensor([5, 6]), torch.tensor([[5, 9, -1]]), starts, row_rejected, num_accepted, counters
        ... )
        >>> row_rejected.tolist(), num_accepted.tolist()
        ([False, True, False, False], [1])
    """
