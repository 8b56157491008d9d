"""The states of all linear-attention layers of an engine, with the manager's protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import has_no_data
from nwor_ops.overlap import Area, first_overlap
from nwor_ops.recurrent.cache import Fold, FoldedLayer, RecurrentCache
from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.torch_fixes import static
from nwor_ops.transaction.protocol import State, Stateful, is_capturing

_SLOT_DTYPES = (torch.int32, torch.int64)


class RecurrentStates(Stateful[FoldedLayer]):
    """The states of all linear-attention layers, which never contain rejected draft tokens.

    A request keeps its slot from step to step. It may be missing from a batch; its rows then stay pending. Between
    windows, the state of a request is the stored state with the accepted rows of its record applied. Call :meth:`fold`
    before anything else reads or writes the state of a slot.

    If a call raises for another reason than its arguments, call :meth:`cancel`. The states are then those before the
    window, or after the fold or copy.

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
        >>> out.shape
        torch.Size([4, 2, 64])
    """

    _called = "states"
    _cache_type = RecurrentCache
    _layers: dict[str, FoldedLayer]

    def __init__(self, *, max_num_requests: int, device: torch.device | str) -> None:
        self.max_num_requests = validation.integer("RecurrentStates: max_num_requests", max_num_requests)
        self.device = validation.device("RecurrentStates: device", device)
        self.num_slots = self.max_window = self.chunk = 0  # set by the first layer
        self._layers = {}
        self._num_requests = 0  # in the open window
        self._verified: set[str] = set()  # layers that ran in the open window, as far as Python can tell

    # ------------------------------------------------------------ set-up

    def register_layer(self, name: str, cache: RecurrentCache) -> None:
        """Register a layer. Every window then includes it.

        Args:
            name: unique name of the layer.
            cache: its states and records, whose memory must not move. All layers have the same number of slots and of
                rows per record; heads, sizes and dtypes may differ.

        Raises:
            ValueError, TypeError: the name is taken, or the cache does not match. The layer is then not registered.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        sizes = cache.num_slots, cache.max_window
        if self._layers and sizes != (self.num_slots, self.max_window):
            raise ValueError(
                f"register_layer: cache of {name!r} must have {self.num_slots} slots with records of "
                f"{self.max_window} rows as the layers before, got {sizes[0]} and {sizes[1]}"
            )
        if self._layers and cache.chunk != self.chunk:
            raise ValueError(
                f"register_layer: cache of {name!r} must have the chunk of the layers before, {self.chunk}, got "
                f"{cache.chunk}"
            )
        self.num_slots, self.max_window = sizes
        self.chunk = cache.chunk
        self._layers[name] = FoldedLayer(cache, torch.zeros(1, dtype=torch.int64, device=self.device))

    def allocate(self) -> None:
        """Allocate cursors, plan and the buffers of a window. Nothing is pending afterwards.

        Call it once, after all layers are registered and before any capture of a CUDA graph.

        Raises:
            ValueError: layers share memory.
        """
        self._require(State.REGISTERING, "allocate")
        if not self._layers:
            raise RuntimeError("allocate: no layer is registered")

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        requests = self.max_num_requests
        self.cursors = Cursors(self.num_slots, self.device, self.chunk)
        self.plan = zeros(requests, 4)
        self.window_id = zeros(1, dtype=torch.int64)
        self.query_start_loc = zeros(requests + 1)
        self.num_kept = zeros(self.num_slots)  # tokens of each slot's last window that stay
        self._num_tokens = zeros(self.num_slots, dtype=torch.int64)  # tokens of each slot's state; slot 0 has any
        self._slots = zeros(requests, dtype=torch.int64)
        self._batch_kept = zeros(requests)  # the same for the requests of a batch
        names = "state", "record_keys", "record_norms", "record_decays", "record_updates"
        areas = [
            (f"{field} of {name!r}", Area.of(getattr(layer.cache, field)))
            for name, layer in self._layers.items()
            for field in names
            if not has_no_data(layer.cache.state)
        ]
        if overlap := first_overlap(areas):  # no kernel sees all layers
            raise ValueError(f"allocate: {overlap[0]} and {overlap[1]} must not share memory")
        self._fold = Fold(self._layers.values())
        self._fold_plan: Tensor | None = None  # of a fold or copy that has begun
        self._copied: tuple[Tensor, Tensor] | None = None  # sources and targets of that copy
        # Marks the layers that such a fold has reached. It counts down, and the windows count up.
        self._fold_number = zeros(1, dtype=torch.int64)
        self._state = State.CLOSED

    def skipped_requests(self) -> int:
        """Return how many requests windows have skipped on CUDA because their numbers are invalid. This synchronizes.

        A request counts once for each window. On the CPU the call raises instead.
        """
        if self._state is State.REGISTERING:
            raise RuntimeError("skipped_requests: the states must be allocated; call allocate() first")
        return int(self.cursors.num_skipped)

    # ------------------------------------------------------------ a window

    def begin(
        self,
        state_slots: Tensor,
        query_start_loc: Tensor,
        is_window: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
    ) -> None:
        """Open a window. One kernel plans it for all layers: the rows to reapply, and where to record the window.

        The arguments are copied, so the caller may change them afterwards.

        Args:
            state_slots: int32 or int64 ``[R]``, any stride: the slot of each request, from 1 on; -1 = padding. Slots
                must be distinct. :meth:`reset` the slot of a new request.
            query_start_loc: int32 ``[>= R + 1]``, contiguous: the first token of each request in the batch, and the
                end of the last one. A request has up to ``max_window`` tokens: first its known tokens (which may be the
                next ones of a prompt), then its draft tokens. A request without tokens is not part of this window.
            is_window: bool ``[>= R]``, contiguous, or None = all True. Set False if another kernel, such as one for
                prompts, writes the state of a request in this step. Such a request may have more tokens, and
                :meth:`verify` writes zeros for them. Its pending rows are dropped, so call :meth:`fold` before, unless
                the other kernel starts a new state.
            num_computed_tokens: int32 or int64 ``[>= R]``: number of each request's tokens before this step. None:
                not checked. The slot must hold the state of as many tokens. This finds a slot that was not
                :meth:`reset` for a new request, a wrong ``num_kept``, and a request with ``is_window`` False whose
                pending rows were not folded (with 0 tokens it may have any). Pass it in every step, or in none.

        Raises:
            ValueError, TypeError: there are more than ``max_num_requests`` requests, or a shape, dtype or device is
                wrong.
            ValueError, IndexError: on the CPU, a window is too long, a slot does not exist, a request with tokens has
                slot 0 or another number of computed tokens, or two requests have the same slot. Nothing has changed
                then. On CUDA such a request is skipped and counted (:meth:`skipped_requests`). If debug mode raises for
                it, the window is open, so call :meth:`cancel`.
        """
        self._require(State.CLOSED, "begin")
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
        slots, kept = self._slots[:requests], self._batch_kept[:requests]
        slots.copy_(state_slots).clamp_(0, self.num_slots - 1)
        torch.index_select(self.num_kept, 0, slots, out=kept)
        wrong = state_slots == 0
        after: tuple[Tensor, Tensor] | None = None
        if num_computed_tokens is not None:
            what = "begin: num_computed_tokens"
            validation.tensor(what, num_computed_tokens, *_SLOT_DTYPES, dims=1, least=requests, device=self.device)
            computed, others = num_computed_tokens[:requests], torch.zeros_like(wrong)
            if is_window is not None:
                validation.tensor("begin: is_window", is_window, torch.bool, dims=1, least=requests, device=self.device)
                others = ~is_window[:requests]
            wrong |= (slots > 0) & self._other_tokens(slots, others, computed)
            if is_window is not None:  # the other kernel's tokens
                tokens = computed + query_start_loc[: requests + 1].diff()
                after = torch.where(others & ~wrong, slots, 0), tokens.long()
        if validation.reads_values(self.device):
            self._refuse_tokens(wrong, state_slots, query_start_loc, num_computed_tokens)
        self._num_requests = requests
        self._verified.clear()
        with self._opening(self.plan):
            self.cursors.plan_window(  # it skips and counts a slot that does not exist
                self.plan, self.window_id, state_slots.masked_fill(wrong, self.num_slots), query_start_loc, kept,
                self.max_window, is_window,
            )  # fmt: skip
        if after is not None:
            self._num_tokens.scatter_(0, *after)
        self.query_start_loc[: requests + 1].copy_(query_start_loc[: requests + 1])
        if requests < self.max_num_requests:  # the other rows have no tokens
            self.query_start_loc[requests + 1 :].copy_(query_start_loc[requests : requests + 1])

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
            RuntimeError: no window is open, or the layer has already run in this window (if Python can tell).
            ValueError, TypeError: as :func:`nwor_ops.gated_delta_verify`; nothing is written.
        """
        layer = self._layer(name, "verify")
        counted = False
        if not torch.compiler.is_compiling():
            validation.tensor("verify: v", v)
            self._require_window("verify", name, self.window_id)
            counted = not is_capturing(self.window_id)  # a capture runs nothing
            if counted and name in self._verified:
                raise RuntimeError(f"verify: layer {name!r} must run once in a window, it has run in this one")
        if out is None:
            out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
        cache = layer.cache
        state, keys, norms, decays, updates = map(static, (cache.state, *cache.records))
        ops.gated_delta_verify(
            out, state, keys, norms, decays, updates, layer.layer_window, q, k, v, a, b, A_log, dt_bias, self.plan,
            self.window_id, self.query_start_loc, scale=cache.state.shape[-1] ** -0.5 if scale is None else scale,
            softplus_beta=softplus_beta, softplus_threshold=softplus_threshold, use_qk_l2norm=use_qk_l2norm, gate=gate,
            norm_weight=norm_weight, norm_eps=norm_eps, gate_activation=gate_activation, all_states=all_states,
            allow_neg_eigval=allow_neg_eigval, gate_lower_bound=gate_lower_bound, chunk=cache.chunk,
        )  # fmt: skip
        if counted:
            self._verified.add(name)
        return out

    def commit(self, num_kept: Tensor) -> None:
        """Set how many tokens of each request stay, and close the window. This changes no state.

        Args:
            num_kept: int32 ``[>= R]``: tokens of the window that stay. These are its known tokens and the accepted
                draft tokens, so at least 1. The value is ignored for requests without a window (padding, no tokens, or
                ``is_window`` False).

        Raises:
            RuntimeError: no window is open, or a fold or copy has failed. On the CPU also: a layer has not run in the
                window. The window stays open; call :meth:`cancel`.
            ValueError, TypeError: a shape, dtype or device is wrong. On the CPU also: a number is not between 1 and the
                tokens of the request. The window stays open. On CUDA, every later window skips such a request (its
                outputs are zeros) until its slot is reset or folded.
        """
        self._require(State.OPEN, "commit")
        if self._fold_plan is not None:
            raise RuntimeError("commit: no window is open, but a fold has failed; call cancel()")
        requests = self._num_requests
        validation.tensor("commit: num_kept", num_kept, torch.int32, dims=1, least=requests, device=self.device)
        slots = self._slots[:requests]
        slots.copy_(self.plan[:requests, 0])  # 0 where there is no window
        if self.device.type == "cpu":
            self._check_commit(slots, num_kept)
        self.num_kept.scatter_(0, slots, num_kept[:requests])
        self._num_tokens.scatter_add_(0, slots, num_kept[:requests].long())
        self._close()

    def cancel(self) -> None:
        """Undo the window and close it: none of its tokens stay, and nothing is pending.

        With ``chunk``, the accepted rows of a request whose state was not to be stored stay pending, and so do the rows
        after a chunk that was to be stored.

        The forward may have stopped at any layer. Layers that ran have applied the rows that were pending before the
        window; cancel applies them in the other layers. The states are those of a window that had just begun. For
        requests with ``is_window`` False, cancel keeps what another kernel wrote.

        After a :meth:`fold` or :meth:`copy` that failed, cancel finishes it. If cancel raises, call it again.
        """
        self._require(State.OPEN, "cancel")
        if self._fold_plan is not None:
            self._finish_fold()
            return
        plan = self.plan
        if self.chunk:  # the window would store this many rows; the others stay pending
            plan = plan.clone()
            plan[:, 1].clamp_(max=self.chunk)
        self._fold.apply(plan, self.window_id)  # repeatable: each folded layer is marked
        self.cursors.table[:, 0].index_fill_(0, self.plan[:, 0].long(), 0)  # earlier rows of a chunk stay
        self._close()

    # ------------------------------------------------------------ between windows

    def fold(self, slots: Tensor) -> None:
        """Apply the pending rows of slots to their states, in all layers.

        Call it before anything else reads or writes these states: a kernel for prompts, a snapshot, a transfer. It
        launches one kernel for the plan, and one for each geometry of layers. With ``chunk``, the next chunk
        begins here.

        Args:
            slots: int32 or int64 ``[E]``; 0 or less = padding. Slots must be distinct.
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
            slots: int32 or int64 ``[E]``; 0 or less = padding. The CPU refuses a slot that does not exist, CUDA skips
                it.
        """
        self._require(State.CLOSED, "reset")
        self._check_slots("reset: slots", slots)
        if self.device.type == "cpu" and slots.numel() and int(slots.max()) >= self.num_slots:
            raise IndexError(f"reset: slots must be less than {self.num_slots}, got {int(slots.max())}")
        rows = self._existing(slots)
        self.cursors.drop(rows)
        self._num_tokens.index_fill_(0, rows, 0)
        for layer in self._layers.values():
            layer.cache.state.index_fill_(0, rows, 0)

    # ------------------------------------------------------------ internals

    def _close(self) -> None:
        # The state first: after an interrupt between the two, cancel must not find an open window without a plan.
        self._state = State.CLOSED
        # Compiled or captured layers may run outside a window, as in a warm-up. They must not apply this plan again.
        self.plan.zero_()

    @contextlib.contextmanager
    def _opening(self, plan: Tensor) -> Iterator[None]:
        """Open the states before a launch that plans. If it raises and has planned nothing, they are closed again."""
        self._state = State.OPEN
        try:
            yield
        except BaseException:
            if has_no_data(plan) or not plan.any():
                self._fold_plan, self._state = None, State.CLOSED
            raise

    def _fold_into(self, source_slots: Tensor, target_slots: Tensor, *, keep_source: bool) -> None:
        kept = self.num_kept.index_select(0, source_slots.clamp(0, self.num_slots - 1))
        plan = self._fold_plan = torch.zeros(source_slots.shape[0], 4, dtype=torch.int32, device=self.device)
        self._copied = (self._existing(source_slots), self._existing(target_slots)) if keep_source else None
        self._fold_number.sub_(1)
        with self._opening(plan):  # the plan clears the cursors before the first layer is folded
            ops.plan_recurrent_fold(plan, self.cursors.table, source_slots, target_slots, kept, keep_source)
        self._finish_fold()

    def _finish_fold(self) -> None:
        """Fold the layers that a fold has not reached."""
        assert self._fold_plan is not None
        if len(self._fold_plan):
            self._fold.apply(self._fold_plan, self._fold_number)
        if self._copied is not None:
            sources, targets = self._copied
            self._num_tokens.scatter_(0, torch.where(sources > 0, targets, 0), self._num_tokens[sources])
        self._fold_plan, self._state = None, State.CLOSED

    def _check_slots(self, what: str, slots: Tensor) -> None:
        validation.tensor(what, slots, *_SLOT_DTYPES, dims=1, device=self.device)

    def _existing(self, slots: Tensor) -> Tensor:
        """Return the slots, and 0 for padding and for each one that does not exist."""
        return torch.where((slots > 0) & (slots < self.num_slots), slots, 0).long()

    def _other_tokens(self, slots: Tensor, others: Tensor, computed: Tensor) -> Tensor:
        """Return which requests do not continue the state of their slot. ``others`` are not run in this window."""
        wrong, pending = computed != self._num_tokens[slots], self.cursors.table[slots, ::2].any(1)
        return torch.where(others, (computed != 0) & (wrong | pending), wrong)

    def _refuse_tokens(
        self, wrong: Tensor, state_slots: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor | None
    ) -> None:
        """Raise for the first request with tokens and a wrong slot or state. Only where the host reads values."""
        tokens = query_start_loc[: len(wrong) + 1].diff()
        for request in (wrong & (tokens > 0) & (state_slots < self.num_slots)).nonzero()[:1, 0].tolist():
            slot = int(state_slots[request])
            if slot == 0:
                raise ValueError(
                    f"begin: state_slots must be 1 to {self.num_slots - 1} for request {request}, which has tokens, "
                    "got 0; -1 is padding"
                )
            assert num_computed_tokens is not None
            computed, held = int(num_computed_tokens[request]), int(self._num_tokens[slot])
            if computed == held:
                raise ValueError(
                    f"begin: is_window must be True for request {request} (slot {slot}), which has rows pending, got "
                    "False; call fold() first"
                )
            raise ValueError(
                f"begin: num_computed_tokens must be {held} for request {request} (slot {slot}), the tokens of its "
                f"state, got {computed}; call reset() for a new request"
            )

    def _check_commit(self, slots: Tensor, num_kept: Tensor) -> None:
        """Check the counts, and that every layer ran. Only on the CPU, because it reads values."""
        recorded = self.cursors.table[slots, 0].tolist()
        windows = [(request, slot) for request, slot in enumerate(slots.tolist()) if slot > 0]
        for request, slot in windows:
            number = int(num_kept[request])
            if not 1 <= number <= recorded[request]:
                raise ValueError(
                    f"commit: num_kept must be 1 to {recorded[request]} for request {request} (slot {slot}), got "
                    f"{number}"
                )
        window_id = int(self.window_id)
        for name, layer in self._layers.items():
            if windows and int(layer.layer_window) != window_id:
                raise RuntimeError(
                    f"commit: every layer must run in a window, {name!r} has not run in this one; cancel it"
                )
