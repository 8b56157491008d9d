"""Is the one state, after what was accepted was replayed, the state that vLLM would have kept? To the bit, every step.

The kernel that verifies a window also gives, where it is asked, the state after each of its tokens as a scheme stores
it that keeps them all. The next window of the request begins with the replay of what was accepted: what is stored then
must be what was given for the last accepted token. Nothing else may have touched the state in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.audit.undo import AuditError


class StateAudit:
    """Compares the states of every window. Waits for the device, and keeps K + 1 states per block: small models.

    Args:
        builders: the metadata builders of all groups, bound.
    """

    def __init__(self, builders: Sequence[Any]) -> None:
        self._builders = builders
        self._kept: dict[tuple[str, int], Tensor] = {}  # by layer and block: the states after each token
        self._counts = Counter(steps=0, windows=0, states_compared=0, rows_replayed=0, folds=0, prompt_folds=0)

    def summary(self) -> dict[str, int]:
        """Steps with windows, windows, states compared (by layer), rows that windows replayed, folds between blocks and
        before the tokens of a prompt."""
        return dict(self._counts)

    def forwarded(self, moment: str) -> None:
        """After the forward of a step, and again before sampling.

        Raises:
            AuditError: a state is not what it should be, or a request of the batch has no window.
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
                        f"the count of its accepted tokens, or its cursor ({rows} rows in half {half}), cannot be"
                    )
                if target:
                    self._compare(builder.group, source, rows, target)
                    for name, layer in builder.group.layers.items():
                        self._kept[name, target] = layer.all_states[start:end].clone()
                    self._counts["windows"] += 1
                    self._counts["rows_replayed"] += rows

    def folded(self, group: Any, plan: Tensor, counted: str = "folds") -> None:
        """Behind a fold: of a window that is pending, or of none, which is a copy. ``counted``: as what.

        Raises:
            AuditError: as above.
        """
        for source, rows, _, target in plan.tolist():
            if target:
                self._compare(group, source, rows, target, keep=True)
                self._counts[counted] += 1

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
            wanted = kept[rows - 1] if rows and kept is not None else states[source]
            differ = int((_bytes(states[target]) != _bytes(wanted)).sum())
            if differ:
                raise AuditError(
                    f"nwor audit: the state of layer {name} in block {target} is not the one after {rows} tokens of "
                    f"the last window: {differ} bytes differ"
                )
            self._counts["states_compared"] += 1


def _bytes(state: Tensor) -> Tensor:
    return state.contiguous().view(torch.uint8)
