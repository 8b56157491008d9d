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

from nwor_ops.vllm.audit.cache import SHADOW, AuditedStep, AuditError, CacheAudit, Images, listed
from nwor_ops.vllm.audit.recurrent_groups import RecurrentGroup
from nwor_ops.vllm.audit.watch import REST_BYTES, bytes_of
from nwor_ops.vllm.transaction.layers.target import TargetLayer, elements, positions


class StageAudit(CacheAudit):
    """Audit one model runner in mode ``"stage"``.

    Args:
        layers, max_num_tokens, others_write, recurrent, rest_bytes: as in :class:`CacheAudit`.
        shadow_blocks: the shadow pages of each group, as block numbers.
    """

    def __init__(
        self,
        layers: list[TargetLayer],
        max_num_tokens: int,
        shadow_blocks: Mapping[str, range],
        others_write: bool = False,
        recurrent: Sequence[RecurrentGroup] = (),
        rest_bytes: int = REST_BYTES,
    ) -> None:
        super().__init__(layers, max_num_tokens, others_write, recurrent, rest_bytes)
        self._shadow_blocks = shadow_blocks
        self._shadows = {address: torch.zeros_like(bytes_of(own)) for address, own in self._storages.items()}
        for layer in layers:
            for plane in layer.cache.planes:
                view, marks = plane.view, self._shadows[layer.kv_cache.untyped_storage().data_ptr()]
                pages = elements(marks, plane).as_strided(view.shape, view.stride(), int(view.storage_offset()))
                pages[list(shadow_blocks[layer.group])] = -1
        # The slot of each token of the open window, per group: in a shadow page if the token was redirected.
        self._redirected: dict[str, Tensor] = {}
        self._before_commit = self._new_images()  # the expected cache before the window ends
        self._built = False  # whether this is so for the current step
        # The rows at the redirected slots after the forward, by plane, of layers whose own writer was never called.
        self._forwarded: dict[str, list[Tensor]] = {}
        self._cancelled = False  # whether the current step ended without sampling

    # ------------------------------------------------------------ events of the session

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """Check that every draft of the window was redirected."""
        step = self._step
        if step is None:
            return
        self._forwarded, self._built = {}, False
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
        if not self._built:
            self._build(step)
        self._totals.moments += 1
        self._compare(step, self._before_commit, moment)

    def _build(self, step: AuditedStep) -> None:
        """Expect the cache before the window ends: only the rows of tokens that were not redirected are new."""
        self._built, images = True, self._before_commit
        self._copy_images(self._image, images)
        moved = {group: self._redirected[group] != own for group, own in step.slot_mappings.items()}
        self._write(
            images, self._records(step), {group: mask.nonzero().flatten().tolist() for group, mask in moved.items()}
        )
        for layer in (layer for name, layer in self._layers.items() if name not in self._recorders):
            own = step.slot_mappings[layer.group].masked_fill(moved[layer.group], -1)
            self._write_rows(layer, images, own, self._rows_of(layer, own))
            self._forwarded[layer.name] = self._rows_of(layer, self._redirected[layer.group])

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
                if layer.name in self._forwarded:
                    self._write_rows(layer, image, own, self._forwarded[layer.name])
                if self._cancelled:  # cancel copied what the shadow page held where the layer did not write
                    slots = own.clone()
                    if layer.name in self._recorders:
                        slots[self._recorders[layer.name].slot_mapping[: len(slots)].cpu() >= 0] = -1
                    self._write_rows(layer, image, slots, self._rows_of(layer, slots))

    def _rows_of(self, layer: TargetLayer, slots: Tensor) -> list[Tensor]:
        """Return the rows of a layer at some slots, by plane. Those of negative slots are arbitrary."""
        storage = layer.kv_cache.untyped_storage()
        return [elements(storage, plane)[positions(plane, slots.clamp(min=0))] for plane in layer.cache.planes]

    def _write_rows(self, layer: TargetLayer, images: Images, slots: Tensor, rows: list[Tensor]) -> None:
        """Write rows of a layer to an image. Those of negative slots are skipped."""
        image, kept = images[layer.kv_cache.untyped_storage().data_ptr()], slots >= 0
        for plane, values in zip(layer.cache.planes, rows, strict=True):
            elements(image, plane)[positions(plane, slots[kept])] = values[kept.to(values.device)]

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
