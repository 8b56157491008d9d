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

import torch
from torch import Tensor

from nwor_ops.vllm.audit.undo import AuditedStep, AuditError, CacheAudit, bytes_of, slots_of
from nwor_ops.vllm.transaction.layers.target import TargetLayer, same_place

# The arguments of one layer's writer in a step: key, value, slots, and the back end's further arguments.
Record = tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]


class _DeferredStep:
    """A step whose forward is over.

    Attributes:
        records: the recorded rows by layer. Tokens that are already settled have slot -1, so only drafts remain.
    """

    def __init__(self, step: AuditedStep, records: dict[str, Record]) -> None:
        self.step, self.records = step, records

    def rows(self, tokens: Sequence[int] | None = None, without: Sequence[int] = ()) -> dict[str, Record]:
        """Return the records of some tokens, or of all tokens, except those in ``without``."""
        found = {}
        for name, (key, value, slots, rest) in self.records.items():
            kept = slots.clone() if tokens is None else torch.full_like(slots, -1)
            if tokens is not None:
                kept[list(tokens)] = slots[list(tokens)]
            kept[list(without)] = -1
            found[name] = key, value, kept, rest
        return found

    def forget(self, tokens: Sequence[int]) -> None:
        for _, _, slots, _ in self.records.values():
            slots[list(tokens)] = -1

    def slots(self, tokens: Sequence[int], layer: TargetLayer) -> list[int]:
        return slots_of(self.records[layer.name][2][list(tokens)]) if layer.name in self.records else []


class PipelineAudit(CacheAudit):
    """Audit one model runner with deferred windows (mode ``"cow"``)."""

    def __init__(self, layers: list[TargetLayer], max_num_tokens: int) -> None:
        super().__init__(layers, max_num_tokens)
        self._settled: dict[int, torch.UntypedStorage] = {}
        self._now: dict[int, torch.UntypedStorage] = {}
        self._deferred_steps: dict[Any, _DeferredStep] = {}  # by the manager's handle, in the order of steps

    # ------------------------------------------------------------ events of the session

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
        self._step = self._begun(query_start_loc, num_draft_tokens, slot_mappings, {})
        found = self._copies()
        for address, storage in found.items():
            if address in self._settled:
                changed = bytes_of(storage) != bytes_of(self._now[address])
                bytes_of(self._settled[address])[changed] = bytes_of(storage)[changed]
            else:
                self._settled[address] = storage.clone()
        self._now = found

    def forwarded(self, moment: str) -> None:
        """Do nothing: :meth:`deferred` is called at the end of the forward."""

    def deferred(self, deferred: Any) -> None:
        """Compare the cache at the end of a forward. All rows of a step without a window are settled.

        Raises:
            AuditError: the forward changed anything but its rows.
        """
        step, self._step = self._step, None
        if step is None:
            return
        waiting = _DeferredStep(step, self._records(step))
        drafts = self._draft_tokens(step) if deferred is not None else []
        given = sorted(set(range(step.query_start_loc[-1])).difference(drafts))
        self._write(self._settled, waiting.rows(given))
        waiting.forget(given)
        if deferred is not None:
            self._deferred_steps[deferred] = waiting
        self._compare(waiting, "at the end of the forward")
        self._totals.steps += 1
        self._totals.verify_steps += any(step.num_draft_tokens)

    def undone(self, deferred: Any, requests: Sequence[int]) -> None:
        """Compare the cache after the drafts of some requests were undone.

        Raises:
            AuditError: a row of these drafts is still there.
        """
        waiting = self._deferred_steps[deferred]
        starts, drafts = waiting.step.query_start_loc, waiting.step.num_draft_tokens
        gone = [token for request in requests
                for token in range(starts[request + 1] - drafts[request], starts[request + 1])]  # fmt: skip
        self._count_exposed_rows(waiting, gone)
        waiting.forget(gone)
        self._compare(waiting, "when requests ended")

    def settled(self, deferred: Any, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after a window was settled. If it was not ``undone``, the cache is taken as it is.

        Raises:
            AuditError: the cache holds other rows of that step than the accepted ones.
        """
        waiting = self._deferred_steps.pop(deferred)
        if not undone:
            self._write(self._settled, waiting.rows())
            return
        rejected = self._rejected_tokens(waiting.step, None if num_sampled is None else num_sampled())
        self._write(self._settled, waiting.rows(without=rejected))
        self._count_exposed_rows(waiting, rejected)
        self._compare(waiting, "when the window was settled")

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after a step was cancelled before its end. Its other tokens may or may not have been
        written."""
        step, self._step = self._step, None
        if step is None:
            return
        waiting = _DeferredStep(step, self._records(step))
        rejected = self._rejected_tokens(step, None)
        self._write(self._settled, waiting.rows(without=rejected))
        self._compare(waiting, "when the step was cancelled")

    # ------------------------------------------------------------ inside

    def _records(self, step: AuditedStep) -> dict[str, Record]:
        found = {}
        for name, recorder in self._recorders.items():
            own = step.slot_mappings[self._layers[name].group]
            slots = own.to(recorder.slot_mapping.device, copy=True)
            slots.masked_fill_(recorder.slot_mapping[: len(slots)] < 0, -1)
            rows = len(slots)
            found[name] = recorder.key[:rows].clone(), recorder.value[:rows].clone(), slots, recorder.rest
        return found

    def _write(self, images: dict[int, torch.UntypedStorage], records: dict[str, Record]) -> None:
        for name, (key, value, slots, rest) in records.items():
            layer = self._layers[name]
            image = images[layer.kv_cache.untyped_storage().data_ptr()]
            layer.own_writer(key, value, same_place(layer.kv_cache, image), slots, *rest)

    def _compare(self, waiting: _DeferredStep, moment: str) -> None:
        expected = {address: storage.clone() for address, storage in self._settled.items()}
        for other in self._deferred_steps.values():
            self._write(expected, other.rows())
        self._now = expected
        self._totals.rows_checked += sum(layer.cache.num_slots for layer in self._layers.values())
        for address, storage in self._storages().items():
            wrong = self._differences(address, storage, expected[address])
            if wrong is not None:
                raise AuditError(f"{moment}, " + self._complaint(waiting.step, self._layers_in(address), wrong, {}))

    def _count_exposed_rows(self, waiting: _DeferredStep, tokens: Sequence[int]) -> None:
        """Count the rows that were in a page of a request until now, and do not stay there."""
        exposed: dict[str, set[int]] = {layer.group: set() for layer in self._layers.values()}
        for address, storage in self._now.items():
            differs = (bytes_of(storage) != bytes_of(self._settled[address])).cpu()
            for layer in self._layers_in(address):
                exposed[layer.group] |= self._changed_slots(differs, layer, waiting.slots(tokens, layer))
        self._totals.exposed_rows += sum(map(len, exposed.values()))
