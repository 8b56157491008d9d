"""Which tokens of this step are drafts: the engine's device tensors, and our persistent ones.

A window is one verification step of one batch. The engine describes it with tensors it has anyway;
:class:`WindowBuffers` holds what the ops derive from them, at addresses that never change, so that a
CUDA graph captured once reads the values of every later step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nwor_ops import ops


class Window(NamedTuple):
    """One verification step, as the engine knows it. All tensors are on the manager's device.

    Args:
        query_start_loc: int32 ``[>= Q + 1]``: first token of each request in the flat batch, then the end.
        cu_num_draft_tokens: int32 ``[Q]``: drafts up to and including each request. Padded requests
            repeat the last value. With ``leading_zero`` ``[Q + 1]``.
        slot_mappings: int64 ``[T]`` per group of layers: the slot of each token, negative = none.
        num_draft_tokens: drafts in the whole batch (or an upper bound of them) where the host knows it,
            else None. With it a window too large for the log is refused before anything is launched,
            and commit looks at no more drafts than that: where there are more, rejected ones stay. Of a commit that a
            CUDA graph captures it must hold in every replay: None, or the capacity.
        num_bonus_tokens: tokens beside its drafts that ``cu_num_draft_tokens`` counts for each request, padded
            ones too: 1 where the engine counts logits, as vLLM's ``cu_num_logits``.
        leading_zero: whether ``cu_num_draft_tokens`` begins with a 0 before the first request's count.
        seq_lens: int32 ``[>= Q]``: length of each sequence with this step's tokens. Mode ``"stage"`` needs it.
        block_tables: int32 ``[>= Q, pages]`` per group of layers: the tables that attention will read. Mode
            ``"stage"`` needs them, and edits them and the slot mappings in place until the window is closed.
        request_states: int32 or int64 ``[>= Q]``, or None: a number of each request that stays its own, below
            ``max_num_requests``; negative in padded rows. With it mode ``"stage"`` need not copy a page to its shadow
            page in every step. Then every window must have it, and
            :meth:`~nwor_ops.DraftCommitManager.forget_shadow_pages` be called where it says.
    """

    query_start_loc: Tensor
    cu_num_draft_tokens: Tensor
    slot_mappings: Mapping[str, Tensor]
    num_draft_tokens: int | None = None
    num_bonus_tokens: int = 0
    seq_lens: Tensor | None = None
    block_tables: Mapping[str, Tensor] | None = None
    request_states: Tensor | None = None
    leading_zero: bool = False

    @property
    def num_requests(self) -> int:
        """Q, padded requests included."""
        return self.cu_num_draft_tokens.size(0) - self.leading_zero


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Numbers of the host, such as request states, as int64 there, without waiting for the device."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class WindowBuffers:
    """What the ops know of the open window. Allocated once.

    Attributes (T tokens, R log rows, G groups, Q requests: the capacities):
        log_rows: int32 ``[T]``: log row of each token, -1 = not a draft.
        row_slots: int64 ``[G, R]``: slot of each log row, -1 = none.
        row_requests, row_positions: int32 ``[R]``: request, and place among its drafts, of each row.
        row_rejected: bool ``[R]``: filled at commit.
        num_accepted: int32 ``[Q]``: filled at commit.
        draft_start_loc: int32 ``[Q + 1]``: first log row of each request, then the number of drafts to the end.
        draft_starts_of: its beginning for each number of requests: making a view in every step would cost the host more
            than looking it up.
        draft_starts: that of the open window, which ops take.
        counters: int64 ``[len(COUNTERS)]``; its first element is also the number of the open window.
    """

    def __init__(
        self,
        num_groups: int,
        max_num_tokens: int,
        max_draft_tokens: int,
        max_num_requests: int,
        device: torch.device,
    ) -> None:
        def filled(value: int, *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        self.log_rows = filled(-1, max_num_tokens, dtype=torch.int32)
        self.row_slots = filled(-1, num_groups, max_draft_tokens, dtype=torch.int64)
        self.row_requests = filled(-1, max_draft_tokens, dtype=torch.int32)
        self.row_positions = filled(-1, max_draft_tokens, dtype=torch.int32)
        self.row_rejected = filled(0, max_draft_tokens, dtype=torch.bool)
        self.num_accepted = filled(0, max_num_requests, dtype=torch.int32)
        self.draft_start_loc = filled(0, max_num_requests + 1, dtype=torch.int32)
        self.draft_starts_of = [self.draft_start_loc[: requests + 1] for requests in range(max_num_requests + 1)]
        self.draft_starts = self.draft_starts_of[0]
        self.counters = filled(0, len(ops.COUNTERS), dtype=torch.int64)
        self.window_id = self.counters[:1]
