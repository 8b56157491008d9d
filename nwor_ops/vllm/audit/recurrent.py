"""Audit: check in every step that the one state of a request equals the state that vLLM would have kept.

If asked, the kernel that verifies a window also returns the state after each token, as a scheme with K + 1 states
stores it. The next window of the request first applies the accepted rows. The resulting state must equal the state
returned for the last accepted token, so nothing else may have changed it in between.

In the chunk form, most windows do not store the state, and a store applies one chunk; later rows stay pending. The
audit then folds the pending rows into a copy of the state and compares that.

vLLM also writes checkpoints: FlashInfer's prefill stores a state from the middle of a prompt in a separate block. Such
a block must hold that state with nothing pending, both now and when a later request starts from it.

The audit compares digests of 64 bits. It keeps 8 bytes of a state, and waits for the device a few times per group of
layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.watch import differing_bytes
from nwor_ops.vllm.step_listener import RecurrentListener, StepListener


class StateAudit(StepListener, RecurrentListener):
    """Compare the states of every window, from the bound metadata builders of all groups."""

    def __init__(self, builders: Sequence[Any]) -> None:
        self._builders = builders
        # By the first layer of a group and block: after each pending row, the digests of all layers' states. None: the
        # row changes nothing (begin_chunk).
        self._kept: dict[tuple[str, int], list[list[int] | None]] = {}
        self._exported: dict[tuple[str, int], int] = {}  # by layer and block: the digest of a checkpoint
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
            group, checks = builder.group, []
            plan, starts, slots = builder.plan.tolist(), builder.starts.tolist(), builder.slots.tolist()
            after = _numbers(digests(layer.all_states[: max(starts)]) for layer in group.layers.values())
            for row, slot, start, end in zip(plan, slots, starts, starts[1:], strict=False):
                source, rows, first, target = row
                if not source and slot > 0 and end > start:
                    rows, first, *_ = group.cursors.table[slot].tolist()
                    where = f"from row {first} of a ring" if group.cursors.chunk else f"in half {first}"
                    raise AuditError(
                        f"{self._where}: the plan skipped the request in block {slot} with {end - start} tokens: "
                        f"the count of its accepted tokens, or its cursor ({rows} rows {where}), is invalid"
                    )
                if source:
                    kept = self._kept.get((_first_of(group), source), [])
                    folded = (group.cursors.chunk or rows) if target else 0
                    pending = kept[folded:rows]
                    checks.append(([source, folded or rows, first, target], kept))
                    if folded and folded < rows:  # the rows after the chunk
                        ring = _ring_of(group)
                        checks.append(([source, rows - folded, (first + folded) % ring, 0], pending))
                    self._kept[_first_of(group), source] = [*pending, *after[start:end]]
                    self._counts["windows"] += 1
                    self._counts["rows_reapplied"] += rows
            self._compare(group, checks)

    def folded(self, group: Any, plan: Tensor, counted: str = "folds") -> None:
        """Compare the targets of a fold. A fold of zero rows is a copy."""
        rows = [row for row in plan.tolist() if row[3]]
        self._compare(group, [(row, self._kept.get((_first_of(group), row[0]), [])) for row in rows])
        self._counts[counted] += len(rows)

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
            stored, wanted = digests(torch.stack([states[block], emitted[index].to(states.dtype)])).tolist()
            if stored != wanted:
                raise AuditError(
                    f"{self._where}: the checkpoint of layer {layer.prefix} in block {block} is not the state that the "
                    f"prefill computed after {offset} tokens"
                )
            self._exported[layer.prefix, block] = wanted
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
            self._kept[_first_of(group), target] = self._kept.pop((_first_of(group), source), [])
            for name, layer in group.layers.items():
                cache = layer.recurrent_cache
                copied = (cache.state, *cache.records)
                if differ := sum(differing_bytes(part[target], part[source]) for part in copied):
                    raise AuditError(
                        f"{self._where}: state and record of layer {name} in block {target} are not those of block "
                        f"{source}, from where they moved: {differ} bytes differ"
                    )
                self._counts["moves"] += 1
                self._exported.pop((name, target), None)
                if (name, source) in self._exported:
                    self._exported[name, target] = self._exported[name, source]

    def began(self, group: Any, slots: Tensor) -> None:
        """Expect rows that change nothing in blocks whose states begin in the middle of a chunk."""
        for block in filter(None, slots.tolist()):
            self._kept[_first_of(group), block] = [None] * int(group.cursors.table[block, 2])

    def overwritten(self, group: Any, slots: Tensor) -> None:
        """Forget the checkpoints in blocks whose state a prompt is about to overwrite."""
        for block in slots.tolist():
            for name in group.layers:
                self._exported.pop((name, block), None)

    def _compare(self, group: Any, checks: Iterable[tuple[list[int], list[list[int] | None]]]) -> None:
        """Compare the states that rows of a plan stored, or would have stored. A check has such a row, and what is kept
        of its source."""
        checks = [(row, kept) for row, kept in checks if row[1] or row[3] not in (0, row[0])]  # others change nothing
        if not checks:
            return
        for (source, rows, *_), kept in checks:
            if len(kept) < rows:
                raise AuditError(
                    f"{self._where}: layer {_first_of(group)} reapplies {rows} rows that no window of block {source} "
                    f"recorded"
                )
        plan, layers = [row for row, _ in checks], group.layers.values()
        device = group.cursors.table.device
        sources = [row[0] for row, kept in checks if not row[1] or kept[row[1] - 1] is None]
        blocks = torch.tensor(sources, device=device)
        numbers = _numbers(digests(layer.kv_cache[1][blocks]) for layer in layers) if sources else []
        at_source = dict(zip(sources, numbers, strict=True))
        found = _numbers(digests(states) for states in _stored(layers, plan, device))
        for ((source, rows, _, target), kept), stored in zip(checks, found, strict=True):
            after = kept[rows - 1] if rows else None
            for index, name in enumerate(group.layers):
                exported = self._exported.get((name, source))
                if after is not None:
                    wanted, what = after[index], f"the state after {rows} tokens of the last window"
                elif exported is not None:
                    wanted, what = exported, f"the checkpoint that vLLM wrote to block {source}"
                    self._counts["checkpoint_hits"] += 1
                else:
                    wanted, what = at_source[source][index], f"the state of block {source}"
                if stored[index] != wanted:
                    block = f"block {target}" if target else f"block {source} with its pending rows"
                    raise AuditError(f"{self._where}: the state of layer {name} in {block} is not {what}")
                self._exported.pop((name, target), None)
                self._counts["states_compared"] += 1

    @property
    def _where(self) -> str:
        return f"nwor audit, step {self._counts['steps']}"

    def _names(self) -> Iterable[str]:
        return (name for builder in self._builders for name in builder.group.layers)

    def _group_of(self, layer: Any) -> Any:
        return next(builder.group for builder in self._builders if layer.prefix in builder.group.layers)


def _first_of(group: Any) -> str:
    """Return the name of a group's first layer."""
    name: str = next(iter(group.layers))
    return name


def digests(states: Tensor) -> Tensor:
    """Return a digest of each state, int64 ``[N]``. It is another one if a single number differs."""
    words = states.contiguous().flatten(1).view(torch.int32)
    return (words * _weights(words.shape[1], words.device)).sum(1)


@cache
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd random numbers."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu").to(device) * 2 + 1


def _numbers(of_layers: Iterable[Tensor]) -> list[list[int]]:
    """Return the digests of each state in all layers, from a tensor for each layer."""
    numbers: list[list[int]] = torch.stack(list(of_layers), dim=1).tolist()
    return numbers


def _stored(layers: Iterable[Any], plan: list[list[int]], device: torch.device) -> Iterator[Tensor]:
    """Yield, for each layer, the state that each row of a plan stored, or would store if it has no target."""
    without = [index for index, row in enumerate(plan) if not row[3]]
    rows = [[number, *plan[index][1:3], number] for number, index in enumerate(without, start=1)]
    targets = torch.tensor([row[3] for row in plan], device=device)
    of_block = torch.tensor([0, *(plan[index][0] for index in without)], device=device)  # blocks to copy, and block 0
    of_copies = torch.tensor(rows, dtype=torch.int32, device=device)  # the plan that folds the copies
    indices = torch.tensor(without, device=device)
    for layer in layers:
        states: Tensor = layer.kv_cache[1][targets]  # a copy
        if without:
            cache = layer.recurrent_cache
            state, keys, norms, decays, updates = (tensor[of_block] for tensor in (cache.state, *cache.records))
            number = torch.zeros_like(layer.layer_window)
            ops.gated_delta_fold([state], [keys], [norms], [decays], [updates], [number], of_copies, chunk=cache.chunk)
            states[indices] = state[1:]
        yield states


def _ring_of(group: Any) -> int:
    """Return the rows of a record."""
    rows: int = next(iter(group.layers.values())).recurrent_cache.record_keys.shape[2]
    return rows
