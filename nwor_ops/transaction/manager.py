"""The transaction: begin a window, write, then commit or cancel it.

    manager = DraftCommitManager(max_num_tokens=..., max_num_requests=..., max_draft_tokens=..., device=...)
    manager.register_layer("layers.0", LayerCache.packed(kv_cache))      # for every layer
    manager.allocate()                                                     # once, before any capture
    manager.bind(Layout({"default": slot_mapping}))                        # once, if the tensors do not move

    manager.begin(Window(query_start_loc, cu_num_draft_tokens))
    ...  manager.write("layers.0", key, value, slot_mapping)               # at each KV-write site
    manager.commit(draft_token_ids, sampled_token_ids)                     # after sampling

Two modes have the same calls:

- ``"cow"`` is an undo log. Drafts are written to their slots, and the overwritten bytes are logged. Commit restores
  them for rejected drafts.
- ``"stage"`` is shadow paging. Begin redirects the window to shadow pages, and commit copies the accepted rows to their
  slots. A rejected row never reaches a page of a request.

Between begin and commit nothing is allocated, nothing synchronizes with the device, and nothing depends on a value that
only the host has. (Cancel, which is for failures, does allocate.) The same calls may therefore run eagerly, or be
captured in a CUDA graph. ``torch.compile`` can also trace ``write`` and ``log``, at the KV-write site of a compiled
model. Compiled or captured code runs Python only once. The protocol is therefore enforced in begin, commit, cancel and
eager writes.

After any exception, a KeyboardInterrupt too, call :meth:`DraftCommitManager.cancel`. Then the caches are right, and the
window counts as cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import LayerCache
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
from nwor_ops.transaction.protocol import State, Stateful, is_capturing
from nwor_ops.transaction.shadow_pages import ShadowPages
from nwor_ops.transaction.undo_log import UndoLog
from nwor_ops.transaction.window import Layout, Window, WindowBuffers
from nwor_ops.transaction.writer import LayerWriter

DEFAULT_GROUP = "default"
_CLOSED, _OPEN = State.CLOSED, State.OPEN  # a global name costs the host less than a member of an enumeration
MODES = ("cow", "stage")


def error_of(method: str, error: Exception, device: torch.device, **tensors: object) -> BaseException:
    """Return the error of a bound call. The call cannot name an argument that is no tensor, or not on the device."""
    try:
        for name, value in tensors.items():
            validation.tensor(f"{method}: {name}", value, device=device)
    except TypeError as wrong_type:
        return wrong_type
    return own_error(error)


class _Handles(NamedTuple):
    """A layout, and its bound calls of begin, ``commit_rejected`` and ``commit``; see :mod:`nwor_ops.ops.bound`."""

    layout: Layout
    begin: Tensor
    commit: Tensor
    commit_tokens: Tensor
    num_rows: memoryview  # of the open window, see num_rows_of


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
        >>> manager.bind(nwor_ops.Layout({"default": slots}))
        >>> manager.begin(nwor_ops.Window(query_start_loc, cu_num_draft_tokens))
        >>> manager.write("layers.0", torch.ones(3, 1, 4), torch.ones(3, 1, 4), slots)
        >>> manager.commit(torch.tensor([7, 8]), torch.tensor([[7, 9, -1]]))  # 7 was accepted, 8 was not
        >>> cache.view(8, 8)[2:5, 0].tolist()
        [1.0, 1.0, 0.0]
        >>> manager.stats().rejected
        1
    """

    _called = "manager"
    _layers: LayerTable

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
        self._reads_values = validation.reads_values(self.device)  # a call in each commit costs the host more
        self.mode = mode
        shadow_blocks = {} if shadow_blocks is None else shadow_blocks
        validation.instance("DraftCommitManager: shadow_blocks", shadow_blocks, Mapping, "a mapping or None")
        first_blocks = {group: size(f"shadow_blocks[{group!r}]", first, 0) for group, first in shadow_blocks.items()}
        self._layers = LayerTable()
        self.recovery: UndoLog | ShadowPages = UndoLog(self._layers)
        if mode == "stage":
            if self.max_drafts_per_request is None:
                raise ValueError('DraftCommitManager: max_drafts_per_request must be given in mode "stage"')
            self.recovery = ShadowPages(self._layers, self.max_drafts_per_request, first_blocks)
        self._writers: dict[str, LayerWriter] = {}
        self._handles: Any = None  # of the bound layout
        self._window: Window | None = None
        self._unfinished = ""  # the method that has begun for the open window and has not returned
        self._cancelled = 0
        self._abandoned = 0
        self._abandoned_drafts: Tensor | int = 0

    # ------------------------------------------------------------ set-up

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of layers, in the order of ``WindowBuffers.row_slots``."""
        return tuple(self._layers.groups)

    def register_layer(self, name: str, cache: LayerCache, group: str = DEFAULT_GROUP) -> None:
        """Add a layer to every transaction.

        Args:
            name: the engine's name of the layer; unique.
            cache: planes of the layer. Their storage must not move while this manager lives.
            group: name of the layers that share a slot mapping. Geometries may differ within a group.
        """
        self._require(State.REGISTERING, "register_layer")
        self._check_new_layer(name, cache)
        if self.mode == "cow" and (owner := self._layers.owner_of(cache, group)) is not None:
            raise ValueError(
                f"register_layer: cache of {name!r} must have other memory than {owner!r} of the same group: a layer "
                "would log what another one wrote; of layers with one cache, register the one that writes"
            )
        self._layers.add(name, cache, group)

    def allocate(self) -> None:
        """Allocate the window buffers, and the undo log or the records of shadow pages. A manager makes no other
        allocation.
        """
        self._require(State.REGISTERING, "allocate")
        if not self._layers:
            raise RuntimeError("allocate: no layer is registered")
        buffers = WindowBuffers(
            len(self.groups), self.max_num_tokens, self.max_draft_tokens, self.max_num_requests, self.device
        )
        self._layers.prepare()
        self.recovery.allocate(buffers)
        unscaled = torch.ones(1, dtype=torch.float32, device=self.device)
        logs = self.recovery.classes if isinstance(self.recovery, UndoLog) else None
        for name, layer in self._layers.items():
            log = None if logs is None else logs[layer.layer_class.number]
            row_slots = buffers.row_slots[self.groups.index(layer.layer_class.group)]
            self._writers[name] = LayerWriter(layer, self, buffers, unscaled, log, row_slots)
        self._zeros = torch.zeros(self.max_num_requests + 1, dtype=torch.int32, device=self.device)
        self.buffers = buffers
        self._state = State.CLOSED

    @property
    def log_bytes(self) -> int:
        """Memory of the undo log in bytes."""
        return self.recovery.log_bytes

    def bind(self, layout: Layout) -> None:
        """Bind the tensors that the next windows share. Begin and each commit then are one call of an op.

        Call it once if the engine's slot mappings and block tables are persistent buffers, and otherwise before each
        window. Begin refuses tensors that moved or changed their length before anything is written. If this raises,
        nothing is bound.

        Args:
            layout: the tensors and conventions of the engine; see :class:`nwor_ops.Layout`.
        """
        self._require(State.CLOSED, "bind")
        validation.instance("bind: layout", layout, Layout, "a Layout")
        if self.device.type == "meta":
            raise TypeError("bind: device of the manager must hold data, got meta")
        self._handles = None
        slot_mappings = _tensors_of_groups("slot_mappings", layout.slot_mappings, self.groups)
        requests = self.max_num_requests
        if self.mode == "stage":
            tables = _tensors_of_groups("block_tables", layout.block_tables, self.groups)
            requests = min(requests, *(len(table) for table in tables))
        zeros = self._zeros[:requests]
        # Each step passes its own tensors in place of these.
        sample = Window(
            self._zeros[: requests + 1], self._zeros[: requests + layout.leading_zero], seq_lens=zeros,
            request_states=zeros if layout.request_states else None,
        )  # fmt: skip
        plan = bind(
            "plan_window", query_start_loc=sample.query_start_loc, cu_num_draft_tokens=sample.cu_num_draft_tokens,
            slot_mappings=slot_mappings, num_bonus_tokens=layout.num_bonus_tokens, leading_zero=layout.leading_zero,
            **self.buffers.plan_arguments(),
        )  # fmt: skip
        begin = self.recovery.bind_begin(plan, layout, sample)
        outcome = bind(
            "reject_rows", begun=begin, draft_token_ids=zeros, sampled_token_ids=zeros.unsqueeze(1),
            **self.buffers.outcome_arguments(requests),
        )  # fmt: skip
        commit = self.recovery.bind_commit(begin, sample, zeros)
        commit_tokens = self.recovery.bind_commit_tokens(outcome, sample)
        self._handles = _Handles(layout, begin, commit, commit_tokens, num_rows_of(begin))

    # ------------------------------------------------------------ the transaction

    def begin(self, window: Window) -> None:
        """Open a window: one kernel finds the drafts among the tokens and assigns their log rows.

        In mode ``"stage"`` another kernel fills the shadow pages. It also redirects the slot mappings and block tables
        in place. Do not change or move these tensors or the window's until the window is closed.

        Args:
            window: the tensors of this step; see :class:`nwor_ops.Window`. The others are those of :meth:`bind`.

        If this raises, pages, slots and tables have not changed. A window that was planned counts as cancelled.
        """
        if self._state is not _CLOSED:
            self._require(_CLOSED, "begin")
        # In a cold cache, a call of a Python function or the read of a field costs the host more than a check. So the
        # checks are written here, and the window is unpacked.
        try:
            query_start_loc, counts, drafts, seq_lens, states = window
        except (TypeError, ValueError):
            raise TypeError(f"begin: window must be a Window, got {validation.shown(window)}") from None
        handles = self._handles
        if handles is None:
            raise RuntimeError("begin: no layout is bound; call bind() first")
        if drafts is not None and not (isinstance(drafts, int) and 0 <= drafts <= self.max_draft_tokens):
            raise ValueError(
                f"begin: window must have 0 to {self.max_draft_tokens} drafts (max_draft_tokens), got {drafts}"
            )
        self._window, self._unfinished, self._state = window, "begin", _OPEN
        try:
            if self.mode == "stage":
                begin_redirected_bound(query_start_loc, counts, handles.begin, seq_lens, states)
            else:
                begin_bound(query_start_loc, counts, handles.begin)
            if drafts is not None:
                handles.num_rows[0] = drafts
        except Exception as error:
            self.cancel()
            tensors: dict[str, object] = {"query_start_loc": query_start_loc, "cu_num_draft_tokens": counts}
            tensors |= {"seq_lens": seq_lens} if self.mode == "stage" else {}
            tensors |= {} if states is None else {"request_states": states}
            raise error_of("begin", error, self.device, **tensors) from None
        self._unfinished = ""

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

        Write each token of a layer once per window: a second write would log the row of the first one. Compiled and
        captured code cannot check for an open window. Outside a window it is a plain write.
        """
        self.writer(name).write(key, value, slot_mapping, k_scale, v_scale, kv_cache_dtype, token_offset)

    def log(self, name: str, slot_mapping: Tensor, *, token_offset: int = 0) -> None:
        """Log what the drafts' slots of a layer hold, before an external writer runs.

        Call it once for each token of a window, with the window's own slots, as :meth:`write`. In mode ``"stage"`` it
        does nothing, since the external writer follows the redirected slots.

        Args:
            name: a registered layer.
            slot_mapping, token_offset: as in :meth:`write`.
        """
        self.writer(name).log(slot_mapping, token_offset)

    def writer(self, name: str) -> LayerWriter:
        """Return the object whose ``write`` and ``log`` are those of this manager for one layer.

        An engine that looks it up once saves the host a lookup by name in each layer of each step.
        """
        try:
            return self._writers[name]
        except KeyError:
            raise KeyError(f"layer {name!r} is not registered, or not allocated") from None

    def commit(self, draft_token_ids: Tensor, sampled_token_ids: Tensor) -> None:
        """Keep the accepted drafts, undo the rejected ones, and close the window.

        Args:
            draft_token_ids, sampled_token_ids: as in :func:`nwor_ops.acceptance_mask`.

        If this raises, the window is still open. End it with :meth:`cancel` or :meth:`abandon`. All arguments are
        checked before the first launch, so only the device can fail between two launches. On the CPU, ids after those
        of the planned drafts are an error, and so is a window that no layer wrote in mode ``"cow"``.
        """
        if self._state is not _OPEN or self._unfinished:
            self._window_to_commit("commit")
        if self._reads_values:
            self._check_drafts(draft_token_ids)
            self._check_window("commit")
        self._unfinished = "commit"
        try:
            commit_tokens_bound(draft_token_ids, sampled_token_ids, self._handles.commit_tokens)
        except Exception as error:
            tensors = {"draft_token_ids": draft_token_ids, "sampled_token_ids": sampled_token_ids}
            raise error_of("commit", error, self.device, **tensors) from None
        self._window, self._unfinished, self._state = None, "", _CLOSED

    def commit_rejected(self, num_rejected: Tensor) -> None:
        """Commit with the number of rejected drafts of each request, for engines that know it; otherwise as
        :meth:`commit`.

        Args:
            num_rejected: int32 ``[>= Q]``: number of rejected drafts of each request. The CPU refuses one above the
                number of its drafts.
        """
        if self._state is not _OPEN or self._unfinished:
            self._window_to_commit("commit_rejected")
        if self._reads_values:
            self._check_window("commit_rejected")
            self._check_rejected(num_rejected)
        self._unfinished = "commit_rejected"
        try:
            commit_bound(num_rejected, self._handles.commit)
        except Exception as error:
            raise error_of("commit_rejected", error, self.device, num_rejected=num_rejected) from None
        self._window, self._unfinished, self._state = None, "", _CLOSED

    def cancel(self) -> None:
        """Undo every draft written since begin, and close the window. All its drafts count as rejected.

        Call it after any exception, also if the forward stopped at any layer. Between windows it does nothing.

        Mode ``"stage"`` does not know which layers were reached, and has no log. It leaves rows only at slots that
        hold nothing valid until the step is repeated: stale rows at the slots of this step's non-draft tokens, in
        layers that were not reached; and after a commit or abandon that failed between two launches, rows of drafts
        past the end of the sequences.

        If this raises, the window is still open: call cancel again, or :meth:`abandon`.
        """
        if self._state is not _OPEN:
            return
        if self._unfinished == "begin":
            self._undo_begin()
            return
        self._close("cancel", self.buffers.draft_start_loc.diff())
        self._end(cancelled=True)

    def abandon(self) -> None:
        """Close the window without undoing anything, so that this step ends as it would without the library.

        Its drafts count neither as accepted nor as rejected. This is for engines that prefer a plain step to a stopped
        one after an error.

        In mode ``"stage"`` all rows are copied to their slots. The next window fills the shadow pages again, because
        the rest of this forward writes only to the requests' pages.

        After a :meth:`commit` that failed, accepted drafts stay in every layer, and rejected ones in the layers that
        the commit did not reach (mode ``"stage"``: in all layers). A window whose begin failed is cancelled instead.

        If this raises, the window is still open: call abandon again, or :meth:`cancel`.
        """
        self._require(_OPEN, "abandon")
        if self._unfinished == "begin":
            self._undo_begin()
            return
        if self.mode == "stage":
            self._close("abandon", self._zeros)
            self.recovery.forget(None)  # the rest of the forward does not write to shadow pages
        self._unfinished = "abandon"
        self._take_back_outcome()
        self.buffers.num_accepted.zero_()
        self._end(abandoned_drafts=self._abandoned_drafts + self._uncounted_drafts())

    def refresh_shadow_pages(self) -> None:
        """Copy rows again that have arrived in an open window, before the slots of this step's tokens, such as a
        loader's.

        Mode ``"stage"`` copies them to the pages that attention reads. Mode ``"cow"`` does nothing.
        """
        window = self._window_to_commit("refresh_shadow_pages")
        self.recovery.refresh(window, self._num_requests(window))

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
        """
        self._require(State.CLOSED, "forget_shadow_pages")
        for state in states or ():
            validation.integer("forget_shadow_pages: states", state, 0, self.max_num_requests - 1)
        if states is None or len(states) > 0:
            self.recovery.forget(states)

    def stats(self, counters: Sequence[int] | None = None) -> Stats:
        """Return the totals so far.

        Args:
            counters: values of ``buffers.counters`` that were read before. None = read them. This synchronizes with the
                device, so do not do it between begin and commit of a hot loop.
        """
        if counters is None:
            counters = [0] * len(ops.COUNTERS) if self._state is State.REGISTERING else self.buffers.counters.tolist()
        named = dict(zip(ops.COUNTERS, counters, strict=True))
        return Stats(**named, cancelled=self._cancelled, abandoned=self._abandoned)

    # ------------------------------------------------------------ inside

    def _window_to_commit(self, method: str) -> Window:
        self._require(_OPEN, method)
        assert self._window is not None
        if self._unfinished:
            raise RuntimeError(f"{method}: {self._unfinished}() has failed for the open window; call cancel() first")
        return self._window

    def _check_drafts(self, draft_token_ids: Tensor) -> None:
        """Raise if there are ids after those of the planned drafts. The rows of such drafts would stay."""
        planned = int(self.buffers.draft_start_loc[-1])
        if self._may_read(draft_token_ids, torch.int32, torch.int64) and (draft_token_ids[planned:] >= 0).any():
            raise ValueError(
                f"commit: draft_token_ids must hold the {planned} drafts of the window, then -1, got "
                f"{int((draft_token_ids >= 0).sum())}; cu_num_draft_tokens is cumulative, see Window.from_counts"
            )

    def _check_rejected(self, num_rejected: Tensor) -> None:
        """Raise if more drafts of a request are rejected than were planned. The rows of the others would stay."""
        assert self._window is not None
        drafts = self.buffers.draft_start_loc.diff()[: self._num_requests(self._window)]
        if not self._may_read(num_rejected, torch.int32) or len(num_rejected) < len(drafts):
            return
        for request in (num_rejected[: len(drafts)] > drafts).nonzero()[:1, 0].tolist():
            raise ValueError(
                f"commit_rejected: num_rejected must be at most {int(drafts[request])} for request {request}, its "
                f"drafts in the window, got {int(num_rejected[request])}; cu_num_draft_tokens is cumulative, see "
                "Window.from_counts"
            )

    def _may_read(self, tensor: Tensor, *dtypes: torch.dtype) -> bool:
        """Return whether a check may read a list of numbers. If not, the op refuses it."""
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.dim() == 1
        return dense and tensor.dtype in dtypes and tensor.device == self.device

    def _check_window(self, method: str) -> None:
        """Raise if no layer has written, or if commit would not look at a draft. Its row would stay."""
        assert self._window is not None
        planned, known = int(self.buffers.draft_start_loc[-1]), self._window.num_draft_tokens
        if known is not None and known < planned:
            raise ValueError(
                f"{method}: num_draft_tokens of the window must be at least {planned}, its drafts, got {known}; "
                "cancel() undoes them"
            )
        if isinstance(self.recovery, UndoLog) and not self.recovery.has_logged():
            raise RuntimeError(
                f"{method}: no layer has written in this window; call write() or log() at each KV-write site, "
                "or cancel()"
            )

    def _num_requests(self, window: Window) -> int:
        return window.cu_num_draft_tokens.size(0) - self._handles.layout.leading_zero

    def _undo_begin(self) -> None:
        """Undo a begin that failed. The window counts as cancelled if it was planned with drafts."""
        assert self._window is not None
        counters = self.buffers.counters
        planned = not is_capturing(counters) and int(self._uncounted_drafts()) > 0
        if planned:
            self.recovery.put_back(self._window, self._num_requests(self._window))
            self._count("rejected", self._uncounted_drafts())
        self._end(cancelled=planned)

    def _close(self, method: str, num_rejected: Tensor) -> None:
        """Make the launches of a commit with this outcome, in place of that of a commit that failed."""
        self._unfinished = method
        self._take_back_outcome()
        self._handles.num_rows[0] = -1
        try:
            commit_bound(num_rejected, self._handles.commit)
        except Exception as error:
            raise own_error(error) from None

    def _end(self, cancelled: bool = False, abandoned_drafts: Tensor | None = None) -> None:
        """Close the window and count how it ended, in one statement."""
        abandoned, drafts = (0, self._abandoned_drafts) if abandoned_drafts is None else (1, abandoned_drafts)
        self._cancelled, self._abandoned, self._abandoned_drafts, self._window, self._unfinished, self._state = (
            self._cancelled + cancelled, self._abandoned + abandoned, drafts, None, "", _CLOSED
        )  # fmt: skip

    def _take_back_outcome(self) -> None:
        """Uncount the drafts of the open window if a call that failed has counted them. Only the device knows it."""
        buffers = self.buffers
        counted = (buffers.row_requests >= 0) & (self._uncounted_drafts() == 0)
        accepted, rejected = (counted & ~buffers.row_rejected).sum(), (counted & buffers.row_rejected).sum()
        self._count("accepted", -accepted)
        self._count("rejected", -rejected)

    def _count(self, counter: str, drafts: Tensor) -> None:
        self.buffers.counters[ops.COUNTERS.index(counter)].add_(drafts)

    def _uncounted_drafts(self) -> Tensor:
        """Return the number of drafts of the open window that count neither as accepted nor as rejected."""
        drafted, accepted, rejected = (
            self.buffers.counters[ops.COUNTERS.index(name)] for name in ("drafted", "accepted", "rejected")
        )
        return drafted - accepted - rejected - self._abandoned_drafts


def _tensors_of_groups(field: str, tensors: Mapping[str, Tensor] | None, groups: Sequence[str]) -> list[Tensor]:
    """Return the tensor of each group."""
    validation.instance(f"bind: {field}", tensors, (Mapping, type(None)), "a mapping from groups to tensors")
    missing = [group for group in groups if tensors is None or group not in tensors]
    if tensors is None or missing:
        raise ValueError(f"bind: {field} must have a tensor for each group, got none for {missing}")
    return [tensors[group] for group in groups]
