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
from nwor_ops.transaction.window import Layout, Window, WindowBuffers
from nwor_ops.validation import BoundToMemory


class ClassLog(NamedTuple):
    """The log of a class of layers."""

    of: LayerClass
    logs: tuple[Tensor, ...]  # per plane: [layers, R, H, W]
    row_windows: Tensor  # int64 [layers, R]

    def of_layer(self, layer: Layer) -> LayerLog:
        index = static_int(layer.index)
        logs = tuple(static(log)[index] for log in self.logs)
        writable = layer.cache.writable
        key_value = (*layer.caches(), *layer.cache.key_value(logs)) if writable else None
        return LayerLog(logs, static(self.row_windows)[index], key_value)


class LayerLog(NamedTuple):
    """The log of a layer, in the form for eager calls or for a trace."""

    logs: tuple[Tensor, ...]  # per plane: [R, H, W]
    row_windows: Tensor  # int64 [R]
    key_value: tuple[Tensor, Tensor, Tensor, Tensor] | None  # both caches, both logs; None if the planes are opaque


class UndoLog(BoundToMemory):
    """The logs of all layers. The manager calls the same methods of :class:`ShadowPages` in mode ``"stage"``."""

    def __init__(self, layers: LayerTable) -> None:
        self._layers = layers
        self.classes: list[ClassLog] = []
        self.launches: list[dict[str, Any]] = []  # arguments of restore_slots, for one plane of every layer of a class

    def allocate(self, buffers: WindowBuffers) -> None:
        rows = len(buffers.row_rejected)
        classes = [
            ClassLog(
                layer_class,
                tuple(_new_log(plane, len(layer_class.names), rows) for plane in layer_class.planes),
                torch.zeros((len(layer_class.names), rows), dtype=torch.int64, device=buffers.row_slots.device),
            )
            for layer_class in self._layers.classes
        ]
        launches = []
        for of_class in classes:
            for plane, views, log in zip(of_class.of.planes, of_class.of.caches, of_class.logs, strict=True):
                caches, table = PlaneList(views).arguments()
                launch = {
                    "caches": caches,
                    "log": log,
                    "row_slots": buffers.row_slots[self._layers.groups.index(of_class.of.group)],
                    "row_rejected": buffers.row_rejected,
                    "page_offsets": plane.page_offsets,
                    "window_id": buffers.window_id,
                    "row_windows": of_class.row_windows,
                    "num_rows": None,
                    "plane_table": table,
                }
                _try_restore(launch, of_class.of.names)
                launches.append(launch)
        self.classes, self.launches, self._buffers = classes, launches, buffers

    @property
    def log_bytes(self) -> int:
        tensors = [tensor for of_class in self.classes for tensor in (*of_class.logs, of_class.row_windows)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def bind_begin(self, plan: Tensor, layout: Layout, sample: Window) -> Tensor:
        """Bind the launches of begin after the bound ``plan_window``, and return the handle of all."""
        return plan  # drafts are logged when they are written

    def bind_commit(self, begun: Tensor, sample: Window, num_rejected: Tensor) -> Tensor:
        """Bind the launches of a commit by counts. The first one also determines the outcome of the drafts."""
        bound = bind(
            "restore_slots_from_rejected", begun=begun, num_rejected=num_rejected,
            **self._buffers.outcome_arguments(len(num_rejected)) | self.launches[0],
        )  # fmt: skip
        return self._bind_restores(bound, self.launches[1:])

    def bind_commit_tokens(self, outcome: Tensor, sample: Window) -> Tensor:
        """Bind the launches of a commit after the bound ``reject_rows``."""
        return self._bind_restores(outcome, self.launches)

    def _bind_restores(self, bound: Tensor, launches: Sequence[dict[str, Any]]) -> Tensor:
        for launch in launches:
            bound = bind("restore_slots", bound, **launch)
        return bound

    def has_logged(self) -> bool:
        """Return whether a layer has logged a draft of the open window, or no draft has a slot. This reads values."""
        number, slots = self._buffers.window_id, self._buffers.row_slots
        return bool(any((of_class.row_windows == number).any() for of_class in self.classes) or not (slots >= 0).any())

    def put_back(self, window: Window, num_requests: int) -> None:
        """Do nothing: begin only planned."""

    def refresh(self, window: Window, num_requests: int) -> None:
        """Do nothing: the rows are in their slots already."""

    def forget(self, states: Sequence[int] | None) -> None:
        """Do nothing: a log holds only one window."""


def _try_restore(launch: dict[str, Any], names: Sequence[str]) -> None:
    """Check the arguments of a restore before any window. No row is rejected, so nothing is written."""
    try:
        ops.restore_slots(**launch)
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
