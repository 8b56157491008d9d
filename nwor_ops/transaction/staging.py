"""A staging buffer holds a window's keys and values outside the cache until their outcome is known.

    buffer = StagingBuffer(max_num_tokens=..., max_num_rows=..., device=...)
    buffer.register_layer("layers.0", LayerCache.packed(kv_cache))       # for every layer
    buffer.allocate()                                                     # once, before any capture

    buffer.begin(row_slots)                                               # each window
    ...  buffer.stage("layers.0", key, value)                             # at each KV-write site
    ...  staged_key, staged_value = buffer.rows("layers.0")               # read by attention, with the cache
    buffer.commit(row_accepted)                                           # after sampling; or reject()

It is a building block for custom engines that verify token trees, if their attention can read keys and values outside
the cache (docs/guides/building-blocks.md). The vLLM plugin does not use it. The rows of a tree's nodes are adjacent,
several of them may name the same slot, and the accepted path goes to consecutive slots.

Between begin and commit nothing synchronizes with the device. ``stage`` can be traced and captured, since all that
changes between windows is data in buffers at fixed addresses. After any exception, call ``reject``.

:class:`KVCacheInterceptor` combines it with a plain writer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import LayerCache
from nwor_ops.torch_fixes import static, static_int
from nwor_ops.transaction.counters import StagingStats
from nwor_ops.transaction.protocol import State, Stateful
from nwor_ops.validation import BoundToMemory

_WINDOWS = slice(ops.STAGE_COUNTERS.index("windows"), ops.STAGE_COUNTERS.index("windows") + 1)


@dataclass
class _StagedLayer(BoundToMemory):
    cache: LayerCache
    index: int
    staged: tuple[Tensor, Tensor] | None = None  # [R, H, Dk] and [R, H, Dv]; filled by allocate()


class StagingBuffer(Stateful[_StagedLayer]):
    """Staged rows of keys and values for every layer, with one record of their destinations.

    Args:
        max_num_tokens: largest number of tokens in one batch, including padding.
        max_num_rows: largest number of rows staged in one window.
        device: device of the caches.

    A staging buffer is not thread-safe. It belongs to the thread that runs the model, and the current stream orders its
    calls. It cannot be copied or pickled.

    Example:
        >>> import torch
        >>> cache = torch.zeros(4, 2, 1, 8)
        >>> buffer = nwor_ops.StagingBuffer(max_num_tokens=8, max_num_rows=8, device="cpu")
        >>> buffer.register_layer("layers.0", nwor_ops.LayerCache.packed(cache))
        >>> buffer.allocate()
        >>> buffer.begin(torch.tensor([2, 3]))
        >>> buffer.stage("layers.0", torch.ones(2, 1, 4), torch.ones(2, 1, 4))
        >>> buffer.commit(torch.tensor([True, False]))
        >>> cache.view(8, 8)[2:4, 0].tolist()
        [1.0, 0.0]
    """

    _called = "staging buffer"
    _closing = "commit() or reject()"
    _layers: dict[str, _StagedLayer]

    def __init__(self, *, max_num_tokens: int, max_num_rows: int, device: torch.device | str) -> None:
        self.max_num_tokens = validation.integer("StagingBuffer: max_num_tokens", max_num_tokens)
        self.max_num_rows = validation.integer("StagingBuffer: max_num_rows", max_num_rows)
        self.device = validation.device("StagingBuffer: device", device)
        self._layers = {}
        self._failed = False  # whether a commit or reject of the open window has begun

    # ------------------------------------------------------------ set-up

    def register_layer(self, name: str, cache: LayerCache) -> None:
        """Add a layer to every window. Its keys and values have the dtype of the cache.

        Args:
            name: the engine's name of the layer; unique.
            cache: planes of the layer, which must hold a key and a value.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        if not cache.writable:
            raise ValueError(f"register_layer: the planes of {name!r} must hold a key and a value, they are opaque")
        self._layers[name] = _StagedLayer(cache, len(self._layers))

    def allocate(self) -> None:
        """Allocate rows and records. A staging buffer makes no other allocation."""
        self._require(State.REGISTERING, "allocate")
        if not self._layers:
            raise RuntimeError("allocate: no layer is registered")
        rows = self.max_num_rows

        def filled(value: int, *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        for layer in self._layers.values():
            key, value = (cache.new_zeros((rows, *cache.shape[2:])) for cache in layer.cache.key_value())
            layer.staged = key, value
        self.stage_rows = filled(-1, self.max_num_tokens, dtype=torch.int32)
        self.row_slots = filled(-1, rows, dtype=torch.int64)
        self.row_accepted = filled(0, rows, dtype=torch.bool)
        self.row_committed = filled(0, rows, dtype=torch.bool)
        self.row_windows = filled(0, len(self._layers), rows, dtype=torch.int64)
        self.window_id = filled(0, 1, dtype=torch.int64)
        self.counters = filled(0, len(ops.STAGE_COUNTERS), dtype=torch.int64)
        self._in_order = torch.arange(self.max_num_tokens, dtype=torch.int32, device=self.device)
        self._unscaled = torch.ones(1, dtype=torch.float32, device=self.device)
        self._num_slots = min(layer.cache.num_slots for layer in self._layers.values())
        for layer in self._layers.values():
            self._commit_layer(layer)  # no row is accepted, so nothing is written
        self._state = State.CLOSED

    @property
    def buffer_bytes(self) -> int:
        """Memory of the staged rows in bytes."""
        staged = (layer.staged for layer in self._layers.values() if layer.staged is not None)
        return sum(tensor.numel() * tensor.element_size() for pair in staged for tensor in pair)

    # ------------------------------------------------------------ a window

    def begin(self, row_slots: Tensor, stage_rows: Tensor | None = None) -> None:
        """Open a window. The arguments are copied, so the caller may change them afterwards.

        Args:
            row_slots: int64 ``[<= max_num_rows]``: destination slot of each row of this window; negative = none. Rows
                may name the same slot if at most one of them will be accepted. :meth:`commit` can replace the slots.
            stage_rows: int32 ``[<= max_num_tokens]``: row of each token, in any order; negative = not staged. None =
                token t has row t, for as many tokens as ``row_slots`` has rows.

        All tensors are on the buffer's device.
        """
        self._require(State.CLOSED, "begin")
        count = self._check("begin", "row_slots", row_slots, self.row_slots)
        if stage_rows is None:
            if count > self.max_num_tokens:
                raise ValueError(f"begin: row_slots must have at most {self.max_num_tokens} rows, one per token")
            stage_rows = self._in_order[:count]
        self._check("begin", "stage_rows", stage_rows, self.stage_rows)
        self._failed = False
        _fill(self.row_slots, row_slots)
        _fill(self.stage_rows, stage_rows)
        # Number of the windows that have ended, plus 1: it tells whether this one was counted.
        torch.add(self.counters[_WINDOWS], 1, out=self.window_id)
        self._state = State.OPEN

    def stage(self, name: str, key: Tensor, value: Tensor, *, token_offset: int = 0) -> None:
        """Stage a layer's keys and values with one kernel.

        Args:
            name: a registered layer.
            key, value: as in :func:`nwor_ops.stage_kv`: one row for each token of the batch from ``token_offset`` on.
            token_offset: index in the batch of the first of these tokens, for micro-batches.
        """
        validation.tensor("stage: key", key)
        layer, tokens = self._layer(name, "stage"), key.shape[0]
        validation.token_offset("stage", name, token_offset, tokens, self.max_num_tokens)
        self._require_window("stage", name, key)
        assert layer.staged is not None
        staged_key, staged_value = map(static, layer.staged)
        row_windows = static(self.row_windows)[static_int(layer.index)]
        rows = self.stage_rows[token_offset : token_offset + tokens]
        ops.stage_kv(key, value, rows, staged_key, staged_value, self.window_id, row_windows)

    def rows(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the staged rows of a layer. Rows that this window has not staged hold data of an earlier window.

        Returns:
            Keys ``[max_num_rows, H, Dk]`` and values ``[max_num_rows, H, Dv]``.
        """
        layer = self._layer(name, "rows")
        if layer.staged is None:
            raise RuntimeError("rows: the buffer must be allocated first")
        return layer.staged

    def commit(self, accepted: Tensor, row_slots: Tensor | None = None) -> None:
        """Write the accepted rows of every layer into the caches, or none of them, and close the window.

        The whole window is rejected, on the device, if any layer has not staged an accepted row in this window, or if a
        slot is out of range. No layer then gets any row, and the window counts as incomplete.

        Args:
            accepted: bool ``[<= max_num_rows]``: accepted rows, in any pattern. :func:`nwor_ops.acceptance_mask`
                returns them for chains of drafts.
            row_slots: int64, as at begin: replaces the destination slots; None = keep them.

        Arguments are checked first. If they are invalid, nothing has changed. After a later error, call :meth:`reject`.
        """
        self._require(State.OPEN, "commit")
        if self._failed:
            raise RuntimeError("commit: commit() or reject() has failed for the open window; call reject()")
        self._check("commit", "accepted", accepted, self.row_accepted)
        if row_slots is not None:
            self._check("commit", "row_slots", row_slots, self.row_slots)
            _fill(self.row_slots, row_slots)
        self._failed = True  # until it has returned
        _fill(self.row_accepted, accepted)
        self._accept()
        for layer in self._layers.values():
            self._commit_layer(layer)
        self._state = State.CLOSED

    def reject(self) -> None:
        """Close the window without writing a row to a cache. Call it after any exception.

        After a :meth:`commit` that failed between two layers, the rows that it wrote stay in their caches, since the
        overwritten rows are lost. All rows then count as rejected.
        """
        self._require(State.OPEN, "reject")
        if self._failed and torch.equal(self.counters[_WINDOWS], self.window_id):  # the window is counted already
            committed = self.row_committed.sum()
            self.counters[ops.STAGE_COUNTERS.index("committed")].sub_(committed)
            self.counters[ops.STAGE_COUNTERS.index("rejected")].add_(committed)
        else:
            self._failed = True
            self.row_accepted.fill_(False)
            self._accept()
        self._state = State.CLOSED

    def stats(self) -> StagingStats:
        """Return the totals so far. Synchronizes with the device."""
        if self._state is State.REGISTERING:
            return StagingStats(*[0] * len(ops.STAGE_COUNTERS))
        return StagingStats(**dict(zip(ops.STAGE_COUNTERS, self.counters.tolist(), strict=True)))

    # ------------------------------------------------------------ inside

    def _accept(self) -> None:
        """Determine which rows are committed, and count them."""
        ops.accept_staged(
            self.row_accepted, self.row_slots, self.window_id, self.row_windows, self._num_slots, self.row_committed,
            self.counters,
        )  # fmt: skip

    def _commit_layer(self, layer: _StagedLayer) -> None:
        assert layer.staged is not None
        ops.commit_staged(
            *layer.staged, self.row_slots, self.row_committed, *layer.cache.key_value(), self._unscaled, self._unscaled,
            "auto",
        )  # fmt: skip

    def _check(self, method: str, name: str, tensor: Tensor, buffer: Tensor) -> int:
        """Check a tensor for the buffer that it fills. Return its length."""
        validation.tensor(f"{method}: {name}", tensor, buffer.dtype, device=self.device)
        if tensor.dim() != 1 or tensor.shape[0] > buffer.shape[0]:
            raise ValueError(
                f"{method}: {name} must have one dimension of at most {buffer.shape[0]}, got {list(tensor.shape)}"
            )
        return tensor.shape[0]


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy the values and fill the rest with "none", so that no data of an earlier window remains."""
    count = values.shape[0]
    buffer[:count].copy_(values)
    buffer[count:].fill_(False if buffer.dtype == torch.bool else -1)


class KVCacheInterceptor(BoundToMemory):
    """The single call at the KV-write sites of an engine. It stages in a window, and otherwise writes into the cache.

    Args:
        buffer: the staging buffer, allocated.

    Attributes:
        refused_windows: number of windows that the buffer refused.

    A window that the buffer refuses at begin (too many rows, an invalid dtype) is counted and written directly: it
    keeps all its rows. Writes without begin, as in profiling and warm-up, are direct too. A later error propagates;
    then call :meth:`cancel`. The decision is made in Python, so it suits engines whose write site runs in Python.
    Compiled code and CUDA graphs should call :meth:`StagingBuffer.stage` directly.

    Example:
        >>> import torch
        >>> cache, slots = torch.zeros(4, 2, 1, 8), torch.tensor([2, 3])
        >>> buffer = nwor_ops.StagingBuffer(max_num_tokens=8, max_num_rows=8, device="cpu")
        >>> buffer.register_layer("layers.0", nwor_ops.LayerCache.packed(cache))
        >>> buffer.allocate()
        >>> interceptor = nwor_ops.KVCacheInterceptor(buffer)
        >>> interceptor.begin(slots)
        True
        >>> interceptor.write("layers.0", torch.ones(2, 1, 4), torch.ones(2, 1, 4), slots)
        >>> interceptor.cancel()
        >>> bool(cache.any())
        False
    """

    def __init__(self, buffer: StagingBuffer) -> None:
        validation.instance("KVCacheInterceptor: buffer", buffer, StagingBuffer, "a StagingBuffer")
        if buffer.state is State.REGISTERING:
            raise RuntimeError("KVCacheInterceptor: the staging buffer must be allocated first")
        self.buffer, self.refused_windows = buffer, 0

    @property
    def staging(self) -> bool:
        """Whether a window is staged. Attention must then read its rows from the buffer."""
        return self.buffer.state is State.OPEN

    def begin(self, row_slots: Tensor, stage_rows: Tensor | None = None) -> bool:
        """Open a window; arguments as in :meth:`StagingBuffer.begin`.

        Returns:
            Whether the window is staged.
        """
        try:
            self.buffer.begin(row_slots, stage_rows)
            return True
        except (ValueError, TypeError) as error:
            self.refused_windows += 1
            if self.refused_windows == 1:
                warnings.warn(f"nwor_ops: a window was written directly: {error}", RuntimeWarning, stacklevel=2)
            return False

    def write(self, name: str, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stage a layer's keys and values, or write them to the slots of ``slot_mapping``.

        The arguments are as in :func:`nwor_ops.write_kv`.
        """
        if self.staging:
            self.buffer.stage(name, key, value)
            return
        caches, one = self.buffer._layer(name, "write").cache.key_value(), self.buffer._unscaled
        ops.write_kv(key, value, *caches, slot_mapping, one, one, "auto")

    def commit(self, accepted: Tensor, row_slots: Tensor | None = None) -> None:
        """Commit a staged window as :meth:`StagingBuffer.commit`. A direct window keeps all its rows, and this does
        nothing."""
        if self.staging:
            self.buffer.commit(accepted, row_slots)

    def cancel(self) -> None:
        """Close a staged window without writing its rows to a cache."""
        if self.staging:
            self.buffer.reject()
