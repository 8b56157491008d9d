"""Audit of the KV cache: compare it, byte for byte, after each step with drafts.

Each storage has an image, the bytes that it must hold. A step is compared in the pages that it writes and in a part of
the rest (:mod:`nwor_ops.vllm.audit.watch`). The expected bytes come from vLLM itself. The layer's original writer
writes this step's keys and values into the image of the cache from before the step, at the slots of prompt, target and
accepted tokens only. The audit therefore shares no code with what it checks. It neither calls our kernels nor uses our
decision which drafts were rejected; it counts vLLM's sampled tokens on the host. For a hybrid model, only the recurrent
states that the step may change are left out (:mod:`nwor_ops.vllm.audit.watch`).

The rows that a step writes are recorded on the device, by a copy at each write site into buffers with fixed addresses.
A CUDA graph captures these copies, so a replay is audited like an eager step.

In mode ``"stage"``, no page of a request may hold a rejected row at any time during a step:

- After a window is opened, every draft names a slot of a shadow page of its group.
- After the forward and again before sampling, the shadow page of a request's first draft holds the committed rows of
  the page that it replaces. Outside the shadow pages only the rows of tokens that were not redirected have changed.
- If a layer's writer was never called (a fused kernel or the model wrote the row), the row found in the shadow page is
  expected after the commit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nwor_ops import validation
from nwor_ops.vllm.audit.watch import REST_BYTES, Pages, RecurrentGroup, Tiles, WatchedStorage
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction.layers.target import TargetLayer, elements, positions, same_place

FREE, COMMITTED, STALE = 0, 1, 2


class AuditError(AssertionError):
    """The cache does not hold the expected bytes."""


@dataclass
class AuditSummary:
    """Totals of an audited run: numbers, summed over steps."""

    steps: int = 0  # compared
    verify_steps: int = 0  # with at least one draft
    drafted: int = 0  # draft tokens
    accepted: int = 0
    rejected: int = 0
    bytes_compared: int = 0  # in all storages, once per step
    recurrent_bytes: int = 0  # bytes of recurrent states that were left out, in all groups
    stale_rows: int = 0  # slots of rejected drafts whose bytes differed after the step
    # In mode "stage":
    moments: int = 0  # comparisons after the forward and before sampling
    tail_rows: int = 0  # committed rows before the first draft that were compared with the copies that attention reads


class _Recorder:
    """The rows that a layer's writer is given in one step. Row t belongs to token t of the batch."""

    def __init__(self, max_num_tokens: int, key: Tensor, value: Tensor) -> None:
        self.key = key.new_zeros((max_num_tokens, *key.shape[1:]))
        self.value = value.new_zeros((max_num_tokens, *value.shape[1:]))
        self.slot_mapping = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=key.device)
        self.rest: tuple[Any, ...] = ()


@dataclass
class AuditedStep:
    """The data of a step."""

    query_start_loc: list[int]
    num_draft_tokens: list[int]
    slot_mappings: dict[str, Tensor]
    written: dict[str, Tensor]  # the blocks of these slots, by group, on the CPU
    recurrent: list[Tensor]  # the blocks whose states the step may change, for each recurrent group
    left_out: dict[WatchedStorage, Tensor] = field(default_factory=dict)  # what CacheAudit._left_out returned
    before_load: dict[int, Tensor] = field(default_factory=dict)  # the watched bytes, by address of the storage
    # The slot of each token of the open window, by group: in a shadow page if the token was redirected.
    redirected: dict[str, Tensor] = field(default_factory=dict)
    # The rows at these slots after the forward, by plane, of layers whose own writer was never called.
    forwarded: dict[str, list[Tensor]] | None = None

    def drafts(self, request: int) -> range:
        """Return the draft tokens of a request."""
        end = self.query_start_loc[request + 1]
        return range(end - self.num_draft_tokens[request], end)

    @property
    def draft_tokens(self) -> list[int]:
        return [token for request in range(len(self.num_draft_tokens)) for token in self.drafts(request)]

    def slots_of(self, group: str, tokens: Sequence[int]) -> Tensor:
        """Return the slots of some tokens, without those that have none: int64 on the CPU."""
        slots = self.slot_mappings[group][list(tokens)]
        return slots[slots >= 0]


def _differ(rows: list[Tensor], others: list[Tensor]) -> Tensor:
    """Return which rows of two lists of planes differ, bool ``[slots]`` on the CPU."""
    pairs = zip(rows, others, strict=True)
    return torch.stack([(some != other).flatten(1).any(1) for some, other in pairs]).any(0).cpu()


def listed(slots: list[int], slot_mapping: Tensor) -> str:
    token_of = {slot: token for token, slot in enumerate(slot_mapping.tolist())}
    texts = [f"{slot} (token {token_of[slot]})" for slot in slots[:8]]
    return ", ".join(texts) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


class CacheAudit(StepListener):
    """Audit one model runner, with a transaction in either mode or without one.

    Args:
        layers: the target layers.
        max_num_tokens: maximum number of tokens in one batch, padding included.
        others_write: whether a KV connector may write to the blocks of waiting requests at any time. If so, only the
            blocks that the step may write are compared. If a block of all layers is one page, everything in that page
            is compared.
        recurrent: the groups of recurrent layers of a hybrid model, which do not belong to the transaction.
        rest_bytes: how much each step compares besides the pages that it may write.
        shadow_blocks: in mode ``"stage"``, the shadow pages of each group, as block numbers.
    """

    def __init__(
        self,
        layers: list[TargetLayer],
        max_num_tokens: int,
        others_write: bool = False,
        recurrent: Sequence[RecurrentGroup] = (),
        rest_bytes: int = REST_BYTES,
        shadow_blocks: Mapping[str, range] | None = None,
    ) -> None:
        self.others_write = others_write
        self._layers = {layer.name: layer for layer in layers}
        # Caches of several layers may lie in one storage, and even share bytes.
        of_storages: dict[int, list[TargetLayer]] = {}
        for layer in layers:
            of_storages.setdefault(layer.kv_cache.untyped_storage().data_ptr(), []).append(layer)
        share = rest_bytes // max(1, len(of_storages))
        # Storages with pages of the same groups at the same places share their tiles.
        tiles: dict[tuple[Any, ...], Tiles] = {}
        self._watched: dict[int, WatchedStorage] = {}
        for address, own in of_storages.items():
            storage = own[0].kv_cache.untyped_storage()
            pages = ((layer.group, plane.view) for layer in own for plane in layer.cache.planes)
            places = ((group, view.storage_offset(), view.shape, view.stride(), view.dtype) for group, view in pages)
            layout = (storage.nbytes(), *places)
            self._watched[address] = WatchedStorage(storage, tiles.setdefault(layout, Tiles(storage, share)))
        self._watched_of = {layer.name: self._watched[address] for address, own in of_storages.items() for layer in own}
        self._recurrent = recurrent
        # For each recurrent group: the bytes of a block's states, in watched storages.
        self._state_bytes = [
            sum(state[0].nbytes for state in group.states if state.untyped_storage().data_ptr() in self._watched)
            for group in recurrent
        ]
        self._shadow_blocks = shadow_blocks or {}
        self._max_num_tokens = max_num_tokens
        self._recorders: dict[str, _Recorder] = {}
        self._step: AuditedStep | None = None
        self._totals = AuditSummary()
        self._block_sizes = {layer.group: layer.cache.planes[0].view.shape[1] for layer in layers}
        slots = {layer.group: layer.cache.num_slots for layer in layers}
        self._states = {group: torch.zeros(count, dtype=torch.uint8, device="cpu") for group, count in slots.items()}

    # ------------------------------------------------------------ events of the session

    def begin(
        self, query_start_loc: Sequence[int], num_draft_tokens: Sequence[int], slot_mappings: Mapping[str, Tensor]
    ) -> None:
        """Expect the cache as it is before the forward: vLLM may have cleared or copied blocks."""
        for recorder in self._recorders.values():
            recorder.slot_mapping.fill_(-1)  # no layer has written in this step yet
        starts = [int(start) for start in query_start_loc]
        slots = {group: mapping[: starts[-1]].cpu().clone() for group, mapping in slot_mappings.items()}
        written = {group: (own[own >= 0] // self._block_sizes[group]).unique() for group, own in slots.items()}
        recurrent = [group.blocks() for group in self._recurrent]
        self._step = AuditedStep(starts, [int(number) for number in num_draft_tokens], slots, written, recurrent)
        sizes = zip(recurrent, self._state_bytes, strict=True)
        self._totals.recurrent_bytes += sum(len(blocks) * size for blocks, size in sizes)
        of_layouts = {watched.tiles: watched for watched in self._watched.values()}  # one storage for all of a layout
        for tiles, watched in of_layouts.items():
            tiles.watch(self._pages(watched, written))
        for watched in self._watched.values():
            watched.expect(watched.read())

    def loading(self) -> None:
        """Copy the cache before a KV connector loads rows or waits for them."""
        if self._step is not None:
            self._step.before_load = {address: watched.read().clone() for address, watched in self._watched.items()}

    def loaded(self) -> None:
        """Expect the bytes that changed since :meth:`loading`, except in slots of drafts, which are never loaded."""
        step = self._step
        if step is None:
            return
        drafts = {group: step.slots_of(group, step.draft_tokens) for group in step.slot_mappings}
        for address, before in step.before_load.items():
            watched = self._watched[address]
            present = watched.read()
            changed = watched.marks(present != before)
            self._take_slots(watched, changed, drafts)
            watched.expect(torch.where(watched.marked(changed), present, watched.read(watched.image)))
        step.before_load = {}

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """Check that every draft of the window was redirected."""
        step = self._step
        if step is None or not self._shadow_blocks:
            return
        for group, own in step.slot_mappings.items():
            slots = step.redirected[group] = slot_mappings[group][: len(own)].cpu().clone()
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
        if self._step is not None:
            self._step.redirected = {}

    def record(
        self, name: str, key: Tensor, value: Tensor, slot_mapping: Tensor, token_offset: int, rest: tuple[Any, ...]
    ) -> None:
        """Record the rows of a layer's write. Also called outside a window: a graph captured there is replayed inside
        one."""
        if name not in self._recorders:
            self._recorders[name] = _Recorder(self._max_num_tokens, key, value)
        recorder, num_tokens = self._recorders[name], slot_mapping.shape[0]  # key and value may have padded rows
        validation.token_offset("nwor audit", name, token_offset, num_tokens, self._max_num_tokens)
        tokens = slice(token_offset, token_offset + num_tokens)
        recorder.key[tokens].copy_(key[:num_tokens])
        recorder.value[tokens].copy_(value[:num_tokens])
        recorder.slot_mapping[tokens].copy_(slot_mapping)
        recorder.rest = rest

    def forwarded(self, moment: str) -> None:
        """In mode ``"stage"``, compare the cache."""
        step = self._step
        if step is None or not step.redirected:
            return
        tails = {group: self._tails(step, group) for group in step.slot_mappings}
        for layer in self._layers.values():
            self._compare_tails(step, moment, layer, *tails[layer.group])
        if step.forwarded is None:
            self._expect_forward(step)
        self._totals.moments += 1
        self._compare(step, moment)

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after the step."""
        step, self._step = self._step, None
        if step is None:
            return
        rejected = self._rejected_tokens(step, None if num_sampled is None else num_sampled())
        slots = {group: step.slots_of(group, rejected) for group in step.slot_mappings}
        kept = {group: own.clone() for group, own in step.slot_mappings.items()}
        for own in kept.values():
            own[rejected] = -1
        self._write(kept)
        if step.redirected:
            self._expect_copies(step, kept, cancelled=num_sampled is None)
        stale = self._compare(step, rejected=slots, undone=undone)
        self._totals.steps += 1
        self._totals.verify_steps += any(step.num_draft_tokens)
        self._totals.bytes_compared += sum(watched.num_bytes for watched in self._watched.values())
        for group, own in kept.items():
            self._states[group][own[own >= 0]] = COMMITTED
            self._states[group][sorted(stale[group])] = STALE
            self._totals.stale_rows += len(stale[group])

    def drop(self) -> None:
        """Forget the open step. It ends without a result that could be compared."""
        self._step = None

    # ------------------------------------------------------------ results

    def summary(self) -> dict[str, int]:
        """Return the totals so far (see :class:`AuditSummary`)."""
        return asdict(self._totals)

    def slot_states(self) -> dict[str, Tensor]:
        """Return the state of each slot, FREE, COMMITTED or STALE: uint8 ``[num_blocks, block_size]`` per group."""
        return {group: states.view(-1, self._block_sizes[group]).clone() for group, states in self._states.items()}

    # ------------------------------------------------------------ the expected image

    def _write(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """Write the recorded rows to the image by vLLM's own writers. Those of negative slots are skipped."""
        on_device: dict[str, Tensor] = {}
        for name, recorder in self._recorders.items():
            layer = self._layers[name]
            if layer.group not in on_device:
                on_device[layer.group] = slot_mappings[layer.group].to(recorder.key.device)
            slots = on_device[layer.group]
            tokens = slice(len(slots))
            slots = slots.masked_fill(recorder.slot_mapping[tokens] < 0, -1)
            image = same_place(layer.kv_cache, self._watched_of[name].image)
            layer.own_writer(recorder.key[tokens], recorder.value[tokens], image, slots, *recorder.rest)

    def _expect_forward(self, step: AuditedStep) -> None:
        """Expect only the rows of tokens that were not redirected. Keep the other rows of layers without records."""
        step.forwarded = {}
        stay = {group: own.masked_fill(step.redirected[group] != own, -1) for group, own in step.slot_mappings.items()}
        self._write(stay)
        for layer in (layer for name, layer in self._layers.items() if name not in self._recorders):
            self._write_rows(layer, stay[layer.group], self._rows_of(layer, stay[layer.group]))
            step.forwarded[layer.name] = self._rows_of(layer, step.redirected[layer.group])

    def _expect_copies(self, step: AuditedStep, kept: Mapping[str, Tensor], cancelled: bool) -> None:
        """Expect the rows that the end of a window copied from shadow pages, in layers without records."""
        for layer in self._layers.values():
            own = kept[layer.group]
            if step.forwarded is not None and layer.name in step.forwarded:
                self._write_rows(layer, own, step.forwarded[layer.name])
            if cancelled:  # cancel copied what the shadow page held where the layer did not write: it may be anything
                if layer.name in self._recorders:
                    own = own.masked_fill(self._recorders[layer.name].slot_mapping[: len(own)].cpu() >= 0, -1)
                self._write_rows(layer, own, self._rows_of(layer, own))

    def _rows_of(self, layer: TargetLayer, slots: Tensor, image: Tensor | None = None) -> list[Tensor]:
        """Return the rows of a layer at some slots, by plane, in its cache, or in a tensor of the storage's size.

        Those of negative slots are arbitrary.
        """
        source = layer.kv_cache if image is None else image
        return [elements(source, plane)[positions(plane, slots.clamp(min=0))] for plane in layer.cache.planes]

    def _write_rows(self, layer: TargetLayer, slots: Tensor, rows: list[Tensor]) -> None:
        """Write rows of a layer to the image. Those of negative slots are skipped."""
        image, kept = self._watched_of[layer.name].image, slots >= 0
        for plane, values in zip(layer.cache.planes, rows, strict=True):
            elements(image, plane)[positions(plane, slots[kept])] = values[kept.to(values.device)]

    def _rejected_tokens(self, step: AuditedStep, num_sampled: list[int] | None) -> list[int]:
        """Return and count the rejected draft tokens. None: the step sampled nothing."""
        rejected: list[int] = []
        for request, drafts in enumerate(step.num_draft_tokens):
            accepted = 0 if num_sampled is None or drafts == 0 else max(num_sampled[request] - 1, 0)
            rejected += step.drafts(request)[accepted:]
            self._totals.drafted += drafts
            self._totals.accepted += accepted
        self._totals.rejected += len(rejected)
        return rejected

    # ------------------------------------------------------------ the comparison

    def _compare(
        self,
        step: AuditedStep,
        moment: str = "",
        rejected: Mapping[str, Tensor] | None = None,
        undone: bool = True,
    ) -> dict[str, set[int]]:
        """Compare the cache with its image, and return the slots of rejected drafts that hold other bytes, by group.

        If not ``undone``, these slots may. ``step`` and ``moment`` are for messages.
        """
        rejected = rejected or {}
        stale: dict[str, set[int]] = {group: set() for group in rejected}
        for watched in self._watched.values():
            wrong = watched.differences(functools.partial(self._left_out, step, watched))
            if wrong is None:
                continue
            for group, slots in self._take_slots(watched, wrong, rejected).items():
                stale[group] |= slots
            if undone or watched.marked(wrong).any():
                raise AuditError(self._complaint(step, watched, wrong, stale if undone else {}, moment))
        return stale

    def _take_slots(self, watched: WatchedStorage, marks: Tensor, slots: Mapping[str, Tensor]) -> dict[str, set[int]]:
        """Clear the marks of some slots of a storage, and return the slots that had one, by group."""
        marked: dict[str, set[int]] = {group: set() for group in slots}
        layers = [layer for layer in self._layers_in(watched) if layer.group in slots]
        for layer in layers:
            marked[layer.group] |= self._marked_slots(layer, marks, slots[layer.group])
        for layer in layers:
            for plane in layer.cache.planes:
                elements(marks, plane)[positions(plane, slots[layer.group])] = 0
        return marked

    def _marked_slots(self, layer: TargetLayer, marks: Tensor, slots: Tensor) -> set[int]:
        """Return the slots of a layer that have a mark. Their pages are watched."""
        rows = self._rows_of(layer, slots, marks)
        return set(slots[_differ(rows, [torch.zeros_like(row) for row in rows])].tolist())

    def _tails(self, step: AuditedStep, group: str) -> tuple[Tensor, Tensor]:
        """Return the slots from the start of each redirected request's tail page to its first redirected token.

        There are two tensors: the request's own slots, and the slots of the shadow page that replaces its tail page.
        """
        own, shadow, size = step.slot_mappings[group], step.redirected[group], self._block_sizes[group]
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
        differ = _differ(self._rows_of(layer, own), self._rows_of(layer, shadow))
        if differ.any():
            wrong = zip(own[differ].tolist(), shadow[differ].tolist(), strict=True)
            slots = ", ".join(f"{slot} (found at {other})" for slot, other in itertools.islice(wrong, 8))
            raise AuditError(
                f"{moment}, nwor audit, step {self._totals.steps}: in layer {layer.name} attention read other rows "
                f"than the committed ones of {int(differ.sum())} slots: {slots}; query_start_loc "
                f"{step.query_start_loc}, drafts {step.num_draft_tokens}"
            )

    def _complaint(
        self, step: AuditedStep, watched: WatchedStorage, wrong: Tensor, stale: Mapping[str, set[int]], moment: str
    ) -> str:
        text = f"{moment}{', ' if moment else ''}nwor audit, step {self._totals.steps}:"
        for group, slots in stale.items():
            if slots:
                tokens = listed(sorted(slots), step.slot_mappings[group])
                text += f" rejected drafts of group {group} left their rows in slots {tokens};"
        if count := int(watched.marked(wrong).sum()):
            text += f" {count} bytes differ from the expected ones"
            for layer in self._layers_in(watched):
                own = step.slot_mappings[layer.group]
                if slots := self._marked_slots(layer, wrong, own[own >= 0]):
                    text += f", in layer {layer.name} slots {listed(sorted(slots), own)}"
            view = next(self._layers_in(watched)).cache.planes[0].view
            size = view.stride(0) * view.element_size()
            offsets = watched.offsets(wrong) - int(view.storage_offset()) * view.element_size()
            blocks, within = (offsets // size).unique().tolist(), offsets % size
            text += (
                f", in blocks {blocks[:8]}{' and others' if len(blocks) > 8 else ''}, bytes {int(within.min())} to "
                f"{int(within.max())} of the {size} bytes of a block;"
            )
        return text + f" query_start_loc {step.query_start_loc}, drafts {step.num_draft_tokens}"

    # ------------------------------------------------------------ bytes that are compared, and those that are not

    def _left_out(self, step: AuditedStep, watched: WatchedStorage) -> Tensor | None:
        """Return the watched bytes that others may change, bool ``[tiles, bytes]``: states of this step, shadow pages,
        and what a KV connector may write."""
        if not self.others_write and not step.recurrent and not self._shadow_blocks:
            return None
        if watched in step.left_out:
            return step.left_out[watched]
        marks = watched.marks(int(self.others_write))
        for pages in self._pages(watched, step.written):
            pages.mark(marks, 0)
        for group, blocks in zip(self._recurrent, step.recurrent, strict=True):
            for state in group.states:
                if state.untyped_storage().data_ptr() == watched.storage.data_ptr():
                    same_place(state.view(torch.uint8), marks.untyped_storage())[blocks] = 1
        shadow = {group: torch.tensor(blocks, device="cpu") for group, blocks in self._shadow_blocks.items()}
        for pages in self._pages(watched, shadow):
            pages.mark(marks, 1)
        step.left_out[watched] = watched.marked(marks)
        return step.left_out[watched]

    def _pages(self, watched: WatchedStorage, blocks: Mapping[str, Tensor]) -> Iterable[Pages]:
        """Return the pages in a storage of these blocks, by group."""
        layers = [layer for layer in self._layers_in(watched) if layer.group in blocks]
        return (Pages(plane.view, blocks[layer.group]) for layer in layers for plane in layer.cache.planes)

    def _layers_in(self, watched: WatchedStorage) -> Iterator[TargetLayer]:
        return (layer for layer in self._layers.values() if self._watched_of[layer.name] is watched)
