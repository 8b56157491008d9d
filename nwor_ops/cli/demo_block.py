"""Watch one block of the cache: before a step, when its drafts are verified, and after its commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction.layers.target import elements, positions

COMMITTED, DRAFT = 1, 3  # 0 and 2 are the audit's FREE and STALE


class BlockWatch(StepListener):
    """Keep the states of a block in the first step in which a request has accepted and rejected drafts, all in it.

    Args:
        session: the session of the engine.
        audit: the audit of its cache, which was subscribed before.

    Attributes:
        panels: the states at ``before``, ``verified`` and ``after``: a digit per slot. Empty before that step.
    """

    def __init__(self, session: Any, audit: Any) -> None:
        self.panels: dict[str, str] = {}
        self._audit, self._layer = audit, next(iter(session.layers.values()))
        # By request: the block, the slots of the last token and the drafts in it, the block's states and its bytes.
        self._windows: dict[int, tuple[int, Tensor, Tensor, Tensor]] = {}
        self._verified: dict[int, Tensor] = {}

    def begin(
        self, query_start_loc: Sequence[int], num_draft_tokens: Sequence[int], slot_mappings: Any, *_: Any
    ) -> None:
        self._windows, slots = {}, slot_mappings[self._layer.group].cpu()
        for request, (end, drafts) in enumerate(zip(query_start_loc[1:], num_draft_tokens, strict=False)):
            own = slots[int(end) - int(drafts) - 1 : int(end)]
            block, first = divmod(int(own[0]), self._size)
            if drafts > 1 and block == int(own[-1]) // self._size and not self.panels:
                self._windows[request] = block, own % self._size, self._states(block, first), self._bytes(block)

    def forwarded(self, moment: str) -> None:
        for request, (block, own, states, before) in self._windows.items():
            written = (self._bytes(block) != before).any(1)
            self._verified[request] = states.clone()
            self._verified[request][own[1:]] = torch.where(written, DRAFT, states)[own[1:]].to(states.dtype)
            self._verified[request][own[:1]] = torch.where(written, COMMITTED, states)[own[:1]].to(states.dtype)

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        sampled = num_sampled() if num_sampled is not None and self._windows else []
        for request, (block, own, states, _) in self._windows.items() if sampled else ():
            if 1 < sampled[request] < len(own) and not self.panels:
                moments = states, self._verified[request], self._states(block, int(own[0]))
                names = ("before", "verified", "after")
                self.panels = {
                    name: "".join(map(str, digits.tolist())) for name, digits in zip(names, moments, strict=True)
                }

    @property
    def _size(self) -> int:
        return int(self._layer.cache.planes[0].view.shape[1])

    def _states(self, block: int, first: int) -> Tensor:
        states: Tensor = self._audit.slot_states()[self._layer.group][block]
        states[:first] = COMMITTED  # by steps without drafts too, which are not audited in the V2 runner
        return states

    def _bytes(self, block: int) -> Tensor:
        """Return what the first layer holds in a block: ``[slots, elements]``."""
        slots = block * self._size + torch.arange(self._size, device="cpu")
        storage = self._layer.kv_cache.untyped_storage()
        rows = [elements(storage, plane)[positions(plane, slots)].flatten(1) for plane in self._layer.cache.planes]
        return torch.cat(rows, dim=1).cpu()
