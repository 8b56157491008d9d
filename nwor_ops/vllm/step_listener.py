"""StepListener: the events of a step, as methods to override.

:class:`~nwor_ops.vllm.transaction.session.Session` notifies its listeners. The audits and the KV connectors
are listeners. This file is not in ``runners``, because the session needs it and the runners need the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


class StepListener:
    """Receive the events of each step. Every method does nothing. Override the methods that you need.

    The methods are in the order of a step.

    A session prepares the arguments of :meth:`begin`, which may synchronize, only for listeners that override it. In
    mode ``"stage"``, the writers of the target layers are patched only if a listener overrides :meth:`record`.
    """

    def begin(
        self, query_start_loc: Sequence[int], num_draft_tokens: Sequence[int], slot_mappings: Mapping[str, Tensor]
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


class RecurrentListener:
    """Receive the events of one recurrent state per request. Every method does nothing. Override those that you need.

    A ``group`` holds the layers of a KV-cache group (``recurrent.page``). A plan is int32 ``[E, 4]`` with rows of
    source block, rows, first row and target block (0: none).
    """

    def folding_tails(self) -> None:
        """The forward is over, and the ends of prompts are about to be folded."""

    def folded(self, group: Any, plan: Tensor, counted: str = "folds") -> None:
        """Pending rows were folded by this plan, for the reason ``"folds"``, ``"prompt_folds"`` or ``"tail_folds"``.
        A fold of zero rows is a copy."""

    def moved(self, group: Any, plan: Tensor) -> None:
        """States moved from the sources of a plan to its targets, with their pending rows."""

    def began(self, group: Any, slots: Tensor) -> None:
        """The states in these blocks begin in the middle of a chunk."""

    def overwritten(self, group: Any, slots: Tensor) -> None:
        """A prompt is about to overwrite the states in these blocks."""

    def copied(self, copies: Sequence[tuple[int, int]]) -> None:
        """Whole blocks were copied, given as (source, target)."""

    def assigned(self, blocks: Iterable[int], may_be_loaded: bool = False) -> None:
        """Blocks got a new owner, or are shared by a prefix-cache hit. A KV connector may have loaded other states."""

    def exported(self, layer: Any, checkpoint: Any, emitted: Tensor, rows: Tensor | None) -> None:
        """vLLM wrote checkpoints of one layer. Its metadata has their blocks and offsets. ``emitted`` has the states of
        the prefill kernel; ``rows`` is the index there of each checkpoint (None: the same order)."""
