"""Recurrent states of linear attention as a transaction: one state per request, and a record of its last window.

    cache = RecurrentCache.new(num_slots=..., max_window=K + 1, num_key_heads=..., num_value_heads=..., ...)
    states = RecurrentStates(max_num_requests=..., device=...)
    states.register_layer("layers.0", cache)                              # every layer, then
    states.allocate()                                                     # once, before any capture

    states.begin(state_slots, query_start_loc)                            # each step
    ...  out = states.verify("layers.0", q, k, v, a, b, A_log, dt_bias)   # in each layer
    states.commit(num_accepted)                                           # after sampling

A rejected draft token cannot be removed from a recurrent state. So the usual scheme keeps the state after each of the
K + 1 tokens of a window. Here the tokens of a window do not change the state. A record stores what each token would add
to it, in about a hundredth of the state's size. The kernel of the next window reapplies the accepted rows. Until then
they are *pending*. docs/recurrent.md says which results are bit-identical.

Between begin and commit, the only allocation is ``verify``'s output if the caller passes none. Nothing synchronizes,
and nothing depends on values that only the host has. So ``verify`` may run eagerly, be traced by ``torch.compile``, or
be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import has_no_data
from nwor_ops.torch_fixes import static
from nwor_ops.transaction.state import State, Stateful, is_capturing

_STATE_DTYPES = (torch.float32, torch.bfloat16)
_KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SLOT_DTYPES = (torch.int32, torch.int64)
_MOST_ROWS = 32  # kMostRecordRows in csrc/recurrent.h


@dataclass(frozen=True)
class RecurrentCache:
    """States and records of one layer, with one slot per request.

    Use :meth:`new` to allocate everything, or :meth:`beside` to add records to existing states. Or pass all five
    tensors, which may be views of an engine's pages: any stride between slots, contiguous within a slot. Slot 0 is
    padding.

    Letters: S slots, W rows of a record (tokens of the longest window, K + 1), H key heads, HV value heads, dk and dv
    elements per key and value head.

    Args:
        state: float32 or bfloat16 ``[S, HV, dv, dk]``.
        record_keys: ``[S, 2, W, H, dk]``, dtype of the layer's keys: bfloat16, float16 or, only on the CPU, float32.
        record_norms: float32 ``[S, 2, W, H]``.
        record_decays: float32 ``[S, 2, W, HV]``, or ``[S, 2, W, HV, dk]`` for layers with a decay per channel (KDA).
        record_values: float32 ``[S, W, HV, dv]``.

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
    record_values: Tensor

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
        device: torch.device | str = "cpu",
    ) -> RecurrentCache:
        """Allocate states and records, filled with zeros.

        Args:
            num_slots: one for each request that may hold a state, and one for slot 0.
            max_window: tokens of the longest window: K draft tokens and 1. At most 32.
            num_key_heads, num_value_heads: heads of the layer. The number of value heads is a multiple of the number of
                key heads; adjacent value heads share a key head.
            key_size, value_size: elements per head. Kernels exist for keys of 64, 96, 128 or 256 and values of 64, 128,
                192 or 256; :meth:`RecurrentStates.allocate` refuses others.
            dtype: dtype of the queries, keys and values.
            state_dtype: dtype of the states, float32 or bfloat16.
            per_channel: whether each channel of a key has a decay (KDA). If False, each value head has one.
            device: device of all tensors.

        Raises:
            ValueError, TypeError: a number, dtype or device is invalid.
        """
        where = "RecurrentCache.new"
        sizes = {"num_slots": num_slots, "num_value_heads": num_value_heads, "value_size": value_size,
                 "key_size": key_size}  # fmt: skip
        shape = [validation.integer(f"{where}: {name}", size) for name, size in sizes.items()]
        _one_of(f"{where}: state_dtype", state_dtype, _STATE_DTYPES)
        found = validation.device(f"{where}: device", device)
        record = cls._record_of(where, max_window, num_key_heads, dtype, per_channel)
        return cls._with(torch.zeros(shape, dtype=state_dtype, device=found), *record)

    @classmethod
    def beside(
        cls,
        state: Tensor,
        *,
        max_window: int,
        num_key_heads: int,
        dtype: torch.dtype = torch.bfloat16,
        per_channel: bool = False,
    ) -> RecurrentCache:
        """Allocate records for existing states.

        Args:
            state: float32 or bfloat16 ``[S, HV, dv, dk]``, contiguous within a slot.
            max_window, num_key_heads, dtype, per_channel: as in :meth:`new`.

        Raises:
            ValueError, TypeError: as :meth:`new`.
        """
        validation.tensor("RecurrentCache.beside: state", state, *_STATE_DTYPES, dims=4)
        return cls._with(state, *cls._record_of("RecurrentCache.beside", max_window, num_key_heads, dtype, per_channel))

    @staticmethod
    def _record_of(
        where: str, max_window: int, num_key_heads: int, dtype: torch.dtype, per_channel: bool
    ) -> tuple[int, int, torch.dtype, bool]:
        rows = validation.integer(f"{where}: max_window", max_window, most=_MOST_ROWS)
        heads = validation.integer(f"{where}: num_key_heads", num_key_heads)
        _one_of(f"{where}: dtype", dtype, _KEY_DTYPES)
        validation.boolean(f"{where}: per_channel", per_channel)
        return rows, heads, dtype, per_channel

    @classmethod
    def _with(cls, state: Tensor, rows: int, heads: int, dtype: torch.dtype, per_channel: bool) -> RecurrentCache:
        slots, value_heads, value_size, key_size = state.shape

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=state.device)

        channels = (key_size,) if per_channel else ()
        return cls(
            state,
            zeros(2, rows, heads, key_size, dtype=dtype),
            zeros(2, rows, heads),
            zeros(2, rows, value_heads, *channels),
            zeros(rows, value_heads, value_size),
        )

    def __post_init__(self) -> None:
        def check(name: str, *dtypes: torch.dtype, dims: int) -> Tensor:
            tensor: Tensor = getattr(self, name)
            validation.tensor(f"RecurrentCache: {name}", tensor, *dtypes, dims=dims, least=1)
            validation.tensor(f"RecurrentCache: {name}", tensor, device=self.state.device)
            if tensor.numel() and not tensor[0].is_contiguous():
                raise ValueError(
                    f"RecurrentCache: {name} must be contiguous within a slot, got strides {list(tensor.stride())}"
                )
            return tensor

        def expect(name: str, letters: str, *shape: int) -> None:
            got = list(getattr(self, name).shape)
            if got != list(shape):
                raise ValueError(f"RecurrentCache: {name} must be {letters}, {list(shape)}, got {got}")

        slots, value_heads, value_size, key_size = check("state", *_STATE_DTYPES, dims=4).shape
        _, _, rows, heads, _ = check("record_keys", *_KEY_DTYPES, dims=5).shape
        per_channel = isinstance(self.record_decays, Tensor) and self.record_decays.dim() == 5
        check("record_decays", torch.float32, dims=5 if per_channel else 4)
        check("record_norms", torch.float32, dims=4)
        check("record_values", torch.float32, dims=4)
        expect("record_keys", "[S, 2, W, H, dk]", slots, 2, rows, heads, key_size)
        expect("record_norms", "[S, 2, W, H]", slots, 2, rows, heads)
        if per_channel:
            expect("record_decays", "[S, 2, W, HV, dk]", slots, 2, rows, value_heads, key_size)
        else:
            expect("record_decays", "[S, 2, W, HV] or [S, 2, W, HV, dk]", slots, 2, rows, value_heads)
        expect("record_values", "[S, W, HV, dv]", slots, rows, value_heads, value_size)
        if heads == 0 or value_heads % heads != 0:
            raise ValueError(
                f"RecurrentCache: state must have a multiple of the {heads} key heads of record_keys, got "
                f"{value_heads} value heads"
            )

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def num_slots(self) -> int:
        return self.state.shape[0]

    @property
    def max_window(self) -> int:
        """Tokens of the longest window, which is the number of rows of a record."""
        return self.record_keys.shape[2]

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a key has a decay (KDA)."""
        return self.record_decays.dim() == 5

    @property
    def geometry(self) -> tuple[object, ...]:
        """Dtypes, shapes and strides. One launch folds all layers for which they are equal."""
        return tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in (self.state, *self.records))

    @property
    def records(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, norms, decays and values, in the order of the ops' arguments."""
        return self.record_keys, self.record_norms, self.record_decays, self.record_values


def _one_of(what: str, dtype: object, dtypes: tuple[torch.dtype, ...]) -> None:
    validation.instance(what, dtype, torch.dtype, "a torch.dtype")
    if dtype not in dtypes:
        raise TypeError(f"{what} must be {' or '.join(map(str, dtypes))}, got {dtype}")


@dataclass(frozen=True)
class RecurrentMemory:
    """Bytes of one slot, summed over all layers.

    Attributes:
        state: the state of the request.
        record: the record of its last window.
        every_state: ``max_window`` states. A scheme that keeps the state after each token needs this instead of both.
    """

    state: int
    record: int
    every_state: int


@dataclass(frozen=True)
class RecurrentStats:
    """Totals since :meth:`RecurrentStates.allocate`, counted on the device.

    Attributes:
        windows: number of windows that were opened.
        refused_requests: number of requests that a window skipped because their counts are invalid, once for each
            window. Only on CUDA; on the CPU the call raises.
    """

    windows: int
    refused_requests: int


@dataclass(frozen=True)
class _Layer:
    cache: RecurrentCache
    window: Tensor  # int64 [1]: the last window in which the layer ran


class _Launch:
    """Layers of equal geometry, which one launch folds."""

    def __init__(self, layers: list[_Layer]) -> None:
        self._windows = [layer.window for layer in layers]
        self._states = [layer.cache.state for layer in layers]
        self._records = [list(tensors) for tensors in zip(*(layer.cache.records for layer in layers), strict=True)]

    def fold(self, plan: Tensor, window: Tensor) -> None:
        """Fold the rows of a plan into the layers whose mark is not ``window``, and mark them with it."""
        keys, norms, decays, values = self._records
        ops.gated_delta_fold(self._states, keys, norms, decays, values, self._windows, plan, window)


class RecurrentStates(Stateful[_Layer]):
    """The states of all linear-attention layers, which never contain rejected draft tokens.

    A request keeps its slot from step to step. It may be missing from a batch; its rows then stay pending. Between
    windows, the state of a request is the stored state with the accepted rows of its record applied. Call :meth:`fold`
    before anything else reads or writes the state of a slot.

    Use it only in the thread that runs the model; the current stream orders its calls. It cannot be copied or pickled.

    Args:
        max_num_requests: maximum number of requests in one batch, including padding.
        device: device of the states.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Example:
        >>> cache = RecurrentCache.new(
        ...     num_slots=3, max_window=4, num_key_heads=1, num_value_heads=2, key_size=64, value_size=64
        ... )
        >>> states = RecurrentStates(max_num_requests=2, device="cpu")
        >>> states.register_layer("layers.0", cache)
        >>> states.allocate()
        >>> starts = torch.tensor([0, 4], dtype=torch.int32)  # one request with four tokens
        >>> states.begin(torch.tensor([1]), starts)
        >>> q = k = torch.ones(4, 1, 64, dtype=torch.bfloat16)
        >>> v = torch.ones(4, 2, 64, dtype=torch.bfloat16)
        >>> a = b = torch.zeros(4, 2)
        >>> out = states.verify("layers.0", q, k, v, a, b, torch.zeros(2), torch.zeros(2))
        >>> states.commit(torch.tensor([2], dtype=torch.int32))  # one draft token was accepted
        >>> out.shape, states.stats().windows
        (torch.Size([4, 2, 64]), 1)
    """

    _called = "states"
    _cache_type = RecurrentCache
    _layers: dict[str, _Layer]
    _in_place_of_a_copy = "make another RecurrentStates, register the layers' own caches and allocate() it"

    def __init__(self, *, max_num_requests: int, device: torch.device | str) -> None:
        self.max_num_requests = validation.integer("RecurrentStates: max_num_requests", max_num_requests)
        self.device = validation.device("RecurrentStates: device", device)
        self.num_slots = self.max_window = 0  # set by the first layer
        self._layers = {}
        self._num_requests = 0  # in the open window
        self._unfinished: Tensor | None = None  # the plan of a fold that an error interrupted
        self._verified: set[str] = set()  # layers that ran in the open window, as far as Python can tell

    # ------------------------------------------------------------ set-up

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self._layers)

    def register_layer(self, name: str, cache: RecurrentCache) -> None:
        """Register a layer. Every window then includes it.

        Args:
            name: unique name of the layer.
            cache: its states and records, whose memory must not move. All layers have the same number of slots and of
                rows per record; heads, sizes and dtypes may differ.

        Raises:
            RuntimeError: :meth:`allocate` was called already.
            ValueError, TypeError: the name is taken, or the cache is on another device or has another number of slots
                or rows. The layer is then not registered.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        sizes = cache.num_slots, cache.max_window
        if self._layers and sizes != (self.num_slots, self.max_window):
            raise ValueError(
                f"register_layer: cache of {name!r} must have {self.num_slots} slots with records of "
                f"{self.max_window} rows as the layers before, got {sizes[0]} and {sizes[1]}"
            )
        self.num_slots, self.max_window = sizes
        self._layers[name] = _Layer(cache, torch.zeros(1, dtype=torch.int64, device=self.device))

    def allocate(self) -> None:
        """Allocate cursors, plan and the buffers of a window. Nothing is pending afterwards.

        Call it once, after all layers are registered and before any capture of a CUDA graph.

        Raises:
            RuntimeError: no layer is registered, or :meth:`allocate` was called already.
            ValueError, TypeError: :func:`nwor_ops.gated_delta_fold` does not support the states of a layer, or states
                and records share memory.
        """
        self._require(State.REGISTERING, "allocate")
        if not self._layers:
            raise RuntimeError("allocate: no layer is registered")

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        requests = self.max_num_requests
        self.cursors = zeros(self.num_slots, 2)
        self.plan = zeros(requests, 4)
        self.window = zeros(1, dtype=torch.int64)
        self.num_refused = zeros(1, dtype=torch.int64)
        self._fold_number = zeros(1, dtype=torch.int64)  # folds between windows count down, windows count up
        self.query_start_loc = zeros(requests + 1)
        self.num_accepted = zeros(self.num_slots)  # tokens of each slot's last window that stay
        self._slots = zeros(requests, dtype=torch.int64)
        self._num_accepted = zeros(requests)  # the same for the requests of a batch
        by_geometry: dict[tuple[object, ...], list[str]] = {}
        for name, layer in self._layers.items():
            self._try_fold([name])
            by_geometry.setdefault(layer.cache.geometry, []).append(name)
        self._check_apart()
        self._launches = [self._try_fold(names) for names in by_geometry.values()]  # the launches of each fold
        self._untraceable = self._layers_of_mixed_storages()
        self._state = State.CLOSED

    def memory(self) -> RecurrentMemory:
        """Return the memory of one request, in bytes, without cursors and buffers (a few bytes per slot).

        Raises:
            RuntimeError: no layer is registered.
        """
        if not self._layers:
            raise RuntimeError("memory: no layer is registered")

        def of_slot(tensor: Tensor) -> int:
            return tensor[0].numel() * tensor.element_size()

        caches = [layer.cache for layer in self._layers.values()]
        state = sum(of_slot(cache.state) for cache in caches)
        record = sum(of_slot(tensor) for cache in caches for tensor in cache.records)
        return RecurrentMemory(state, record, self.max_window * state)

    def stats(self) -> RecurrentStats:
        """Return the totals so far. This synchronizes.

        Raises:
            RuntimeError: the states are not allocated.
        """
        if self._state is State.REGISTERING:
            raise RuntimeError("stats: the states must be allocated; call allocate() first")
        return RecurrentStats(int(self.window), int(self.num_refused))

    # ------------------------------------------------------------ a window

    def begin(self, state_slots: Tensor, query_start_loc: Tensor, is_window: Tensor | None = None) -> None:
        """Open a window. One kernel plans it for all layers: the rows to reapply, and where to record the window.

        The arguments are copied, so the caller may change them afterwards.

        Args:
            state_slots: int32 or int64 ``[R]``, any stride: the slot of each request; 0 or less = padding. Slots must
                be distinct.
            query_start_loc: int32 ``[>= R + 1]``, contiguous: the first token of each request in the batch, and the
                end of the last one. A request has up to ``max_window`` tokens: first its known tokens (which may be the
                next ones of a prompt), then its draft tokens. A request without tokens is not part of this window.
            is_window: bool ``[>= R]``, contiguous, or None = all True. Set False if another kernel, such as one for
                prompts, writes the state of a request in this step. Such a request may have more tokens, and
                :meth:`verify` writes zeros for them. Its pending rows are dropped, so call :meth:`fold` before, unless
                the other kernel starts a new state.

        Raises:
            RuntimeError: a window is open already.
            ValueError, TypeError: there are more than ``max_num_requests`` requests, or a shape, dtype or device is
                wrong.
            ValueError, IndexError: on the CPU, a window is too long, a slot does not exist, or two requests have the
                same slot. Nothing has changed then. On CUDA such a request is skipped and counted (:meth:`stats`). If
                debug mode raises for it, the window is cancelled (:func:`nwor_ops.plan_recurrent_window`).
        """
        self._require(State.CLOSED, "begin")
        self._check_begin(state_slots, query_start_loc, is_window)
        self._finish_fold()
        requests = state_slots.shape[0]
        slots, accepted = self._slots[:requests], self._num_accepted[:requests]
        slots.copy_(state_slots).clamp_(0, self.num_slots - 1)
        torch.index_select(self.num_accepted, 0, slots, out=accepted)
        self._num_requests = requests
        self._verified.clear()
        try:
            self._state = State.OPEN  # after an error following the launch of the plan, cancel() can undo the window
            ops.plan_recurrent_window(
                self.plan, self.cursors, self.window, state_slots, query_start_loc, accepted, self.max_window,
                is_window, self.num_refused,
            )  # fmt: skip
            self.query_start_loc[: requests + 1].copy_(query_start_loc[: requests + 1])
            if requests < self.max_num_requests:  # the other rows have no tokens
                self.query_start_loc[requests + 1 :].copy_(query_start_loc[requests : requests + 1])
        except BaseException:
            if has_no_data(self.plan) or not self.plan.any():  # nothing was planned
                self._state = State.CLOSED
            else:
                self.cancel()
            raise

    def verify(
        self,
        name: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        *,
        out: Tensor | None = None,
        scale: float | None = None,
        softplus_beta: float = 1.0,
        softplus_threshold: float = 20.0,
        use_qk_l2norm: bool = True,
        gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-5,
        gate_activation: str = "silu",
        all_states: Tensor | None = None,
        allow_neg_eigval: bool = False,
        gate_lower_bound: float | None = None,
    ) -> Tensor:
        """Run a layer's tokens with one kernel. It reapplies the pending rows, stores the state and records the window.

        Call this once for each layer of a window, with all tokens of the batch.

        Args:
            name: a registered layer.
            q, k, v, a, b, A_log, dt_bias, softplus_beta, softplus_threshold, use_qk_l2norm, gate, norm_weight,
                norm_eps, gate_activation, all_states, allow_neg_eigval, gate_lower_bound: as in
                :func:`nwor_ops.gated_delta_verify`. In a layer with a decay per channel (KDA), ``a`` is
                ``[T, HV, dk]`` and ``dt_bias`` is ``[HV, dk]``.
            out: as in that op, **mutated**. None = a new tensor, with zeros for tokens that belong to no request.
            scale: factor of the queries; None = ``dk ** -0.5``.

        Returns:
            ``out``.

        Raises:
            RuntimeError: no window is open; the layer has already run in this window (if Python can tell); or
                ``torch.compile`` traces a layer whose tensors share a storage with tensors of another dtype
                (docs/recurrent.md).
            KeyError: no layer has this name.
            ValueError, TypeError: as :func:`nwor_ops.gated_delta_verify`; nothing is written.
        """
        layer = self._layer(name, "verify")
        traced = torch.compiler.is_compiling()
        counted = False
        if traced and name in self._untraceable:
            raise RuntimeError(
                f"verify: the tensors of layer {name!r} must not share a storage with tensors of another dtype if "
                "torch.compile traces this call; call it from a custom op instead"
            )
        if not traced:
            validation.tensors("verify", q=q, v=v)
            self._require_window("verify", name, q)
            counted = not is_capturing(q)  # a capture runs nothing
            if counted and name in self._verified:
                raise RuntimeError(f"verify: layer {name!r} must run once in a window, it has run in this one")
        if out is None:
            out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        cache = layer.cache
        state, keys, norms, decays, values = map(static, (cache.state, *cache.records))
        ops.gated_delta_verify(
            out, state, keys, norms, decays, values, layer.window, q, k, v, a, b, A_log, dt_bias, self.plan,
            self.window, self.query_start_loc, scale=cache.state.shape[-1] ** -0.5 if scale is None else scale,
            softplus_beta=softplus_beta, softplus_threshold=softplus_threshold, use_qk_l2norm=use_qk_l2norm, gate=gate,
            norm_weight=norm_weight, norm_eps=norm_eps, gate_activation=gate_activation, all_states=all_states,
            allow_neg_eigval=allow_neg_eigval, gate_lower_bound=gate_lower_bound,
        )  # fmt: skip
        if counted:
            self._verified.add(name)
        return out

    def commit(self, num_accepted: Tensor) -> None:
        """Set how many tokens of each request stay, and close the window. This changes no state.

        Args:
            num_accepted: int32 ``[>= R]``: tokens of the window that stay. These are its known tokens and the accepted
                draft tokens, so at least 1. The value is ignored for requests without a window (padding, no tokens, or
                ``is_window`` False).

        Raises:
            RuntimeError: no window is open. On the CPU also: a layer has not run in it; call :meth:`cancel`. The window
                stays open.
            ValueError, TypeError: a shape, dtype or device is wrong. On the CPU also: a number is not between 1 and the
                tokens of the request. The window stays open. On CUDA, every later window skips such a request (its
                outputs are zeros) until its slot is reset or folded.
        """
        self._require(State.OPEN, "commit")
        requests = self._num_requests
        validation.tensor("commit: num_accepted", num_accepted, torch.int32, dims=1, least=requests, device=self.device)
        slots = self._slots[:requests]
        slots.copy_(self.plan[:requests, 3])  # 0 where there is no window
        if self.device.type == "cpu":
            self._check_commit(slots, num_accepted)
        self.num_accepted.scatter_(0, slots, num_accepted[:requests])
        self._close()

    def cancel(self) -> None:
        """Undo the window and close it: none of its tokens stay, and nothing is pending.

        The forward may have stopped at any layer. Layers that ran have applied the rows that were pending before the
        window; cancel applies them in the other layers. The states are those of a window that had just begun. For
        requests with ``is_window`` False, cancel keeps what another kernel wrote.

        If this raises, the window stays open and cancel can be called again.

        Raises:
            RuntimeError: no window is open.
        """
        self._require(State.OPEN, "cancel")
        self._undo()
        self._close()

    # ------------------------------------------------------------ between windows

    def fold(self, slots: Tensor) -> None:
        """Apply the pending rows of slots to their states, in all layers.

        Call it before anything else reads or writes these states: a kernel for prompts, a snapshot, a transfer. It
        launches one kernel for the plan, and one for each geometry of layers.

        Args:
            slots: int32 or int64 ``[E]``; 0 or less = padding. Slots must be distinct.

        Raises:
            RuntimeError: a window is open.
            ValueError, TypeError, IndexError: as :func:`nwor_ops.plan_recurrent_fold`; nothing has changed then.
        """
        self._require(State.CLOSED, "fold")
        self._check_slots("fold: slots", slots)
        self._fold_into(slots, slots, keep_source=False)

    def copy(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy states to other slots, with the pending rows applied as in :meth:`fold`. The sources do not change.

        Use it for requests that share a beginning: a cached prefix, a beam, a second sample.

        Args:
            source_slots: int32 or int64 ``[E]``; 0 or less = no copy.
            target_slots: int32 or int64 ``[E]``; 0 or less = no copy. Targets must be distinct, and not be sources.

        Raises:
            RuntimeError: a window is open.
            ValueError, TypeError, IndexError: as :func:`nwor_ops.plan_recurrent_fold`; nothing has changed then.
        """
        self._require(State.CLOSED, "copy")
        self._check_slots("copy: source_slots", source_slots)
        self._check_slots("copy: target_slots", target_slots)
        if source_slots.shape != target_slots.shape:
            raise ValueError(
                f"copy: target_slots must be as many as source_slots, {source_slots.shape[0]}, got "
                f"{target_slots.shape[0]}"
            )
        self._fold_into(source_slots, target_slots, keep_source=True)

    def reset(self, slots: Tensor) -> None:
        """Set the states of slots to zero, with nothing pending. Use it for new requests; it fills each layer.

        Args:
            slots: int32 or int64 ``[E]``; 0 or less = padding.

        Raises:
            RuntimeError: a window is open.
            ValueError, TypeError: a shape, dtype or device is wrong.
            IndexError: on the CPU, a slot does not exist. Nothing has changed then. CUDA skips such a slot.
        """
        self._require(State.CLOSED, "reset")
        self._check_slots("reset: slots", slots)
        if self.device.type == "cpu" and slots.numel() and int(slots.max()) >= self.num_slots:
            raise IndexError(f"reset: slots must be less than {self.num_slots}, got {int(slots.max())}")
        self._finish_fold()
        rows = torch.where((slots > 0) & (slots < self.num_slots), slots, 0).long()
        self._drop_pending(rows)
        for layer in self._layers.values():
            layer.cache.state.index_fill_(0, rows, 0)

    # ------------------------------------------------------------ internals

    def _close(self) -> None:
        # Compiled or captured layers may run outside a window, as in a warm-up. They must not apply this plan again.
        self.plan.zero_()
        self._state = State.CLOSED

    def _undo(self) -> None:
        """Fold the rows from before the open window in the layers that have not run, and drop the window's rows.

        It can be repeated: each folded layer is marked, and a second call skips it.
        """
        for launch in self._launches:
            launch.fold(self.plan, self.window)
        self._drop_pending(self.plan[:, 3].long())

    def _try_fold(self, names: list[str]) -> _Launch:
        """Check the arguments of a fold. The plan is all zeros before the first window, so no state changes."""
        launch = _Launch([self._layers[name] for name in names])
        try:
            launch.fold(self.plan, self.window)
        except (ValueError, TypeError) as error:
            raise type(error)(f"allocate: cannot fold {', '.join(names)}: {error}") from error
        return launch

    def _check_apart(self) -> None:
        """Raise if states or records share memory, within a layer or between layers.

        A window would overwrite other data, and no kernel could check it, because none sees all layers.
        """
        places = [(f"{field.name} of {name!r}", getattr(layer.cache, field.name))
                  for name, layer in self._layers.items() for field in fields(layer.cache)]  # fmt: skip
        if any(has_no_data(tensor) for _, tensor in places):
            return  # no addresses to compare
        slots = torch.arange(self.num_slots)
        starts = torch.cat([tensor.data_ptr() + slots * tensor.stride(0) * tensor.itemsize for _, tensor in places])
        sizes = torch.tensor([tensor[0].numel() * tensor.itemsize for _, tensor in places])
        starts, order = starts.sort()
        ends = starts + sizes.repeat_interleave(self.num_slots)[order]
        for index in (starts[1:] < ends[:-1]).nonzero()[:1, 0].tolist():
            first, second = sorted(int(place) // self.num_slots for place in order[index : index + 2])
            raise ValueError(f"allocate: {places[first][0]} and {places[second][0]} must not share memory")

    def _layers_of_mixed_storages(self) -> set[str]:
        """Return the layers with a storage that holds several dtypes, such as pages.

        AOTAutograd (torch 2.13) refuses a graph that mutates such inputs, and its message does not name them.
        """
        tensors = [(name, tensor) for name, layer in self._layers.items()
                   for tensor in (layer.cache.state, *layer.cache.records)]  # fmt: skip
        dtypes: dict[int, set[torch.dtype]] = {}
        for _, tensor in tensors:
            dtypes.setdefault(tensor.untyped_storage()._cdata, set()).add(tensor.dtype)
        return {name for name, tensor in tensors if len(dtypes[tensor.untyped_storage()._cdata]) > 1}

    def _fold_into(self, source_slots: Tensor, target_slots: Tensor, *, keep_source: bool) -> None:
        self._finish_fold()
        count = source_slots.shape[0]
        if count == 0:
            return
        plan = torch.zeros(count, 4, dtype=torch.int32, device=self.device)
        accepted = self.num_accepted.index_select(0, source_slots.clamp(0, self.num_slots - 1))
        self._fold_number.sub_(1)
        self._unfinished = plan
        ops.plan_recurrent_fold(plan, self.cursors, source_slots, target_slots, accepted, keep_source)
        self._finish_fold()

    def _finish_fold(self) -> None:
        """Fold the layers that an interrupted fold or copy did not reach. Its plan already cleared the cursors."""
        if self._unfinished is None:
            return
        for launch in self._launches:
            launch.fold(self._unfinished, self._fold_number)
        self._unfinished = None

    def _drop_pending(self, rows: Tensor) -> None:
        self.cursors[:, 0].index_fill_(0, rows, 0)

    def _check_slots(self, what: str, slots: Tensor) -> None:
        validation.tensor(what, slots, *_SLOT_DTYPES, dims=1, device=self.device)

    def _check_begin(self, state_slots: Tensor, query_start_loc: Tensor, is_window: Tensor | None) -> None:
        self._check_slots("begin: state_slots", state_slots)
        requests = state_slots.shape[0]
        if requests > self.max_num_requests:
            raise ValueError(
                f"begin: state_slots must have at most {self.max_num_requests} requests (max_num_requests), got "
                f"{requests}"
            )
        validation.tensor(
            "begin: query_start_loc", query_start_loc, torch.int32, dims=1, least=requests + 1, device=self.device
        )
        if is_window is not None:
            validation.tensor("begin: is_window", is_window, torch.bool, dims=1, least=requests, device=self.device)

    def _check_commit(self, slots: Tensor, num_accepted: Tensor) -> None:
        """Check the counts, and that every layer ran. Only on the CPU, because it reads values."""
        recorded = self.cursors[:, 0][slots].tolist()
        windows = [(request, slot) for request, slot in enumerate(slots.tolist()) if slot > 0]
        for request, slot in windows:
            number = int(num_accepted[request])
            if not 1 <= number <= recorded[request]:
                raise ValueError(
                    f"commit: num_accepted must be 1 to {recorded[request]} for request {request} (slot {slot}), got "
                    f"{number}"
                )
        window = int(self.window)
        for name, layer in self._layers.items():
            if windows and int(layer.window) != window:
                raise RuntimeError(
                    f"commit: every layer must run in a window, {name!r} has not run in this one; cancel it"
                )
