"""What a manager asks of the two ways to keep rejected rows out of the cache, of which it knows no more than this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nwor_ops.transaction.layers import Layer
from nwor_ops.transaction.window import Window, WindowBuffers

# Slot mappings and block tables that each launch changes and puts back; none where another launch of its groups does.
Redirects = list[tuple[list[Tensor], list[Tensor]]]


class Capacity(NamedTuple):
    """What a manager was made for."""

    max_num_tokens: int
    max_num_requests: int
    max_draft_tokens: int
    max_drafts_per_request: int | None
    shadow_blocks: Mapping[str, int]
    device: torch.device


class Recovery(Protocol):
    """An undo log, or shadow pages. Made of layers and a capacity, before all layers are there."""

    def allocate(self, buffers: WindowBuffers) -> None:
        """All that is allocated. Where it fails, it can be called again."""

    @property
    def log_bytes(self) -> int:
        """Memory of the undo log."""

    @property
    def launches_per_window(self) -> int:
        """Kernels that :meth:`open` and :meth:`close` launch."""

    def check(self, window: Window) -> None:
        """Raises ValueError or TypeError where a window lacks what :meth:`open` needs, or has it in another form."""

    def redirects(self, window: Window, slot_mappings: list[Tensor]) -> Redirects:
        """What each launch will redirect and put back. To be kept while the window is open: ``window`` holds mappings
        that an engine may fill anew. Any exception means that :meth:`check` has something to say."""

    def open(self, window: Window, redirects: Redirects) -> None:
        """Open a window that ``plan_window`` has planned. If this raises, it is as it was."""

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
        """Write a layer's keys and values: one kernel."""

    def log(self, layer: Layer, log_rows: Tensor, slot_mapping: Tensor) -> None:
        """Be told of the rows that another writer is about to write."""

    def close(self, window: Window, redirects: Redirects, first: int = 0, num_drafts: int | None = None) -> None:
        """Keep the rows that ``buffers.row_rejected`` does not name, in every layer. Twice is the same as once.

        Args:
            first: the launch to begin with; those before it were made.
            num_drafts: no more drafts than these are looked at; None = all.
        """

    def close_from_rejected(self, window: Window, redirects: Redirects, num_rejected: Tensor) -> None:
        """The first launch of :meth:`close`, which finds out by itself what was rejected."""

    def close_keeping_all(self, window: Window, redirects: Redirects) -> None:
        """Close a window whose rows all stay."""

    def refresh(self, window: Window) -> None:
        """Rows of requests have arrived behind :meth:`open`, before the slots of this step's tokens."""

    def forget(self, states: Sequence[int] | None) -> None:
        """Rely on nothing that is remembered of these request states; None = of any."""
