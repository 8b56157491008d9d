"""Rerun a window of the chunk form, in windows of one token, for the audit.

The bits of a token must not depend on how the text is cut into windows, so both have the same outputs and records.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.recurrent.cache import RecurrentCache
from nwor_ops.validation import BoundToMemory
from nwor_ops.vllm.audit.cache import AuditError


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that a layer has run.

    Attributes:
        block: the block of its state and record.
        rows: rows that are pending in the block, before those of the window.
        first: the first one of these rows.
        start, end: its tokens in the batch.
    """

    block: int
    rows: int
    first: int
    start: int
    end: int


class Rerun(BoundToMemory):
    """The inputs and outputs of the last window of one layer.

    CUDA graphs copy them to the same buffers, so the buffers never move.

    Args:
        layer: a layer with one state per request.
        most_tokens: maximum number of window tokens in one step.
    """

    def __init__(self, layer: Any, most_tokens: int) -> None:
        self._layer, self._most_tokens = layer, most_tokens
        self._kept: dict[str, Tensor] = {}
        self._norm: dict[str, Any] = {}
        self._is_gated = torch.zeros(1, dtype=torch.bool, device=layer.layer_window.device)

    def keep(self, out: Tensor, inputs: Sequence[Tensor], gate: Tensor | None, norm: dict[str, Any]) -> None:
        """Copy the tensors of a window. It does not synchronize.

        Args:
            out: the outputs, after norm and gate if there is a gate.
            inputs: q, k, v, a and b.
            gate: the gate, or None.
            norm: arguments of the norm, which are the same for all windows with a gate.
        """
        self._is_gated.fill_(gate is not None)
        given = dict(zip("qkvab", inputs, strict=True)) | {"out": out}
        if gate is not None:
            given["gate"], self._norm = gate.reshape(-1, *out.shape[1:])[: out.shape[0]], norm
        for name, tensor in given.items():
            if name not in self._kept:
                self._kept[name] = tensor.new_zeros(self._most_tokens, *tensor.shape[1:])
            self._kept[name][: tensor.shape[0]].copy_(tensor)

    def compare(self, windows: Sequence[Window]) -> int:
        """Run the last windows again, token by token.

        Returns:
            The number of tokens.

        Raises:
            AuditError: outputs or records have other bits.
        """
        cache: RecurrentCache = self._layer.recurrent_cache
        blocks = torch.tensor([0, *(window.block for window in windows)], device=cache.device)
        state, keys, norms, decays, updates = (tensor[blocks] for tensor in (cache.state, *cache.records))  # copies
        scratch = RecurrentCache(state, keys, norms, decays, updates, cache.ring_rows, cache.chunk)
        kept, ring = self._kept, cache.record_keys.shape[2]
        is_gated = bool(self._is_gated)
        rows, firsts = [window.rows for window in windows], [window.first for window in windows]
        for step in range(max(window.end - window.start for window in windows)):
            active = [n for n, window in enumerate(windows) if window.start + step < window.end]
            plan = []
            for n in active:
                plan.append([n + 1, rows[n], firsts[n], n + 1 if rows[n] >= cache.chunk else 0])
                if rows[n] >= cache.chunk:
                    rows[n], firsts[n] = rows[n] - cache.chunk, (firsts[n] + cache.chunk) % ring
                rows[n] += 1
            tokens = torch.tensor([windows[n].start + step for n in active], device=cache.device)
            given = {name: tensor[tokens] for name, tensor in kept.items()}
            expected, out = given["out"], torch.zeros_like(given["out"])
            self._layer.run_window(
                out,
                scratch,
                torch.zeros_like(self._layer.layer_window),
                tuple(given[name] for name in "qkvab"),
                (
                    torch.tensor(plan, dtype=torch.int32, device=cache.device),
                    torch.ones_like(self._layer.layer_window),
                    torch.arange(len(active) + 1, dtype=torch.int32, device=cache.device),
                ),
                **(self._norm | {"gate": given["gate"]} if is_gated else {}),
            )
            for n, found, wanted in zip(active, out, expected, strict=True):
                self._check(found, wanted, f"the output of token {step}", windows[n])
        names = ("keys", "norms", "decays", "updates")
        for name, found, wanted in zip(names, scratch.records, cache.records, strict=True):
            for n, window in enumerate(windows):
                self._check(found[n + 1], wanted[window.block], f"the recorded {name}", window)
        return sum(window.end - window.start for window in windows)

    def _check(self, found: Tensor, wanted: Tensor, what: str, window: Window) -> None:
        if differ := int((bytes_of(found) != bytes_of(wanted)).sum()):
            raise AuditError(
                f"nwor audit: {what} of layer {self._layer.prefix} in the window of block {window.block}, of "
                f"{window.end - window.start} tokens after {window.rows} pending rows, is not that of windows of one "
                f"token: {differ} bytes differ"
            )


def windows_of(plan: Sequence[Sequence[int]], starts: Sequence[int], chunk: int, ring: int) -> list[Window]:
    """Return the windows of a plan that have run, with the rows that are pending since.

    Args:
        plan: rows of the plan.
        starts: first token of each request, and the end of the last one.
        chunk: rows that a store folds.
        ring: rows of a record.
    """
    found = []
    for (source, rows, first, target), (start, end) in zip(plan, itertools.pairwise(starts), strict=False):
        if source:
            folded = chunk if target else 0
            found.append(Window(source, rows - folded, (first + folded) % ring, start, end))
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
