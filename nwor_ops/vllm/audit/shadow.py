"""Audit of mode ``"stage"``: at no time during a step does a page of a request hold a rejected row.

- After a window is opened, every draft names a slot of a shadow page of its group.
- After the forward and again before sampling, two things hold. The shadow page of a request's first draft holds the
  committed rows of the page that it replaces, because attention reads them there. Outside the shadow pages only the
  rows of tokens that were not redirected have changed since the step began. These are prompts, and tokens before the
  tail page.
- After commit, the same check as in mode ``"cow"`` runs outside the shadow pages.

The expected rows come from vLLM's own writer, given the recorded keys and values. If that writer was never called (a
fused kernel or the model wrote the row), the row found in the shadow page is expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nwor_ops.vllm.audit.recurrent_groups import RecurrentGroup
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
from nwor_ops.vllm.transaction.layers.target import TargetLayer


class StageAudit(CacheAudit):
    """Audit one model runner in mode ``"stage"``.

    Args:
        layers: as in :class:`CacheAudit`.
        max_num_tokens: as in :class:`CacheAudit`.
        shadow_blocks: the shadow pages of each group, as block numbers.
        others_write: as in :class:`CacheAudit`.
        recurrent: as in :class:`CacheAudit`.
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
        # The slot of each token of the open window, per group: in a shadow page if the token was redirected.
        self._redirected: dict[str, Tensor] = {}
        self._forwarded: dict[int, torch.UntypedStorage] = {}
        self._cancelled = False  # whether the current step ended without sampling

    # ------------------------------------------------------------ events of the session

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """Check that every draft of the window was redirected.

        Raises:
            AuditError: a draft names a slot outside the shadow pages.
        """
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
                    f"nwor audit, step {self._totals.steps}: group {group}: the slots of these tokens must be in "
                    f"blocks {blocks.start} to {blocks.stop - 1}: {listed(slots_of(found[wrong]), found)}"
                )

    def abandoned(self) -> None:
        """Expect the rows of this step in the pages of the requests."""
        self._redirected = {}

    def forwarded(self, moment: str) -> None:
        """Compare the cache before the window ends.

        Raises:
            AuditError: a shadow page lacks the committed rows that attention reads, or a page outside the shadow pages
                holds a row that is not committed yet.
        """
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
        """Compare the cache after the step, as :meth:`CacheAudit.commit` does.

        After a cancelled window, the slots of tokens that a layer did not write may hold anything, except the slots of
        drafts.
        """
        self._cancelled = num_sampled is None
        try:
            super().commit(num_sampled, undone)
        finally:
            self._redirected = {}

    def drop(self) -> None:
        super().drop()
        self._redirected = {}

    def slot_states(self) -> dict[str, Tensor]:
        """Return the state of each slot, as :meth:`CacheAudit.slot_states` does. Slots of shadow pages are SHADOW."""
        states = super().slot_states()
        for group, blocks in self._shadow_blocks.items():
            states[group][blocks.start : blocks.stop] = SHADOW
        return states

    # ------------------------------------------------------------ inside

    def _tails(self, step: AuditedStep, group: str) -> tuple[Tensor, Tensor]:
        """Return the slots from the start of each redirected request's tail page to its first redirected token.

        There are two tensors: the request's own slots, and the slots of the shadow page that replaces its tail page.
        """
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
                    f"{moment}, nwor audit, step {self._totals.steps}: in layer {layer.name} attention read other rows "
                    f"than the committed ones of {int(differ.sum())} slots: {slots}; query_start_loc "
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
        """Accept the current bytes at the slots of tokens that a layer did not write: cancel copied them from the
        shadow pages."""
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
        """Return the layers whose own writer was never called."""
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
