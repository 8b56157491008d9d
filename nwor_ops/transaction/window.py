"""A window: the draft tokens of one step, as the engine's device tensors and as our persistent buffers.

The engine describes a window with tensors that it has anyway. :class:`WindowBuffers` holds what the ops derive from
them. Its addresses never change, so a CUDA graph captured once reads the values of every later step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.validation import BoundToMemory


class Layout(NamedTuple):
    """What all windows of an engine share, for :meth:`nwor_ops.DraftCommitManager.bind`.

    The tensors are on the manager's device. They must not move or change their length while they are bound.

    Args:
        slot_mappings: int64 ``[T]`` per group of layers: slot of each token; negative = no slot.
        block_tables: int32 ``[>= Q, pages]`` per group of layers: the tables that attention will read. Required in mode
            ``"stage"``, which edits them and the slot mappings in place until the window is closed. Therefore the
            tensors of two groups must not share memory. Layers with the same slots belong to one group. The table
            entry of a token's page must be ``slot // block_size``. This is not checked: when the window is closed,
            the entries of redirected tokens get that value.
        num_bonus_tokens: number of tokens per request in ``cu_num_draft_tokens`` that are not drafts. Padded requests
            have them too. It is 1 for engines that count logits, such as vLLM's ``cu_num_logits``.
        leading_zero: whether ``cu_num_draft_tokens`` begins with a 0 before the first request's count.
        request_states: whether windows have ``request_states``.

    Example:
        >>> import torch
        >>> layout = nwor_ops.Layout(slot_mappings={"default": torch.full((16,), -1)})
    """

    slot_mappings: Mapping[str, Tensor]
    block_tables: Mapping[str, Tensor] | None = None
    num_bonus_tokens: int = 0
    leading_zero: bool = False
    request_states: bool = False


class Window(NamedTuple):
    """The draft tokens of one step, as the engine knows them. All tensors are on the manager's device.

    Args:
        query_start_loc: int32 ``[>= Q + 1]``: index of each request's first token in the flat batch, then the end.
        cu_num_draft_tokens: int32 ``[Q]``: cumulative number of drafts, including this request. Padded requests repeat
            the last value. With ``Layout.leading_zero`` its shape is ``[Q + 1]``.
        num_draft_tokens: number of drafts in the batch, or an upper bound. None if the host does not know it. If given,
            a window too large for the log raises before any launch. Commit then looks only at this many drafts, and
            rejected drafts beyond it stay. For a commit captured in a CUDA graph, the value must hold in every replay,
            so use None or the capacity.
        seq_lens: int32 ``[>= Q]``: length of each sequence including this step's tokens. Required in mode ``"stage"``.
        request_states: int32 or int64 ``[>= Q]``, or None. A stable number of each request, below ``max_num_requests``.
            It is negative for padded rows. With it, mode ``"stage"`` need not copy a page to its shadow page in every
            step. If one window has it, every window must have it, and the engine must call
            :meth:`~nwor_ops.DraftCommitManager.forget_shadow_pages` as described there.

    Example:
        >>> import torch
        >>> window = nwor_ops.Window(  # requests of 1 + 2 and 1 + 0 tokens: two drafts
        ...     query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32),
        ...     cu_num_draft_tokens=torch.tensor([2, 2], dtype=torch.int32),
        ... )
    """

    query_start_loc: Tensor
    cu_num_draft_tokens: Tensor
    num_draft_tokens: int | None = None
    seq_lens: Tensor | None = None
    request_states: Tensor | None = None

    @classmethod
    def from_counts(cls, query_start_loc: Tensor, counts: Iterable[int] | Tensor, **fields: Any) -> Window:
        """Return a window from the number of drafts of each request, in place of cumulative numbers.

        Args:
            query_start_loc: as in the window.
            counts: integers, or an int32 or int64 tensor ``[Q]`` on the manager's device. Padded requests have 0.
                From integers, ``num_draft_tokens`` is known too.
            fields: ``seq_lens`` and ``request_states``.

        Example:
            >>> import torch
            >>> window = nwor_ops.Window.from_counts(torch.tensor([0, 3, 4], dtype=torch.int32), [2, 0])
            >>> window.cu_num_draft_tokens.tolist(), window.num_draft_tokens
            ([2, 2], 2)
        """
        what = "Window.from_counts: counts"
        if isinstance(counts, Tensor):
            validation.tensor(what, counts, torch.int32, torch.int64, dims=1)
            return cls(query_start_loc, counts.cumsum(0, dtype=torch.int32), **fields)
        validation.tensor("Window.from_counts: query_start_loc", query_start_loc)
        validation.instance(what, counts, Iterable, "a tensor or integers")
        numbers = [validation.integer(f"{what}[{request}]", count, 0) for request, count in enumerate(counts)]
        ends = numbers_on(query_start_loc.device, list(accumulate(numbers))).int()
        return cls(query_start_loc, ends, num_draft_tokens=sum(numbers), **fields)


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Copy host integers, such as request states, to the device as int64 without synchronizing."""
    on_host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


class WindowBuffers(BoundToMemory):
    """The buffers that ops derive from the open window. They are allocated once.

    Attributes (capacities: T tokens, R log rows, G groups, Q requests):
        log_rows: int32 ``[T]``: log row of each token; -1 = not a draft.
        row_slots: int64 ``[G, R]``: slot of each log row; -1 = none.
        row_requests, row_positions: int32 ``[R]``: request of each row, and index among that request's drafts.
        row_rejected: bool ``[R]``: filled at commit.
        num_accepted: int32 ``[Q]``: filled at commit.
        draft_start_loc: int32 ``[Q + 1]``: first log row of each request; the rest repeats the number of drafts.
        counters: int64 ``[len(COUNTERS)]``. Its first element is also the number of the open window.
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
        self.counters = filled(0, len(ops.COUNTERS), dtype=torch.int64)
        self.window_id = self.counters[:1]

    def plan_arguments(self) -> dict[str, Tensor]:
        """Return the arguments of ``plan_window`` that are the same for every window."""
        names = ("log_rows", "row_slots", "row_requests", "row_positions", "counters", "draft_start_loc")
        return {name: getattr(self, name) for name in names}

    def outcome_arguments(self, num_requests: int) -> dict[str, Tensor]:
        """Return the arguments of the ops that determine which drafts were accepted, by name."""
        return {
            "draft_start_loc": self.draft_start_loc[: num_requests + 1],
            "row_rejected": self.row_rejected,
            "num_accepted": self.num_accepted,
            "counters": self.counters,
        }
