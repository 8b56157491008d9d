"""The audit of mode ``"stage"``: not only after commit, at every moment of a step no page that a request owns holds a
rejected row.

- When a window has been opened: every draft names a slot of a shadow page of its group.
- After the forward, and once more before sampling: the shadow page of a request's first draft holds the committed rows
  of the page that it stands for, which attention read there. Outside the shadow pages the cache holds what it held
  before the step, and the rows of tokens that were not redirected (prompts, tokens before the tail page); nothing else.
- After commit: as in mode ``"cow"``, outside the shadow pages.

Rows are expected as vLLM's own writer makes them, from the keys and values that it was given. Where it was not asked
(a fused kernel wrote, or the model itself), what such a row should be is what was found in the shadow page.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nwor_ops.vllm.audit.recurrent import RecurrentGroup
from nwor_ops.vllm.audit.undo import (
    SHADOW,
    AuditedStep,
    AuditError,
    CacheAudit,
    either,
    elements_of,
    listed,
    rows_at,
    slot_elements,
    slots_of,
)
from nwor_ops.vllm.layers.target import TargetLayer


class StageAudit(CacheAudit):
    """Audits one model runner in mode ``"stage"``.

    Args:
        layers, max_num_tokens, others_write, recurrent: as in :class:`CacheAudit`.
        shadow_blocks: the shadow pages of each group.
    """

    def __init__(
        self,
        layers: list[TargetLayer],
        max_num_tokens: int,
        shadow_blocks: Mapping[str, range],
        others_write: bool = False,
        recurrent: Sequence[RecurrentGroup] = (),
    ) -> None:
        super().__init__(layers, max_num_tokens, others_write, recurrent)
        self._shadow_blocks = shadow_blocks
        shadows = {group: torch.tensor(blocks) for group, blocks in shadow_blocks.items()}
        self._shadows = {address: self._bytes_of_blocks(address, shadows) for address in self._storages()}
        # Of the open window, per group: the slots that its tokens were redirected to, else their own.
        self._redirected: dict[str, Tensor] = {}
        self._forwarded: dict[int, torch.UntypedStorage] = {}
        self._cancelled = False  # whether the step that is compared ended without sampling

    # ------------------------------------------------------------ what the session tells of

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """Raises AuditError for a draft that was not redirected."""
        step = self._step
        if step is None:
            return
        self._forwarded = {}
        for group, own in step.slot_mappings.items():
            found = self._redirected[group] = slot_mappings[group][: len(own)].cpu().clone()
            blocks, size = self._shadow_blocks[group], self._block_sizes[group]
            in_shadow = (found >= blocks.start * size) & (found < blocks.stop * size)
            must = found != own
            must[self._draft_tokens(step)] = True
            wrong = must & (own >= 0) & ~in_shadow
            if wrong.any():
                raise AuditError(
                    f"nwor audit, step {self._totals.steps}: group {group}: these tokens must name a slot of blocks "
                    f"{blocks.start} to {blocks.stop - 1}: {listed(slots_of(found[wrong]), found)}"
                )

    def forwarded(self, moment: str) -> None:
        """Raises AuditError where attention did not read what is committed, or a page outside the shadow pages holds
        what is not committed yet."""
        super().forwarded(moment)
        step = self._step
        if step is None or not self._redirected:
            return
        for group in step.slot_mappings:
            tails = self._tails(step, group)
            for layer in self._layers.values():
                if layer.group == group:
                    self._compare_tails(step, moment, layer, *tails)
        images = {address: storage.clone() for address, storage in step.before.items()}
        self._write_rows(step, images, {group: self._redirected_tokens(step, group) for group in step.slot_mappings})
        unrecorded = self._unrecorded()
        self._forwarded = self._copies() if unrecorded else {}
        for layer in unrecorded:
            tokens = self._own_tokens(step, layer.group)
            self._copy_rows(layer, self._forwarded, images, step.slot_mappings[layer.group][tokens],
                            step.slot_mappings[layer.group][tokens])  # fmt: skip
        self._totals.moments += 1
        for address, storage in self._storages().items():
            wrong = self._differences(address, storage, images[address])
            if wrong is not None:
                raise AuditError(f"{moment}, " + self._complaint(step, self._layers_in(address), wrong, {}))

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """As :meth:`CacheAudit.commit`. Of a cancelled window nothing is promised of the slots that a layer was to
        write, and did not, but those of drafts."""
        self._cancelled = num_sampled is None
        try:
            super().commit(num_sampled, undone)
        finally:
            self._redirected = {}

    def drop(self) -> None:
        super().drop()
        self._redirected = {}

    def slot_states(self) -> dict[str, Tensor]:
        """As :meth:`CacheAudit.slot_states`; slots of shadow pages are SHADOW."""
        states = super().slot_states()
        for group, blocks in self._shadow_blocks.items():
            states[group][blocks.start : blocks.stop] = SHADOW
        return states

    # ------------------------------------------------------------ inside

    def _tails(self, step: AuditedStep, group: str) -> tuple[Tensor, Tensor]:
        """Of each request that is redirected, the slots from the start of its tail page to its first redirected token:
        its own, and those of the shadow page."""
        own, found, size = step.slot_mappings[group], self._redirected[group], self._block_sizes[group]
        tails = [(own[:0], own[:0])]
        for start, end in itertools.pairwise(step.query_start_loc):
            moved = torch.nonzero(found[start:end] != own[start:end])
            if len(moved) > 0:
                token = start + int(moved[0])
                rows = torch.arange(-int(own[token] % size), 0)
                tails.append((own[token] + rows, found[token] + rows))
        some, others = zip(*tails, strict=True)
        return torch.cat(some), torch.cat(others)

    def _compare_tails(self, step: AuditedStep, moment: str, layer: TargetLayer, own: Tensor, found: Tensor) -> None:
        storage = layer.kv_cache.untyped_storage()
        self._totals.tail_rows += len(own)
        for plane in layer.cache.planes:
            differ = (rows_at(plane, storage, own) != rows_at(plane, storage, found)).flatten(1).any(1).cpu()
            if differ.any():
                pairs = zip(own[differ].tolist(), found[differ].tolist(), strict=True)
                slots = ", ".join(f"{slot} (found at {other})" for slot, other in itertools.islice(pairs, 8))
                raise AuditError(
                    f"{moment}, nwor audit, step {self._totals.steps}: in layer {layer.name} attention did not read "
                    f"what is committed in {int(differ.sum())} slots: {slots}; query_start_loc "
                    f"{step.query_start_loc}, drafts {step.num_draft_tokens}"
                )

    def _make_expected(self, step: AuditedStep, rejected: list[int]) -> None:
        super()._make_expected(step, rejected)
        left_out = set(rejected)
        for group in self._redirected:
            tokens = [token for token in self._redirected_tokens(step, group) if token not in left_out]
            layers = [layer for layer in self._layers.values() if layer.group == group]
            self._totals.committed_rows += len(tokens) * len(layers)
            self._totals.committed_bytes += len(tokens) * sum(map(self._row_bytes, layers))
        for layer in self._unrecorded() if self._forwarded else ():
            own = torch.ones(len(step.slot_mappings[layer.group]), dtype=torch.bool)
            own[rejected] = False
            found = self._redirected[layer.group]
            self._copy_rows(layer, self._forwarded, step.before, found[own], step.slot_mappings[layer.group][own])
        if self._cancelled and self._redirected:
            self._expect_what_is_there(step, rejected)

    def _expect_what_is_there(self, step: AuditedStep, rejected: list[int]) -> None:
        """At the slots of tokens that a layer was not seen to write: cancel copied what their shadow pages held."""
        found = self._copies()
        for name, layer in self._layers.items():
            slots = step.slot_mappings[layer.group].clone()
            slots[rejected] = -1
            if name in self._recorders:
                slots[self._recorders[name].slot_mapping[: len(slots)].cpu() >= 0] = -1
            self._copy_rows(layer, found, step.before, slots, slots)

    def _redirected_tokens(self, step: AuditedStep, group: str) -> list[int]:
        return torch.nonzero(self._redirected[group] != step.slot_mappings[group]).flatten().tolist()

    def _own_tokens(self, step: AuditedStep, group: str) -> list[int]:
        own = step.slot_mappings[group]
        return torch.nonzero((self._redirected[group] == own) & (own >= 0)).flatten().tolist()

    def _unrecorded(self) -> list[TargetLayer]:
        """Layers whose own writer was never called."""
        return [layer for name, layer in self._layers.items() if name not in self._recorders]

    def _copy_rows(
        self,
        layer: TargetLayer,
        source: dict[int, torch.UntypedStorage],
        target: dict[int, torch.UntypedStorage],
        source_slots: Tensor,
        target_slots: Tensor,
    ) -> None:
        address = layer.kv_cache.untyped_storage().data_ptr()
        for plane in layer.cache.planes:
            found, made = elements_of(source[address], plane), elements_of(target[address], plane)
            for from_slot, to_slot in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
                if to_slot >= 0:
                    made[slot_elements(plane, to_slot)] = found[slot_elements(plane, from_slot)]

    def _row_bytes(self, layer: TargetLayer) -> int:
        views = (plane.view for plane in layer.cache.planes)
        return sum(view.shape[2] * view.shape[3] * view.element_size() for view in views)

    def _ignored(self, address: int) -> Tensor | None:
        return either(super()._ignored(address), self._shadows[address])
