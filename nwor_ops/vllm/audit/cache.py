"""Audit of the KV cache: compare it, byte for byte, after each step with drafts.

A step is compared in the pages that it writes and in a part of the rest (:mod:`nwor_ops.vllm.audit.watch`). The
expected bytes come from vLLM itself. The layer's original writer writes this step's keys and values into a copy of the
cache from before the step, at the slots of prompt, target and accepted tokens only. The audit therefore shares no code
with what it checks. It neither calls our kernels nor uses our decision which drafts were rejected; it counts vLLM's
sampled tokens on the host. For a hybrid model, only the recurrent states that the step may change are left out
(:mod:`nwor_ops.vllm.audit.recurrent_groups`).

The rows that a step writes are recorded on the device, by a copy at each write site into buffers with fixed addresses.
A CUDA graph captures these copies, so a replay is audited like an eager step.

Mode ``"stage"`` is a subclass that supplies the expected image and more moments of comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.audit.recurrent_groups import RecurrentGroup
from nwor_ops.vllm.audit.watch import REST_BYTES, Pages, WatchedStorage, bytes_of
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction.layers.target import TargetLayer, elements, positions, same_place

FREE, COMMITTED, STALE, SHADOW = 0, 1, 2, 3
BEFORE_SAMPLING = "before sampling"

# Caches of several layers may lie in one storage, and even share bytes. So an image copies a storage.
Images = dict[int, torch.UntypedStorage]  # by the address of the storage that each of them copies
# By layer: key, value, slot of each token (-1: not written), and the further arguments of the layer's writer.
Records = dict[str, tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]]


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
    stale_rows_at_end: int = 0  # slots that still hold the row of a rejected draft
    exposed_rows: int = 0  # slots in pages of requests that held a draft before sampling which was then rejected
    # In mode "stage":
    moments: int = 0  # comparisons after the forward and before sampling
    committed_rows: int = 0  # rows that commit copied to pages of requests, in all layers; not only those of drafts
    committed_bytes: int = 0
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
    """The data of a step. ``touched`` has the slots of drafts that the forward changed, by group."""

    query_start_loc: list[int]
    num_draft_tokens: list[int]
    slot_mappings: dict[str, Tensor]
    touched: dict[str, set[int]] = field(default_factory=dict)

    def drafts(self, request: int) -> range:
        """Return the draft tokens of a request."""
        end = self.query_start_loc[request + 1]
        return range(end - self.num_draft_tokens[request], end)

    @property
    def draft_tokens(self) -> list[int]:
        return [token for request in range(len(self.num_draft_tokens)) for token in self.drafts(request)]

    def slots_of(self, group: str, tokens: Sequence[int]) -> list[int]:
        """Return the slots of some tokens, without those that have none."""
        return [slot for slot in self.slot_mappings[group][list(tokens)].tolist() if slot >= 0]


def listed(slots: list[int], slot_mapping: Tensor) -> str:
    token_of = {slot: token for token, slot in enumerate(slot_mapping.tolist())}
    texts = [f"{slot} (token {token_of[slot]})" for slot in slots[:8]]
    return ", ".join(texts) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


class CacheAudit(StepListener):
    """Audit one model runner in mode ``"cow"``, or without a transaction.

    Args:
        layers: the target layers.
        max_num_tokens: maximum number of tokens in one batch, padding included.
        others_write: whether a KV connector may write to the blocks of waiting requests at any time. If so, only the
            blocks of requests in the batch are compared. If a block of all layers is one page, everything in that page
            is compared.
        recurrent: the groups of recurrent layers of a hybrid model, which do not belong to the transaction.
        rest_bytes: how much each step compares besides the pages that it may write.
    """

    def __init__(
        self,
        layers: list[TargetLayer],
        max_num_tokens: int,
        others_write: bool = False,
        recurrent: Sequence[RecurrentGroup] = (),
        rest_bytes: int = REST_BYTES,
    ) -> None:
        self.others_write = others_write
        self._layers = {layer.name: layer for layer in layers}
        self._layers_in: dict[int, list[TargetLayer]] = {}
        for layer in layers:
            self._layers_in.setdefault(layer.kv_cache.untyped_storage().data_ptr(), []).append(layer)
        self._storages = {address: own[0].kv_cache.untyped_storage() for address, own in self._layers_in.items()}
        share = rest_bytes // max(1, len(self._storages))
        self._watched = {address: WatchedStorage(storage, share) for address, storage in self._storages.items()}
        self._recurrent = recurrent
        self._max_num_tokens = max_num_tokens
        self._recorders: dict[str, _Recorder] = {}
        self._step: AuditedStep | None = None
        # Only watched bytes of an image are valid.
        self._image = self._new_images()  # the cache before the step, then the expected cache
        self._loading: dict[int, Tensor] = {}  # the watched bytes before a load
        self._left_out: dict[int, Tensor] = {}  # mask of the bytes that others may change in this step
        self._marks: dict[int, Tensor] = {}  # a byte for each byte of a storage, zero outside of `_leave_out`
        self._shadows: dict[int, Tensor] = {}  # 1 for each byte of the shadow pages
        self._totals = AuditSummary()
        self._block_sizes = {layer.group: layer.cache.planes[0].view.shape[1] for layer in layers}
        slots = {layer.group: layer.cache.num_slots for layer in layers}
        self._states = {group: torch.zeros(count, dtype=torch.uint8, device="cpu") for group, count in slots.items()}

    # ------------------------------------------------------------ events of the session

    def begin(
        self,
        query_start_loc: Sequence[int],
        num_draft_tokens: Sequence[int],
        slot_mappings: Mapping[str, Tensor],
        block_tables: Mapping[str, Tensor] | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        """Expect the cache as it is before the forward: vLLM may have cleared or copied blocks."""
        for recorder in self._recorders.values():
            recorder.slot_mapping.fill_(-1)  # no layer has written in this step yet
        starts = [int(start) for start in query_start_loc]
        slots = {group: mapping[: starts[-1]].cpu().clone() for group, mapping in slot_mappings.items()}
        self._step = AuditedStep(starts, [int(number) for number in num_draft_tokens], slots)
        recurrent = [group.blocks() for group in self._recurrent]
        written = {group: (own[own >= 0] // self._block_sizes[group]).unique() for group, own in slots.items()}
        owned = None
        if self.others_write and block_tables is not None and seq_lens is not None:
            lens = seq_lens[: len(starts) - 1].tolist()
            owned = {group: self._blocks(group, table, lens) for group, table in block_tables.items()}
        self._left_out = {}
        for address, watched in self._watched.items():
            watched.watch(self._pages(address, owned or written, recurrent))
            watched.write(self._image[address], watched.read())
            if address in self._shadows:
                self._leave_out(address, self._shadows[address])
            if self._recurrent:
                self._leave_out_states(address, recurrent)
            if owned is not None:
                self._leave_out(address, self._pages_not_in(address, owned))
        self._forget_zeroed_blocks(owned or written)
        for group, states in self._states.items() if recurrent else ():  # these blocks hold no rows of tokens
            states.view(-1, self._block_sizes[group])[sorted(set().union(*recurrent))] = FREE

    def loading(self) -> None:
        """Copy the cache before a KV connector loads rows or waits for them."""
        open_step = self._step is not None
        self._loading = {address: watched.read().clone() for address, watched in self._watched.items() if open_step}

    def loaded(self) -> None:
        """Expect the bytes that changed since :meth:`loading`, except in slots of drafts, which are never loaded."""
        step, before = self._step, self._loading
        self._loading = {}
        if step is None:
            return
        drafts = {group: step.slots_of(group, step.draft_tokens) for group in step.slot_mappings}
        for address, values in before.items():
            watched = self._watched[address]
            present, expected = watched.read(), watched.read(self._image[address])
            changed = present != values
            self._take_slots(address, changed, drafts)
            watched.write(self._image[address], torch.where(changed, present, expected))

    def record(
        self, name: str, key: Tensor, value: Tensor, slot_mapping: Tensor, token_offset: int, rest: tuple[Any, ...]
    ) -> None:
        """Record the rows of a layer's write. Also called outside a window: a graph captured there is replayed inside
        one."""
        if name not in self._recorders:
            self._recorders[name] = _Recorder(self._max_num_tokens, key, value)
        recorder, num_tokens = self._recorders[name], slot_mapping.shape[0]  # key and value may have padded rows
        tokens = slice(token_offset, token_offset + num_tokens)
        recorder.key[tokens].copy_(key[:num_tokens])
        recorder.value[tokens].copy_(value[:num_tokens])
        recorder.slot_mapping[tokens].copy_(slot_mapping)
        recorder.rest = rest

    def forwarded(self, moment: str) -> None:
        """Note which drafts a page of a request holds before sampling."""
        step = self._step
        if step is not None and moment == BEFORE_SAMPLING:
            for group in step.slot_mappings:
                slots = step.slots_of(group, step.draft_tokens)
                step.touched[group] = self._changed_slots(group, slots)

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after the step."""
        step, self._step = self._step, None
        if step is None:
            return
        rejected = self._rejected_tokens(step, None if num_sampled is None else num_sampled())
        slots = {group: step.slots_of(group, rejected) for group in step.slot_mappings}
        self._totals.exposed_rows += sum(len(step.touched[group].intersection(slots[group])) for group in step.touched)
        self._expect(step, self._image, rejected)
        stale = self._compare(step, self._image, rejected=slots, undone=undone)
        self._count_step(step)
        for group, own in step.slot_mappings.items():
            kept = own.clone()
            kept[rejected] = -1
            self._states[group][kept[kept >= 0]] = COMMITTED
            self._states[group][sorted(stale[group])] = STALE
            self._totals.stale_rows += len(stale[group])

    def drop(self) -> None:
        """Forget the open step. It ends without a result that could be compared."""
        self._step = None

    # ------------------------------------------------------------ results

    def summary(self) -> dict[str, int]:
        """Return the totals so far (see :class:`AuditSummary`)."""
        self._totals.stale_rows_at_end = sum(int((states == STALE).sum()) for states in self._states.values())
        return asdict(self._totals)

    def slot_states(self) -> dict[str, Tensor]:
        """Return the state of each slot, FREE, COMMITTED or STALE: uint8 ``[num_blocks, block_size]`` per group."""
        return {group: states.view(-1, self._block_sizes[group]).clone() for group, states in self._states.items()}

    # ------------------------------------------------------------ the expected image

    def _expect(self, step: AuditedStep, image: Images, rejected: list[int]) -> None:
        """Turn the image from before the step into the expected image after it."""
        self._write(image, self._records(step), dict.fromkeys(step.slot_mappings, rejected))

    def _records(self, step: AuditedStep) -> Records:
        """Return the rows that the layers wrote in this step, each at its token's own slot."""
        records: Records = {}
        for name, recorder in self._recorders.items():
            own = step.slot_mappings[self._layers[name].group]
            tokens = slice(len(own))
            slots = own.to(recorder.key.device, copy=True).masked_fill_(recorder.slot_mapping[tokens] < 0, -1)
            records[name] = recorder.key[tokens], recorder.value[tokens], slots, recorder.rest
        return records

    def _write(self, images: Images, records: Records, without: Mapping[str, Sequence[int]] | None = None) -> None:
        """Write recorded rows to images of the cache by vLLM's own writers.

        ``without`` lists tokens of each group that are not written.
        """
        for name, (key, value, slots, rest) in records.items():
            layer = self._layers[name]
            if without is not None:
                slots = slots.clone()
                slots[list(without[layer.group])] = -1
            image = images[layer.kv_cache.untyped_storage().data_ptr()]
            layer.own_writer(key, value, same_place(layer.kv_cache, image), slots, *rest)

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
        images: Images,
        moment: str = "",
        rejected: Mapping[str, list[int]] | None = None,
        undone: bool = True,
    ) -> dict[str, set[int]]:
        """Compare the cache with the expected images.

        Args:
            step: the step, for messages.
            images: the expected images.
            moment: when this is, for messages.
            rejected: slots of rejected drafts by group.
            undone: whether these slots must hold the expected bytes too.

        Returns:
            The slots in ``rejected`` that hold other bytes, by group.
        """
        rejected = rejected or {}
        stale: dict[str, set[int]] = {group: set() for group in rejected}
        for address, watched in self._watched.items():
            wrong = watched.differences(images[address])
            if wrong is None:
                continue
            if (left_out := self._left_out.get(address)) is not None:
                wrong &= ~left_out
            if not wrong.any():
                continue
            for group, slots in self._take_slots(address, wrong, rejected).items():
                stale[group] |= slots
            if undone or wrong.any():
                raise AuditError(self._complaint(step, address, wrong, stale if undone else {}, moment))
        return stale

    def _take_slots(self, address: int, mask: Tensor, slots: Mapping[str, list[int]]) -> dict[str, set[int]]:
        """Clear the bytes of some slots in a mask of a storage, and return the slots that had a byte, by group."""
        marked: dict[str, set[int]] = {group: set() for group in slots}
        layers = [layer for layer in self._layers_in[address] if slots.get(layer.group)]
        for layer in layers:
            marked[layer.group] |= self._marked_slots(layer, address, mask, slots[layer.group])
        for layer in layers:
            for plane in layer.cache.planes:
                self._watched[address].clear_rows(mask, plane, slots[layer.group])
        return marked

    def _marked_slots(self, layer: TargetLayer, address: int, mask: Tensor, slots: Sequence[int]) -> set[int]:
        """Return the slots of a layer that have a byte in a mask of its storage."""
        values = [self._watched[address].row_values(mask, plane, slots) for plane in layer.cache.planes]
        return set(torch.tensor(slots, device="cpu")[torch.stack(values).any(0).cpu()].tolist())

    def _changed_slots(self, group: str, slots: Sequence[int]) -> set[int]:
        """Return the slots of a group whose rows differ from the image."""
        numbers = torch.tensor(slots, dtype=torch.int64, device="cpu")
        differ = torch.zeros(len(slots), dtype=torch.bool, device="cpu")
        for layer in self._layers_of(group):
            address = layer.kv_cache.untyped_storage().data_ptr()
            for plane in layer.cache.planes:
                place = positions(plane, numbers)
                rows, expected = (elements(one[address], plane)[place] for one in (self._storages, self._image))
                differ |= (rows != expected).flatten(1).any(1).cpu()
        return set(numbers[differ].tolist())

    def _count_step(self, step: AuditedStep) -> None:
        self._totals.steps += 1
        self._totals.verify_steps += any(step.num_draft_tokens)
        self._totals.bytes_compared += sum(watched.num_bytes for watched in self._watched.values())

    def _complaint(
        self, step: AuditedStep, address: int, wrong: Tensor, stale: Mapping[str, set[int]], moment: str
    ) -> str:
        text = f"{moment}{', ' if moment else ''}nwor audit, step {self._totals.steps}:"
        for group, slots in stale.items():
            if slots:
                tokens = listed(sorted(slots), step.slot_mappings[group])
                text += f" rejected drafts of group {group} left their rows in slots {tokens};"
        if wrong.any():
            text += f" {int(wrong.sum())} bytes differ from the expected ones"
            for layer in self._layers_in[address]:
                own = step.slot_mappings[layer.group]
                if slots := self._marked_slots(layer, address, wrong, own[own >= 0].tolist()):
                    text += f", in layer {layer.name} slots {listed(sorted(slots), own)}"
            view = self._layers_in[address][0].cache.planes[0].view
            size = view.stride(0) * view.element_size()
            offsets = self._watched[address].offsets(wrong) - int(view.storage_offset()) * view.element_size()
            blocks, within = (offsets // size).unique().tolist(), offsets % size
            text += (
                f", in blocks {blocks[:8]}{' and others' if len(blocks) > 8 else ''}, bytes {int(within.min())} to "
                f"{int(within.max())} of the {size} bytes of a block;"
            )
        return text + f" query_start_loc {step.query_start_loc}, drafts {step.num_draft_tokens}"

    # ------------------------------------------------------------ bytes that are compared, and those that are not

    def _pages(self, address: int, blocks: Mapping[str, Tensor], recurrent: Sequence[set[int]] = ()) -> Iterable[Pages]:
        """Return the pages in a storage of these blocks by group, and of these blocks of states."""
        for layer in self._layers_in[address]:
            yield from (Pages(plane.view, blocks[layer.group]) for plane in layer.cache.planes)
        for group, own in zip(self._recurrent, recurrent, strict=False):
            yield from group.pages(own, address)

    def _blocks(self, group: str, table: Tensor, seq_lens: list[int]) -> Tensor:
        """Return the blocks of the requests in a block table, by their lengths."""
        rows = table[: len(seq_lens)].cpu()
        size = self._block_sizes[group]
        return torch.cat([row[: -(-length // size)] for row, length in zip(rows, seq_lens, strict=True)]).long()

    def _leave_out(self, address: int, marks: Tensor) -> None:
        """Do not compare the marked bytes of a storage in this step, besides those that are left out already."""
        mask, known = self._watched[address].read(marks.untyped_storage()) != 0, self._left_out.get(address)
        self._left_out[address] = mask if known is None else known | mask

    def _leave_out_states(self, address: int, blocks: Sequence[set[int]]) -> None:
        """Do not compare the recurrent states that this step may change."""
        marks = self._cleared_marks(address)
        for group, own in zip(self._recurrent, blocks, strict=True):
            self._totals.recurrent_bytes += group.mark(own, marks, address)
        self._leave_out(address, marks)

    def _pages_not_in(self, address: int, blocks: Mapping[str, Tensor]) -> Tensor:
        """Return marks of the watched bytes of a storage that lie in no block of a layer, by group."""
        marks, watched = self._cleared_marks(address), self._watched[address]
        watched.write(marks.untyped_storage(), torch.ones_like(watched.read()))
        for pages in self._pages(address, blocks):
            pages.mark(marks, 0)
        return marks

    def _cleared_marks(self, address: int) -> Tensor:
        """Return marks of a storage. Those that this step watches are zero."""
        watched, storage = self._watched[address], self._storages[address]
        if address not in self._marks:
            self._marks[address] = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device)
        watched.write(self._marks[address].untyped_storage(), torch.zeros_like(watched.read()))
        return self._marks[address]

    def _forget_zeroed_blocks(self, blocks: Mapping[str, Tensor]) -> None:
        """Mark zeroed blocks as FREE: vLLM zeroes a block before it gives it to a new request."""
        for layer in {layer.group: layer for layer in self._layers.values()}.values():
            own = blocks[layer.group]
            zeroed = (layer.kv_cache[own.to(layer.kv_cache.device)] == 0).flatten(1).all(-1).cpu()
            self._states[layer.group].view(-1, self._block_sizes[layer.group])[own[zeroed]] = FREE

    # ------------------------------------------------------------ images

    def _layers_of(self, group: str) -> Iterable[TargetLayer]:
        return (layer for layer in self._layers.values() if layer.group == group)

    def _new_images(self) -> Images:
        return {address: torch.empty_like(bytes_of(own)).untyped_storage() for address, own in self._storages.items()}

    def _copy_images(self, source: Images, target: Images) -> None:
        for address, watched in self._watched.items():
            watched.write(target[address], watched.read(source[address]))
