"""The interface of the two modes: the undo log and the shadow pages, which keep rejected rows out of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nwor_ops.transaction.window import Layout, Window, WindowBuffers


class Capacity(NamedTuple):
    """The limits of a manager."""

    max_num_tokens: int
    max_num_requests: int
    max_draft_tokens: int
    max_drafts_per_request: int | None
    shadow_blocks: Mapping[str, int]
    device: torch.device


Redirects = list[tuple[list[Tensor], list[Tensor]]]
"""The slot mappings and block tables of each launch, which begin redirects."""


class Recovery(Protocol):
    """An undo log or shadow pages.

    Attributes:
        redirects: those of the open window, which begin sets; None in mode ``"cow"``.
    """

    redirects: Any  # Redirects | None; a mode narrows it

    @property
    def log_bytes(self) -> int:
        """Memory of the undo log in bytes."""

    @property
    def launches_per_window(self) -> int:
        """Number of kernels that begin and commit launch in addition to planning and finding the outcome."""

    def allocate(self, buffers: WindowBuffers) -> None:
        """Make every allocation. After a failure it can be called again."""

    def bind_begin(self, plan: Tensor, layout: Layout, sample: Window) -> Tensor:
        """Bind the launches of begin after the bound ``plan_window``, and return the handle of all.

        ``sample`` has as many requests as the largest window that the handle serves.
        """

    def bind_commit(self, begun: Tensor, sample: Window, num_rejected: Tensor) -> Tensor:
        """Bind the launches of a commit by counts. The first one also determines the outcome of the drafts."""

    def bind_commit_tokens(self, outcome: Tensor, sample: Window) -> Tensor:
        """Bind the launches of a commit after the bound ``reject_rows``."""

    def put_back(self, window: Window, num_requests: int) -> None:
        """Restore slots and tables after a begin that failed before or after any launch. It can be repeated."""

    def refresh(self, window: Window, num_requests: int) -> None:
        """Handle rows of requests that arrived after begin, before the slots of this step's tokens."""

    def forget(self, states: Sequence[int] | None) -> None:
        """Discard everything remembered of these request states; None = of all states."""
