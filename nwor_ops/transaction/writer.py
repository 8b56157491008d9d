"""The writer of a layer: writes its keys and values in the open window, and logs what the drafts overwrite."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.transaction.layers import Layer
from nwor_ops.transaction.protocol import State, Stateful, waits_for_checks
from nwor_ops.transaction.undo_log import ClassLog, LayerLog
from nwor_ops.transaction.window import WindowBuffers
from nwor_ops.validation import BoundToMemory


class LayerWriter(BoundToMemory):
    """Writes the rows of one layer; :meth:`nwor_ops.DraftCommitManager.writer` returns it.

    Args:
        class_log: the log of the layer's class; None in mode ``"stage"``, where the slots are redirected already.
        row_slots: int64 ``[R]``: the window's slots of the layer's group, by log row.
    """

    def __init__(
        self,
        layer: Layer,
        manager: Stateful[Layer],
        buffers: WindowBuffers,
        unscaled: Tensor,
        class_log: ClassLog | None,
        row_slots: Tensor,
    ) -> None:
        self._layer, self._manager, self._buffers, self._unscaled = layer, manager, buffers, unscaled
        self._class_log, self._row_slots = class_log, row_slots
        self._eager_log = None if class_log is None else class_log.of_layer(layer)

    def write(
        self,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        token_offset: int = 0,
    ) -> None:
        """See :meth:`nwor_ops.DraftCommitManager.write`."""
        if not torch.compiler.is_compiling() and self._manager._state is not State.OPEN:  # a trace has no guard on it
            self._manager._require_window("write", self._layer.name, key)
        if not self._layer.cache.writable:
            raise RuntimeError(
                f"write: the planes of layer {self._layer.name!r} are opaque; call log(), then the layer's own writer"
            )
        k_scale = self._unscaled if k_scale is None else k_scale
        v_scale = self._unscaled if v_scale is None else v_scale
        log_rows, log = self._log_rows("write", token_offset, slot_mapping), self._log()
        if log is None or log.key_value is None:
            ops.write_kv(key, value, *self._layer.caches(), slot_mapping, k_scale, v_scale, kv_cache_dtype)
            return
        key_cache, value_cache, key_log, value_log = log.key_value
        # By position: this runs in every layer, and torch takes 3 us longer to read the names.
        ops.write_kv_logged(
            key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype, log_rows, key_log,
            value_log, self._buffers.window_id, log.row_windows,
        )  # fmt: skip

    def log(self, slot_mapping: Tensor, token_offset: int = 0) -> None:
        """See :meth:`nwor_ops.DraftCommitManager.log`."""
        if not torch.compiler.is_compiling() and self._manager._state is not State.OPEN:  # a trace has no guard on it
            self._manager._require_window("log", self._layer.name, slot_mapping)
        log_rows, log = self._log_rows("log", token_offset, slot_mapping), self._log()
        if log is None:
            return
        last = len(self._layer.cache.planes) - 1
        for index, plane in enumerate(self._layer.cache.planes):
            # Only the last plane marks the rows, after all planes of the layer are logged.
            marks = (self._buffers.window_id, log.row_windows) if index == last else (None, None)
            ops.log_slots(plane.view, slot_mapping, log_rows, log.logs[index], plane.page_offsets, *marks)

    def _log(self) -> LayerLog | None:
        # Functionalization handles many mutated inputs that share one storage badly. A traced graph therefore
        # sees the one tensor of the class and selects from it.
        if self._class_log is not None and torch.compiler.is_compiling():
            return self._class_log.of_layer(self._layer)
        return self._eager_log

    def _log_rows(self, method: str, token_offset: int, slot_mapping: Tensor) -> Tensor:
        """Return the log rows of a micro-batch. The ops accept more log rows than tokens.

        In debug mode, raise for a draft written to another slot than the window has. It would not be undone.
        """
        log_rows = self._buffers.log_rows
        if type(token_offset) is not int or token_offset != 0:
            validation.token_offset(method, self._layer.name, token_offset, slot_mapping.shape[0], log_rows.shape[0])
            log_rows = log_rows[token_offset:]
        if self._class_log is not None and waits_for_checks(slot_mapping):
            rows = log_rows[: slot_mapping.shape[0]]
            tokens = (rows >= 0).nonzero().squeeze(1)
            planned = self._row_slots[rows[tokens]]
            for token in tokens[slot_mapping[tokens] != planned].tolist():
                raise ValueError(
                    f"{method} of layer {self._layer.name!r}: slot_mapping must have the slots of the window, got slot "
                    f"{int(slot_mapping[token])} for the draft at index {token}, which has another slot there"
                )
        return log_rows
