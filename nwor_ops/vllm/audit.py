"""The audit: after every step the whole cache is compared, byte for byte, with what it should hold.

What it should hold is made by vLLM itself: the cache as it was before the step, written by the
layer's own, unwrapped writer with this step's keys and values, at the slots of prompt, target and
accepted tokens only. So the audit shares no code with what it checks: neither our kernels nor our
idea of which draft was rejected (it counts vLLM's sampled tokens on the host).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from nwor_ops.cache import LayerCache

FREE, COMMITTED, STALE = 0, 1, 2


class AuditError(AssertionError):
    """The cache does not hold what was promised."""


@dataclass
class AuditedLayer:
    """One target layer, as the audit needs it.

    Attributes:
        name: the layer's name in vLLM.
        group: its KV-cache group.
        kv_cache: the tensor vLLM bound to it.
        planes: a function from such a tensor to its planes.
        write: the layer's own writer: (key, value, kv_cache, slot_mapping).
    """

    name: str
    group: str
    kv_cache: Tensor
    planes: Callable[[Tensor], LayerCache]
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass
class AuditSummary:
    """Totals of an audited run.

    Attributes:
        steps: steps compared.
        verify_steps: steps with at least one draft.
        drafted, accepted, rejected: draft tokens.
        rows_checked: slots whose bytes were compared, summed over layers and steps.
        bytes_compared: likewise.
        stale_rows: slots of rejected drafts whose bytes had changed after the step, summed over steps.
        stale_rows_at_end: slots that still hold a rejected draft's row.
    """

    steps: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    rows_checked: int = 0
    bytes_compared: int = 0
    stale_rows: int = 0
    stale_rows_at_end: int = 0


@dataclass
class _Write:
    key: Tensor
    value: Tensor
    slot_mapping: Tensor


@dataclass
class _Step:
    """What is kept from begin to commit."""

    query_start_loc: list[int]
    num_draft_tokens: list[int]
    slot_mappings: dict[str, Tensor]
    before: dict[str, Tensor]
    writes: dict[str, list[_Write]] = field(default_factory=dict)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _changed_slots(before: LayerCache, after: LayerCache) -> Tensor:
    """bool ``[num_slots]``: slots any byte of which differs."""
    changed = None
    for old, new in zip(before.planes, after.planes, strict=True):
        num_blocks, block_size = old.view.shape[:2]
        if old.page_offsets is None:
            differs = (_bytes(old.view) != _bytes(new.view)).reshape(num_blocks, block_size, -1).any(-1)
        else:
            # [B, H, page elements, bytes] -> the elements of each slot.
            pages = [_bytes(p.view.transpose(1, 2)).reshape(num_blocks, old.view.shape[2], -1) for p in (old, new)]
            size = old.view.element_size()
            per_element = (pages[0] != pages[1]).reshape(*pages[0].shape[:2], -1, size).any(-1)
            differs = per_element[:, :, old.page_offsets.long()].any(-1).any(1)
        changed = differs if changed is None else changed | differs
    assert changed is not None
    return changed.flatten()


class CacheAudit:
    """Audits one model runner.

    Args:
        layers: the target layers.
        enforce: raise :class:`AuditError` at a stale row. False only counts them (vanilla vLLM leaves
            them by design); a change anywhere else is an error either way.
    """

    def __init__(self, layers: list[AuditedLayer], enforce: bool) -> None:
        self._layers = {layer.name: layer for layer in layers}
        self._enforce = enforce
        self._step: _Step | None = None
        self._totals = AuditSummary()
        self._states: dict[str, Tensor] = {}
        for layer in layers:
            planes = layer.planes(layer.kv_cache)
            self._states.setdefault(layer.group, torch.zeros(planes.num_slots, dtype=torch.uint8))
        self._block_sizes = {layer.group: layer.planes(layer.kv_cache).planes[0].view.shape[1] for layer in layers}

    # ------------------------------------------------------------ called by the session

    def begin(self, query_start_loc: list[int], num_draft_tokens: list[int], slot_mappings: dict[str, Tensor]) -> None:
        """Before the forward: remember the whole cache. ``slot_mappings`` hold the step's tokens, unpadded."""
        self._step = _Step(
            query_start_loc,
            num_draft_tokens,
            {group: slots.cpu().clone() for group, slots in slot_mappings.items()},
            {name: layer.kv_cache.clone() for name, layer in self._layers.items()},
        )
        self._forget_zeroed_blocks()

    def write(self, name: str, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """At a layer's write site: remember what is written."""
        if self._step is not None:
            write = _Write(key.clone(), value.clone(), slot_mapping.clone())
            self._step.writes.setdefault(name, []).append(write)

    def commit(self, sampled_token_ids: Tensor | None) -> None:
        """After commit: compare.

        Args:
            sampled_token_ids: ``[Q, columns]`` of vLLM's sampler, negative = no token; None if the
                window was cancelled: every draft counts as rejected.
        """
        step, self._step = self._step, None
        if step is None:
            return
        rejected = self._rejected_tokens(step, sampled_token_ids)
        stale: dict[str, Tensor] = {group: torch.zeros_like(s, dtype=torch.bool) for group, s in self._states.items()}
        for layer in self._layers.values():
            stale[layer.group] |= self._compare(step, layer, rejected)
        self._record(step, rejected, stale)

    def drop(self) -> None:
        """Forget the open step: it ends in a way that nothing is promised of."""
        self._step = None

    def summary(self) -> dict[str, int]:
        """Totals so far (see :class:`AuditSummary`)."""
        self._totals.stale_rows_at_end = sum(int((states == STALE).sum()) for states in self._states.values())
        return asdict(self._totals)

    def slot_states(self) -> dict[str, Tensor]:
        """Per group uint8 ``[num_blocks, block_size]``: what each slot holds now: FREE, COMMITTED or STALE."""
        return {group: states.reshape(-1, self._block_sizes[group]).clone() for group, states in self._states.items()}

    # ------------------------------------------------------------ inside

    def _rejected_tokens(self, step: _Step, sampled_token_ids: Tensor | None) -> list[int]:
        rejected: list[int] = []
        valid = None if sampled_token_ids is None else (sampled_token_ids.cpu() >= 0).sum(-1).tolist()
        for request, drafts in enumerate(step.num_draft_tokens):
            if drafts == 0:
                continue
            accepted = 0 if valid is None else max(valid[request] - 1, 0)
            end = step.query_start_loc[request + 1]
            rejected += range(end - (drafts - accepted), end)
            self._totals.drafted += drafts
            self._totals.accepted += accepted
            self._totals.rejected += drafts - accepted
        return rejected

    def _compare(self, step: _Step, layer: AuditedLayer, rejected: list[int]) -> Tensor:
        """bool ``[num_slots]``: rejected slots that changed. Raises where anything else is wrong."""
        rejected_slots = step.slot_mappings[layer.group][rejected]
        rejected_slots = rejected_slots[rejected_slots >= 0]
        expected = step.before[layer.name]
        for write in step.writes.get(layer.name, []):
            slots = write.slot_mapping.clone()
            slots[torch.isin(slots, rejected_slots.to(slots.device))] = -1
            layer.write(write.key, write.value, expected, slots)
        self._totals.rows_checked += layer.planes(expected).num_slots
        self._totals.bytes_compared += expected.numel() * expected.element_size()
        none = torch.zeros_like(self._states[layer.group], dtype=torch.bool)
        if torch.equal(_bytes(expected), _bytes(layer.kv_cache)):
            return none
        changed = _changed_slots(layer.planes(expected), layer.planes(layer.kv_cache)).cpu()
        if not changed.any():
            raise AuditError(f"nwor audit, step {self._totals.steps}: layer {layer.name} changed outside every slot")
        stale = none.clone()
        stale[rejected_slots] = changed[rejected_slots]
        wrong = changed & ~stale
        if wrong.any() or (self._enforce and stale.any()):
            raise AuditError(self._complaint(step, layer, wrong, stale))
        return stale

    def _complaint(self, step: _Step, layer: AuditedLayer, wrong: Tensor, stale: Tensor) -> str:
        token_of = {slot: token for token, slot in enumerate(step.slot_mappings[layer.group].tolist())}

        def listed(slots: Tensor) -> str:
            found = slots.nonzero().flatten().tolist()
            texts = [f"{slot} (token {token_of[slot]})" if slot in token_of else str(slot) for slot in found[:8]]
            return ", ".join(texts) + (f" and {len(found) - 8} more" if len(found) > 8 else "")

        text = f"nwor audit, step {self._totals.steps}, layer {layer.name}, group {layer.group}:"
        if stale.any():
            text += f" rejected drafts left their rows in slots {listed(stale)};"
        if wrong.any():
            text += f" slots {listed(wrong)} do not hold what this step should leave there;"
        return text + f" query_start_loc {step.query_start_loc}, drafts {step.num_draft_tokens}"

    def _record(self, step: _Step, rejected: list[int], stale: dict[str, Tensor]) -> None:
        self._totals.steps += 1
        self._totals.verify_steps += any(step.num_draft_tokens)
        for group, slots in step.slot_mappings.items():
            kept = torch.ones(len(slots), dtype=torch.bool)
            kept[rejected] = False
            kept &= slots >= 0
            self._states[group][slots[kept]] = COMMITTED
            self._states[group][stale[group]] = STALE
            self._totals.stale_rows += int(stale[group].sum())

    def _forget_zeroed_blocks(self) -> None:
        """vLLM zeroes blocks it hands out anew: whatever they held is gone."""
        for group, states in self._states.items():
            layer = next(layer for layer in self._layers.values() if layer.group == group)
            blocks = layer.kv_cache.reshape(layer.kv_cache.shape[0], -1)
            states.reshape(-1, self._block_sizes[group])[(blocks == 0).all(-1).cpu()] = FREE
