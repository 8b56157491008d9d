"""The transaction: begin a window, write, then commit or cancel it.

    manager = DraftCommitManager(max_num_tokens=..., max_num_requests=..., max_draft_tokens=..., device=...)
    manager.register_layer("layers.0", LayerCache.packed(kv_cache))      # for every layer
    manager.allocate()                                                     # once, before any capture

    manager.begin(Window(query_start_loc, cu_num_draft_tokens, {"default": slot_mapping}))
    ...  manager.write("layers.0", key, value, slot_mapping)               # at each KV-write site
    manager.commit(draft_token_ids, sampled_token_ids)                     # after sampling

Two modes have the same calls:

- ``"cow"`` is an undo log. Drafts are written to their slots, and the overwritten bytes are logged. Commit restores
  them for rejected drafts.
- ``"stage"`` is shadow paging. Begin redirects the window to shadow pages, and commit copies the accepted rows to their
  slots. A rejected row never reaches a page of a request.

Between begin and commit nothing is allocated, nothing synchronizes with the device, and nothing depends on a value that
only the host has. (Cancel, which is for failures, does allocate.) The same calls may therefore run eagerly, or be
captured in a CUDA graph. ``torch.compile`` can also trace them: ``write`` is at the KV-write site of a compiled model.
Compiled or captured code runs Python only once. The protocol is therefore enforced in begin, commit, cancel and eager
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import LayerCache, has_no_data
from nwor_ops.ops.bound import (
    begin_bound,
    begin_redirected_bound,
    bind,
    commit_bound,
    commit_tokens_bound,
    num_rows_of,
    own_error,
)
from nwor_ops.transaction.counters import Stats
from nwor_ops.transaction.layers import Layer, LayerTable
from nwor_ops.transaction.recovery import Capacity, Recovery, Redirects
from nwor_ops.transaction.shadow_pages import ShadowPages
from nwor_ops.transaction.state import State, Stateful, is_capturing, raises_after_launches
from nwor_ops.transaction.undo_log import UndoLog
from nwor_ops.transaction.window import Window, WindowBuffers
from nwor_ops.validation import explained

DEFAULT_GROUP = "default"


class _BoundCalls:
    """The calls of begin and commit, bound to the tensors that windows share; see :mod:`nwor_ops.ops.bound`.

    Attributes:
        begin: the handle of begin.
        num_rows: see :func:`nwor_ops.ops.bound.num_rows_of`.
        commit, commit_tokens: those of :meth:`DraftCommitManager.commit_rejected` and
            :meth:`DraftCommitManager.commit`; None until the first commit of that kind.
        redirects: as in :meth:`Recovery.redirects`.
        most_requests: the calls refuse windows of more requests, before any launch.
        slot_mappings: group and tensor of each slot mapping.
        block_tables: the same for the tables; empty in mode ``"cow"``.
        num_bonus_tokens, leading_zero: as in the window.
        has_states: whether the window has request states.
    """

    __slots__ = (
        "begin", "block_tables", "commit", "commit_tokens", "has_states", "leading_zero", "most_requests",
        "num_bonus_tokens", "num_rows", "redirects", "slot_mappings",
    )  # fmt: skip

    def __init__(self, window: Window, groups: Sequence[str], begin: Tensor, redirects: Redirects):
        self.begin, self.num_rows, self.redirects = begin, num_rows_of(begin), redirects
        self.commit: Tensor | None = None
        self.commit_tokens: Tensor | None = None
        self.most_requests = window.num_requests
        self.slot_mappings = [(group, window.slot_mappings[group]) for group in groups]
        tables: Any = window.block_tables
        self.block_tables = [(group, tables[group]) for group in groups] if redirects else []
        self.num_bonus_tokens, self.leading_zero = window.num_bonus_tokens, window.leading_zero
        self.has_states = window.request_states is not None

    def have_tables(self, tables: Mapping[str, Tensor] | None, states: Tensor | None) -> bool:
        """Return whether the calls serve a window with these tables and states."""
        if tables is None or (states is not None) is not self.has_states:
            return False
        return all(tables.get(group) is table for group, table in self.block_tables)

    def is_outgrown_by(self, window: Window) -> bool:
        """Return whether a window has more requests than the calls serve."""
        try:
            return window.num_requests > self.most_requests
        except (AttributeError, IndexError):
            return False


_CLOSED, _OPEN = State.CLOSED, State.OPEN  # a global name costs the host less than a member of an enumeration
_RECOVERIES: dict[str, type[UndoLog] | type[ShadowPages]] = {"cow": UndoLog, "stage": ShadowPages}
MODES = tuple(_RECOVERIES)


def _check_write(
    key: object, value: object, slot_mapping: object, k_scale: object, v_scale: object, kv_cache_dtype: object
) -> None:
    """Raise TypeError for the first argument of a failed write that no op accepts."""
    validation.tensors("write", key=key, value=value, slot_mapping=slot_mapping)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            validation.tensor(f"write: {name}", scale)
    validation.instance("write: kv_cache_dtype", kv_cache_dtype, str, "a string")


class DraftCommitManager(Stateful[Layer]):
    """Makes the KV-cache writes of speculative decoding a transaction on one device.

    Args:
        max_num_tokens: largest number of tokens in one batch, including padding.
        max_num_requests: largest number of requests in one batch, including padding.
        max_draft_tokens: largest number of drafts in one batch, which is the number of rows of the undo log. The log
            has this many rows of every registered layer; see :attr:`log_bytes`.
        device: device of the caches. A process may have any number of managers. All layers of one engine share one,
            because a window covers all of them.
        mode: ``"cow"`` or ``"stage"``. ``"stage"`` has no log but takes pages: the last
            :func:`nwor_ops.num_shadow_blocks` pages of each group's caches. The engine must not assign them to a
            request.
        max_drafts_per_request: largest number of drafts of one request. Required in mode ``"stage"``.
        shadow_blocks: first shadow page of each group, if it does not use its last pages. Groups that share memory must
            not share shadow pages.

    A manager is not thread-safe. It belongs to the thread that runs the model, and the current stream orders its calls.
    It cannot be copied or pickled.

    Example:
        >>> import torch
        >>> cache = torch.zeros(4, 2, 1, 8)  # pages, slots per page, heads, key and value
        >>> manager = nwor_ops.DraftCommitManager(
        ...     max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="cpu"
        ... )
        >>> manager.register_layer("layers.0", nwor_ops.LayerCache.packed(cache))
        >>> manager.allocate()
        >>> query_start_loc = torch.tensor([0, 3], dtype=torch.int32)
        >>> cu_num_draft_tokens = torch.tensor([2], dtype=torch.int32)
        >>> slots = torch.tensor([2, 3, 4])  # one target token, two drafts
        >>> manager.begin(nwor_ops.Window(query_start_loc, cu_num_draft_tokens, {"default": slots}))
        >>> manager.write("layers.0", torch.ones(3, 1, 4), torch.ones(3, 1, 4), slots)
        >>> manager.commit(torch.tensor([7, 8]), torch.tensor([[7, 9, -1]]))  # 7 was accepted, 8 was not
        >>> cache.view(8, 8)[2:5, 0].tolist()
        [1.0, 1.0, 0.0]
        >>> manager.stats().rejected
        1
    """

    _called = "manager"
    _layers: LayerTable
    _windows = 1  # capacity of the log, in windows
    _binds = True  # whether begin may run bound calls in place of _plan() and recovery.open()
    _in_place_of_a_copy = "make another DraftCommitManager, register the layers' own caches and allocate() it"

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_requests: int,
        max_draft_tokens: int,
        device: torch.device | str,
        mode: str = "cow",
        max_drafts_per_request: int | None = None,
        shadow_blocks: Mapping[str, int] | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"DraftCommitManager: mode must be one of {', '.join(MODES)}, got {mode!r}")

        def size(name: str, value: int, least: int = 1) -> int:
            return validation.integer(f"DraftCommitManager: {name}", value, least)

        self.max_num_tokens = size("max_num_tokens", max_num_tokens)
        self.max_num_requests = size("max_num_requests", max_num_requests)
        self.max_draft_tokens = size("max_draft_tokens", max_draft_tokens)
        self.max_drafts_per_request = (
            None if max_drafts_per_request is None else size("max_drafts_per_request", max_drafts_per_request)
        )
        self.device = validation.device("DraftCommitManager: device", device)
        self.mode = mode
        if shadow_blocks is not None:
            validation.instance("DraftCommitManager: shadow_blocks", shadow_blocks, Mapping, "a mapping or None")
        first_blocks = {
            group: size(f"shadow_blocks[{group!r}]", first, 0) for group, first in (shadow_blocks or {}).items()
        }
        self._layers = LayerTable()
        self._groups = self._layers.groups
        self._log_rows = self.max_draft_tokens * self._windows
        capacity = Capacity(
            self.max_num_tokens, self.max_num_requests, self._log_rows, self.max_drafts_per_request,
            first_blocks, self.device,
        )  # fmt: skip
        self.recovery: Recovery = _RECOVERIES[mode](self._layers, capacity)
        self._window: Window | None = None
        self._redirects: Redirects = []  # redirects of the open window
        self._bound: _BoundCalls | None = None  # of the open window, or of the last one
        self._last: list[Tensor] = []  # slot mappings and tables of the last window that was not bound
        # Whether the open window's drafts are in row_rejected and in the counters; None: only the device knows.
        self._outcome_known: bool | None = False
        self._ending = ""  # "cancel" or "abandon" after it has begun for the open window, or "begin" until it is done
        self._opening = False  # whether an unfinished begin has planned the window
        self._cancelled = 0
        self._abandoned = 0
        self._abandoned_drafts: Tensor | int = 0

    # ------------------------------------------------------------ set-up

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of layers, in the order of ``WindowBuffers.row_slots``."""
        return tuple(self._groups)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self._layers)

    def register_layer(self, name: str, cache: LayerCache, group: str = DEFAULT_GROUP) -> None:
        """Add a layer to every transaction.

        Args:
            name: the engine's name of the layer; unique.
            cache: planes of the layer. Their storage must not move while this manager lives.
            group: name of the layers that share a slot mapping. Geometries may differ within a group.

        Raises:
            RuntimeError: the manager is allocated already.
            ValueError, TypeError: the name is taken, or the cache is on another device. Or, in mode ``"cow"``, it is
                the cache of another layer of the group. The layer is not registered.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        validation.instance("register_layer: group", group, str, "a string")
        if self.mode == "cow" and (owner := self._layers.owner_of(cache, group)) is not None:
            raise ValueError(
                f"register_layer: cache of {name!r} must have other memory than {owner!r} of the same group: a layer "
                "would log what another one wrote; of layers with one cache, register the one that writes"
            )
        self._layers.add(name, cache, group)

    def allocate(self) -> None:
        """Allocate the window buffers, and the undo log or the records of shadow pages. A manager makes no other
        allocation.

        Raises:
            RuntimeError: no layer is registered, or the manager is allocated already.
            ValueError, IndexError: in mode ``"cow"``: the planes of a layer cannot be restored, for example because
                elements overlap.
            ValueError: in mode ``"stage"``: a group has too few pages, or layers with different pages; shadow pages of
                two groups share memory; or ``shadow_blocks`` names a group without layers.
        """
        self._require(State.REGISTERING, "allocate")
        if not self._layers:
            raise RuntimeError("allocate: no layer is registered")
        buffers = WindowBuffers(
            len(self.groups), self.max_num_tokens, self._log_rows, self.max_num_requests, self.device
        )
        self._layers.prepare()
        self.recovery.allocate(buffers)
        self._unscaled = torch.ones(1, dtype=torch.float32, device=self.device)
        self.buffers = buffers
        self._state = State.CLOSED

    @property
    def log_bytes(self) -> int:
        """Memory of the undo log in bytes."""
        return self.recovery.log_bytes

    @property
    def launches_per_window(self) -> int:
        """Largest number of kernels that begin and commit launch together, whatever the number of layers.

        :meth:`commit_rejected` launches one fewer, since the first launch of the undo also finds the rejected drafts.
        """
        return 2 + self.recovery.launches_per_window

    # ------------------------------------------------------------ the transaction

    def begin(self, window: Window) -> None:
        """Open a window: one kernel finds the drafts among the tokens and assigns their log rows.

        In mode ``"stage"`` another kernel fills the shadow pages. It also redirects the window's slot mappings and
        block tables in place. Do not change or move the window's tensors until the window is closed.

        Args:
            window: the tensors of this step; see :class:`nwor_ops.Window`. Mode ``"stage"`` **mutates**
                ``slot_mappings`` and ``block_tables``.

        Raises:
            RuntimeError: a window is open already.
            ValueError, TypeError: more drafts, tokens or requests than the manager's limits; a missing slot mapping,
                table or length; or a tensor of another shape, dtype or device. Nothing has changed.
            ValueError: in mode ``"stage"``: slot mappings or block tables of two groups share memory. Nothing has
                changed.
            ValueError, TypeError, IndexError: in mode ``"stage"``: lengths, tables or states of another shape, dtype or
                device, or, on the CPU, a request with inconsistent values (:func:`nwor_ops.open_window`). Pages of
                requests, slots and tables have not changed. The window counts as cancelled if it was planned before
                the error was found.

        Two windows in a row may have the same slot mappings and tables (the same objects). Begin and each commit then
        check them once. From then on each of them makes one call of an op.

        A signal such as KeyboardInterrupt undoes begin too. If that fails or is interrupted, the window stays open, and
        only :meth:`cancel` and :meth:`abandon` accept it. Both undo begin.
        """
        if self._state is not _CLOSED:
            self._require(_CLOSED, "begin")
        if not isinstance(window, Window):
            raise TypeError(f"begin: window must be a Window, got {validation.shown(window)}")
        # In a cold cache, a call of a Python function or the read of a field costs the host more than a check. So the
        # checks are written here, and the window is unpacked. The size of a tensor costs still more, so the bound calls
        # check the number of requests.
        bound = self._bound
        query_start_loc, counts, slot_mappings, drafts, bonus_tokens, seq_lens, tables, states, leading_zero = window
        slots: list[Tensor] = []
        try:
            if bound is not None:
                for group, mapping in bound.slot_mappings:
                    if slot_mappings.get(group) is not mapping:
                        bound = None
                        break
            if (
                bound is None
                or bonus_tokens != bound.num_bonus_tokens
                or leading_zero != bound.leading_zero
                or (drafts is not None and not (type(drafts) is int and 0 <= drafts <= self.max_draft_tokens))
                or (bound.block_tables and not bound.have_tables(tables, states))
            ):
                slots = self._slot_mappings(window)
                redirects = self.recovery.redirects(window, slots)
                bound = self._bound = self._bind(window, slots, redirects)
            if bound is not None:
                redirects = bound.redirects
        except Exception as error:
            raise explained(error, self._check_window, window) from None
        self._window, self._redirects, self._ending, self._opening, self._outcome_known, self._state = (
            window, redirects, "begin", False, False, _OPEN
        )  # fmt: skip
        self.buffers.window = window
        try:
            if bound is None:
                self._plan(window, slots)
                self._opening = True
                self.recovery.open(window, redirects)
            elif redirects:
                begin_redirected_bound(query_start_loc, counts, bound.begin, seq_lens, states)
            else:
                begin_bound(query_start_loc, counts, bound.begin)
            self._ending = ""
        except BaseException as raised:
            found = own_error(raised)
            if bound is None or not isinstance(found, ValueError) or not bound.is_outgrown_by(window):
                check = self.recovery.check if self._opening else self._check_window
                self._undo_begin(window)
                if not isinstance(found, Exception):
                    raise
                raise explained(found, check, window) from None
            # Nothing was launched.
            self._bound, self._window, self._redirects, self._state = None, None, [], State.CLOSED
        if self._ending:
            self.begin(window)

    def _bind(self, window: Window, slot_mappings: list[Tensor], redirects: Redirects) -> _BoundCalls | None:
        """Bind the calls of begin if the last window had the same slot mappings and tables.

        The window that binds is checked as any other, so bound calls serve windows of as many requests or fewer.

        Returns:
            None: :meth:`begin` calls the ops themselves.
        """
        last, self._last = self._last, [*slot_mappings, *(table for _, tables in redirects for table in tables)]
        if not self._binds or len(last) != len(self._last) or torch.compiler.is_compiling():
            return None
        if window.num_requests == 0 or any(a is not b for a, b in zip(last, self._last, strict=True)):
            return None
        self.buffers.window = window
        try:
            begin = bind("plan_window", **self._plan_arguments(window, slot_mappings))
            begin = self.recovery.bind_open(window, redirects, begin)
        except (ValueError, TypeError, IndexError):  # the ops will raise it again, and say more
            return None
        except Exception:  # not because of this window; do not try again in each step
            self._binds = False
            return None
        return _BoundCalls(window, self.groups, begin, redirects)

    def _undo_begin(self, window: Window) -> None:
        """Undo a begin that failed. The window counts as cancelled if it was planned. This can be repeated."""
        self._ending = "begin"
        counters = self.buffers.counters
        planned = not has_no_data(counters) and (
            self._opening or (not is_capturing(counters) and int(self._uncounted_drafts()) > 0)
        )
        if planned:
            self.recovery.put_back(window, self._redirects)
            self._count_as_rejected()
        self._end(cancelled=planned)

    def _plan(self, window: Window, slot_mappings: list[Tensor]) -> None:
        ops.plan_window(**self._plan_arguments(window, slot_mappings))

    def _plan_arguments(self, window: Window, slot_mappings: list[Tensor]) -> dict[str, Any]:
        buffers = self.buffers
        return {
            "query_start_loc": window.query_start_loc,
            "cu_num_draft_tokens": window.cu_num_draft_tokens,
            "slot_mappings": slot_mappings,
            "log_rows": buffers.log_rows,
            "row_slots": buffers.row_slots,
            "row_requests": buffers.row_requests,
            "row_positions": buffers.row_positions,
            "counters": buffers.counters,
            "draft_start_loc": buffers.draft_start_loc,
            "num_bonus_tokens": window.num_bonus_tokens,
            "leading_zero": window.leading_zero,
        }

    def _slot_mappings(self, window: Window) -> list[Tensor]:
        """Return the slot mapping of each group. Raise ValueError if the window exceeds the manager's limits."""
        drafts = window.num_draft_tokens
        if drafts is not None:
            if type(drafts) is not int:
                validation.integer("begin: window.num_draft_tokens", drafts, 0)
            if drafts < 0:
                raise ValueError(f"begin: window.num_draft_tokens must not be negative, got {drafts}")
            if drafts > self.max_draft_tokens:
                raise ValueError(self._too_many_drafts(drafts))
        requests = window.num_requests
        if requests > self.max_num_requests:
            raise ValueError(
                f"begin: window must have at most {self.max_num_requests} requests (max_num_requests), got {requests}"
            )
        try:
            return [window.slot_mappings[group] for group in self._groups]
        except KeyError as missing:
            raise ValueError(
                f"begin: window.slot_mappings must have a slot mapping for each group, got none for {missing}"
            ) from None

    def _check_window(self, window: Window) -> None:
        """Raise for the first invalid field. Called only after begin has failed, to explain the failure."""

        def check(name: str, value: object, *dtypes: torch.dtype, least: int = 0) -> None:
            validation.tensor(f"begin: window.{name}", value, *dtypes, dims=1, least=least, device=self.device)

        validation.boolean("begin: window.leading_zero", window.leading_zero)
        validation.integer("begin: window.num_bonus_tokens", window.num_bonus_tokens, 0)
        check("cu_num_draft_tokens", window.cu_num_draft_tokens, torch.int32, least=int(window.leading_zero))
        check("query_start_loc", window.query_start_loc, torch.int32, least=window.num_requests + 1)
        validation.instance("begin: window.slot_mappings", window.slot_mappings, Mapping, "a mapping")
        for group in self._groups:
            if group in window.slot_mappings:
                check(f"slot_mappings[{group!r}]", window.slot_mappings[group], torch.int64)
                tokens = window.slot_mappings[group].shape[0]
                if tokens > self.max_num_tokens:
                    raise ValueError(
                        f"begin: window must have at most {self.max_num_tokens} tokens (max_num_tokens), got {tokens} "
                        f"in slot_mappings[{group!r}]"
                    )
        if self.device.type == "cpu" and window.num_requests > 0:
            counted = int(window.cu_num_draft_tokens[-1]) - window.num_bonus_tokens * window.num_requests
            if counted > self.max_draft_tokens:
                raise ValueError(self._too_many_drafts(counted))
        self.recovery.check(window)

    def _too_many_drafts(self, drafts: int) -> str:
        return f"begin: window must have at most {self.max_draft_tokens} drafts (max_draft_tokens), got {drafts}"

    def write(
        self,
        name: str,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        kv_cache_dtype: str = "auto",
        token_offset: int = 0,
    ) -> None:
        """Write a layer's keys and values and log what the drafts' slots held, with one kernel.

        Args:
            name: a registered layer whose planes hold a key and a value.
            key, value, kv_cache_dtype: as in :func:`nwor_ops.write_kv`.
            slot_mapping: int64 ``[T]``: the window's slot mapping of this layer's group, or its part from
                ``token_offset`` on. Only debug mode (``VLLM_NWOR_DEBUG_SYNC=1``) compares them. A draft written to
                another slot is not undone there, and commit restores the logged bytes to the window's slot instead. In
                mode ``"stage"``, pass the window's tensor or a view of it. A copy made before begin is not redirected.
            k_scale, v_scale: as in :func:`nwor_ops.write_kv`; None = 1.
            token_offset: index in the batch of the first token of ``slot_mapping``, for micro-batches.

        Write each token of a layer once per window: a second write would log the row of the first one. If ``key`` or
        the layer's cache has no data (fake, meta, freed storage), nothing is written. An empty tensor is checked as any
        other one. If both have data, the other tensors must have data too. Compiled and captured code cannot check for
        an open window. Outside a window it is a plain write.

        Raises:
            RuntimeError: no window is open, or the layer's planes are opaque.
            KeyError: the layer is not registered.
            ValueError, TypeError: with this ``token_offset`` the tokens are not in the batch; nothing is written.
            ValueError, TypeError, IndexError: as :func:`nwor_ops.write_kv_logged`.
        """
        layer = self._layer(name, "write")
        if self._passes_through("write", name, layer, "key", key):
            return
        if not layer.cache.writable:
            raise RuntimeError(
                f"write: the planes of layer {name!r} are opaque; call log() and then the layer's own writer"
            )
        try:
            log_rows = self._log_rows_from("write", token_offset, slot_mapping)
            self.recovery.write(
                layer, log_rows, key, value, slot_mapping,
                self._unscaled if k_scale is None else k_scale, self._unscaled if v_scale is None else v_scale,
                kv_cache_dtype,
            )  # fmt: skip
        except Exception as error:
            raise explained(error, _check_write, key, value, slot_mapping, k_scale, v_scale, kv_cache_dtype) from None

    def log(self, name: str, slot_mapping: Tensor, *, token_offset: int = 0) -> None:
        """Log what the drafts' slots of a layer hold, before an external writer runs.

        Call it once for each token of a window, with the window's own slots, as :meth:`write`. In mode ``"stage"`` it
        does nothing, since the external writer follows the redirected slots.

        Args:
            name: a registered layer.
            slot_mapping, token_offset: as in :meth:`write`.

        Raises:
            RuntimeError, KeyError, ValueError, TypeError, IndexError: as :meth:`write`.
        """
        layer = self._layer(name, "log")
        if self._passes_through("log", name, layer, "slot_mapping", slot_mapping):
            return
        self.recovery.log(layer, self._log_rows_from("log", token_offset, slot_mapping), slot_mapping)

    def commit(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> None:
        """Keep the accepted drafts, undo the rejected ones, and close the window.

        Args:
            draft_token_ids, sampled_token_ids: as in :func:`nwor_ops.acceptance_mask`.

        If this raises, the window is still open:

        - Arguments are checked first. If they are invalid, nothing has changed.
        - The outcome of the drafts is determined once. Then one launch per geometry undoes the rejected drafts (mode
          ``"stage"``: copies the accepted ones). :meth:`begin` has checked everything that these launches need. Only
          the device can fail between two of them.
        - To finish a commit after its outcome was determined, call this or :meth:`commit_rejected` again. The first
          outcome is kept; later arguments are ignored.
        - Otherwise end the window with :meth:`cancel` or :meth:`abandon`. They describe their effect on a partial
          commit.

        Raises:
            RuntimeError: no window is open, or its cancel or abandon has begun and failed.
            ValueError, TypeError: as :func:`nwor_ops.reject_rows`.
        """
        window, handle = self._window_to_commit("commit"), None
        if not self._is_outcome_known():
            try:
                handle = self._bound_commit(window, draft_token_ids, sampled_token_ids)
                if handle is None:
                    self._determine_outcome(
                        ops.reject_rows, *self._outcome(draft_token_ids, sampled_token_ids).values()
                    )
                else:
                    assert self._bound is not None
                    drafts = window.num_draft_tokens
                    self._bound.num_rows[0] = -1 if drafts is None else drafts
                    self._determine_outcome(commit_tokens_bound, draft_token_ids, sampled_token_ids, handle)
            except Exception as error:
                if raises_after_launches(self.buffers.counters):
                    self._take_back_counts()  # no row was moved: the next commit determines the outcome again
                ids = {"draft_token_ids": draft_token_ids, "sampled_token_ids": sampled_token_ids}
                raise explained(own_error(error), validation.tensors, "commit", **ids) from None
        if handle is None:
            self._close(window)
        else:
            self._end()

    def _bound_commit(self, window: Window, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> Tensor | None:
        """Return the handle of a bound :meth:`commit`, or None if it must make its launches one by one."""
        bound = self._bound
        if bound is None or window.num_draft_tokens == 0:
            return None
        # Bound calls serve as many requests as their first one had, and begin's must not serve more. In debug mode an
        # error tells whether a row was moved only if the launches are made one by one.
        if (
            bound.commit_tokens is None
            and window.num_requests == bound.most_requests
            and not raises_after_launches(self.buffers.counters)
        ):
            outcome = bind("reject_rows", begun=bound.begin, **self._outcome(draft_token_ids, sampled_token_ids))
            bound.commit_tokens = self.recovery.bind_close_after(window, self._redirects, outcome)
        return bound.commit_tokens

    def _outcome(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of reject_rows, in the order of its schema."""
        buffers = self.buffers
        return {
            "draft_token_ids": draft_token_ids,
            "sampled_token_ids": sampled_token_ids,
            "draft_start_loc": buffers.draft_starts,
            "row_rejected": buffers.row_rejected,
            "num_accepted": buffers.num_accepted,
            "counters": buffers.counters,
        }

    def commit_rejected(self, num_rejected: Tensor) -> None:
        """Commit with the number of rejected drafts of each request, for engines that know it; otherwise as
        :meth:`commit`.

        Args:
            num_rejected: int32 ``[>= Q]``: number of rejected drafts of each request.

        Raises:
            RuntimeError: as :meth:`commit`.
            ValueError, TypeError: as :func:`nwor_ops.reject_rows_from_rejected`.
        """
        bound, window = self._bound, self._window
        # The fast path of most steps. It avoids method calls, which cost some us each in a cold cache.
        if (
            bound is not None and (commit := bound.commit) is not None and window is not None
            and (drafts := window.num_draft_tokens) != 0
            and self._state is _OPEN and self._outcome_known is False and not self._ending
        ):  # fmt: skip
            self._outcome_known = None
            try:
                bound.num_rows[0] = -1 if drafts is None else drafts
                commit_bound(num_rejected, commit)
            except Exception as error:
                raise explained(
                    own_error(error), validation.tensors, "commit_rejected", num_rejected=num_rejected
                ) from None
            self._outcome_known, self._window, self._redirects, self._state = True, None, [], _CLOSED
            return
        window, buffers, first = self._window_to_commit("commit_rejected"), self.buffers, 0
        if not self._is_outcome_known():
            try:
                if window.num_draft_tokens == 0:
                    self._determine_outcome(
                        ops.reject_rows_from_rejected, num_rejected, buffers.draft_starts, buffers.row_rejected,
                        buffers.num_accepted, buffers.counters,
                    )  # fmt: skip
                else:
                    # Bound calls serve as many requests as their first one had, and begin's must not serve more.
                    if bound is not None and bound.commit is None and window.num_requests == bound.most_requests:
                        bound.commit = self.recovery.bind_close(window, self._redirects, num_rejected, bound.begin)
                    self._determine_outcome(self.recovery.close_from_rejected, window, self._redirects, num_rejected)
                    first = 1
            except Exception as error:
                raise explained(error, validation.tensors, "commit_rejected", num_rejected=num_rejected) from None
        self._close(window, first)

    def cancel(self) -> None:
        """Undo every draft written since begin, and close the window. All its drafts count as rejected.

        It is safe after a forward that stopped at any layer. In mode ``"cow"``, a layer that was not reached has logged
        nothing in this window and does not change. Mode ``"stage"`` does not know which layers were reached. It copies
        the rows of this step's non-draft tokens from the shadow pages in all layers. A layer that was not reached gets
        stale rows at these slots, and only there. The slots hold no valid rows until the step is repeated.

        After a :meth:`commit` that failed between two launches:

        - In mode ``"cow"``, accepted drafts are undone from the log too, in every layer.
        - In mode ``"stage"`` there is no log. Layers whose launch was made keep the rows of accepted drafts, never of
          rejected ones. These slots are past the end of the cancelled step's sequences. Other layers get none of these
          rows. Slots and tables are restored. To have the same rows in all layers, finish the commit instead.

        After an :meth:`abandon` that failed between two launches, mode ``"stage"`` leaves every draft in the layers
        whose launch was made, rejected ones too. To have the same rows in all layers, finish the abandon instead. In
        mode ``"cow"`` an abandon makes no launch, and cancel undoes every draft.

        If this raises, the window is still open: call cancel again, or :meth:`abandon`.
        """
        window = self._open_window("cancel")
        if self._ending == "begin":
            self._undo_begin(window)
            return
        self._ending = "cancel"
        self._count_as_rejected()
        self.recovery.close(window, self._redirects)
        self._end(cancelled=True)

    def abandon(self) -> None:
        """Close the window without undoing anything, so that this step ends as it would without the library.

        Its drafts count neither as accepted nor as rejected. This is for engines that prefer a plain step to a stopped
        one after an error.

        In mode ``"stage"`` all rows are copied to their slots. The next window fills the shadow pages again, because
        the rest of this forward writes only to the requests' pages.

        After a :meth:`commit` that failed, every accepted draft stays. In mode ``"cow"``, rejected drafts stay in the
        layers that the commit did not reach. In mode ``"stage"``, all drafts stay.

        If this raises, the window is still open: call abandon again, or :meth:`cancel`.
        """
        window = self._open_window("abandon")
        if self._ending == "begin":
            self._undo_begin(window)
            return
        self._ending = "abandon"
        self._take_back_counts()
        self.buffers.num_accepted.zero_()
        self.recovery.close_keeping_all(window, self._redirects)
        self._end(abandoned_drafts=self._abandoned_drafts + self._uncounted_drafts())

    def refresh_shadow_pages(self) -> None:
        """Copy rows again that have arrived in an open window, before the slots of this step's tokens, such as a
        loader's.

        Mode ``"stage"`` copies them to the pages that attention reads. Mode ``"cow"`` does nothing.

        Raises:
            RuntimeError: no window is open, or its cancel or abandon has begun and failed.
        """
        self.recovery.refresh(self._window_to_commit("refresh_shadow_pages"))

    def forget_shadow_pages(self, states: Sequence[int] | None = None) -> None:
        """Discard what the shadow pages are assumed to hold, for engines that pass ``Window.request_states``.

        A shadow page keeps the rows of its request for that request's next window with drafts. A window that has the
        request without drafts discards them; this detects that a state belongs to a new request. In the following cases
        the engine must call this method, on the stream of its windows:

        - instead of begin, in a step that runs without a window;
        - before begin, with their states, if requests have drafts in their first step, or in the first step after their
          pages were reassigned.

        In mode ``"cow"`` nothing is kept, and this does nothing.

        Args:
            states: the states to forget; None = all. Do not capture a call with states in a CUDA graph. A replay would
                read them from host memory that has been reused by then.

        Raises:
            RuntimeError: a window is open, or nothing is allocated.
            ValueError, TypeError: a state is not below ``max_num_requests``.
        """
        self._require(State.CLOSED, "forget_shadow_pages")
        if states is not None:
            states = validation.items("forget_shadow_pages: states", states, "integers")
            for state in states:
                validation.integer("forget_shadow_pages: states", state, 0, self.max_num_requests - 1)
        if states is None or len(states) > 0:
            self.recovery.forget(states)

    # The counters show on the device whether the drafts of a window are counted. Python cannot know it after a signal,
    # which may arrive right after a launch. The answer synchronizes with the device. Without data nothing is counted.

    def _determine_outcome(self, launch: Callable[..., None], *arguments: Any) -> None:
        """Launch the op that determines which drafts were accepted, and counts them."""
        self._outcome_known = None
        launch(*arguments)
        self._outcome_known = True

    def _is_outcome_known(self) -> bool:
        if self._outcome_known is None:
            self._outcome_known = self._is_counted(self._uncounted_drafts(), slice(None))
        return self._outcome_known

    def _is_counted(self, uncounted: Tensor, rows: slice) -> bool:
        """Return whether the drafts in these log rows are counted, given the number of drafts that may not be."""
        return not has_no_data(uncounted) and bool(uncounted < self._planned_drafts(rows))

    def _take_back_counts(self) -> None:
        """Uncount the outcome of this window's drafts, if it was counted."""
        if self._is_outcome_known():
            self._outcome_known = None
            self._uncount(slice(None))
        self._outcome_known = False

    def _uncount(self, rows: slice) -> None:
        """Uncount the outcome of the drafts in these log rows, with one launch."""
        buffers = self.buffers
        planned, rejected, counts = (
            buffers.row_requests[rows] >= 0,
            buffers.row_rejected[rows],
            buffers.counters.clone(),
        )
        for name, outcome in (("accepted", ~rejected), ("rejected", rejected)):
            counts[ops.COUNTERS.index(name)].sub_((planned & outcome).sum())
        buffers.counters.copy_(counts)

    def _count_as_rejected(self) -> None:
        """Count every draft of the planned window as rejected, whatever its counted outcome was."""
        self._take_back_counts()
        self.buffers.num_accepted.zero_()
        self.buffers.row_rejected.fill_(True)
        self._outcome_known = None
        self._add_rejected(self._uncounted_drafts())
        self._outcome_known = True

    def _add_rejected(self, drafts: Tensor) -> None:
        self.buffers.counters[ops.COUNTERS.index("rejected")].add_(drafts)

    def _planned_drafts(self, rows: slice) -> Tensor:
        """Return the number of drafts that have one of these log rows."""
        return (self.buffers.row_requests[rows] >= 0).sum()

    def _uncounted_drafts(self) -> Tensor:
        """Return the number of drafts of the open window that count neither as accepted nor as rejected."""
        drafted, accepted, rejected = (
            self.buffers.counters[ops.COUNTERS.index(name)] for name in ("drafted", "accepted", "rejected")
        )
        return drafted - accepted - rejected - self._abandoned_drafts

    def stats(self, counters: Tensor | None = None) -> Stats:
        """Return the totals so far.

        Args:
            counters: int64 ``[len(COUNTERS)]``: a copy of ``buffers.counters`` on the host. None = read the device
                counters. This synchronizes with the device, so do not do it between begin and commit of a hot loop.
        """
        if self._state is State.REGISTERING:
            return Stats(0, 0, 0, 0, 0, 0, 0)
        if counters is not None:
            validation.tensor("stats: counters", counters, torch.int64, dims=1, least=len(ops.COUNTERS))
        return Stats.read(self.buffers.counters if counters is None else counters, self._cancelled, self._abandoned)

    # ------------------------------------------------------------ inside

    def _log_rows_from(self, method: str, token_offset: int, slot_mapping: Tensor) -> Tensor:
        # The ops accept more log rows than tokens, so only a micro-batch needs a view.
        log_rows = self.buffers.log_rows
        if type(token_offset) is int and token_offset == 0:
            return log_rows
        validation.token_offset(method, token_offset, slot_mapping.shape[0], self.max_num_tokens)
        return log_rows[token_offset:]

    def _close(self, window: Window, first: int = 0) -> None:
        """Make the launches of a commit from launch ``first`` on.

        With 0 drafts an undo log needs none. Shadow pages are closed in any case: a window that has drafts although the
        caller said 0 has redirected slots and tables.
        """
        if window.num_draft_tokens != 0 or self._redirects:
            self.recovery.close(window, self._redirects, first, window.num_draft_tokens)
        self._end()

    def _end(self, cancelled: bool = False, abandoned_drafts: Tensor | None = None) -> None:
        """Close the window and count how it ended, in one statement."""
        abandoned, drafts = (0, self._abandoned_drafts) if abandoned_drafts is None else (1, abandoned_drafts)
        self._cancelled, self._abandoned, self._abandoned_drafts, self._window, self._redirects, self._state = (
            self._cancelled + cancelled, self._abandoned + abandoned, drafts, None, [], State.CLOSED
        )  # fmt: skip

    def _open_window(self, method: str) -> Window:
        self._require(State.OPEN, method)
        assert self._window is not None
        return self._window

    def _window_to_commit(self, method: str) -> Window:
        window = self._open_window(method)
        if self._ending == "begin":
            raise RuntimeError(f"{method}: begin() has failed for the open window; call cancel() first")
        if self._ending:  # rows may be undone or kept already
            raise RuntimeError(f"{method}: {self._ending}() has begun for the open window; call {self._ending}() again")
        return window

    def _passes_through(self, method: str, name: str, layer: Layer, argument: str, tensor: Tensor) -> bool:
        """Return whether there is nothing to write. Raise outside a window, except in compiled or captured code."""
        if torch.compiler.is_compiling():
            return False
        try:
            if has_no_data(tensor) or has_no_data(layer.cache.planes[0].view):
                return True
        except (AttributeError, RuntimeError) as error:
            raise explained(error, validation.tensor, f"{method}: {argument}", tensor) from None
        if self._state is not State.OPEN:
            self._require_window(method, name, tensor)
        return False


# ---------------------------------------------------------------- the manager of a device


# Weak references: an engine's cache must not outlive the engine.
_current: WeakValueDictionary[torch.device, DraftCommitManager] = WeakValueDictionary()


def set_current_manager(manager: DraftCommitManager | None, device: torch.device | str | None = None) -> None:
    """Make a manager the one that :func:`current_manager` returns for its device, in every thread.

    Only the owner of the manager keeps it alive. Engines that share a device must pass their managers on themselves.

    Args:
        manager: the manager; None removes the current one.
        device: for None, the device whose manager is removed; default: all devices.

    Raises:
        ValueError, TypeError, RuntimeError: ``manager`` or ``device`` is invalid.

    Example:
        >>> import nwor_ops
        >>> nwor_ops.set_current_manager(None, "cpu")
        >>> nwor_ops.current_manager("cpu") is None
        True
    """
    if manager is not None:
        validation.instance("set_current_manager: manager", manager, DraftCommitManager, "a DraftCommitManager or None")
        _current[manager.device] = manager
    elif device is not None:
        _current.pop(validation.device("set_current_manager: device", device), None)
    else:
        _current.clear()


def current_manager(device: torch.device | str) -> DraftCommitManager | None:
    """Return the manager of a device, for attention back ends that hold no reference to one.

    Args:
        device: a device or its name; ``"cuda"`` is the current one.

    Returns:
        The manager that :func:`set_current_manager` set for the device, or None.

    Raises:
        ValueError, TypeError, RuntimeError: the device is invalid or not available.

    Example:
        >>> import nwor_ops
        >>> manager = nwor_ops.DraftCommitManager(
        ...     max_num_tokens=4, max_num_requests=1, max_draft_tokens=2, device="cpu"
        ... )
        >>> nwor_ops.set_current_manager(manager)
        >>> nwor_ops.current_manager("cpu") is manager
        True
    """
    return _current.get(validation.device("current_manager: device", device))
