"""Audit of the KV cache: compare the whole cache, byte for byte, after each step with drafts.

With vLLM's V1 runner, every step is compared. The expected bytes come from vLLM itself. The layer's original writer
writes this step's keys and values into a copy of the cache from before the step, at the slots of prompt, target and
accepted tokens only. The audit therefore shares no code with what it checks. It neither calls our kernels nor uses our
decision which drafts were rejected; it counts vLLM's sampled tokens on the host. For a hybrid model, only the recurrent
states that the step may change are left out (:mod:`nwor_ops.vllm.audit.recurrent_groups`).

The rows that a step writes are recorded on the device, by a copy at each write site into buffers with fixed addresses.
A CUDA graph captures these copies, so a replay is audited like an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nwor_ops.kv_cache import Plane
from nwor_ops.vllm.audit.recurrent_groups import RecurrentGroup
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction.layers.target import TargetLayer, same_place

FREE, COMMITTED, STALE, SHADOW = 0, 1, 2, 3
COUNTED_AT_ONCE = 1 << 25  # bytes of a mask


class AuditError(AssertionError):
    """The cache does not hold the expected bytes."""


@dataclass
class AuditSummary:
    """Totals of an audited run.

    Attributes:
        steps: number of steps compared.
        verify_steps: number of steps with at least one draft.
        drafted: number of draft tokens.
        accepted: number of accepted draft tokens.
        rejected: number of rejected draft tokens.
        rows_checked: number of slots compared, summed over layers and steps.
        bytes_compared: number of bytes compared, summed over layers and steps.
        recurrent_bytes: number of bytes of recurrent states that were left out, summed over steps.
        stale_rows: number of slots of rejected drafts whose bytes differed after the step, summed over steps.
        stale_rows_at_end: number of slots that still hold the row of a rejected draft.
        exposed_rows: number of slots in pages of requests that held a draft before sampling which was then rejected,
            summed over steps. 0 in mode ``"stage"``.
        moments: number of comparisons during a step: after the forward, and before sampling (mode ``"stage"``).
        committed_rows: number of rows that commit copied to pages of requests, summed over layers and steps (mode
            ``"stage"``). These are rows of accepted drafts, and of earlier tokens that were redirected too.
        committed_bytes: number of bytes of these rows.
        tail_rows: number of committed rows that were compared with the copies that attention reads, summed over layers
            and comparisons (mode ``"stage"``). They lie in the page of each request's first draft.
    """

    steps: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    rows_checked: int = 0
    bytes_compared: int = 0
    recurrent_bytes: int = 0
    stale_rows: int = 0
    stale_rows_at_end: int = 0
    exposed_rows: int = 0
    moments: int = 0
    committed_rows: int = 0
    committed_bytes: int = 0
    tail_rows: int = 0


class _Recorder:
    """The rows that a layer's writer is given in one step. Row t belongs to token t of the batch."""

    def __init__(self, max_num_tokens: int, key: Tensor, value: Tensor) -> None:
        self.key = key.new_zeros((max_num_tokens, *key.shape[1:]))
        self.value = value.new_zeros((max_num_tokens, *value.shape[1:]))
        self.slot_mapping = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=key.device)
        self.rest: tuple[Any, ...] = ()

    def record(
        self, key: Tensor, value: Tensor, slot_mapping: Tensor, token_offset: int, rest: tuple[Any, ...]
    ) -> None:
        num_tokens = slot_mapping.shape[0]  # key and value may have further, padded rows
        tokens = slice(token_offset, token_offset + num_tokens)
        self.key[tokens].copy_(key[:num_tokens])
        self.value[tokens].copy_(value[:num_tokens])
        self.slot_mapping[tokens].copy_(slot_mapping)
        self.rest = rest


@dataclass
class AuditedStep:
    """The data that is kept from begin to commit. ``before`` has a copy of each storage that holds a layer's cache."""

    query_start_loc: list[int]
    num_draft_tokens: list[int]
    slot_mappings: dict[str, Tensor]
    before: dict[int, torch.UntypedStorage]
    # Mask of the bytes that the forward changed, by storage.
    touched: dict[int, Tensor] = field(default_factory=dict)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slot_elements(plane: Plane, slot: int) -> Tensor:
    """Return the positions of a slot's elements in the storage of a plane, in units of elements."""
    view = plane.view
    _, block_size, num_heads, width = view.shape
    block, offset = divmod(slot, block_size)
    block_stride, slot_stride, head_stride, width_stride = view.stride()
    start = int(view.storage_offset()) + block * block_stride
    if plane.page_offsets is None:
        row = offset * slot_stride + torch.arange(width) * width_stride
    else:
        row = plane.page_offsets[offset].long().cpu()
    return start + torch.arange(num_heads)[:, None] * head_stride + row


def elements_of(storage: torch.UntypedStorage, plane: Plane) -> Tensor:
    """Return a storage as a tensor of integers with the element size of a plane."""
    dtype = INTEGERS[plane.view.element_size()]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def pages(plane: Plane, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of another storage with the layout of a plane, as integers."""
    view = plane.view
    like = torch.empty(0, dtype=INTEGERS[view.element_size()], device=storage.device)
    return like.set_(storage, view.storage_offset(), view.shape, view.stride())


def rows_at(plane: Plane, storage: torch.UntypedStorage, slots: Tensor) -> Tensor:
    """Return the rows of some slots in another storage with the layout of a plane: integers ``[slots, H, W]``."""
    view, slots = plane.view, slots.to(storage.device)
    blocks, offsets = slots // view.shape[1], slots % view.shape[1]
    if plane.page_offsets is None:
        return pages(plane, storage)[blocks, offsets]
    starts = int(view.storage_offset()) + blocks * view.stride(0)
    heads = torch.arange(view.shape[2], device=storage.device) * view.stride(2)
    in_page = heads[:, None] + plane.page_offsets[offsets][:, None]
    return elements_of(storage, plane)[starts[:, None, None] + in_page]


def _places(wrong: Tensor, layer: TargetLayer) -> str:
    """Name the blocks of a mask of bytes, and the part of a block that they lie in."""
    view = layer.cache.planes[0].view
    size = view.element_size()
    found = wrong.nonzero().flatten() - int(view.storage_offset()) * size
    blocks, within = found // (view.stride(0) * size), found % (view.stride(0) * size)
    numbers = blocks.unique().tolist()
    more = " and others" if len(numbers) > 8 else ""
    return (
        f"blocks {numbers[:8]}{more}, bytes {int(within.min())} to {int(within.max())} "
        f"of the {view.stride(0) * size} bytes of a block"
    )


def unmarked(storage: torch.UntypedStorage, device: torch.device | str | None = None) -> torch.UntypedStorage:
    """Return a storage of zeros with the same size, on the same device unless ``device`` is given."""
    marks = torch.UntypedStorage(storage.nbytes(), device=device or storage.device)
    bytes_of(marks).zero_()
    return marks


def count(mask: Tensor) -> int:
    """Return the number of True bytes of a flat mask.

    torch sums a copy with 8 bytes per element, which does not fit next to a large cache, so it sums parts.
    """
    return sum(int(part.sum()) for part in mask.split(COUNTED_AT_ONCE))


def either(some: Tensor | None, more: Tensor) -> Tensor:
    """Return the union of two masks; None is an empty mask."""
    return more if some is None else some | more


def slots_of(slot_mapping: Tensor) -> list[int]:
    return [slot for slot in slot_mapping.tolist() if slot >= 0]


def listed(slots: list[int], slot_mapping: Tensor) -> str:
    token_of = {slot: token for token, slot in enumerate(slot_mapping.tolist())}
    texts = [f"{slot} (token {token_of[slot]})" for slot in slots[:8]]
    return ", ".join(texts) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


class CacheAudit(StepListener):
    """Audit one model runner.

    The caches of several layers and groups may lie in one storage, and may even share bytes. The audit therefore
    compares storages, and finds the layer and slot of a wrong byte afterwards.

    Args:
        layers: the target layers.
        max_num_tokens: maximum number of tokens in one batch, padding included.
        others_write: whether a KV connector may write to the blocks of waiting requests at any time. If so, only the
            blocks of requests in the batch are compared. If a block of all layers is one page, everything in that page
            is compared.
        recurrent: the groups of recurrent layers of a hybrid model, which do not belong to the transaction.
    """

    needs_begin = needs_rows = True

    def __init__(
        self,
        layers: list[TargetLayer],
        max_num_tokens: int,
        others_write: bool = False,
        recurrent: Sequence[RecurrentGroup] = (),
    ) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self.others_write = others_write
        self._recurrent = recurrent
        # Mask of the bytes of each storage that recurrent layers or a connector may change in this step.
        self._left_out: dict[int, Tensor] = {}
        self._loading: dict[int, torch.UntypedStorage] = {}
        self._max_num_tokens = max_num_tokens
        self._recorders: dict[str, _Recorder] = {}
        self._step: AuditedStep | None = None
        self._totals = AuditSummary()
        self._states: dict[str, Tensor] = {}
        for layer in layers:
            self._states.setdefault(layer.group, torch.zeros(layer.cache.num_slots, dtype=torch.uint8))
        self._block_sizes = {layer.group: layer.cache.planes[0].view.shape[1] for layer in layers}

    # ------------------------------------------------------------ events of the session

    def begin(
        self,
        query_start_loc: Sequence[int],
        num_draft_tokens: Sequence[int],
        slot_mappings: Mapping[str, Tensor],
        block_tables: Mapping[str, Tensor] | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        """Copy the whole cache before the forward."""
        self._step = step = self._begun(query_start_loc, num_draft_tokens, slot_mappings, self._copies())
        self._forget_zeroed_blocks()
        self._left_out = self._recurrent_states() if self._recurrent else {}
        if self.others_write and block_tables is not None and seq_lens is not None:
            lens = seq_lens[: len(step.query_start_loc) - 1].tolist()
            owned = {group: self._blocks(group, table, lens) for group, table in block_tables.items()}
            for address in self._storages():
                others = ~self._bytes_of_pages(address, owned)
                self._left_out[address] = either(self._left_out.get(address), others)

    def _begun(
        self,
        query_start_loc: Sequence[int],
        num_draft_tokens: Sequence[int],
        slot_mappings: Mapping[str, Tensor],
        before: dict[int, torch.UntypedStorage],
    ) -> AuditedStep:
        """Return the new step. No layer has written in it yet."""
        for recorder in self._recorders.values():
            recorder.slot_mapping.fill_(-1)
        starts = [int(start) for start in query_start_loc]
        slots = {group: mapping[: starts[-1]].cpu().clone() for group, mapping in slot_mappings.items()}
        return AuditedStep(starts, [int(number) for number in num_draft_tokens], slots, before)

    def loading(self) -> None:
        """Copy the cache before a KV connector loads rows or waits for them."""
        self._loading = self._copies() if self._step is not None else {}

    def loaded(self) -> None:
        """Expect the bytes that changed since :meth:`loading`, except in slots of drafts, which are never loaded."""
        step, found = self._step, self._loading
        self._loading = {}
        if step is None:
            return
        for address in found:
            left = bytes_of(self._storages()[address])
            changed = left != bytes_of(found[address])
            if not changed.any():
                continue
            drafts = self._draft_tokens(step)
            slots = {group: slots_of(own[drafts]) for group, own in step.slot_mappings.items()}
            changed &= ~self._bytes_of_slots(address, slots).to(changed.device)
            bytes_of(step.before[address])[changed] = left[changed]

    def record(
        self, name: str, key: Tensor, value: Tensor, slot_mapping: Tensor, token_offset: int, rest: tuple[Any, ...]
    ) -> None:
        """Record the rows of a layer's write. Also called outside a window: a graph captured there is replayed inside
        one."""
        if name not in self._recorders:
            self._recorders[name] = _Recorder(self._max_num_tokens, key, value)
        self._recorders[name].record(key, value, slot_mapping, token_offset, rest)

    def forwarded(self, moment: str) -> None:
        """Note which bytes the forward changed. Called after the forward and again before sampling."""
        step = self._step
        if step is None:
            return
        for address, storage in self._storages().items():
            step.touched[address] = bytes_of(storage) != bytes_of(step.before[address])

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Compare the cache after the step.

        Args:
            num_sampled: returns the number of tokens that vLLM sampled for each request. None if the window was
                cancelled; then every draft counts as rejected.
            undone: whether rejected drafts must be undone. If False, their rows are only counted: a vanilla step leaves
                them by design. A change anywhere else is an error in both cases.

        Raises:
            AuditError: the cache does not hold the expected bytes.
        """
        step, self._step = self._step, None
        if step is None:
            return
        rejected = self._rejected_tokens(step, None if num_sampled is None else num_sampled())
        rejected_slots = {group: slots_of(slots[rejected]) for group, slots in step.slot_mappings.items()}
        self._count_exposed(step, rejected_slots)
        self._make_expected(step, rejected)
        stale = self._stale_slots(step, rejected_slots, undone)
        self._record(step, rejected, stale)

    def drop(self) -> None:
        """Forget the open step. It ends without a result that could be compared."""
        self._step = None

    def summary(self) -> dict[str, int]:
        """Return the totals so far (see :class:`AuditSummary`)."""
        self._totals.stale_rows_at_end = sum(int((states == STALE).sum()) for states in self._states.values())
        return asdict(self._totals)

    @property
    def recorded_layers(self) -> list[str]:
        """The names of the layers whose own writer was called at least once."""
        return list(self._recorders)

    def slot_states(self) -> dict[str, Tensor]:
        """Return the state of each slot, FREE, COMMITTED or STALE: uint8 ``[num_blocks, block_size]`` per group."""
        return {group: states.clone() for group, states in self._by_block().items()}

    # ------------------------------------------------------------ inside

    def _by_block(self) -> dict[str, Tensor]:
        """Return views of the slot states, ``[num_blocks, block_size]`` per group."""
        return {group: states.view(-1, self._block_sizes[group]) for group, states in self._states.items()}

    def _draft_tokens(self, step: AuditedStep) -> list[int]:
        ends = step.query_start_loc[1:]
        return [token for end, drafts in zip(ends, step.num_draft_tokens, strict=False)
                for token in range(end - drafts, end)]  # fmt: skip

    def _rejected_tokens(self, step: AuditedStep, num_sampled: list[int] | None) -> list[int]:
        rejected: list[int] = []
        for request, drafts in enumerate(step.num_draft_tokens):
            if drafts == 0:
                continue
            accepted = 0 if num_sampled is None else max(num_sampled[request] - 1, 0)
            end = step.query_start_loc[request + 1]
            rejected += range(end - (drafts - accepted), end)
            self._totals.drafted += drafts
            self._totals.accepted += accepted
            self._totals.rejected += drafts - accepted
        return rejected

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        storages = (layer.kv_cache.untyped_storage() for layer in self._layers.values())
        return {storage.data_ptr(): storage for storage in storages}

    def _layers_in(self, address: int) -> list[TargetLayer]:
        return [la for la in self._layers.values() if la.kv_cache.untyped_storage().data_ptr() == address]

    def _copies(self) -> dict[int, torch.UntypedStorage]:
        return {address: storage.clone() for address, storage in self._storages().items()}

    def _count_exposed(self, step: AuditedStep, rejected_slots: dict[str, list[int]]) -> None:
        exposed: dict[str, set[int]] = {group: set() for group in rejected_slots}
        for address, touched in step.touched.items():
            found = touched.cpu()
            for layer in self._layers_in(address):
                exposed[layer.group] |= self._changed_slots(found, layer, rejected_slots[layer.group])
        self._totals.exposed_rows += sum(map(len, exposed.values()))

    def _make_expected(self, step: AuditedStep, rejected: list[int]) -> None:
        """Turn the image from before the step into the expected image after it."""
        self._write_rows(step, step.before, dict.fromkeys(step.slot_mappings, rejected))
        self._totals.rows_checked += sum(layer.cache.num_slots for layer in self._layers.values())

    def _write_rows(
        self, step: AuditedStep, images: dict[int, torch.UntypedStorage], left_out: Mapping[str, list[int]]
    ) -> None:
        """Write the recorded rows of this step to images of the cache, each token at its own slot.

        ``left_out`` lists the tokens of each group that are not written.
        """
        sent: dict[str, Tensor] = {}  # copied to the device once per group, not once per layer
        for group, own in step.slot_mappings.items():
            slots = torch.full((self._max_num_tokens,), -1, dtype=torch.int64)
            slots[: len(own)] = own
            slots[left_out[group]] = -1
            sent[group] = slots
        for name, recorder in self._recorders.items():
            layer = self._layers[name]
            sent[layer.group] = slots = sent[layer.group].to(recorder.slot_mapping.device)
            slots = slots.masked_fill(recorder.slot_mapping < 0, -1)
            image = images[layer.kv_cache.untyped_storage().data_ptr()]
            layer.own_writer(recorder.key, recorder.value, same_place(layer.kv_cache, image), slots, *recorder.rest)

    def _ignored(self, address: int) -> Tensor | None:
        """Return a mask of the bytes of a storage that are not compared, on its device, or None."""
        return self._left_out.get(address)

    def _recurrent_states(self) -> dict[int, Tensor]:
        """Return masks of the recurrent states that this step may change, by storage. Their blocks hold no rows of
        tokens."""
        blocks = [group.blocks() for group in self._recurrent]
        for states in self._by_block().values():
            states[sorted(set().union(*blocks))] = FREE
        found = {}
        for address, storage in self._storages().items():
            marked = unmarked(storage)
            for group, own in zip(self._recurrent, blocks, strict=True):
                group.mark(own, marked, address)
            found[address] = bytes_of(marked) != 0
            self._totals.recurrent_bytes += count(found[address])
        return found

    def _blocks(self, group: str, table: Tensor, seq_lens: list[int]) -> Tensor:
        """Return the blocks of the requests in a block table, by their lengths."""
        rows = table[: len(seq_lens)].cpu()
        size = self._block_sizes[group]
        return torch.cat([row[: -(-length // size)] for row, length in zip(rows, seq_lens, strict=True)]).long()

    def _bytes_of_blocks(self, address: int, blocks: Mapping[str, Any]) -> Tensor:
        """Return a mask of the bytes of a storage that lie in blocks of its layers, by group: bool, on its device."""
        marked = unmarked(self._storages()[address])
        for layer in self._layers_in(address):
            for plane in layer.cache.planes:
                pages(plane, marked)[blocks[layer.group]] = -1
        return bytes_of(marked) != 0

    def _bytes_of_pages(self, address: int, blocks: Mapping[str, Tensor]) -> Tensor:
        """Return a mask as :meth:`_bytes_of_blocks`. If a block of all layers is one page, all bytes of that page are
        included."""
        found = self._bytes_of_blocks(address, blocks)
        for layer in self._layers_in(address):
            view = layer.cache.planes[0].view
            if view.shape[0] * view.stride(0) * view.element_size() == found.numel():
                found.view(view.shape[0], -1)[blocks[layer.group]] = True
        return found

    def _bytes_of_slots(self, address: int, slots: Mapping[str, list[int]]) -> Tensor:
        """Return a mask of the bytes of a storage that belong to slots of its layers, by group: bool, on the host."""
        marked = unmarked(self._storages()[address], "cpu")
        for layer in self._layers_in(address):
            for plane in layer.cache.planes:
                for slot in slots[layer.group]:
                    elements_of(marked, plane)[slot_elements(plane, slot)] = -1
        return bytes_of(marked) != 0

    def _stale_slots(
        self, step: AuditedStep, rejected_slots: dict[str, list[int]], undone: bool
    ) -> dict[str, list[int]]:
        """Return the rejected slots that changed, per group. Raises AuditError if any other byte is wrong."""
        stale: dict[str, set[int]] = {group: set() for group in rejected_slots}
        for address, storage in self._storages().items():
            differs = self._differences(address, storage, step.before[address])
            if differs is None:
                continue
            layers = self._layers_in(address)
            for layer in layers:
                stale[layer.group] |= self._changed_slots(differs, layer, rejected_slots[layer.group])
            wrong = differs & ~self._bytes_of_slots(address, rejected_slots)
            if wrong.any() or undone:
                raise AuditError(self._complaint(step, layers, wrong, stale if undone else {}))
        return {group: sorted(slots) for group, slots in stale.items()}

    def _differences(self, address: int, storage: torch.UntypedStorage, image: torch.UntypedStorage) -> Tensor | None:
        """Return a mask of the bytes of a storage that differ from its image: bool, on the host. None if no byte
        differs."""
        self._totals.bytes_compared += storage.nbytes()
        differs = bytes_of(storage) != bytes_of(image)
        ignored = self._ignored(address)
        if ignored is not None:
            differs &= ~ignored
        return differs.cpu() if differs.any() else None

    def _changed_slots(self, differs: Tensor, layer: TargetLayer, slots: list[int]) -> set[int]:
        """Return the slots that contain a byte that differs."""
        storage = differs.view(torch.uint8).untyped_storage()
        planes = layer.cache.planes
        return {
            slot
            for slot in slots
            if any(bool((elements_of(storage, p)[slot_elements(p, slot)] != 0).any()) for p in planes)
        }

    def _complaint(
        self, step: AuditedStep, layers: list[TargetLayer], wrong: Tensor, stale: dict[str, set[int]]
    ) -> str:
        text = f"nwor audit, step {self._totals.steps}:"
        for group, slots in stale.items():
            if slots:
                tokens = listed(sorted(slots), step.slot_mappings[group])
                text += f" rejected drafts of group {group} left their rows in slots {tokens};"
        if wrong.any():
            text += f" {int(wrong.sum())} bytes differ from the expected ones"
            for layer in layers:
                written = slots_of(step.slot_mappings[layer.group])
                if slots := self._changed_slots(wrong, layer, written):
                    tokens = listed(sorted(slots), step.slot_mappings[layer.group])
                    text += f", in layer {layer.name} slots {tokens}"
            text += f", in {_places(wrong, layers[0])};"
        return text + f" query_start_loc {step.query_start_loc}, drafts {step.num_draft_tokens}"

    def _record(self, step: AuditedStep, rejected: list[int], stale: dict[str, list[int]]) -> None:
        self._totals.steps += 1
        self._totals.verify_steps += any(step.num_draft_tokens)
        for group, slots in step.slot_mappings.items():
            kept = torch.ones(len(slots), dtype=torch.bool)
            kept[rejected] = False
            kept &= slots >= 0
            self._states[group][slots[kept]] = COMMITTED
            self._states[group][stale[group]] = STALE
            self._totals.stale_rows += len(stale[group])

    def _forget_zeroed_blocks(self) -> None:
        """Mark zeroed blocks as FREE: vLLM zeroes a block before it gives it to a new request."""
        for group, states in self._by_block().items():
            layer = next(layer for layer in self._layers.values() if layer.group == group)
            blocks = layer.kv_cache.reshape(layer.kv_cache.shape[0], -1)
            states[(blocks == 0).all(-1).cpu()] = FREE
