"""The states and records of a layer, and the launches that fold pending rows into the states of several layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.ops.bound import bind, fold_bound, own_error
from nwor_ops.validation import BoundToMemory

_MOST_ROWS = 32  # kMostRecordRows in csrc/recurrent_plan.h
CHUNK, MOST_CHUNK_WINDOW, CHUNK_WIDTH = 16, 8, 128  # of the kernels of the chunk form


@dataclass(frozen=True)
class RecurrentCache(BoundToMemory):
    """States and records of one layer, with one slot per request.

    Use :meth:`new` to allocate everything. Or pass all five tensors, which may be views of an engine's pages: any
    stride between slots, contiguous within a slot. Slot 0 is padding.

    Letters: S slots, W tokens of the longest window (K + 1), which is the number of rows of a record, H key heads, HV
    value heads, dk and dv elements per key and value head.

    Args:
        state: float32 or bfloat16 ``[S, HV, dv, dk]``.
        record_keys: ``[S, 2, W, H, dk]``, dtype of the layer's keys: bfloat16, float16 or, only on the CPU, float32.
        record_norms: float32 ``[S, 2, W, H]``.
        record_decays: float32 ``[S, 2, W, HV]``, or ``[S, 2, W, HV, dk]`` for layers with a decay per channel (KDA).
        record_updates: float32 ``[S, W, HV, dv]``.
        chunk: C, 0 or 16. With 16 windows have the chunk form, and a store folds exactly 16 rows
            (:func:`nwor_ops.gated_delta_verify`). It needs dk = dv = 128, no decay per channel and W of at most 8. Up
            to R = C - 1 + W rows may be pending. So records have one half of R + W rows, ``[S, 1, R + W, ...]``, and
            ``record_updates`` is ``[S, R + W, HV, dv]``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match.

    Example:
        >>> cache = RecurrentCache.new(
        ...     num_slots=3, max_window=4, num_key_heads=1, num_value_heads=2, key_size=64, value_size=64
        ... )
        >>> cache.state.shape, cache.num_slots, cache.max_window
        (torch.Size([3, 2, 64, 64]), 3, 4)
    """

    state: Tensor
    record_keys: Tensor
    record_norms: Tensor
    record_decays: Tensor
    record_updates: Tensor
    chunk: int = 0

    @classmethod
    def new(
        cls,
        *,
        num_slots: int,
        max_window: int,
        num_key_heads: int,
        num_value_heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        per_channel: bool = False,
        chunk: int = 0,
        device: torch.device | str = "cpu",
    ) -> RecurrentCache:
        """Allocate states and records, filled with zeros.

        Args:
            num_slots: one for each request that may hold a state, and one for slot 0.
            max_window: tokens of the longest window: K draft tokens and 1. At most 32.
            num_key_heads, num_value_heads: heads of the layer. The number of value heads is a multiple of the number of
                key heads; adjacent value heads share a key head.
            key_size, value_size: elements per head. Kernels exist for keys of 64, 96, 128 or 256 and values of 64, 128,
                192 or 256.
            dtype: dtype of the queries, keys and values.
            state_dtype: dtype of the states, float32 or bfloat16.
            per_channel: whether each channel of a key has a decay (KDA). If False, each value head has one.
            chunk: 0 or 16: how many rows a store folds. 0 = a store folds all pending rows.
            device: device of all tensors.

        Raises:
            ValueError, TypeError: a number, dtype or device is invalid.
        """
        sizes = {"num_slots": num_slots, "num_key_heads": num_key_heads, "num_value_heads": num_value_heads,
                 "key_size": key_size, "value_size": value_size}  # fmt: skip
        for name, size in sizes.items():
            validation.integer(f"RecurrentCache.new: {name}", size)
        chunk = validation.integer("RecurrentCache.new: chunk", chunk, least=0, most=CHUNK)
        most = MOST_CHUNK_WINDOW if chunk else _MOST_ROWS
        rows = validation.integer("RecurrentCache.new: max_window", max_window, most=most)
        validation.boolean("RecurrentCache.new: per_channel", per_channel)
        on = validation.device("RecurrentCache.new: device", device)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=on)

        channels = (key_size,) if per_channel else ()
        halves, rows = (1, chunk - 1 + 2 * rows) if chunk else (2, rows)
        return cls(
            zeros(num_value_heads, value_size, key_size, dtype=state_dtype),
            zeros(halves, rows, num_key_heads, key_size, dtype=dtype),
            zeros(halves, rows, num_key_heads),
            zeros(halves, rows, num_value_heads, *channels),
            zeros(rows, num_value_heads, value_size),
            chunk,
        )

    def __post_init__(self) -> None:
        """Let the op that folds check the tensors, with a plan of no rows."""
        validation.integer("RecurrentCache: chunk", self.chunk, least=0)
        device = getattr(self.state, "device", "cpu")
        plan = torch.zeros(0, 4, dtype=torch.int32, device=device)
        layer_window = torch.zeros(1, dtype=torch.int64, device=device)
        keys, norms, decays, updates = ([record] for record in self.records)
        try:
            ops.gated_delta_fold(
                [self.state], keys, norms, decays, updates, [layer_window], plan, None, self.chunk
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            sentence = str(error).removeprefix("gated_delta_fold: ").replace("states[0]", "state").replace("[0]", "")
            raise type(error)(f"RecurrentCache: {sentence}") from None

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def num_slots(self) -> int:
        return self.state.shape[0]

    @property
    def max_window(self) -> int:
        """Tokens of the longest window."""
        rows = self.record_keys.shape[2]
        return (rows - self.chunk + 1) // 2 if self.chunk else rows

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a key has a decay (KDA)."""
        return self.record_decays.dim() == 5

    @property
    def geometry(self) -> tuple[object, ...]:
        """Chunk, dtypes, shapes and strides. One launch folds all layers for which they are equal."""
        tensors = (self.state, *self.records)
        return self.chunk, *((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)

    @property
    def records(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, norms, decays and updates, in the order of the ops' arguments."""
        return self.record_keys, self.record_norms, self.record_decays, self.record_updates


@dataclass(frozen=True)
class FoldedLayer(BoundToMemory):
    """A layer whose pending rows are folded.

    Attributes:
        cache: its states and records.
        layer_window: int64 ``[1]``: the last window in which the layer ran.
    """

    cache: RecurrentCache
    layer_window: Tensor


class Fold(BoundToMemory):
    """The launches that fold layers: one for all layers of equal geometry."""

    def __init__(self, layers: Iterable[FoldedLayer]) -> None:
        by_geometry: dict[tuple[object, ...], list[FoldedLayer]] = {}
        for layer in layers:
            by_geometry.setdefault(layer.cache.geometry, []).append(layer)
        self._launches: list[dict[str, Any]] = [
            {
                "states": [layer.cache.state for layer in group],
                "record_keys": [layer.cache.record_keys for layer in group],
                "record_norms": [layer.cache.record_norms for layer in group],
                "record_decays": [layer.cache.record_decays for layer in group],
                "record_updates": [layer.cache.record_updates for layer in group],
                "layer_windows": [layer.layer_window for layer in group],
                "chunk": group[0].cache.chunk,
            }
            for group in by_geometry.values()
        ]
        self._bound: list[Tensor] | None = None

    def apply(self, plan: Tensor, window_id: Tensor | None = None) -> None:
        """Fold the rows of a plan in all layers.

        Args:
            plan: int32 ``[E, 4]``: a plan of :func:`nwor_ops.plan_recurrent_fold`, or of an open window to cancel it.
            window_id: int64 ``[1]`` or None. Layers that are marked with this number are left out, and the others
                are marked with it. So a call can be repeated after an error. None = fold all layers and mark none.
        """
        if window_id is not None:
            for launch in self._launches:
                ops.gated_delta_fold(plan=plan, window_id=window_id, **launch)
            return
        if self._bound is None:
            self._bound = [bind("gated_delta_fold", plan=plan, **launch) for launch in self._launches]
        try:
            for bound in self._bound:
                fold_bound(plan, bound)
        except Exception as error:
            raise own_error(error) from None
