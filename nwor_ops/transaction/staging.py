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
changes between windows is data in buffers at fixed addresses.

:class:`KVCacheInterceptor` combines it with a plain writer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import LayerCache, has_no_data
from nwor_ops.torch_fixes import static, static_int
from nwor_ops.transaction.counters import InterceptorStats, StagingStats
from nwor_ops.transaction.state import State, Stateful
from nwor_ops.validation import BoundToMemory, explained

_WINDOWS = ops.STAGE_COUNTERS.index("windows")


@dataclass
class _StagedLayer(BoundToMemory):
    cache: LayerCache
    index: int
    dtype: torch.dtype
    kv_cache_dtype: str
    k_scale: Tensor | None
    v_scale: Tensor | None
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
    _in_place_of_a_copy = "make another StagingBuffer, register the layers' own caches and allocate() it"

    def __init__(self, *, max_num_tokens: int, max_num_rows: int, device: torch.device | str) -> None:
        self.max_num_tokens = validation.integer("StagingBuffer: max_num_tokens", max_num_tokens)
        self.max_num_rows = validation.integer("StagingBuffer: max_num_rows", max_num_rows)
        self.device = validation.device("StagingBuffer: device", device)
        self._layers = {}
        self._by_request = False  # whether the open window's rows have requests and positions
        self._destinations: Tensor | None = None  # slots of the open window's rows, after their outcome is known
        self._launched: Tensor | None = None  # the same before: only the device knows whether the outcome is counted
        self._after_reject: Tensor | None = None  # counters of a window that was counted before it was rejected

    # ------------------------------------------------------------ set-up

    def register_layer(
        self,
        name: str,
        cache: LayerCache,
        *,
        dtype: torch.dtype | None = None,
        kv_cache_dtype: str = "auto",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Add a layer to every window.

        Args:
            name: the engine's name of the layer; unique.
            cache: planes of the layer, which must hold a key and a value.
            dtype: dtype of its keys and values; None = that of the cache (``kv_cache_dtype="auto"``).
            kv_cache_dtype, k_scale, v_scale: as in :func:`nwor_ops.write_kv`; None = 1. Rows are staged unquantized and
                quantized at commit, so a scale per token has one value for each row of the buffer.

        Raises:
            RuntimeError: the buffer is allocated already.
            ValueError, TypeError: the name is taken, or the cache cannot be staged. The layer is not registered.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        validation.instance("register_layer: kv_cache_dtype", kv_cache_dtype, str, "a string")
        if dtype is not None:
            validation.instance("register_layer: dtype", dtype, torch.dtype, "a torch.dtype or None")
        for what, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                validation.tensor(f"register_layer: {what}", scale)
        if not cache.writable:
            raise ValueError(f"register_layer: the planes of {name!r} must hold a key and a value, they are opaque")
        if dtype is None:
            if kv_cache_dtype != "auto":
                raise ValueError(f"register_layer: dtype must be given for kv_cache_dtype {kv_cache_dtype}, got None")
            dtype = cache.planes[0].view.dtype
        self._layers[name] = _StagedLayer(cache, len(self._layers), dtype, kv_cache_dtype, k_scale, v_scale)

    def allocate(self) -> None:
        """Allocate rows and records. A staging buffer makes no other allocation.

        Raises:
            RuntimeError: no layer is registered, or the buffer is allocated already.
            ValueError, TypeError: :func:`nwor_ops.commit_staged` would refuse a layer. This is checked here, because at
                the end of a window the layers before it would have their rows already.
        """
        self._require(State.REGISTERING, "allocate")
        if not self._layers:
            raise RuntimeError("allocate: no layer is registered")
        rows = self.max_num_rows

        def filled(value: int, *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        for layer in self._layers.values():
            caches = layer.cache.key_value()
            key, value = (
                torch.zeros((rows, *cache.shape[2:]), dtype=layer.dtype, device=self.device) for cache in caches
            )
            layer.staged = key, value
        self.stage_rows = filled(-1, self.max_num_tokens, dtype=torch.int32)
        self.row_slots = filled(-1, rows, dtype=torch.int64)
        self._other_slots = filled(-1, rows, dtype=torch.int64)  # slots of a commit that replaces them
        self.row_requests = filled(-1, rows, dtype=torch.int32)
        self.row_positions = filled(-1, rows, dtype=torch.int32)
        self.row_accepted = filled(0, rows, dtype=torch.bool)
        self.row_committed = filled(0, rows, dtype=torch.bool)
        self.row_windows = filled(0, len(self._layers), rows, dtype=torch.int64)
        self.window_id = filled(0, 1, dtype=torch.int64)
        self.counters = filled(0, len(ops.STAGE_COUNTERS), dtype=torch.int64)
        self._in_order = torch.arange(self.max_num_tokens, dtype=torch.int32, device=self.device)
        self._unscaled = torch.ones(1, dtype=torch.float32, device=self.device)
        self._num_slots = min(layer.cache.num_slots for layer in self._layers.values())
        for name, layer in self._layers.items():
            self._try_commit(name, layer)
        self._state = State.CLOSED

    @property
    def buffer_bytes(self) -> int:
        """Memory of the staged rows in bytes."""
        staged = (layer.staged for layer in self._layers.values() if layer.staged is not None)
        return sum(tensor.numel() * tensor.element_size() for pair in staged for tensor in pair)

    # ------------------------------------------------------------ a window

    def begin(
        self,
        row_slots: Tensor,
        stage_rows: Tensor | None = None,
        row_requests: Tensor | None = None,
        row_positions: Tensor | None = None,
    ) -> None:
        """Open a window. The arguments are copied, so the caller may change them afterwards.

        Args:
            row_slots: int64 ``[<= max_num_rows]``: destination slot of each row of this window; negative = none. Rows
                may name the same slot if at most one of them will be accepted. :meth:`commit` can replace the slots.
            stage_rows: int32 ``[<= max_num_tokens]``: row of each token, in any order; negative = not staged. None =
                token t has row t, for as many tokens as ``row_slots`` has rows.
            row_requests, row_positions: int32, as long as ``row_slots``: request of each row, and index among that
                request's rows. Required for a commit by number of accepted rows.

        All tensors are on the buffer's device.

        Raises:
            RuntimeError: a window is open already.
            ValueError, TypeError: more rows or tokens than the buffer's limits, or an invalid dtype. Nothing has
                changed.
        """
        self._require(State.CLOSED, "begin")
        count = self._check("begin", "row_slots", row_slots, self.row_slots)
        if stage_rows is None:
            if count > self.max_num_tokens:
                raise ValueError(f"begin: row_slots must have at most {self.max_num_tokens} rows, one per token")
            stage_rows = self._in_order[:count]
        self._check("begin", "stage_rows", stage_rows, self.stage_rows)
        if (row_requests is None) != (row_positions is None):
            raise ValueError("begin: row_requests and row_positions must be given together")
        if row_requests is not None and row_positions is not None:
            self._check("begin", "row_requests", row_requests, self.row_requests, count)
            self._check("begin", "row_positions", row_positions, self.row_positions, count)
            _fill(self.row_requests, row_requests)
            _fill(self.row_positions, row_positions)
        self._by_request, self._destinations, self._launched = row_requests is not None, None, None
        _fill(self.row_slots, row_slots)
        _fill(self.stage_rows, stage_rows)
        # Number of the windows that have ended, plus 1: after an interrupt, it tells whether this one was counted.
        torch.add(self.counters[_WINDOWS : _WINDOWS + 1], 1, out=self.window_id)
        self._state = State.OPEN

    def stage(self, name: str, key: Tensor, value: Tensor, *, token_offset: int = 0) -> None:
        """Stage a layer's keys and values with one kernel.

        Args:
            name: a registered layer.
            key, value: as in :func:`nwor_ops.stage_kv`: one row for each token of the batch from ``token_offset`` on.
            token_offset: index in the batch of the first of these tokens, for micro-batches.

        Raises:
            RuntimeError: no window is open.
            KeyError: the layer is not registered.
            ValueError, TypeError: more tokens than the buffer's limit, or a ``token_offset`` outside the batch; nothing
                is staged.
            ValueError, TypeError, IndexError: as :func:`nwor_ops.stage_kv`.
        """
        layer = self._layer(name, "stage")
        if not isinstance(key, Tensor) or key.dim() == 0:
            validation.tensor("stage: key", key, dims=3)
        if type(token_offset) is not int or token_offset != 0:
            validation.token_offset("stage", token_offset, 0, self.max_num_tokens)
        room = self.max_num_tokens - token_offset
        if key.shape[0] > room:
            raise ValueError(
                f"stage: key must have at most {room} tokens (max_num_tokens {self.max_num_tokens}, "
                f"token_offset {token_offset}), got {key.shape[0]}"
            )
        self._require_window("stage", name, key)
        assert layer.staged is not None
        rows = self.stage_rows[token_offset : token_offset + key.shape[0]]
        staged_key, staged_value = map(static, layer.staged)
        row_windows = static(self.row_windows)[static_int(layer.index)]
        try:
            ops.stage_kv(key, value, rows, staged_key, staged_value, self.window_id, row_windows)
        except Exception as error:
            raise explained(error, validation.tensors, "stage", value=value) from None

    def rows(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the staged rows of a layer. Rows that this window has not staged hold data of an earlier window.

        Args:
            name: a registered layer.

        Returns:
            Keys ``[max_num_rows, H, Dk]`` and values ``[max_num_rows, H, Dv]``.

        Raises:
            KeyError: the layer is not registered.
            RuntimeError: the buffer is not allocated.
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
            accepted: bool ``[<= max_num_rows]``: accepted rows, in any pattern. Or int32 ``[Q]``: number of accepted
                rows of each request, if begin got ``row_requests`` and ``row_positions``.
            row_slots: int64, as at begin: replaces the destination slots; None = keep them.

        If this raises, the window is still open, and the data of begin has not changed. Arguments are checked first. If
        they are invalid, nothing has changed. The outcome of the rows is then determined once. Then the layers are
        written one by one, with arguments that :meth:`allocate` has checked, so only the device can fail between two
        layers. Call this again to finish: the first outcome and its slots are kept. Or call :meth:`reject`.

        Raises:
            RuntimeError: no window is open, or its reject has begun and failed.
            ValueError, TypeError: an invalid shape, dtype or device.
        """
        self._require(State.OPEN, "commit")
        if self._after_reject is not None:
            raise RuntimeError("commit: reject() has begun for the open window; call reject() again")
        by_request = self._by_request and isinstance(accepted, Tensor) and accepted.dtype == torch.int32
        if by_request:
            validation.tensor("commit: accepted", accepted, torch.int32, dims=1, device=self.device)
            if not accepted.is_contiguous():
                raise ValueError(f"commit: accepted must be contiguous, got strides {list(accepted.stride())}")
        else:
            self._check("commit", "accepted", accepted, self.row_accepted)
        if row_slots is not None:
            self._check("commit", "row_slots", row_slots, self.row_slots)
        if not self._is_outcome_known():
            self._determine_outcome(accepted, row_slots, by_request)
        assert self._destinations is not None
        for layer in self._layers.values():
            self._commit_layer(layer, self._destinations)
        self._state = State.CLOSED

    def reject(self) -> None:
        """Close the window without writing a row to a cache. It is also for a forward that failed at any layer.

        After a :meth:`commit` that failed between two layers, the rows that it wrote stay in their caches, since the
        overwritten rows are lost. All rows then count as rejected. To have the same rows in all layers, finish the
        commit instead.

        Raises:
            RuntimeError: no window is open.
        """
        self._require(State.OPEN, "reject")
        if not self._is_outcome_known():
            self.row_accepted.fill_(False)
            self._accept(self.row_accepted, self.row_slots)
        elif self._after_reject is None:  # the window is counted already
            counts, committed = self.counters.clone(), self.row_committed.sum()
            counts[ops.STAGE_COUNTERS.index("committed")].sub_(committed)
            counts[ops.STAGE_COUNTERS.index("rejected")].add_(committed)
            self._after_reject = counts
        if self._after_reject is not None:
            self.counters.copy_(self._after_reject)
        self._after_reject, self._state = None, State.CLOSED

    def stats(self) -> StagingStats:
        """Return the totals so far. Synchronizes with the device."""
        if self._state is State.REGISTERING:
            return StagingStats(*[0] * len(ops.STAGE_COUNTERS))
        return StagingStats(**dict(zip(ops.STAGE_COUNTERS, self.counters.tolist(), strict=True)))

    # ------------------------------------------------------------ inside

    def _is_outcome_known(self) -> bool:
        """Return whether the rows of this window are counted. After an interrupt, this synchronizes with the device.

        Without data nothing is counted.
        """
        if (
            self._launched is not None and not has_no_data(self.counters)
            and torch.equal(self.counters[_WINDOWS : _WINDOWS + 1], self.window_id)
        ):  # fmt: skip
            self._destinations = self._launched
        self._launched = None
        return self._destinations is not None

    def _determine_outcome(self, accepted: Tensor, row_slots: Tensor | None, by_request: bool) -> None:
        """Determine which rows are committed, and their slots. The data of begin does not change."""
        slots = self.row_slots
        if row_slots is not None:
            slots = self._other_slots
            _fill(slots, row_slots)
        if by_request:
            self._accept(accepted, slots, self.row_requests, self.row_positions)
        else:
            _fill(self.row_accepted, accepted)
            self._accept(self.row_accepted, slots)

    def _accept(self, accepted: Tensor, slots: Tensor, *of_requests: Tensor) -> None:
        self._launched = slots
        ops.accept_staged(
            accepted, slots, self.window_id, self.row_windows, self._num_slots, self.row_committed, self.counters,
            *of_requests,
        )  # fmt: skip
        self._destinations, self._launched = slots, None

    def _try_commit(self, name: str, layer: _StagedLayer) -> None:
        """Check the arguments of a commit before any window. No row is accepted, so nothing is written."""
        try:
            self._commit_layer(layer, self.row_slots)
        except (ValueError, TypeError) as error:
            raise type(error)(f"allocate: layer {name!r} could not be committed: {error}") from error

    def _commit_layer(self, layer: _StagedLayer, slots: Tensor) -> None:
        assert layer.staged is not None
        caches = layer.cache.key_value()
        scales = [self._unscaled if scale is None else scale for scale in (layer.k_scale, layer.v_scale)]
        ops.commit_staged(*layer.staged, slots, self.row_committed, *caches, scales[0], scales[1], layer.kv_cache_dtype)

    def _check(self, method: str, name: str, tensor: Tensor, buffer: Tensor, count: int | None = None) -> int:
        """Check a tensor for the buffer that it fills, and its length for ``count``. Return its length."""
        validation.tensor(f"{method}: {name}", tensor, buffer.dtype, device=self.device)
        if tensor.dim() != 1 or tensor.shape[0] > buffer.shape[0] or count not in (None, tensor.shape[0]):
            wanted = f"at most {buffer.shape[0]}" if count is None else f"{count}, one for each of row_slots"
            raise ValueError(f"{method}: {name} must have one dimension of {wanted}, got {list(tensor.shape)}")
        return tensor.shape[0]


def _fill(buffer: Tensor, values: Tensor) -> None:
    """Copy the values and fill the rest with "none", so that no data of an earlier window remains."""
    count = values.shape[0]
    buffer[:count].copy_(values)
    buffer[count:].fill_(False if buffer.dtype == torch.bool else -1)


# Errors of ops and buffers for invalid arguments.
_REFUSALS = (ValueError, TypeError, IndexError, RuntimeError)


class KVCacheInterceptor(BoundToMemory):
    """The single call at the KV-write sites of an engine. It writes into the cache or stages, depending on the window.

    Args:
        buffer: the staging buffer, allocated.
        mode: ``"staging"`` or ``"direct"``. With ``"direct"``, every window is written into the caches directly and
            keeps all its rows, as without this library.

    A window is staged if the mode says so, warm-up is over, and the buffer accepts it. Call :meth:`finish_warm_up`
    after profiling and capture, since these runs must not open windows. If there is an error before the first layer is
    staged (too many rows, an invalid dtype), the window is written directly, and ``refused_windows`` counts it. A later
    error propagates, because earlier layers have staged their rows, and attention has read them. :meth:`cancel` then
    closes the window.

    The decision is made in Python, so it suits engines whose write site runs in Python. Compiled code and CUDA graphs
    should call :meth:`StagingBuffer.stage` directly.

    Example:
        >>> import torch
        >>> cache, slots = torch.zeros(4, 2, 1, 8), torch.tensor([2, 3])
        >>> buffer = nwor_ops.StagingBuffer(max_num_tokens=8, max_num_rows=8, device="cpu")
        >>> buffer.register_layer("layers.0", nwor_ops.LayerCache.packed(cache))
        >>> buffer.allocate()
        >>> interceptor = nwor_ops.KVCacheInterceptor(buffer)
        >>> interceptor.finish_warm_up()
        >>> interceptor.begin(slots)
        True
        >>> interceptor.write("layers.0", torch.ones(2, 1, 4), torch.ones(2, 1, 4), slots)
        >>> interceptor.cancel()
        >>> bool(cache.any())
        False
    """

    _in_place_of_a_copy = "make another KVCacheInterceptor for the same buffer"

    def __init__(self, buffer: StagingBuffer, mode: str = "staging") -> None:
        validation.instance("KVCacheInterceptor: buffer", buffer, StagingBuffer, "a StagingBuffer")
        if buffer.state is State.REGISTERING:
            raise RuntimeError("KVCacheInterceptor: the staging buffer must be allocated first")
        self.buffer, self.mode = buffer, mode
        self.ready = False
        self.reason = ""  # why the last window was not staged
        self._staged_layers = 0
        self._direct_windows = 0
        self._refused_windows = 0

    @property
    def mode(self) -> str:
        """``"staging"`` or ``"direct"``. A new value takes effect at the next window."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in ("direct", "staging"):
            raise ValueError(f"KVCacheInterceptor: mode must be one of direct, staging, got {mode!r}")
        self._mode = mode

    @property
    def staging(self) -> bool:
        """Whether the open window is staged. Attention must then read its rows from the buffer."""
        return self.buffer.state is State.OPEN

    def finish_warm_up(self) -> None:
        """Allow windows to be staged from now on."""
        self.ready = True

    def begin(
        self,
        row_slots: Tensor,
        stage_rows: Tensor | None = None,
        row_requests: Tensor | None = None,
        row_positions: Tensor | None = None,
    ) -> bool:
        """Open a window; arguments as in :meth:`StagingBuffer.begin`.

        Returns:
            Whether the window is staged.

        Raises:
            RuntimeError: a staged window is open.
        """
        if self.staging:
            raise RuntimeError("begin: a staged window is open; commit or cancel it first")
        self._staged_layers = 0
        if self.mode == "direct" or not self.ready:
            self._write_directly("the mode is direct" if self.mode == "direct" else "warm-up is not over")
            return False
        try:
            self.buffer.begin(row_slots, stage_rows, row_requests, row_positions)
        except _REFUSALS as error:
            self._skip_staging(error)
            return False
        self.reason = ""
        return True

    def write(
        self,
        name: str,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Stage a layer's keys and values, or write them to the slots of ``slot_mapping``.

        Args:
            name: a layer registered in the buffer, which has the format of the cache.
            key, value, slot_mapping: as in :func:`nwor_ops.write_kv`.
            k_scale, v_scale: scales for a direct write; None = the registered ones.

        Raises:
            KeyError: the layer is not registered. As any other error of the first layer, it leaves no staged window
                open.
            ValueError, TypeError, IndexError, RuntimeError: as :func:`nwor_ops.write_kv`; for a later layer of a staged
                window, as :meth:`StagingBuffer.stage`.
        """
        if self.staging:
            try:
                self.buffer.stage(name, key, value)
            except BaseException as error:
                if self._staged_layers > 0:
                    raise
                self.buffer.reject()
                if not isinstance(error, _REFUSALS):
                    raise
                self._skip_staging(error)
            else:
                self._staged_layers += 1
                return
        layer, unscaled = self.buffer._layer(name, "write"), self.buffer._unscaled
        caches = layer.cache.key_value()
        scales = [
            next((scale for scale in given if scale is not None), unscaled)
            for given in ((k_scale, layer.k_scale), (v_scale, layer.v_scale))
        ]
        try:
            ops.write_kv(key, value, *caches, slot_mapping, scales[0], scales[1], layer.kv_cache_dtype)
        except Exception as error:
            arguments = {"key": key, "value": value, "slot_mapping": slot_mapping}
            raise explained(error, validation.tensors, "write", **arguments) from None

    def commit(self, accepted: Tensor, row_slots: Tensor | None = None) -> None:
        """Commit a staged window as :meth:`StagingBuffer.commit`. A direct window keeps all its rows, and this does
        nothing."""
        if self.staging:
            self.buffer.commit(accepted, row_slots)

    def cancel(self) -> None:
        """Close a staged window without writing its rows to a cache."""
        if self.staging:
            self.buffer.reject()

    def stats(self) -> InterceptorStats:
        """Return the totals so far. Synchronizes with the device."""
        return InterceptorStats(self.buffer.stats(), self._direct_windows, self._refused_windows)

    def _write_directly(self, reason: str) -> None:
        self.reason = reason
        self._direct_windows += 1

    def _skip_staging(self, error: Exception) -> None:
        self._write_directly(str(error))
        self._refused_windows += 1
        if self._refused_windows == 1:
            warnings.warn(f"nwor_ops: a window was written directly: {error}", RuntimeWarning, stacklevel=3)
