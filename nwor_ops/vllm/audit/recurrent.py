"""Audit: check in every step that the one state of a request equals the state that vLLM would have kept, in all bytes.

If asked, the kernel that verifies a window also returns the state after each token, as a scheme with K + 1 states
stores it. The next window of the request first applies the accepted rows. The resulting state must equal the state
returned for the last accepted token, so nothing else may have changed it in between.

In the chunk form, most windows do not store the state, and a store applies one chunk; later rows stay pending. The
audit then folds the pending rows into a copy of the state and compares that.

vLLM also writes checkpoints: FlashInfer's prefill stores a state from the middle of a prompt in a separate block. Such
a block must hold that state with nothing pending, both now and when a later request starts from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.watch import differing_bytes
from nwor_ops.vllm.step_listener import RecurrentListener, StepListener


class StateAudit(StepListener, RecurrentListener):
    """Compare the states of every window, from the bound metadata builders of all groups.

    The audit synchronizes and keeps a state per block for each row of a record, so use it only with small models.
    """

    def __init__(self, builders: Sequence[Any]) -> None:
        self._builders = builders
        # By layer and block: the state after each pending row. None: the row changes nothing (begin_chunk).
        self._kept: dict[tuple[str, int], list[Tensor | None]] = {}
        self._exported: dict[tuple[str, int], Tensor] = {}  # by layer and block: the state of a checkpoint
        self._counts = Counter(
            dict.fromkeys(("steps", "windows", "states_compared", "rows_reapplied", "folds", "prompt_folds"), 0)
            | dict.fromkeys(("tail_folds", "checkpoints", "checkpoint_hits"), 0)
        )

    def summary(self) -> dict[str, int]:
        """Return the counts by name. States, checkpoints and moves (only of the chunk form) count once for each
        layer."""
        return dict(self._counts)

    def forwarded(self, moment: str) -> None:
        """Compare the windows that were planned since the last call. Call it after a forward."""
        ran = [builder for builder in self._builders if builder.take_planned()]
        self._counts["steps"] += bool(ran)
        for builder in ran:
            plan, starts, slots = builder.plan.tolist(), builder.starts.tolist(), builder.slots.tolist()
            for row, slot, start, end in zip(plan, slots, starts, starts[1:], strict=False):
                source, rows, _, target = row
                if not source and slot > 0 and end > start:
                    rows, first, *_ = builder.group.cursors.table[slot].tolist()
                    where = f"from row {first} of a ring" if builder.group.cursors.chunk else f"in half {first}"
                    raise AuditError(
                        f"{self._where}: the plan skipped the request in block {slot} with {end - start} tokens: "
                        f"the count of its accepted tokens, or its cursor ({rows} rows {where}), is invalid"
                    )
                if source:
                    names, chunk = builder.group.layers, builder.group.cursors.chunk
                    folded = (chunk or rows) if target else 0
                    pending = {name: self._kept.get((name, source), [])[folded:rows] for name in names}
                    self._compare(builder.group, [source, folded, row[2], target] if folded else row)
                    for name, layer in names.items():
                        self._kept[name, source] = [*pending[name], *layer.all_states[start:end].clone()]
                    if folded and folded < rows:  # the rows after the chunk
                        ring = _ring_of(builder.group)
                        self._compare(builder.group, [source, rows - folded, (row[2] + folded) % ring, 0], keep=True)
                    self._counts["windows"] += 1
                    self._counts["rows_reapplied"] += rows

    def folded(self, group: Any, plan: Tensor, counted: str = "folds") -> None:
        """Compare the targets of a fold. A fold of zero rows is a copy."""
        for row in plan.tolist():
            if row[3]:
                self._compare(group, row, keep=True)
                self._counts[counted] += 1

    def exported(self, layer: Any, checkpoint: Any, emitted: Tensor, rows: Tensor | None) -> None:
        """Compare the checkpoints of one layer that vLLM just wrote."""
        states, cursors = layer.kv_cache[1], self._group_of(layer).cursors.table
        blocks, offsets = checkpoint.state_indices.tolist(), checkpoint.checkpoint_offsets.tolist()
        indices = range(len(blocks)) if rows is None else rows.tolist()
        for block, offset, index in zip(blocks, offsets, indices, strict=True):
            if block <= 0 or offset <= 0:
                continue
            if pending := int(cursors[block, ::2].sum()):
                raise AuditError(
                    f"{self._where}: vLLM wrote a checkpoint of layer {layer.prefix} to block {block}, where {pending} "
                    f"rows of another window are pending"
                )
            wanted = emitted[index].to(states.dtype)
            if differ := differing_bytes(states[block], wanted):
                raise AuditError(
                    f"{self._where}: the checkpoint of layer {layer.prefix} in block {block} is not the state that the "
                    f"prefill computed after {offset} tokens: {differ} bytes differ"
                )
            self._exported[layer.prefix, block] = wanted.clone()
            self._counts["checkpoints"] += 1

    def assigned(self, blocks: Iterable[int], may_be_loaded: bool = False) -> None:
        """Forget the windows of blocks that get a new owner."""
        for block in blocks:
            for name in self._names():
                self._kept.pop((name, block), None)
                if may_be_loaded:
                    self._exported.pop((name, block), None)

    def copied(self, copies: Iterable[tuple[int, int]]) -> None:
        """Follow copies of whole blocks, given as (source, target)."""
        tables: tuple[dict[tuple[str, int], Any], ...] = (self._kept, self._exported)
        for source, target in copies:
            for name in self._names():
                for known in tables:
                    known.pop((name, target), None)
                    if (name, source) in known:
                        known[name, target] = known[name, source]

    def folding_tails(self) -> None:
        self.forwarded("before the ends of prompts are folded")

    def moved(self, group: Any, plan: Tensor) -> None:
        """Follow states that moved to another block with their pending rows. 0: no move."""
        for source, _, _, target in plan.tolist():
            if not source or not target:
                continue
            for name, layer in group.layers.items():
                cache = layer.recurrent_cache
                copied = (cache.state, *cache.records)
                if differ := sum(differing_bytes(part[target], part[source]) for part in copied):
                    raise AuditError(
                        f"{self._where}: state and record of layer {name} in block {target} are not those of block "
                        f"{source}, from where they moved: {differ} bytes differ"
                    )
                self._counts["moves"] += 1
                self._kept[name, target] = self._kept.pop((name, source), [])
                self._exported.pop((name, target), None)
                if (name, source) in self._exported:
                    self._exported[name, target] = self._exported[name, source]

    def began(self, group: Any, slots: Tensor) -> None:
        """Expect rows that change nothing in blocks whose states begin in the middle of a chunk."""
        for block in slots.tolist():
            for name in group.layers if block else ():
                self._kept[name, block] = [None] * int(group.cursors.table[block, 2])

    def overwritten(self, group: Any, slots: Tensor) -> None:
        """Forget the checkpoints in blocks whose state a prompt is about to overwrite."""
        for block in slots.tolist():
            for name in group.layers:
                self._exported.pop((name, block), None)

    def _compare(self, group: Any, row: list[int], keep: bool = False) -> None:
        """Compare the state that a row of a plan stored, or would have stored. ``keep``: the rows may stay pending."""
        source, rows, _, target = row
        for name, layer in group.layers.items():
            kept = self._kept.get((name, source))
            if not keep:
                self._kept.pop((name, source), None)
            states = layer.kv_cache[1]
            if rows == 0 and target in (0, source):  # nothing was pending
                continue
            if rows and (kept is None or len(kept) < rows):
                raise AuditError(
                    f"{self._where}: layer {name} reapplies {rows} rows that no window of block {source} recorded"
                )
            exported = self._exported.get((name, source))
            after = kept[rows - 1] if rows and kept is not None else None
            if after is not None:
                wanted, what = after, f"the state after {rows} tokens of the last window"
            elif exported is not None:
                wanted, what = exported, f"the checkpoint that vLLM wrote to block {source}"
                self._counts["checkpoint_hits"] += 1
            else:
                wanted, what = states[source], f"the state of block {source}"
            stored = states[target] if target else _folded(layer, row)
            if differ := differing_bytes(stored, wanted):
                block = f"block {target}" if target else f"block {source} with its pending rows"
                raise AuditError(
                    f"{self._where}: the state of layer {name} in {block} is not {what}: {differ} bytes differ"
                )
            self._exported.pop((name, target), None)
            self._counts["states_compared"] += 1

    @property
    def _where(self) -> str:
        return f"nwor audit, step {self._counts['steps']}"

    def _names(self) -> Iterable[str]:
        return (name for builder in self._builders for name in builder.group.layers)

    def _group_of(self, layer: Any) -> Any:
        return next(builder.group for builder in self._builders if layer.prefix in builder.group.layers)


def _folded(layer: Any, row: list[int]) -> Tensor:
    """Return the state that a row of a plan would store. The cache does not change."""
    cache = layer.recurrent_cache
    of_block = torch.tensor([0, row[0]], device=cache.device)
    state, keys, norms, decays, updates = (tensor[of_block] for tensor in (cache.state, *cache.records))  # copies
    plan = torch.tensor([[1, *row[1:3], 1]], dtype=torch.int32, device=cache.device)
    number = torch.zeros_like(layer.layer_window)
    ops.gated_delta_fold([state], [keys], [norms], [decays], [updates], [number], plan, chunk=cache.chunk)
    folded: Tensor = state[1]
    return folded


def _ring_of(group: Any) -> int:
    """Return the rows of a record."""
    rows: int = next(iter(group.layers.values())).recurrent_cache.record_keys.shape[2]
    return rows
