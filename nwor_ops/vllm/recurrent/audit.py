"""Checks that the one state of a request is, byte by byte, the state that vLLM would have kept. Every step.

On request the kernel that verifies a window also returns the state after each token, as a scheme stores it that keeps
them all. The next window of the request first applies the accepted rows. The state that this stores must equal the
state that was returned for the last accepted token, so nothing else may have changed it meanwhile.

vLLM also writes checkpoints: FlashInfer's prefill stores a state from inside a prompt in a block of its own. Such a
block must hold that state and have nothing pending, now and when a later request begins with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.audit.undo import AuditError


class StateAudit:
    """Compares the states of every window. It waits for the device and keeps K + 1 states per block: small models only.

    Args:
        builders: the metadata builders of all groups, bound.
    """

    def __init__(self, builders: Sequence[Any]) -> None:
        self._builders = builders
        self._kept: dict[tuple[str, int], Tensor] = {}  # by layer and block: the states after each token
        self._exported: dict[tuple[str, int], Tensor] = {}  # likewise: the state of a checkpoint
        self._counts = Counter(
            steps=0,
            windows=0,
            states_compared=0,
            rows_replayed=0,
            folds=0,
            prompt_folds=0,
            tail_folds=0,
            checkpoints=0,
            checkpoint_hits=0,
        )

    def summary(self) -> dict[str, int]:
        """Return the counts.

        Steps with windows, windows, states compared (by layer), rows that windows applied, folds between blocks,
        before the tokens of a prompt and after its last one, checkpoints that vLLM exported (by layer), and how often
        a request began with the state of a checkpoint (by layer).
        """
        return dict(self._counts)

    def forwarded(self, moment: str) -> None:
        """Compare the windows of a step: after its forward, and again before sampling.

        Raises:
            AuditError: a state is wrong, or a request of the batch has no window.
        """
        ran = [builder for builder in self._builders if builder.take_planned()]
        self._counts["steps"] += bool(ran)
        for builder in ran:
            plan, starts, slots = builder.plan.tolist(), builder.starts.tolist(), builder.slots.tolist()
            for (source, rows, _, target), slot, start, end in zip(plan, slots, starts, starts[1:], strict=False):
                if not target and slot > 0 and end > start:
                    rows, half = builder.group.cursors[slot].tolist()
                    raise AuditError(
                        f"nwor audit: the request in block {slot} was left out of its window of {end - start} tokens: "
                        f"the count of its accepted tokens, or its cursor ({rows} rows in half {half}), is invalid"
                    )
                if target:
                    self._compare(builder.group, source, rows, target)
                    for name, layer in builder.group.layers.items():
                        self._kept[name, target] = layer.all_states[start:end].clone()
                    self._counts["windows"] += 1
                    self._counts["rows_replayed"] += rows

    def folded(self, group: Any, plan: Tensor, counted: str = "folds") -> None:
        """Compare the targets of a fold. A fold of no rows is a copy.

        Args:
            group: the layers of a KV-cache group.
            plan: of the fold.
            counted: the count that it adds to.

        Raises:
            AuditError: a state is wrong.
        """
        for source, rows, _, target in plan.tolist():
            if target:
                self._compare(group, source, rows, target, keep=True)
                self._counts[counted] += 1

    def exported(self, layer: Any, checkpoint: Any, emitted: Tensor, rows: Tensor | None) -> None:
        """Compare the checkpoints of one layer that vLLM just wrote.

        Args:
            layer: with one state per request.
            checkpoint: vLLM's metadata, with the block and the offset of each.
            emitted: the states that the prefill kernel computed.
            rows: of each checkpoint, its place in ``emitted``; None: its own place.

        Raises:
            AuditError: a block does not hold the emitted state, or has rows pending.
        """
        states, cursors = layer.kv_cache[1], self._group_of(layer).cursors
        blocks, offsets = checkpoint.state_indices.tolist(), checkpoint.checkpoint_offsets.tolist()
        places = range(len(blocks)) if rows is None else rows.tolist()
        for block, offset, place in zip(blocks, offsets, places, strict=True):
            if block <= 0 or offset <= 0:
                continue
            if pending := int(cursors[block, 0]):
                raise AuditError(
                    f"nwor audit: vLLM wrote a checkpoint of layer {layer.prefix} to block {block}, where {pending} "
                    f"rows of another window are pending"
                )
            wanted = emitted[place].to(states.dtype)
            if differ := int((_bytes(states[block]) != _bytes(wanted)).sum()):
                raise AuditError(
                    f"nwor audit: the checkpoint of layer {layer.prefix} in block {block} is not the state that the "
                    f"prefill computed after {offset} tokens: {differ} bytes differ"
                )
            self._exported[layer.prefix, block] = wanted.clone()
            self._counts["checkpoints"] += 1

    def assigned(self, blocks: Iterable[int], may_be_loaded: bool = False) -> None:
        """Forget the windows of blocks that get a new owner.

        Args:
            blocks: new ones, and those that a prefix-cache hit shares.
            may_be_loaded: a KV connector may have loaded other states to these blocks.
        """
        for block in blocks:
            for name in self._names():
                self._kept.pop((name, block), None)
                if may_be_loaded:
                    self._exported.pop((name, block), None)

    def copied(self, copies: Iterable[tuple[int, int]]) -> None:
        """Follow copies of whole blocks: (source, target)."""
        for source, target in copies:
            for name in self._names():
                for known in (self._kept, self._exported):
                    known.pop((name, target), None)
                    if (name, source) in known:
                        known[name, target] = known[name, source]

    def overwritten(self, group: Any, slots: Tensor) -> None:
        """Forget the checkpoints in blocks whose state a prompt is about to overwrite."""
        for block in slots.tolist():
            for name in group.layers:
                self._exported.pop((name, block), None)

    def _compare(self, group: Any, source: int, rows: int, target: int, keep: bool = False) -> None:
        for name, layer in group.layers.items():
            kept = self._kept.get((name, source))
            if not keep:
                self._kept.pop((name, source), None)
            states = layer.kv_cache[1]
            if rows == 0 and source == target:  # nothing was pending
                continue
            if rows and (kept is None or len(kept) < rows):
                raise AuditError(
                    f"nwor audit: layer {name} replays {rows} rows that no window of block {source} recorded"
                )
            exported = self._exported.get((name, source))
            if rows and kept is not None:
                wanted, what = kept[rows - 1], f"the one after {rows} tokens of the last window"
            elif exported is not None:
                wanted, what = exported, f"the checkpoint that vLLM wrote to block {source}"
                self._counts["checkpoint_hits"] += 1
            else:
                wanted, what = states[source], f"that of block {source}"
            if differ := int((_bytes(states[target]) != _bytes(wanted)).sum()):
                raise AuditError(
                    f"nwor audit: the state of layer {name} in block {target} is not {what}: {differ} bytes differ"
                )
            self._exported.pop((name, target), None)
            self._counts["states_compared"] += 1

    def _names(self) -> Iterable[str]:
        return (name for builder in self._builders for name in builder.group.layers)

    def _group_of(self, layer: Any) -> Any:
        return next(builder.group for builder in self._builders if layer.prefix in builder.group.layers)


def _bytes(state: Tensor) -> Tensor:
    return state.contiguous().view(torch.uint8)
