"""The audit: after every step with drafts the whole cache is compared, byte for byte, with what it should hold.
(With vLLM's V1 runner after every step.)

What it should hold is made by vLLM itself: the cache as it was before the step, written by the
layer's own, unwrapped writer with this step's keys and values, at the slots of prompt, target and
accepted tokens only. So the audit shares no code with what it checks: neither our kernels nor our
idea of which draft was rejected (it counts vLLM's sampled tokens on the host). Of a hybrid model the recurrent
states that the step may change are left out, and nothing else (:mod:`nwor_ops.vllm.audit.recurrent`).

What a step writes is recorded on the device, in buffers that never move: a copy at each write site,
which a CUDA graph captures with the rest, so that a replay is audited like an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nwor_ops.kv_cache import Plane
from nwor_ops.vllm.audit.recurrent import RecurrentGroup
from nwor_ops.vllm.layers.target import TargetLayer, same_place

FREE, COMMITTED, STALE, SHADOW = 0, 1, 2, 3


class AuditError(AssertionError):
    """The cache does not hold what was promised."""


@dataclass
class AuditSummary:
    """Totals of an audited run.

    Attributes:
        steps: steps compared.
        verify_steps: steps with at least one draft.
        drafted, accepted, rejected: draft tokens.
        rows_checked: slots whose bytes were compared, summed over layers and steps.
        bytes_compared: likewise.
        recurrent_bytes: bytes of recurrent states that were left out, once for each step.
        stale_rows: slots of rejected drafts whose bytes had changed after the step, summed over steps.
        stale_rows_at_end: slots that still hold a rejected draft's row.
        exposed_rows: slots of rejected drafts whose bytes had changed between the forward and sampling, summed over
            steps: rows of a request's pages that held what was then rejected. In mode ``"stage"`` there are none.
        moments: comparisons in the middle of a step: after the forward, and before sampling (mode ``"stage"``).
        committed_rows: rows that commit copied to pages of a request, summed over layers and steps (mode
            ``"stage"``): of accepted drafts, and of the tokens before them that had been redirected too.
        committed_bytes: their bytes.
        tail_rows: committed rows that were compared with those that attention reads in their place, summed over layers
            and moments (mode ``"stage"``): of the page of each request's first draft.
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
    """What a layer is given to write in one step. Row t belongs to token t of the batch."""

    def __init__(self, max_num_tokens: int, key: Tensor, value: Tensor) -> None:
        self.key = key.new_zeros((max_num_tokens, *key.shape[1:]))
        self.value = value.new_zeros((max_num_tokens, *value.shape[1:]))
        self.slot_mapping = torch.full((max_num_tokens,), -1, dtype=torch.int64, device=key.device)
        self.rest: tuple[Any, ...] = ()

    def record(
        self, key: Tensor, value: Tensor, slot_mapping: Tensor, token_offset: int, rest: tuple[Any, ...]
    ) -> None:
        num_tokens = slot_mapping.shape[0]  # key and value may be padded beyond it
        tokens = slice(token_offset, token_offset + num_tokens)
        self.key[tokens].copy_(key[:num_tokens])
        self.value[tokens].copy_(value[:num_tokens])
        self.slot_mapping[tokens].copy_(slot_mapping)
        self.rest = rest


@dataclass
class AuditedStep:
    """What is kept from begin to commit. `before` has a copy of each storage that holds a layer's cache."""

    query_start_loc: list[int]
    num_draft_tokens: list[int]
    slot_mappings: dict[str, Tensor]
    before: dict[int, torch.UntypedStorage]
    # Which bytes the forward had changed.
    touched: dict[int, Tensor] = field(default_factory=dict)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def slot_elements(plane: Plane, slot: int) -> Tensor:
    """Where in its storage, in elements, a plane keeps a slot."""
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
    dtype = INTEGERS[plane.view.element_size()]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


def pages(plane: Plane, storage: torch.UntypedStorage) -> Tensor:
    """A plane's view of another storage, as integers."""
    view = plane.view
    like = torch.empty(0, dtype=INTEGERS[view.element_size()], device=storage.device)
    return like.set_(storage, view.storage_offset(), view.shape, view.stride())


def rows_at(plane: Plane, storage: torch.UntypedStorage, slots: Tensor) -> Tensor:
    """What a plane keeps at some slots, of another storage: integers ``[slots, H, W]``."""
    view, slots = plane.view, slots.to(storage.device)
    blocks, offsets = slots // view.shape[1], slots % view.shape[1]
    if plane.page_offsets is None:
        return pages(plane, storage)[blocks, offsets]
    starts = int(view.storage_offset()) + blocks * view.stride(0)
    heads = torch.arange(view.shape[2], device=storage.device) * view.stride(2)
    in_page = heads[:, None] + plane.page_offsets[offsets][:, None]
    return elements_of(storage, plane)[starts[:, None, None] + in_page]


def unmarked(storage: torch.UntypedStorage, device: torch.device | str | None = None) -> torch.UntypedStorage:
    """Of the same size, all zero; on the same device unless another is named."""
    marks = torch.UntypedStorage(storage.nbytes(), device=device or storage.device)
    bytes_of(marks).zero_()
    return marks


def either(some: Tensor | None, more: Tensor) -> Tensor:
    """Bytes that either names; None names none."""
    return more if some is None else some | more


def slots_of(slot_mapping: Tensor) -> list[int]:
    return [slot for slot in slot_mapping.tolist() if slot >= 0]


def listed(slots: list[int], slot_mapping: Tensor) -> str:
    token_of = {slot: token for token, slot in enumerate(slot_mapping.tolist())}
    texts = [f"{slot} (token {token_of[slot]})" for slot in slots[:8]]
    return ", ".join(texts) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


class CacheAudit:
    """Audits one model runner.

    Caches of several layers, and of several groups, may lie in one storage and even share bytes: the audit
    compares storages, and says afterwards which slot of which layer a wrong byte belongs to.

    Args:
        layers: the target layers.
        max_num_tokens: most tokens in one batch, padding included.
        others_write: a KV connector may write to blocks of requests that wait for it, at any time: only the blocks of
            the requests in the batch are compared, with all that lies in them where a block of all layers is one page.
        recurrent: the groups of a hybrid model that are no part of the transaction.
    """

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
        # Of the step: the bytes of each storage that recurrent states, or others, may change.
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

    # ------------------------------------------------------------ what the session tells of

    def begin(
        self,
        query_start_loc: Sequence[int],
        num_draft_tokens: Sequence[int],
        slot_mappings: Mapping[str, Tensor],
        block_tables: Mapping[str, Tensor] | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        """Before the forward: remember the whole cache."""
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
        """The step; no layer has written in it."""
        for recorder in self._recorders.values():
            recorder.slot_mapping.fill_(-1)
        starts = [int(start) for start in query_start_loc]
        slots = {group: mapping[: starts[-1]].cpu().clone() for group, mapping in slot_mappings.items()}
        return AuditedStep(starts, [int(number) for number in num_draft_tokens], slots, before)

    def loading(self) -> None:
        """A KV connector is about to load rows, or to wait for them."""
        self._loading = self._copies() if self._step is not None else {}

    def loaded(self) -> None:
        """What has changed meanwhile was loaded, and must stay; but for slots of drafts, which are never loaded."""
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
        """At a layer's write site, also outside a window: a graph captured there replays inside one."""
        if name not in self._recorders:
            self._recorders[name] = _Recorder(self._max_num_tokens, key, value)
        self._recorders[name].record(key, value, slot_mapping, token_offset, rest)

    def opened(self, slot_mappings: Mapping[str, Tensor]) -> None:
        """The window is open. ``slot_mappings`` are the buffers that the forward will read, per group."""

    def forwarded(self, moment: str) -> None:
        """After the forward, and once more before sampling: what the drafts' slots hold before it is known which
        are accepted."""
        step = self._step
        if step is None:
            return
        for address, storage in self._storages().items():
            step.touched[address] = bytes_of(storage) != bytes_of(step.before[address])

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """After commit: compare.

        Args:
            num_sampled: gives the tokens that vLLM sampled for each request; None if the window was cancelled:
                every draft counts as rejected.
            undone: raise :class:`AuditError` at a stale row. False only counts them: vanilla vLLM, and a
                step that fell back to it, leave them by design. A change anywhere else is an error either way.
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
        """Forget the open step: it ends in a way that nothing is promised of."""
        self._step = None

    def summary(self) -> dict[str, int]:
        """Totals so far (see :class:`AuditSummary`)."""
        self._totals.stale_rows_at_end = sum(int((states == STALE).sum()) for states in self._states.values())
        return asdict(self._totals)

    @property
    def recorded_layers(self) -> list[str]:
        """The layers whose own writer was called at least once."""
        return list(self._recorders)

    def slot_states(self) -> dict[str, Tensor]:
        """Per group uint8 ``[num_blocks, block_size]``: what each slot holds now: FREE, COMMITTED or STALE."""
        return {group: states.clone() for group, states in self._by_block().items()}

    # ------------------------------------------------------------ inside

    def _by_block(self) -> dict[str, Tensor]:
        """Views of the slots' states, ``[num_blocks, block_size]`` per group."""
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
        """Turn the image of before the step into what should be there after it."""
        self._write_rows(step, step.before, dict.fromkeys(step.slot_mappings, rejected))
        self._totals.rows_checked += sum(layer.cache.num_slots for layer in self._layers.values())

    def _write_rows(
        self, step: AuditedStep, images: dict[int, torch.UntypedStorage], left_out: Mapping[str, list[int]]
    ) -> None:
        """Write to images of the cache what the layers wrote in this step, each token at its own slot, but for the
        tokens left out of each group."""
        sent: dict[str, Tensor] = {}  # sent to the device once for each group, not for each layer
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
        """Bytes of a storage of which nothing is promised, on its device; or None."""
        return self._left_out.get(address)

    def _recurrent_states(self) -> dict[int, Tensor]:
        """Which bytes of each storage are recurrent states that this step may change. Slots there hold no rows."""
        blocks = [group.blocks() for group in self._recurrent]
        for states in self._by_block().values():
            states[sorted(set().union(*blocks))] = FREE
        found = {}
        for address, storage in self._storages().items():
            marked = unmarked(storage)
            for group, own in zip(self._recurrent, blocks, strict=True):
                group.mark(own, marked, address)
            found[address] = bytes_of(marked) != 0
            self._totals.recurrent_bytes += int(found[address].sum())
        return found

    def _blocks(self, group: str, table: Tensor, seq_lens: list[int]) -> Tensor:
        """The blocks of requests, by their lengths."""
        rows = table[: len(seq_lens)].cpu()
        size = self._block_sizes[group]
        return torch.cat([row[: -(-length // size)] for row, length in zip(rows, seq_lens, strict=True)]).long()

    def _bytes_of_blocks(self, address: int, blocks: Mapping[str, Any]) -> Tensor:
        """Which bytes of a storage lie in blocks of the layers there, by group; bool, on its device."""
        marked = unmarked(self._storages()[address])
        for layer in self._layers_in(address):
            for plane in layer.cache.planes:
                pages(plane, marked)[blocks[layer.group]] = -1
        return bytes_of(marked) != 0

    def _bytes_of_pages(self, address: int, blocks: Mapping[str, Tensor]) -> Tensor:
        """As :meth:`_bytes_of_blocks`, with what other layers have there where a block of all layers is one page."""
        found = self._bytes_of_blocks(address, blocks)
        for layer in self._layers_in(address):
            view = layer.cache.planes[0].view
            if view.shape[0] * view.stride(0) * view.element_size() == found.numel():
                found.view(view.shape[0], -1)[blocks[layer.group]] = True
        return found

    def _bytes_of_slots(self, address: int, slots: Mapping[str, list[int]]) -> Tensor:
        """Which bytes of a storage are of slots of the layers there, by group; bool, on the host."""
        marked = unmarked(self._storages()[address], "cpu")
        for layer in self._layers_in(address):
            for plane in layer.cache.planes:
                for slot in slots[layer.group]:
                    elements_of(marked, plane)[slot_elements(plane, slot)] = -1
        return bytes_of(marked) != 0

    def _stale_slots(
        self, step: AuditedStep, rejected_slots: dict[str, list[int]], undone: bool
    ) -> dict[str, list[int]]:
        """Per group, the rejected slots that changed. Raises where anything else is wrong."""
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
        """Which bytes of a storage are not as in its image: bool, on the host; None if all are."""
        self._totals.bytes_compared += storage.nbytes()
        differs = bytes_of(storage) != bytes_of(image)
        ignored = self._ignored(address)
        if ignored is not None:
            differs &= ~ignored
        return differs.cpu() if differs.any() else None

    def _changed_slots(self, differs: Tensor, layer: TargetLayer, slots: list[int]) -> set[int]:
        """Which of the slots hold a byte that differs."""
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
            text += f" {int(wrong.sum())} bytes are not what this step should leave there"
            for layer in layers:
                written = slots_of(step.slot_mappings[layer.group])
                if slots := self._changed_slots(wrong, layer, written):
                    tokens = listed(sorted(slots), step.slot_mappings[layer.group])
                    text += f", in layer {layer.name} slots {tokens}"
            text += ";"
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
        """vLLM zeroes blocks it hands out anew: whatever they held is gone."""
        for group, states in self._by_block().items():
            layer = next(layer for layer in self._layers.values() if layer.group == group)
            blocks = layer.kv_cache.reshape(layer.kv_cache.shape[0], -1)
            states[(blocks == 0).all(-1).cpu()] = FREE
