"""Session: runs the transaction of each step, for both generations of vLLM's model runner.

A runner attachment (``runners.v1``, ``runners.v2``) turns its runner's objects into a :class:`Step` and calls
:meth:`Session.begin` and :meth:`Session.commit`. In mode ``"cow"``, :meth:`Session.write` replaces the writer of each
target layer. In mode ``"stage"``, ``begin`` redirects the step to shadow pages, and the writers stay as they are.

The session notifies its listeners, for example an audit, of each event of a step. It also decides what happens after an
error:

- strict (default): the exception propagates, and the engine stops with the reason.
- ``on_unsupported="vanilla"``: the step continues without this library, and is counted.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import Stats
from nwor_ops.transaction.in_flight import Deferred, InFlightManager
from nwor_ops.transaction.manager import DraftCommitManager, set_current_manager
from nwor_ops.transaction.state import State, is_capturing
from nwor_ops.transaction.window import Window
from nwor_ops.vllm.layers.target import TargetLayer
from nwor_ops.vllm.spare_blocks import ShadowBlocks
from nwor_ops.vllm.support import check_library


class Step(NamedTuple):
    """One forward of the target model, described by its runner.

    Attributes:
        window: device tensors for the manager.
        on_host: returns ``query_start_loc`` and the number of draft tokens of each request, as host numbers. May
            synchronize; called only if a listener needs them.
        new_states: request states of this window whose pages may have belonged to another request since the last
            window. Only states of requests with drafts.
    """

    window: Window
    on_host: Callable[[], tuple[Sequence[int], Sequence[int]]]
    new_states: Sequence[int] = ()


# The events of a step, in order. Session.subscribe describes them.
EVENTS = (
    "begin", "loading", "loaded", "opened", "record", "forwarded", "commit", "ended", "drop", "returned",
    "deferred", "undone", "settled",
)  # fmt: skip


class Session:
    """Hold the transaction state of one model runner.

    Args:
        config: the plugin's settings.
        layers: the target layers.
        slot_mappings: int64 ``[max_num_tokens]`` per group. These are the engine's persistent buffers; each forward
            takes slices of them.
        max_num_requests: maximum number of requests in one batch.
        max_draft_tokens: maximum number of draft tokens in one batch.
        max_drafts_per_request: maximum number of draft tokens of one request.
        shadow_blocks: the shadow pages in mode ``"stage"``, otherwise None.
        logger: vLLM's logger.
        windows: maximum number of windows that are open or deferred at a time. Above 1 on a pipeline rank that does not
            sample, since it learns in a later step which drafts were accepted.

    Attributes:
        audit: the audit that checks every step, or None. It is subscribed like any other listener; the session keeps it
            only so that its summary can be read.
    """

    def __init__(
        self,
        config: NworConfig,
        layers: list[TargetLayer],
        slot_mappings: dict[str, Tensor],
        max_num_requests: int,
        max_draft_tokens: int,
        max_drafts_per_request: int,
        shadow_blocks: ShadowBlocks | None,
        logger: Any,
        windows: int = 1,
    ) -> None:
        self.config = config
        self.windows = windows
        self.mode = config.mode
        self.shadow_blocks = shadow_blocks
        self._layers = {layer.name: layer for layer in layers}
        self._addresses = {name: layer.kv_cache.data_ptr() for name, layer in self._layers.items()}
        self._logger = logger
        self._step: Step | None = None
        self.begun = 0  # number of windows, counted on the host before the device counts them
        self.loads = True  # whether a connector loads rows for the current step within that step
        self._pages_stay = False  # whether shadow pages may hold rows for the next window
        self.slot_mappings = slot_mappings
        self.max_num_tokens = min(slots.numel() for slots in slot_mappings.values())
        self.vanilla_steps: Counter[str] = Counter()
        self.audit: Any = None
        self._listeners: dict[str, list[Callable[..., None]]] = {event: [] for event in EVENTS}
        self.manager: DraftCommitManager | None = None
        if config.mode != "off":
            self.manager = self._make_manager(
                layers,
                max_num_tokens=self.max_num_tokens,
                max_num_requests=max_num_requests,
                max_draft_tokens=max_draft_tokens,
                max_drafts_per_request=max_drafts_per_request,
            )

    def _make_manager(self, layers: list[TargetLayer], **limits: Any) -> DraftCommitManager:
        device = layers[0].kv_cache.device
        check_library(device.type)
        shadow = None
        if self.shadow_blocks is not None:
            shadow = {layer.group: self.shadow_blocks.of_group(int(layer.group)).start for layer in layers}
        limits |= {"device": device, "mode": self.mode}
        manager = (
            DraftCommitManager(**limits, shadow_blocks=shadow)
            if self.windows == 1
            else InFlightManager(**limits, windows=self.windows)
        )
        for layer in layers:
            manager.register_layer(layer.name, layer.cache, layer.group)
        manager.allocate()
        set_current_manager(manager)
        return manager

    def subscribe(self, **listeners: Callable[..., None]) -> None:
        """Register listeners, one function per event name. The events of a step, in order:

        - ``begin(query_start_loc, num_draft_tokens, slot_mappings, block_tables, seq_lens)``: the inputs of the step
          are prepared. Nothing is redirected or written yet. The step may still run without a window.
        - ``opened(slot_mappings)``: the window is open. The mappings, one per group, are those that the forward will
          read.
        - ``record(name, key, value, slot_mapping, token_offset, rest)``: a layer is about to write these rows. This
          event also occurs outside a window, because a graph captured there is replayed inside one.
        - ``loading()``, ``loaded()``: sent before and after each call in which a KV connector may load rows.
        - ``forwarded(moment)``: sent after the forward, and again before sampling.
        - ``commit(num_sampled, undone)``: the step is over. ``num_sampled()`` synchronizes and returns the number of
          tokens sampled for each request; it is None after a cancellation. ``undone`` tells whether the rows of
          rejected drafts are restored.
        - ``ended()``: every listener has received ``commit``.
        - ``returned(output)``: the runner is about to return ``output`` for a step that sampled.
        - ``drop()``: a step that may have begun will receive no further events.

        If the outcome arrives in a later step, three events replace ``commit``. The argument ``deferred`` identifies
        the window; it is None for a step without drafts.

        - ``deferred(deferred)``: the forward and the step are over.
        - ``undone(deferred, requests)``: the drafts of these requests are undone, because their slots are about to be
          reused.
        - ``settled(deferred, num_sampled, undone)``: the same as ``commit``, for an earlier step.
        """
        for event, listener in listeners.items():
            self._listeners[event].append(listener)

    def unsubscribe(self, **listeners: Callable[..., None]) -> None:
        """Remove listeners that :meth:`subscribe` registered."""
        for event, listener in listeners.items():
            self._listeners[event] = [other for other in self._listeners[event] if other != listener]

    def tell(self, event: str, *what: Any) -> None:
        """Notify the listeners of an event. Runners and connectors call it for ``forwarded``, ``loading`` and
        ``loaded``."""
        for listener in self._listeners[event]:
            listener(*what)

    def heard(self, event: str) -> bool:
        """Return whether an event has a listener."""
        return bool(self._listeners[event])

    @property
    def patches_writers(self) -> bool:
        """Whether the writes of the target layers must go through :meth:`write`."""
        return self.mode != "stage" or self.heard("record")

    # ------------------------------------------------------------ one step

    def begin(self, step: Step) -> None:
        """Open the window of a step. Call it after the runner prepared its inputs and before the forward."""
        self.observe(step)
        if self.manager is None:
            return
        drafts, rows = step.window.num_draft_tokens, self.manager.max_draft_tokens
        if drafts is not None and drafts > rows:  # not an error, even in strict mode: the step is a vanilla step
            self.skip()
            self._count(
                "more drafts than log rows", f"{drafts} drafts, {rows} rows; this step runs without the transaction"
            )
            return
        self.begun += 1
        try:
            if step.new_states:
                self.manager.forget_shadow_pages(step.new_states)
            self._pages_stay = self.shadow_blocks is not None
            self.manager.begin(step.window)
        except Exception as error:
            self._handle_error("begin", error)
            return
        self._step = step
        self.tell("opened", step.window.slot_mappings)

    def skip(self) -> None:
        """Run a step without a window; call it in place of :meth:`begin`.

        It forgets the contents of the shadow pages, because the step may write to the same pages of its requests. If a
        window is still open, its drafts are undone first, as in :meth:`begin`.
        """
        manager = self.manager
        if manager is None:
            return
        if manager.state is State.OPEN:
            self.close_interrupted()  # calls skip again, with the window closed
        elif self._pages_stay:
            manager.forget_shadow_pages()
            self._pages_stay = False

    def loaded(self) -> None:
        """Copy the rows that a connector loaded since the step began into the shadow pages.

        They belong to new requests, and some of those already have drafts.
        """
        if self._step is not None and self._step.new_states and self.loads:
            assert self.manager is not None
            self.manager.refresh_shadow_pages()
        self.tell("loaded")

    def write(self, name: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
        """Replace a layer's own writer; the arguments are the same.

        Python runs this at each step of an eager or piecewise-compiled forward. For a graph of the whole forward it
        runs once, at capture time and outside any window: each replay inside a window then logs the rows. A replay in a
        step without drafts logs rows that are never restored.
        """
        layer = self._layers[name]
        for record in self._listeners["record"]:
            record(name, key, value, slot_mapping, self._token_offset(layer.group, slot_mapping), rest)
        in_window = self._step is not None or (self.manager is not None and is_capturing(slot_mapping))
        logs = in_window and self.mode == "cow"
        if not logs or not self._log(layer, key, value, kv_cache, slot_mapping):
            layer.own_writer(key, value, kv_cache, slot_mapping, *rest)

    def commit(self, close: Callable[[DraftCommitManager], None], num_sampled: Callable[[], list[int]]) -> None:
        """Commit the window. Call it right after sampling: before the tokens are published and before the drafter runs.

        Args:
            close: commits the window of the manager it is given, with the sampler's outcome.
            num_sampled: returns the number of tokens sampled for each request, on the host. Synchronizes; called only
                if a listener needs it.
        """
        step, self._step = self._step, None
        committed = False
        if step is not None:
            assert self.manager is not None
            try:
                close(self.manager)
                committed = True
            except Exception as error:
                self._handle_error("commit", error)
        self.tell("commit", num_sampled, committed)
        self.tell("ended")

    # ------------------------------------------------------------ deferred windows

    def observe(self, step: Step) -> None:
        """Notify the listeners that a step began. A step without drafts needs nothing else."""
        self.close_interrupted()
        if self.heard("begin"):
            window = step.window
            self.tell("begin", *step.on_host(), window.slot_mappings, window.block_tables, window.seq_lens)

    def defer(self) -> Deferred | None:
        """End a step on a pipeline rank that does not sample.

        Returns:
            The handle for :meth:`settle`, or None if the step has no window.
        """
        step, self._step = self._step, None
        deferred = self._deferring_manager.defer() if step is not None else None
        self.tell("deferred", deferred)
        return deferred

    def settle(self, deferred: Deferred, num_rejected: Tensor, num_sampled: Callable[[], list[int]]) -> None:
        """End a deferred window, once the outcome of its step is known.

        Args:
            deferred: what :meth:`defer` returned.
            num_rejected: number of rejected draft tokens per request, on the device.
            num_sampled: as in :meth:`commit`.
        """
        try:
            self._deferring_manager.settle(deferred, num_rejected)
        except Exception as error:
            self._handle_deferred_error(deferred, error)
            return
        self.tell("settled", deferred, num_sampled, True)

    def undo(self, deferred: Deferred, requests: Sequence[int]) -> bool:
        """Undo the drafts of some requests in a deferred window, before their blocks are reused.

        Args:
            deferred: what :meth:`defer` returned.
            requests: positions of the requests in the batch of that step.

        Returns:
            Whether the window is still deferred. It is not if undoing failed.
        """
        try:
            self._deferring_manager.undo(deferred, requests)
        except Exception as error:
            self._handle_deferred_error(deferred, error)
            return False
        self.tell("undone", deferred, requests)
        return True

    def cancel_deferred(self, deferred: Deferred) -> None:
        """Undo all drafts of a deferred window whose outcome will never arrive."""
        try:
            self._deferring_manager.cancel_deferred(deferred)
        except Exception as error:
            self._handle_deferred_error(deferred, error)
            return
        self._count("cancelled", "a step ended without sampling; its drafts were undone")
        self.tell("settled", deferred, None, True)

    @property
    def _deferring_manager(self) -> InFlightManager:
        assert isinstance(self.manager, InFlightManager)
        return self.manager

    def _handle_deferred_error(self, deferred: Deferred, error: Exception) -> None:
        """Handle an error as :meth:`_handle_error` does; the drafts of that step stay."""
        with contextlib.suppress(RuntimeError):  # the manager has already forgotten it
            self._deferring_manager.forget(deferred)
        self.tell("settled", deferred, None, False)
        self._handle_error("commit", error)

    def after_failure(self, close: Callable[[], None]) -> None:
        """Close the window of a step that failed. The original exception propagates; an error while closing is only
        logged."""
        try:
            close()
            self.skip()
        except Exception:
            self._logger.exception("nwor: closing the window of a step that failed")

    def close_interrupted(self) -> None:
        """Undo the drafts of a window that is still open: its step failed before it could end."""
        self._step = None
        if self.manager is None or self.manager.state is not State.OPEN:
            self.tell("drop")
            return
        if self._cancel(self.manager):
            self.tell("commit", None, True)
            self.tell("ended")

    def _cancel(self, manager: DraftCommitManager) -> bool:
        """Cancel the open window and return whether its drafts are undone."""
        try:
            manager.cancel()
        except Exception as error:
            self.tell("drop")
            self._handle_error("cancel", error)
            return False
        self.skip()
        self._count("cancelled", "a step ended without sampling; its drafts were undone")
        return True

    # ------------------------------------------------------------ reporting

    @property
    def in_window(self) -> bool:
        """Whether the window of the current step is still open."""
        return self._step is not None

    def stats(self) -> Stats:
        """Return the totals so far. Synchronizes with the device."""
        return self.manager.stats() if self.manager is not None else Stats(0, 0, 0, 0, 0, 0, 0)

    def describe(self) -> str:
        """Return the session's part of the log line ``nwor: active, ...``."""
        if self.manager is None:
            return f"audits {len(self._layers)} layers, no transaction"
        if self.shadow_blocks is not None:
            return (
                f"{len(self._layers)} layers, at most {self.manager.launches_per_window} launches per step and none in "
                f"a layer; {self.shadow_blocks.describe()}"
            )
        fused = sum(layer.fused for layer in self._layers.values())
        deferred = f", at most {self.windows} windows open or deferred" if self.windows > 1 else ""
        return (
            f"{len(self._layers)} layers ({fused} with the fused writer), "
            f"{self.manager.max_draft_tokens} log rows, log {self.manager.log_bytes / 2**20:.1f} MiB, "
            f"at most {self.manager.launches_per_window} launches per step beyond the writers{deferred}"
        )

    # ------------------------------------------------------------ inside

    def _log(self, layer: TargetLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> bool:
        """Log the rows that a layer is about to overwrite. If our kernel also writes the new rows, return True."""
        assert self.manager is not None
        name = layer.name
        try:
            if kv_cache.data_ptr() != self._addresses[name]:
                raise RuntimeError(f"the KV cache of layer {name} moved to another address after the engine started")
            offset = self._token_offset(layer.group, slot_mapping)
            if not layer.fused:
                self.manager.log(name, slot_mapping, token_offset=offset)
                return False
            k_scale, v_scale = layer.scales() if layer.scales is not None else (None, None)
            self.manager.write(
                name,
                key,
                value,
                slot_mapping,
                k_scale=k_scale,
                v_scale=v_scale,
                kv_cache_dtype=layer.kv_cache_dtype,
                token_offset=offset,
            )
            return True
        except Exception as error:
            self._handle_error("write", error)
            return False

    def _token_offset(self, group: str, slot_mapping: Tensor) -> int:
        """Return the position in the batch at which a slot mapping starts: 0, or the start of a micro-batch's slice.

        Both are views of one persistent buffer, so the position follows from the addresses.
        """
        batch = self.slot_mappings[group]
        start, batch_start = slot_mapping.data_ptr(), batch.data_ptr()
        if start == batch_start:
            return 0
        token_offset = (start - batch_start) // slot_mapping.element_size()
        if not 0 <= token_offset <= batch.numel() - slot_mapping.shape[0]:
            raise RuntimeError(
                f"a layer of group {group} must be given a slice of its group's {batch.numel()} slot mappings, got "
                f"{slot_mapping.shape[0]} starting at index {token_offset}"
            )
        return token_offset

    def _handle_error(self, moment: str, error: Exception) -> None:
        """Raise the error in strict mode. Otherwise finish the step without the transaction.

        The second case is safe after a commit that failed part of the way: it has restored only rejected drafts, never
        accepted ones.
        """
        self._step = None
        if self.manager is not None and self.manager.state is State.OPEN:
            self.manager.abandon()
        self.skip()
        if self.config.strict:
            raise RuntimeError(
                f"nwor: {moment} failed: {error} (VLLM_NWOR_ON_UNSUPPORTED=vanilla runs such steps without the "
                "transaction)"
            ) from error
        self._count(f"{moment} failed", str(error))

    def _count(self, reason: str, detail: str) -> None:
        if self.vanilla_steps[reason] == 0:
            self._logger.warning("nwor: %s: %s (further ones are counted, not logged)", reason, detail)
        self.vanilla_steps[reason] += 1
