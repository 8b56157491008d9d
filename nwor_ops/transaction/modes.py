"""The interface of the two modes: the undo log and the shadow pages, which keep rejected rows out of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nwor_ops import validation
from nwor_ops.kv_cache import has_no_data
from nwor_ops.transaction.layers import Layer
from nwor_ops.transaction.protocol import State, Stateful
from nwor_ops.transaction.window import Layout, Window, WindowBuffers
from nwor_ops.validation import BoundToMemory


class Capacity(NamedTuple):
    """The limits of a manager."""

    max_num_tokens: int
    max_num_requests: int
    max_draft_tokens: int
    max_drafts_per_request: int | None
    shadow_blocks: Mapping[str, int]
    device: torch.device


class LayerWriter(BoundToMemory):
    """Writes the rows of one layer in the open window; :meth:`nwor_ops.DraftCommitManager.writer` returns it."""

    def __init__(self, layer: Layer, manager: Stateful[Layer], buffers: WindowBuffers, unscaled: Tensor) -> None:
        self._layer, self._manager, self._buffers, self._unscaled = layer, manager, buffers, unscaled

    def write(
        self,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        token_offset: int = 0,
    ) -> None:
        """See :meth:`nwor_ops.DraftCommitManager.write`."""
        raise NotImplementedError

    def log(self, slot_mapping: Tensor, token_offset: int = 0) -> None:
        """See :meth:`nwor_ops.DraftCommitManager.log`."""
        raise NotImplementedError

    def _has_nothing_to_write(self, method: str, tensor: Tensor) -> bool:
        """Return whether a tensor or the cache has no data. Raise outside a window, except in compiled or captured
        code."""
        if torch.compiler.is_compiling():
            return False
        if has_no_data(tensor) or has_no_data(self._layer.cache.planes[0].view):
            return True
        if self._manager._state is not State.OPEN:
            self._manager._require_window(method, self._layer.name, tensor)
        return False

    def _require_writable(self) -> None:
        if not self._layer.cache.writable:
            raise RuntimeError(
                f"write: the planes of layer {self._layer.name!r} are opaque; call log(), then the layer's own writer"
            )

    def _log_rows(self, method: str, token_offset: int, slot_mapping: Tensor) -> Tensor:
        """Return the log rows of a micro-batch. The ops accept more log rows than tokens."""
        log_rows = self._buffers.log_rows
        if type(token_offset) is int and token_offset == 0:
            return log_rows
        validation.token_offset(method, token_offset, slot_mapping.shape[0], log_rows.shape[0])
        return log_rows[token_offset:]


class Recovery(Protocol):
    """An undo log or shadow pages."""

    @property
    def log_bytes(self) -> int:
        """Memory of the undo log in bytes."""

    @property
    def launches_per_window(self) -> int:
        """Number of kernels that begin and commit launch in addition to planning and finding the outcome."""

    def allocate(self, buffers: WindowBuffers) -> None:
        """Make every allocation. After a failure it can be called again."""

    def writer(self, layer: Layer, manager: Stateful[Layer], unscaled: Tensor) -> LayerWriter:
        """Return the writer of a layer."""

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
