"""StepListener: the events of a step, as methods to override.

:class:`~nwor_ops.vllm.transaction.session.Session` notifies its listeners. The audits and the KV connectors
are listeners. This file is not in ``runners``, because the session needs it and the runners need the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nwor_ops.transaction.in_flight import Deferred


class StepListener:
    """Receive the events of each step. Every method does nothing. Override the methods that you need.

    The methods are in the order of a step. If the outcome of a step arrives in a later step, :meth:`deferred`,
    :meth:`undone` and :meth:`settled` replace :meth:`commit`.

    Attributes:
        needs_begin: call :meth:`begin`. Its arguments may need a synchronization with the device.
        needs_rows: call :meth:`record`. In mode ``"stage"``, the writers of the target layers are patched only for it.
    """

    needs_begin: bool = False
    needs_rows: bool = False

    def begin(
        self,
        query_start_loc: Sequence[int],
        num_draft_tokens: Sequence[int],
        slot_mappings: Mapping[str, Tensor],
        block_tables: Mapping[str, Tensor] | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        """The inputs of the step are prepared. Nothing is redirected or written yet. The step may still run without a
        window."""

    def loading(self) -> None:
        """A KV connector is about to load rows, or to wait for them."""

    def loaded(self) -> None:
        """The KV connector returned from the call that :meth:`loading` announced."""

    def abandoned(self) -> None:
        """The window was abandoned before the forward, which reads and writes the requests' own pages. :meth:`commit`
        still follows."""

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """The window is open. The forward will read these mappings, one per group."""

    def record(
        self, name: str, key: Tensor, value: Tensor, slot_mapping: Tensor, token_offset: int, rest: tuple[Any, ...]
    ) -> None:
        """A layer is about to write these rows. Also called outside a window: a graph captured there is replayed inside
        one."""

    def forwarded(self, moment: str) -> None:
        """The forward is over. Called after the forward, and again before sampling."""

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """The step is over.

        Args:
            num_sampled: synchronizes and returns the number of tokens sampled for each request. None after a
                cancellation.
            undone: whether the rows of rejected drafts are restored.
        """

    def drop(self) -> None:
        """A step that may have begun will receive no further events."""

    def deferred(self, deferred: Deferred | None) -> None:
        """The forward and the step are over. ``deferred`` identifies the window; it is None for a step without
        drafts."""

    def undone(self, deferred: Deferred, requests: Sequence[int]) -> None:
        """The drafts of these requests are undone, because their slots are about to be reused."""

    def settled(self, deferred: Deferred, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """The outcome of a deferred window is known. The other arguments are those of :meth:`commit`."""
