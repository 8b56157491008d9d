"""The interface of the undo log and of shadow pages, the two ways to keep rejected rows out of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nwor_ops.transaction.layers import Layer
from nwor_ops.transaction.window import Window, WindowBuffers

# Slot mappings and block tables that each launch redirects and restores. Empty if another launch of its groups does it.
Redirects = list[tuple[list[Tensor], list[Tensor]]]


class Capacity(NamedTuple):
    """The limits of a manager."""

    max_num_tokens: int
    max_num_requests: int
    max_draft_tokens: int
    max_drafts_per_request: int | None
    shadow_blocks: Mapping[str, int]
    device: torch.device


class Recovery(Protocol):
    """An undo log or shadow pages. It is created with the layer table and the capacity, before all layers are
    registered."""

    def allocate(self, buffers: WindowBuffers) -> None:
        """Make every allocation. After a failure it can be called again."""

    @property
    def log_bytes(self) -> int:
        """Memory of the undo log in bytes."""

    @property
    def launches_per_window(self) -> int:
        """Number of kernels that :meth:`open` and :meth:`close` launch."""

    def check(self, window: Window) -> None:
        """Raise ValueError or TypeError if a window lacks a field that :meth:`open` needs, or has an invalid one."""

    def redirects(self, window: Window, slot_mappings: list[Tensor]) -> Redirects:
        """Return the slot mappings and block tables that each launch redirects and restores.

        The manager keeps them while the window is open, because the engine may refill the mappings of ``window``. Any
        exception means that :meth:`check` has an error to report.
        """

    def open(self, window: Window, redirects: Redirects) -> None:
        """Open a window after ``plan_window``."""

    def put_back(self, window: Window, redirects: Redirects) -> None:
        """Restore slots and tables if :meth:`open` raised before or after any of its launches. It is idempotent."""

    def write(
        self,
        layer: Layer,
        log_rows: Tensor,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        kv_cache_dtype: str,
    ) -> None:
        """Write a layer's keys and values with one kernel."""

    def log(self, layer: Layer, log_rows: Tensor, slot_mapping: Tensor) -> None:
        """Log the rows that an external writer is about to write."""

    def close(self, window: Window, redirects: Redirects, first: int = 0, num_drafts: int | None = None) -> None:
        """Keep the rows that ``buffers.row_rejected`` does not mark, in every layer. It is idempotent.

        Args:
            first: index of the first launch to make. The earlier ones were made before.
            num_drafts: number of drafts to look at; None = all.
        """

    def bind_open(self, window: Window, redirects: Redirects, plan: Tensor) -> Tensor:
        """Bind the launches of :meth:`open` after the bound ``plan_window``, and return the handle of all."""

    def bind_close(self, window: Window, redirects: Redirects, num_rejected: Tensor, begun: Tensor) -> Tensor:
        """Bind the launches of :meth:`close`, of which the first also finds out which rows were rejected.

        ``begun`` is what :meth:`bind_open` returned.
        """

    def bind_close_after(self, window: Window, redirects: Redirects, outcome: Tensor) -> Tensor:
        """Bind the launches of :meth:`close` after the bound op that finds out which rows were rejected."""

    def close_from_rejected(self, window: Window, redirects: Redirects, num_rejected: Tensor) -> None:
        """Make the first launch of :meth:`close`, which also finds out which rows were rejected."""

    def close_keeping_all(self, window: Window, redirects: Redirects) -> None:
        """Close a window and keep all its rows."""

    def refresh(self, window: Window) -> None:
        """Handle rows of requests that arrived after :meth:`open`, before the slots of this step's tokens."""

    def forget(self, states: Sequence[int] | None) -> None:
        """Discard everything remembered of these request states; None = of all states."""
