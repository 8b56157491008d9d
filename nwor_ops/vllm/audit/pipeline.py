"""Audit of a pipeline rank with deferred windows.

Other steps run before a window is settled, so an image of the cache from before the step does not tell what should be
there afterwards. This audit keeps two images instead, both made by vLLM's own writers:

- *settled*: the rows of prompt tokens, target tokens and accepted drafts.
- *now*: the same rows, and the drafts of deferred windows.

The cache is compared with the second image, byte for byte. This happens at the end of each forward, after a window is
settled, and after the drafts of a request that ended are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from nwor_ops.vllm.audit.cache import AuditedStep, CacheAudit, Records
from nwor_ops.vllm.audit.images import Images, bytes_of


class PipelineAudit(CacheAudit):
    """Audit one model runner with deferred windows (mode ``"cow"``). The arguments are those of :class:`CacheAudit`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settled: Images = {}
        self._now: Images = {}
        # By the manager's handle, in the order of steps. The records are of drafts only: other tokens have slot -1.
        self._deferred: dict[Any, tuple[AuditedStep, Records]] = {}

    def begin(
        self,
        query_start_loc: Sequence[int],
        num_draft_tokens: Sequence[int],
        slot_mappings: Mapping[str, Tensor],
        block_tables: Mapping[str, Tensor] | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        """Adopt the changes that vLLM made to the cache since the last comparison, for example by clearing or copying
        blocks."""
        self._step = self._begun(query_start_loc, num_draft_tokens, slot_mappings)
        present = self._copies()
        for address, image in present.items():
            settled = self._settled.setdefault(address, image.clone())
            if self._now:
                changed = bytes_of(image) != bytes_of(self._now[address])
                bytes_of(settled)[changed] = bytes_of(image)[changed]
        self._now = present

    def forwarded(self, moment: str) -> None:
        """Do nothing: :meth:`deferred` is called at the end of the forward."""

    def deferred(self, deferred: Any) -> None:
        """Compare the cache at the end of a forward. All rows of a step without a window are settled."""
        step, self._step = self._step, None
        if step is None:
            return
        # The next step overwrites the recorders.
        records = {
            name: (k.clone(), v.clone(), slots, rest) for name, (k, v, slots, rest) in self._records(step).items()
        }
        drafts = step.draft_tokens if deferred is not None else []
        self._write(self._settled, records, dict.fromkeys(step.slot_mappings, drafts))
        self._forget(records, sorted(set(range(step.query_start_loc[-1])).difference(drafts)))
        if deferred is not None:
            self._deferred[deferred] = step, records
        self._compare_now(step, "at the end of the forward")
        self._count_step(step)

    def undone(self, deferred: Any, requests: Sequence[int]) -> None:
        """Compare the cache after the drafts of some requests were undone."""
        step, records = self._deferred[deferred]
        tokens = [token for request in requests for token in step.drafts(request)]
        self._count_visible(step, tokens)
        self._forget(records, tokens)
        self._compare_now(step, "when requests ended")

    def settled(self, deferred: Any, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after a window was settled. If it was not ``undone``, the cache is taken as it is."""
        step, records = self._deferred.pop(deferred)
        rejected = self._rejected_tokens(step, None if num_sampled is None else num_sampled()) if undone else []
        self._write(self._settled, records, dict.fromkeys(step.slot_mappings, rejected))
        if undone:
            self._count_visible(step, rejected)
            self._compare_now(step, "when the window was settled")

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after a step was cancelled before its end. Its other tokens may or may not have been
        written."""
        step, self._step = self._step, None
        if step is not None:
            self._expect(step, self._settled, self._rejected_tokens(step, None))
            self._compare_now(step, "when the step was cancelled")

    def _forget(self, records: Records, tokens: Sequence[int]) -> None:
        for _, _, slots, _ in records.values():
            slots[list(tokens)] = -1

    def _compare_now(self, step: AuditedStep, moment: str) -> None:
        self._now = {address: image.clone() for address, image in self._settled.items()}
        for _, records in self._deferred.values():
            self._write(self._now, records)
        self._compare(step, self._now, moment)

    def _count_visible(self, step: AuditedStep, tokens: Sequence[int]) -> None:
        """Count the rows that were in a page of a request until now, and do not stay there."""
        masks = {address: bytes_of(image) != bytes_of(self._settled[address]) for address, image in self._now.items()}
        self._count_exposed(masks, {group: step.slots_of(group, tokens) for group in step.slot_mappings})
