"""The undo log, mode ``"cow"``: saves the rows that drafts overwrite and restores the rejected ones.

The log holds raw bytes. It has one row for each draft of a window in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.kv_cache import Plane, PlaneList
from nwor_ops.ops.bound import bind
from nwor_ops.torch_fixes import static, static_int
from nwor_ops.transaction.layers import Layer, LayerClass, LayerTable
from nwor_ops.transaction.recovery import Capacity, Redirects
from nwor_ops.transaction.state import waits_for_checks
from nwor_ops.transaction.window import Window, WindowBuffers
from nwor_ops.validation import BoundToMemory


class Launch(NamedTuple):
    """Arguments of one call of restore_slots: one plane of every layer of a class."""

    planes: PlaneList
    log: Tensor
    row_slots: Tensor
    page_offsets: Tensor | None
    row_windows: Tensor


class ClassLog(NamedTuple):
    """The log of a class of layers."""

    of: LayerClass
    logs: tuple[Tensor, ...]  # per plane: [layers, R, H, W]
    row_windows: Tensor  # int64 [layers, R]

    def of_layer(self, layer: Layer) -> LayerLog:
        place = static_int(layer.index)
        logs = tuple(static(log)[place] for log in self.logs)
        writable = layer.cache.writable
        key_value = (*layer.caches(), *layer.cache.key_value(logs)) if writable else None
        return LayerLog(logs, static(self.row_windows)[place], key_value)


class LayerLog(NamedTuple):
    """The log of a layer, in the form for eager calls or for a trace."""

    logs: tuple[Tensor, ...]  # per plane: [R, H, W]
    row_windows: Tensor  # int64 [R]
    key_value: tuple[Tensor, Tensor, Tensor, Tensor] | None  # both caches, both logs; None if the planes are opaque


class UndoLog(BoundToMemory):
    """See :class:`nwor_ops.transaction.recovery.Recovery`."""

    def __init__(self, layers: LayerTable, capacity: Capacity) -> None:
        self._layers, self._capacity = layers, capacity
        self.classes: list[ClassLog] = []
        self.launches: list[Launch] = []

    def allocate(self, buffers: WindowBuffers) -> None:
        rows = self._capacity.max_draft_tokens
        classes = [
            ClassLog(
                layer_class,
                tuple(_new_log(plane, len(layer_class.names), rows) for plane in layer_class.planes),
                torch.zeros((len(layer_class.names), rows), dtype=torch.int64, device=self._capacity.device),
            )
            for layer_class in self._layers.classes
        ]
        launches = [
            Launch(
                PlaneList(caches),
                log,
                buffers.row_slots[self._layers.groups.index(found.of.group)],
                plane.page_offsets,
                found.row_windows,
            )
            for found in classes
            for plane, caches, log in zip(found.of.planes, found.of.caches, found.logs, strict=True)
        ]
        names = [found.of.names for found in classes for _ in found.of.planes]
        for launch, layers in zip(launches, names, strict=True):
            _try_restore(launch, buffers, layers)
        # Assigned together, so that a failed allocation can be repeated.
        self.classes, self.launches, self._buffers = classes, launches, buffers
        self._of_layer = {
            name: classes[layer.layer_class.number].of_layer(layer) for name, layer in self._layers.items()
        }

    @property
    def log_bytes(self) -> int:
        tensors = [tensor for found in self.classes for tensor in (*found.logs, found.row_windows)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def launches_per_window(self) -> int:
        return sum(len(layer_class.planes) for layer_class in self._layers.classes)

    def check(self, window: Window) -> None:
        """Do nothing: the undo log has no requirements beyond those of every window."""

    def redirects(self, window: Window, slot_mappings: list[Tensor]) -> Redirects:
        return []

    def open(self, window: Window, redirects: Redirects) -> None:
        """Do nothing: drafts are logged when they are written."""

    def write(
        self,
        layer: Layer,
        log_rows: Tensor,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        kv_cache_dtype: str,
    ) -> None:
        self._check_slots("write", layer, log_rows, slot_mapping)
        log = self.of_layer(layer)
        assert log.key_value is not None
        key_cache, value_cache, key_log, value_log = log.key_value
        # By position: this runs in every layer, and torch takes 3 us longer to read the names.
        ops.write_kv_logged(
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype,
            log_rows, key_log, value_log, self._buffers.window_id, log.row_windows,
        )  # fmt: skip

    def log(self, layer: Layer, log_rows: Tensor, slot_mapping: Tensor) -> None:
        self._check_slots("log", layer, log_rows, slot_mapping)
        log = self.of_layer(layer)
        last = len(layer.cache.planes) - 1
        for index, plane in enumerate(layer.cache.planes):
            # Only the last plane marks the rows, after all planes of the layer are logged.
            marks = (self._buffers.window_id, log.row_windows) if index == last else (None, None)
            ops.log_slots(plane.view, slot_mapping, log_rows, log.logs[index], plane.page_offsets, *marks)

    def _check_slots(self, method: str, layer: Layer, log_rows: Tensor, slot_mapping: Tensor) -> None:
        """In debug mode, raise for a draft written to another slot than the window has. It would not be undone."""
        if not waits_for_checks(slot_mapping) or slot_mapping.device != log_rows.device:
            return
        rows = log_rows[: slot_mapping.shape[0]]
        tokens = (rows >= 0).nonzero().squeeze(1)
        group = layer.layer_class.group
        planned = self._buffers.row_slots[self._layers.groups.index(group)][rows[tokens].to(torch.int64)]
        for token in tokens[slot_mapping[tokens] != planned].tolist():
            raise ValueError(
                f"{method}: slot_mapping must have the slots of the window's slot_mappings[{group!r}], got slot "
                f"{int(slot_mapping[token])} for the draft at index {token}, which has another slot there"
            )

    def bind_open(self, window: Window, redirects: Redirects, plan: Tensor) -> Tensor:
        return plan

    def close(self, window: Window, redirects: Redirects, first: int = 0, num_drafts: int | None = None) -> None:
        for launch in self.launches[first:]:
            ops.restore_slots(*self._restore(launch, num_drafts).values())

    def _restore(self, launch: Launch, num_drafts: int | None) -> dict[str, Any]:
        return _restore_arguments(launch, self._buffers, num_drafts)

    def _restore_from_rejected(self, window: Window, num_rejected: Tensor) -> dict[str, Any]:
        buffers = self._buffers
        return self._restore(self.launches[0], window.num_draft_tokens) | {
            "num_rejected": num_rejected,
            "draft_start_loc": buffers.draft_starts,
            "num_accepted": buffers.num_accepted,
            "counters": buffers.counters,
        }

    def close_from_rejected(self, window: Window, redirects: Redirects, num_rejected: Tensor) -> None:
        ops.restore_slots_from_rejected(**self._restore_from_rejected(window, num_rejected))

    def bind_close(self, window: Window, redirects: Redirects, num_rejected: Tensor, begun: Tensor) -> Tensor:
        bound = bind("restore_slots_from_rejected", begun=begun, **self._restore_from_rejected(window, num_rejected))
        return self._bind_from(1, window, bound)

    def bind_close_after(self, window: Window, redirects: Redirects, outcome: Tensor) -> Tensor:
        return self._bind_from(0, window, outcome)

    def _bind_from(self, first: int, window: Window, bound: Tensor) -> Tensor:
        for launch in self.launches[first:]:
            bound = bind("restore_slots", bound, **self._restore(launch, window.num_draft_tokens))
        return bound

    def close_keeping_all(self, window: Window, redirects: Redirects) -> None:
        """Do nothing: every row is in its slot already."""

    def put_back(self, window: Window, redirects: Redirects) -> None:
        """Do nothing: :meth:`open` did nothing."""

    def refresh(self, window: Window) -> None:
        """Do nothing: the rows are in their slots already."""

    def forget(self, states: Sequence[int] | None) -> None:
        """Do nothing: a log holds only one window."""

    def of_layer(self, layer: Layer) -> LayerLog:
        if not torch.compiler.is_compiling():
            return self._of_layer[layer.name]
        # Functionalization handles many mutated inputs that share one storage badly. A traced graph therefore
        # sees the one tensor of the class and selects from it.
        return self.classes[layer.layer_class.number].of_layer(layer)


def _restore_arguments(launch: Launch, buffers: WindowBuffers, num_drafts: int | None) -> dict[str, Any]:
    """Return the arguments of restore_slots, in the order of its schema."""
    caches, table = launch.planes.arguments()
    return {
        "caches": caches,
        "log": launch.log,
        "row_slots": launch.row_slots,
        "row_rejected": buffers.row_rejected,
        "page_offsets": launch.page_offsets,
        "window_id": buffers.window_id,
        "row_windows": launch.row_windows,
        "num_rows": num_drafts,
        "plane_table": table,
    }


def _try_restore(launch: Launch, buffers: WindowBuffers, names: Sequence[str]) -> None:
    """Check the arguments of a restore before any window. No row is rejected, so nothing is written."""
    try:
        ops.restore_slots(*_restore_arguments(launch, buffers, None).values())
    except (ValueError, TypeError, IndexError) as error:
        raise type(error)(f"allocate: layers {', '.join(map(repr, names))} could not be restored: {error}") from error


def _new_log(plane: Plane, layers: int, rows: int) -> Tensor:
    """Allocate a log ``[layers, rows, H, W]`` with the memory order of the plane.

    Rows are adjacent if slots are, so the drafts of a request, in consecutive slots, move together.
    """
    _, _, heads, width = plane.view.shape
    if plane.page_offsets is None and plane.view.stride(1) == 1 and width > 1:
        return plane.view.new_zeros((layers, heads, width, rows)).permute(0, 3, 1, 2)
    return plane.view.new_zeros((layers, rows, heads, width))
