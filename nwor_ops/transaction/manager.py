"""The transaction: begin, write, then commit or cancel.

    manager = DraftCommitManager(max_num_tokens=..., max_num_requests=..., max_draft_tokens=..., device=...)
    manager.register_layer("layers.0", LayerCache.packed(kv_cache))      # every layer, then
    manager.allocate()                                                     # once, before any capture

    manager.begin(Window(query_start_loc, cu_num_draft_tokens, {"default": slot_mapping}))
    ...  manager.write("layers.0", key, value, slot_mapping)               # at each KV-write site
    manager.commit(draft_token_ids, sampled_token_ids)                     # after sampling

There are two modes, with the same calls. ``"cow"``: drafts are written to their slots, what they overwrite is logged,
commit puts it back where a draft was rejected. ``"stage"``: begin redirects the window to spare pages, commit copies
the accepted rows to their slots; a rejected row never reaches a page of a request.

Between begin and commit nothing is allocated, nothing waits for the device, and nothing depends on a
value that only the host has (cancel, which is for failures, does allocate): the same calls may run
eagerly, be traced by ``torch.compile`` (``write`` at the KV-write site of a compiled model) or be
captured in a CUDA graph. Inside compiled or captured code Python runs once, so the protocol is
enforced where Python does run: begin, commit, cancel, and eager writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import LayerCache, has_no_data
from nwor_ops.transaction.counters import Stats
from nwor_ops.transaction.layers import Layer, LayerTable
from nwor_ops.transaction.recovery import Capacity, Recovery, Redirects
from nwor_ops.transaction.shadow_pages import ShadowPages
from nwor_ops.transaction.state import State, Stateful, raises_behind_launches
from nwor_ops.transaction.undo_log import UndoLog
from nwor_ops.transaction.window import Window, WindowBuffers
from nwor_ops.validation import explained

DEFAULT_GROUP = "default"
_RECOVERIES: dict[str, type[UndoLog] | type[ShadowPages]] = {"cow": UndoLog, "stage": ShadowPages}
MODES = tuple(_RECOVERIES)


def _check_write(
    key: object, value: object, slot_mapping: object, k_scale: object, v_scale: object, kv_cache_dtype: object
) -> None:
    """Raises TypeError for the first argument of a write that failed which no op could take."""
    validation.tensors("write", key=key, value=value, slot_mapping=slot_mapping)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            validation.tensor(f"write: {name}", scale)
    validation.instance("write: kv_cache_dtype", kv_cache_dtype, str, "a string")


class DraftCommitManager(Stateful[Layer]):
    """Makes the cache writes of speculative decoding a transaction on one device.

    Args:
        max_num_tokens: most tokens in one batch, padding included.
        max_num_requests: most requests in one batch, padding included.
        max_draft_tokens: most drafts in one batch: rows of the undo log. The log takes this many rows
            of every registered layer; see :attr:`log_bytes`.
        device: where the caches are. A process may have any number of managers; layers of one engine share one, since
            a window is of all of them.
        mode: ``"cow"`` or ``"stage"``. ``"stage"`` has no log, but takes pages: the last
            :func:`nwor_ops.num_shadow_blocks` ones of each group's caches, which the engine must not give to a request.
        max_drafts_per_request: most drafts of one request; mode ``"stage"`` needs it.
        shadow_blocks: first shadow page of each group, where they are not its last ones: groups that share memory must
            not share shadow pages.

    Not thread-safe: one manager belongs to the thread that runs the model, and its calls are ordered
    by the current stream. It cannot be copied or pickled.
    """

    _called = "manager"
    _layers: LayerTable
    _windows = 1  # which the log has room for
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
        self._redirects: Redirects = []  # of the open window
        self._judged = False  # whether row_rejected says of the open window's drafts what the counters count
        self._ending = ""  # "cancel" or "abandon" once it has begun in the open window
        self._cancelled = 0
        self._abandoned = 0

    # ------------------------------------------------------------ set-up

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of layers, in the order of ``WindowBuffers.row_slots``."""
        return tuple(self._groups)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self._layers)

    def register_layer(self, name: str, cache: LayerCache, group: str = DEFAULT_GROUP) -> None:
        """Make a layer part of every transaction.

        Args:
            name: the engine's name of the layer; unique.
            cache: its planes; their storage must stay where it is while this manager lives.
            group: layers that share a slot mapping. Geometries may differ within a group.

        Raises:
            RuntimeError: the manager is allocated already.
            ValueError, TypeError: a name that is taken, a cache on another device; no layer was registered then.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        validation.instance("register_layer: group", group, str, "a string")
        self._layers.add(name, cache, group)

    def allocate(self) -> None:
        """Allocate the undo log, or the records of shadow pages, and the window buffers: all that a manager allocates.

        Raises:
            ValueError: in mode ``"stage"``, a group without enough pages, or whose layers differ in their pages; groups
                that share memory and shadow pages; ``shadow_blocks`` of a group that has no layer.
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
        """Memory of the undo log."""
        return self.recovery.log_bytes

    @property
    def launches_per_window(self) -> int:
        """Kernels that begin and commit launch together at most, whatever the number of layers; with
        :meth:`commit_rejected`, which judges in the first launch of the undo, one fewer."""
        return 2 + self.recovery.launches_per_window

    # ------------------------------------------------------------ the transaction

    def begin(self, window: Window) -> None:
        """Open a window: one kernel works out which tokens are drafts and where each is logged.

        In mode ``"stage"`` one more fills the shadow pages and redirects the window's slot mappings and block tables,
        in place: they must not change, nor move, until the window is closed.

        Raises:
            RuntimeError: a window is open already.
            ValueError, TypeError: more drafts, tokens or requests than this manager was made for, a slot mapping, table
                or length that is missing, or a tensor of another shape, dtype or device; nothing has changed then.
            ValueError, TypeError, IndexError: in mode ``"stage"``, lengths, tables or states of another shape, dtype or
                device, or on the CPU a request whose numbers do not agree (:func:`nwor_ops.open_window`); the pages of
                requests, slots and tables have not changed then, and the window counts as cancelled.
        """
        self._require(State.CLOSED, "begin")
        if not isinstance(window, Window):
            raise TypeError(f"begin: window must be a Window, got {validation.shown(window)}")
        buffers = self.buffers
        try:
            requests = window.num_requests
            slot_mappings = self._slot_mappings(window, requests)
            redirects = self.recovery.redirects(window, slot_mappings)
            self._plan(window, slot_mappings)
        except Exception as error:
            raise explained(error, self._check_window, window) from None
        buffers.draft_starts = buffers.draft_starts_of[requests]
        self._judged, self._ending = False, ""
        try:
            self.recovery.open(window, redirects)
        except Exception as error:
            self._count_as_rejected()
            self._cancelled += 1
            raise explained(error, self.recovery.check, window) from None
        self._window, self._redirects = window, redirects
        self._state = State.OPEN

    def _plan(self, window: Window, slot_mappings: list[Tensor]) -> None:
        buffers = self.buffers
        ops.plan_window(
            window.query_start_loc, window.cu_num_draft_tokens, slot_mappings, buffers.log_rows,
            buffers.row_slots, buffers.row_requests, buffers.row_positions, buffers.counters,
            buffers.draft_start_loc, None, window.num_bonus_tokens, window.leading_zero,
        )  # fmt: skip

    def _slot_mappings(self, window: Window, requests: int) -> list[Tensor]:
        """One for each group. Raises ValueError for a window that is larger than this manager was made for."""
        drafts = window.num_draft_tokens
        if drafts is not None:
            if type(drafts) is not int:
                validation.integer("begin: window.num_draft_tokens", drafts, 0)
            if drafts < 0:
                raise ValueError(f"begin: window.num_draft_tokens must not be negative, got {drafts}")
            if drafts > self.max_draft_tokens:
                raise ValueError(self._too_many_drafts(drafts))
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
        """Raises for the first field that cannot be what it should be. For sentences: begin has failed already."""

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
        """Write a layer's keys and values, logging what the drafts' slots held: one kernel.

        Args:
            name: a registered layer whose planes hold a key and a value.
            key, value, kv_cache_dtype: as in :func:`nwor_ops.write_kv`.
            slot_mapping: likewise; the window's own of this layer's group, or a part of it from ``token_offset`` on.
                Only debug mode (``VLLM_NWOR_DEBUG_SYNC=1``) compares them: a draft that is written elsewhere is not
                undone there, and the slot that the window has for it gets what was logged elsewhere. In mode
                ``"stage"`` the very tensor, or a view of it, not a copy from before begin, which is not redirected.
            k_scale, v_scale: likewise; None = 1.
            token_offset: place in the batch of the first token of ``slot_mapping`` (micro-batches).

        Write each token of a layer once per window: a second write would log the first one's row.
        Tensors without data (fake, meta, freed storage) pass through: nothing is written.
        In compiled and captured code, which cannot see whether a window is open, it is a plain write outside of one.

        Raises:
            RuntimeError: no window is open, or the layer's planes are opaque.
            KeyError: no such layer.
            ValueError, TypeError: a ``token_offset`` with which the tokens do not lie in the batch; nothing is written.
            ValueError, TypeError, IndexError: as :func:`nwor_ops.write_kv_logged`.
        """
        layer = self._layer(name, "write")
        if self._passes_through("write", name, layer, "key", key):
            return
        if not layer.cache.writable:
            raise RuntimeError(f"write: the planes of layer {name!r} are opaque; call log(), then their own writer")
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
        """Log what the drafts' slots of a layer hold, before a writer that is not ours runs.

        Once for each token of a window, with the window's own slots, as :meth:`write`. In mode ``"stage"`` there is
        nothing to log: that writer follows the redirected slots.

        Raises:
            RuntimeError, KeyError, ValueError, TypeError, IndexError: as :meth:`write`.
        """
        layer = self._layer(name, "log")
        if self._passes_through("log", name, layer, "slot_mapping", slot_mapping):
            return
        self.recovery.log(layer, self._log_rows_from("log", token_offset, slot_mapping), slot_mapping)

    def commit(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> None:
        """Keep the accepted drafts, undo the rest, and close the window.

        Args:
            draft_token_ids, sampled_token_ids: as in :func:`nwor_ops.acceptance_mask`.

        If this raises, the window is still open:

        - Arguments are looked at first. Where they are refused nothing has changed.
        - Drafts are judged once, and then undone (mode ``"stage"``: copied) in one launch for each geometry. What a
          launch needs was checked before the first one, at :meth:`begin`, so only the device can fail between two.
        - Call this, or :meth:`commit_rejected`, again to finish a commit that had judged: its verdict stands, the
          arguments of the second call are not asked.
        - :meth:`cancel` or :meth:`abandon` end the window otherwise; they say what they make of half a commit.

        Raises:
            RuntimeError: no window is open; or a cancel or abandon of it has begun and failed.
            ValueError, TypeError: as :func:`nwor_ops.reject_rows`.
        """
        window, buffers = self._window_to_commit("commit"), self.buffers
        if not self._judged:
            try:
                self._judge(
                    ops.reject_rows, draft_token_ids, sampled_token_ids, buffers.draft_starts, buffers.row_rejected,
                    buffers.num_accepted, buffers.counters,
                )  # fmt: skip
            except Exception as error:
                self._take_back_counts()  # no row was moved: another commit judges anew
                ids = {"draft_token_ids": draft_token_ids, "sampled_token_ids": sampled_token_ids}
                raise explained(error, validation.tensors, "commit", **ids) from None
        self._close(window)

    def commit_rejected(self, num_rejected: Tensor) -> None:
        """:meth:`commit` for engines that know how many drafts of each request were rejected.

        Args:
            num_rejected: int32 ``[>= Q]``.
        """
        window, buffers, first = self._window_to_commit("commit_rejected"), self.buffers, 0
        if not self._judged:
            try:
                if window.num_draft_tokens == 0:
                    self._judge(
                        ops.reject_rows_from_rejected, num_rejected, buffers.draft_starts, buffers.row_rejected,
                        buffers.num_accepted, buffers.counters,
                    )  # fmt: skip
                else:
                    self._judge(self.recovery.close_from_rejected, window, self._redirects, num_rejected)
                    first = 1
            except Exception as error:
                raise explained(error, validation.tensors, "commit_rejected", num_rejected=num_rejected) from None
        self._close(window, first)

    def cancel(self) -> None:
        """Undo every draft written since begin, and close the window. All its drafts count as rejected.

        Safe wherever the forward stopped: a layer it never reached has logged nothing in this window
        and is left alone. In mode ``"stage"``, which does not know the layers reached, the rows of this step's other
        tokens come from the shadow pages in all of them: a layer that was not reached gets stale rows at these
        slots, which hold nothing until the step is repeated, and nowhere else.

        After a :meth:`commit` that failed between two launches: in mode ``"cow"`` the accepted drafts are undone too,
        in every layer, from the log. In mode ``"stage"``, which has none, the layers of the launches that were made
        keep the accepted drafts' rows (never a rejected one's), at slots past the end of the cancelled step's
        sequences; slots and tables are put back, and no other layer gets one. Finish that commit to have all layers
        alike.

        If this raises, the window is still open, for another cancel or an abandon.
        """
        window = self._open_window("cancel")
        self._ending = "cancel"
        self._count_as_rejected()
        self.recovery.close(window, self._redirects)
        self._cancelled += 1
        self._end()

    def abandon(self) -> None:
        """Close the window without undoing anything: this step ends as it would without the library. Its drafts count
        neither as accepted nor as rejected.

        For engines whose own error handling prefers a plain step to a stopped one. In mode ``"stage"`` all rows are
        copied to their slots, and shadow pages keep none: what the rest of a forward writes goes to the requests'
        pages alone. After a :meth:`commit` that failed every accepted draft stays, and so do, in mode
        ``"cow"``, the rejected ones of the layers that it had not come to; in mode ``"stage"``, all.

        If this raises, the window is still open, for another abandon or a cancel.
        """
        window = self._open_window("abandon")
        self._ending = "abandon"
        self._take_back_counts()
        self.buffers.num_accepted.zero_()
        self.recovery.close_keeping_all(window, self._redirects)
        self._abandoned += 1
        self._end()

    def refresh_shadow_pages(self) -> None:
        """In an open window: rows of requests with drafts have arrived since begin, before those of this step, as a
        loader's do. Mode ``"stage"`` copies them to the pages that attention reads; in mode ``"cow"`` they are there.

        Raises:
            RuntimeError: no window is open.
        """
        self.recovery.refresh(self._open_window("refresh_shadow_pages"))

    def forget_shadow_pages(self, states: Sequence[int] | None = None) -> None:
        """Have the next window copy what shadow pages are thought to hold: for engines that pass
        ``Window.request_states``.

        A shadow page keeps the rows of its request for the next window with drafts of it. They are forgotten where a
        window is begun with the request in it and no drafts: that is how a state that changed hands shows. Beyond that
        the engine calls this, on the stream of its windows,

        - in place of begin, in a step that is run without a window;
        - with their states before begin, where requests have drafts in their first step, or in the first one since
          their pages were given away.

        In mode ``"cow"`` nothing is kept, and this does nothing.

        Args:
            states: which ones, not to be captured in a CUDA graph, as a replay would read them from memory of the host
                that is another's by then; None = all.

        Raises:
            RuntimeError: a window is open, or nothing is allocated.
            ValueError, TypeError: a state that is none of this manager's.
        """
        self._require(State.CLOSED, "forget_shadow_pages")
        for state in () if states is None else states:
            validation.integer("forget_shadow_pages: states", state, 0, self.max_num_requests - 1)
        if states is None or len(states) > 0:
            self.recovery.forget(states)

    def _judge(self, launch: Callable[..., None], *arguments: Any) -> None:
        """Make the launch that judges the drafts. One that raises has changed nothing, unless it raises behind the
        launch: then the counters tell."""
        counters = self.buffers.counters
        before = counters.tolist() if raises_behind_launches(counters) else None
        try:
            launch(*arguments)
        except Exception:
            self._judged = before is not None and before != counters.tolist()
            raise
        self._judged = True

    def _take_back_counts(self) -> None:
        """Uncount what :meth:`_judged` drafts of this window were counted as."""
        if self._judged:
            self._uncount(slice(None))
        self._judged = False

    def _uncount(self, rows: slice) -> None:
        """Take back what the drafts of these log rows were judged to be."""
        buffers = self.buffers
        planned, rejected = buffers.row_requests[rows] >= 0, buffers.row_rejected[rows]
        for name, judged in (("accepted", ~rejected), ("rejected", rejected)):
            buffers.counters[ops.COUNTERS.index(name)].sub_((planned & judged).sum())

    def _count_as_rejected(self) -> None:
        """Every draft of the planned window, whatever it was counted as before."""
        self._take_back_counts()
        buffers = self.buffers
        buffers.num_accepted.zero_()
        buffers.row_rejected.fill_(True)
        buffers.counters[ops.COUNTERS.index("rejected")].add_((buffers.row_requests >= 0).sum())
        self._judged = True

    def stats(self, counters: Tensor | None = None) -> Stats:
        """Totals so far.

        Args:
            counters: a copy of ``buffers.counters`` on the host. None = the device's own: waits for the device, so
                never call it between begin and commit of a hot loop.
        """
        if self._state is State.REGISTERING:
            return Stats(0, 0, 0, 0, 0, 0, 0)
        if counters is not None:
            validation.tensor("stats: counters", counters, torch.int64, dims=1, least=len(ops.COUNTERS))
        return Stats.read(self.buffers.counters if counters is None else counters, self._cancelled, self._abandoned)

    # ------------------------------------------------------------ inside

    def _log_rows_from(self, method: str, token_offset: int, slot_mapping: Tensor) -> Tensor:
        # The ops take more log rows than tokens, so only a micro-batch needs a view.
        log_rows = self.buffers.log_rows
        if type(token_offset) is int and token_offset == 0:
            return log_rows
        validation.token_offset(method, token_offset, slot_mapping.shape[0], self.max_num_tokens)
        return log_rows[token_offset:]

    def _close(self, window: Window, first: int = 0) -> None:
        """The launches of a commit from some launch on; where the host knows of no draft there is none."""
        if window.num_draft_tokens != 0:
            self.recovery.close(window, self._redirects, first, window.num_draft_tokens)
        self._end()

    def _end(self) -> None:
        self._window, self._redirects = None, []
        self._state = State.CLOSED

    def _open_window(self, method: str) -> Window:
        self._require(State.OPEN, method)
        assert self._window is not None
        return self._window

    def _window_to_commit(self, method: str) -> Window:
        window = self._open_window(method)
        if self._ending:  # what it has done is not to be committed
            raise RuntimeError(
                f"{method}: the window must not be one whose {self._ending}() has begun; call that again"
            )
        return window

    def _passes_through(self, method: str, name: str, layer: Layer, argument: str, tensor: Tensor) -> bool:
        """Whether there is nothing to write. Raises outside a window, where Python can tell."""
        if torch.compiler.is_compiling():
            return False
        try:
            if has_no_data(tensor) or has_no_data(layer.cache.planes[0].view):
                return True
        except AttributeError as error:
            raise explained(error, validation.tensor, f"{method}: {argument}", tensor) from None
        if self._state is not State.OPEN:
            self._require_window(method, name, tensor)
        return False


# ---------------------------------------------------------------- one manager per device, found from anywhere


# A manager's owner keeps it alive: this must not hold an engine's cache for longer than the engine lives.
_current: WeakValueDictionary[torch.device, DraftCommitManager] = WeakValueDictionary()


def set_current_manager(manager: DraftCommitManager | None, device: torch.device | str | None = None) -> None:
    """Make a manager the one that :func:`current_manager` finds for its device, in every thread; None removes it.

    It is kept alive by its owner alone. Engines that share a device hand out their managers themselves.
    """
    if manager is not None:
        validation.instance("set_current_manager: manager", manager, DraftCommitManager, "a DraftCommitManager or None")
        _current[manager.device] = manager
    elif device is not None:
        _current.pop(validation.device("set_current_manager: device", device), None)
    else:
        _current.clear()


def current_manager(device: torch.device | str) -> DraftCommitManager | None:
    """The manager of a device, for attention back ends that hold no reference to one."""
    return _current.get(validation.device("current_manager: device", device))
