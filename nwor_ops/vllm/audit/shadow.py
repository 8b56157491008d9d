"""Audit of mode ``"stage"``: at no time during a step does a page of a request hold a rejected row.

- After a window is opened, every draft names a slot of a shadow page of its group.
- After the forward and again before sampling, the shadow page of a request's first draft holds the committed rows of
  the page that it replaces. Outside the shadow pages only the rows of tokens that were not redirected have changed.
- After commit, the same check as in mode ``"cow"`` runs outside the shadow pages.

The expected rows come from vLLM's own writer. If it was never called (a fused kernel or the model wrote the row), the
row found in the shadow page is expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nwor_ops.vllm.audit.cache import SHADOW, AuditedStep, AuditError, CacheAudit, Images, listed, pages, unmarked
from nwor_ops.vllm.audit.recurrent_groups import RecurrentGroup
from nwor_ops.vllm.transaction.layers.target import TargetLayer, elements, positions


class StageAudit(CacheAudit):
    """Audit one model runner in mode ``"stage"``.

    Args:
        layers, max_num_tokens, others_write, recurrent: as in :class:`CacheAudit`.
        shadow_blocks: the shadow pages of each group, as block numbers.
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
        self._shadows = {address: unmarked(storage) for address, storage in self._storages.items()}
        for layer in layers:
            for plane in layer.cache.planes:
                mask = self._shadows[layer.kv_cache.untyped_storage().data_ptr()]
                pages(mask, plane)[list(shadow_blocks[layer.group])] = -1
        # The slot of each token of the open window, per group: in a shadow page if the token was redirected.
        self._redirected: dict[str, Tensor] = {}
        self._forwarded: Images = {}  # the cache after the forward, if a layer's own writer was never called
        self._cancelled = False  # whether the current step ended without sampling

    # ------------------------------------------------------------ events of the session

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """Check that every draft of the window was redirected."""
        step = self._step
        if step is None:
            return
        self._forwarded = {}
        for group, own in step.slot_mappings.items():
            slots = self._redirected[group] = slot_mappings[group][: len(own)].cpu().clone()
            blocks, size = self._shadow_blocks[group], self._block_sizes[group]
            must = slots != own
            must[step.draft_tokens] = True
            wrong = must & (own >= 0) & ~((slots >= blocks.start * size) & (slots < blocks.stop * size))
            if wrong.any():
                raise AuditError(
                    f"nwor audit, step {self._totals.steps}: group {group}: the slots of these tokens must be in "
                    f"blocks {blocks.start} to {blocks.stop - 1}: {listed(slots[wrong].tolist(), slots)}"
                )

    def abandoned(self) -> None:
        """Expect the rows of this step in the pages of the requests."""
        self._redirected = {}

    def forwarded(self, moment: str) -> None:
        """Compare the cache before the window ends."""
        super().forwarded(moment)
        step = self._step
        if step is None or not self._redirected:
            return
        for group in step.slot_mappings:
            own, shadow = self._tails(step, group)
            for layer in self._layers_of(group):
                self._compare_tails(step, moment, layer, own, shadow)
        images = {address: image.clone() for address, image in self._settled.items()}
        moved = {group: self._redirected[group] != own for group, own in step.slot_mappings.items()}
        self._write(
            images, self._records(step), {group: mask.nonzero().flatten().tolist() for group, mask in moved.items()}
        )
        unrecorded = self._unrecorded()
        self._forwarded = self._copies() if unrecorded else {}
        for layer in unrecorded:
            own = step.slot_mappings[layer.group][~moved[layer.group]]
            self._copy_rows(layer, self._forwarded, images, own, own)
        self._totals.moments += 1
        self._compare(step, images, moment)

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

    # ------------------------------------------------------------ the expected images

    def _expect(self, step: AuditedStep, image: Images, rejected: list[int]) -> None:
        super()._expect(step, image, rejected)
        for group, shadow in self._redirected.items():
            own = step.slot_mappings[group].clone()
            own[rejected] = -1
            rows = int(((shadow != own) & (own >= 0)).sum())
            for layer in self._layers_of(group):
                views = [plane.view for plane in layer.cache.planes]
                self._totals.committed_rows += rows
                self._totals.committed_bytes += rows * sum(view[0, 0].numel() * view.element_size() for view in views)
                if layer.name not in self._recorders and self._forwarded:
                    self._copy_rows(layer, self._forwarded, image, shadow, own)
                if self._cancelled:  # cancel copied what the shadow page held where the layer did not write
                    slots = own.clone()
                    if layer.name in self._recorders:
                        slots[self._recorders[layer.name].slot_mapping[: len(slots)].cpu() >= 0] = -1
                    self._copy_rows(layer, self._storages, image, slots, slots)

    def _unrecorded(self) -> list[TargetLayer]:
        """Return the layers whose own writer was never called."""
        return [layer for name, layer in self._layers.items() if name not in self._recorders]

    def _copy_rows(self, layer: TargetLayer, source: Images, target: Images, sources: Tensor, targets: Tensor) -> None:
        """Copy rows of a layer from one image to another. Negative targets are skipped."""
        address = layer.kv_cache.untyped_storage().data_ptr()
        kept = targets >= 0
        for plane in layer.cache.planes:
            rows = elements(source[address], plane)[positions(plane, sources[kept])]
            elements(target[address], plane)[positions(plane, targets[kept])] = rows

    def _tails(self, step: AuditedStep, group: str) -> tuple[Tensor, Tensor]:
        """Return the slots from the start of each redirected request's tail page to its first redirected token.

        There are two tensors: the request's own slots, and the slots of the shadow page that replaces its tail page.
        """
        own, shadow, size = step.slot_mappings[group], self._redirected[group], self._block_sizes[group]
        tails = [(own[:0], own[:0])]
        for start, end in itertools.pairwise(step.query_start_loc):
            moved = torch.nonzero(shadow[start:end] != own[start:end])
            if len(moved) > 0:
                token = start + int(moved[0])
                rows = torch.arange(-int(own[token] % size), 0, device=own.device)
                tails.append((own[token] + rows, shadow[token] + rows))
        some, others = zip(*tails, strict=True)
        return torch.cat(some), torch.cat(others)

    def _compare_tails(self, step: AuditedStep, moment: str, layer: TargetLayer, own: Tensor, shadow: Tensor) -> None:
        self._totals.tail_rows += len(own)
        for plane in layer.cache.planes:
            image = elements(layer.kv_cache.untyped_storage(), plane)
            differ = (image[positions(plane, own)] != image[positions(plane, shadow)]).flatten(1).any(1).cpu()
            if differ.any():
                pairs = zip(own[differ].tolist(), shadow[differ].tolist(), strict=True)
                slots = ", ".join(f"{slot} (found at {other})" for slot, other in itertools.islice(pairs, 8))
                raise AuditError(
                    f"{moment}, nwor audit, step {self._totals.steps}: in layer {layer.name} attention read other rows "
                    f"than the committed ones of {int(differ.sum())} slots: {slots}; query_start_loc "
                    f"{step.query_start_loc}, drafts {step.num_draft_tokens}"
                )
