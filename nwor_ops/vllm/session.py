"""One model runner's transactions: what is the same for every generation of vLLM's runner.

A generation of runners (``runners.v1``, ``runners.v2``) turns its runner's objects into a :class:`Step` and calls
:meth:`Session.begin` and :meth:`Session.commit`; in mode ``"cow"`` each target layer's writer is replaced by
:meth:`Session.write`. In mode ``"stage"`` begin redirects the step to shadow pages, and writers need no wrapper.
What happens in a step is told to those who subscribe: an audit, for one. The policy for errors is here and nowhere
else:

- strict (default): the error goes up, the engine stops with the reason;
- ``on_unsupported="vanilla"``: the step goes on as if this library were not there, and is counted.
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
from nwor_ops.vllm.spare_blocks import SpareBlocks
from nwor_ops.vllm.support import check_library


class Step(NamedTuple):
    """One forward of the target model, as its runner describes it.

    Attributes:
        window: device tensors for the manager.
        on_host: gives ``query_start_loc`` and the number of drafts of each request, on the host. May wait for the
            device: called where that is listened to alone.
        new_states: of the window's request states, those of requests with drafts whose pages may have been another's
            since the last window.
    """

    window: Window
    on_host: Callable[[], tuple[Sequence[int], Sequence[int]]]
    new_states: Sequence[int] = ()


# Of a step, in order; see Session.subscribe.
EVENTS = (
    "begin", "loading", "loaded", "opened", "record", "forwarded", "commit", "ended", "drop", "returned",
    "deferred", "undone", "settled",
)  # fmt: skip


class Session:
    """Everything this library holds for one model runner.

    Args:
        config: what was asked for.
        layers: the target layers.
        slot_mappings: int64 ``[max_num_tokens]`` per group: the engine's persistent buffers, of which
            every forward takes slices.
        max_num_requests, max_draft_tokens: most in one batch.
        max_drafts_per_request: most of one request.
        spare: the blocks that belong to no request, in mode ``"stage"``.
        logger: vLLM's.
        windows: above 1 on a pipeline stage that learns later which drafts were accepted: most steps that wait for it.

    Attributes:
        audit: what checks every step, if the configuration asks for it. The session tells it what every listener
            hears; it is kept here for those who ask for its summary.
    """

    def __init__(
        self,
        config: NworConfig,
        layers: list[TargetLayer],
        slot_mappings: dict[str, Tensor],
        max_num_requests: int,
        max_draft_tokens: int,
        max_drafts_per_request: int,
        spare: SpareBlocks | None,
        logger: Any,
        windows: int = 1,
    ) -> None:
        self.config = config
        self.windows = windows
        self.mode = config.mode
        self.spare = spare
        self._layers = {layer.name: layer for layer in layers}
        self._addresses = {name: layer.kv_cache.data_ptr() for name, layer in self._layers.items()}
        self._logger = logger
        self._step: Step | None = None
        self.begun = 0  # windows, counted before the device counts them
        self.loads = True  # whether rows that the step that runs reads are loaded in it
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
        if self.spare is not None:
            shadow = {layer.group: self.spare.of_group(int(layer.group)).start for layer in layers}
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
        """Tell functions what happens, each of the event that it is passed for. In the order of a step:

        - ``begin(query_start_loc, num_draft_tokens, slot_mappings, block_tables, seq_lens)``: the step's inputs are
          prepared, nothing of it is redirected or written. Not every step that begins is opened.
        - ``opened(slot_mappings)``: as the forward will read them, per group.
        - ``record(name, key, value, slot_mapping, token_offset, rest)``: what a layer is about to write. Also outside a
          window: a graph captured there replays inside one.
        - ``loading()``, ``loaded()``: around each call in which a KV connector may load rows.
        - ``forwarded(moment)``: after the forward, and again before sampling.
        - ``commit(num_sampled, undone)``: it is over; ``num_sampled`` waits for the device and gives the tokens sampled
          for each request, None after a cancellation. ``undone``: whether the rejected drafts' rows are.
        - ``ended()``: likewise, when all have heard of it.
        - ``returned(output)``: what the runner returns of a step that sampled.
        - ``drop()``: a step that may have begun will not be told of to its end.

        In place of ``commit``, where steps wait for their verdict (``deferred`` is what the manager knows a window by,
        None where it had no drafts):

        - ``deferred(deferred)``: the forward is over, and with it the step.
        - ``undone(deferred, requests)``: drafts of these requests are undone, as their slots are given away.
        - ``settled(deferred, num_sampled, undone)``: as ``commit``, of an earlier step.
        """
        for event, listener in listeners.items():
            self._listeners[event].append(listener)

    def unsubscribe(self, **listeners: Callable[..., None]) -> None:
        for event, listener in listeners.items():
            self._listeners[event] = [other for other in self._listeners[event] if other != listener]

    def tell(self, event: str, *what: Any) -> None:
        """Runners and connectors say what the session does not see: ``forwarded``, ``loading``, ``loaded``."""
        for listener in self._listeners[event]:
            listener(*what)

    def heard(self, event: str) -> bool:
        """Whether anyone listens."""
        return bool(self._listeners[event])

    @property
    def wraps_writers(self) -> bool:
        """Whether what the target layers write is to come through :meth:`write`."""
        return self.mode != "stage" or self.heard("record")

    # ------------------------------------------------------------ the moments of a step

    def begin(self, step: Step) -> None:
        """After the runner prepared its inputs, before the forward."""
        self.observe(step)
        if self.manager is None:
            return
        drafts, rows = step.window.num_draft_tokens, self.manager.max_draft_tokens
        if drafts is not None and drafts > rows:  # no fault: the step is plain vLLM's, strict or not
            self.skip()
            self._count(
                "more drafts than log rows", f"{drafts} drafts, {rows} rows; this step runs without the transaction"
            )
            return
        self.begun += 1
        try:
            if step.new_states:
                self.manager.forget_shadow_pages(step.new_states)
            self._pages_stay = self.spare is not None
            self.manager.begin(step.window)
        except Exception as error:
            self._fall_back("begin", error)
            return
        self._step = step
        self.tell("opened", step.window.slot_mappings)

    def skip(self) -> None:
        """In place of :meth:`begin`, in a step that writes to pages of requests without a window: what shadow pages
        hold of them is of no more use. Like begin, it first undoes the drafts of a window that is still open."""
        manager = self.manager
        if manager is None:
            return
        if manager.state is State.OPEN:
            self.close_interrupted()  # comes back here with the window closed
        elif self._pages_stay:
            manager.forget_shadow_pages()
            self._pages_stay = False

    def loaded(self) -> None:
        """A connector may have loaded rows since the step began: of new requests, some of which have drafts at once."""
        if self._step is not None and self._step.new_states and self.loads:
            assert self.manager is not None
            self.manager.refresh_shadow_pages()
        self.tell("loaded")

    def write(self, name: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
        """In place of the layer's own writer, with its arguments.

        Python is here at every step of an eager or piecewise-compiled forward, and once, outside any
        window, where a graph of the whole forward is captured: the captured kernel logs in every replay
        that happens inside a window. (In one without drafts it logs what is not restored.)
        """
        layer = self._layers[name]
        for record in self._listeners["record"]:
            record(name, key, value, slot_mapping, self._token_offset(layer.group, slot_mapping), rest)
        in_window = self._step is not None or (self.manager is not None and is_capturing(slot_mapping))
        logs = in_window and self.mode == "cow"
        if not logs or not self._log(layer, key, value, kv_cache, slot_mapping):
            layer.own_writer(key, value, kv_cache, slot_mapping, *rest)

    def commit(self, close: Callable[[DraftCommitManager], None], num_sampled: Callable[[], list[int]]) -> None:
        """Right behind sampling: before anyone is told of the tokens, and before the drafter.

        Args:
            close: commits the manager's window with what the sampler said.
            num_sampled: tokens sampled for each request, on the host. Waits: called where that is listened to alone.
        """
        step, self._step = self._step, None
        committed = False
        if step is not None:
            assert self.manager is not None
            try:
                close(self.manager)
                committed = True
            except Exception as error:
                self._fall_back("commit", error)
        self.tell("commit", num_sampled, committed)
        self.tell("ended")

    # ------------------------------------------------------------ where the verdict comes later

    def observe(self, step: Step) -> None:
        """A step that begins, for those who listen; of one without drafts, that is all."""
        self.close_interrupted()
        if self.heard("begin"):
            window = step.window
            self.tell("begin", *step.on_host(), window.slot_mappings, window.block_tables, window.seq_lens)

    def defer(self) -> Deferred | None:
        """At the end of a step on a stage that samples nothing: what :meth:`settle` takes, None where there is nothing
        to settle."""
        step, self._step = self._step, None
        deferred = self._in_flight.defer() if step is not None else None
        self.tell("deferred", deferred)
        return deferred

    def settle(self, deferred: Deferred, num_rejected: Tensor, num_sampled: Callable[[], list[int]]) -> None:
        """When it is known what was sampled in an earlier step. ``num_sampled``: as for :meth:`commit`."""
        try:
            self._in_flight.settle(deferred, num_rejected)
        except Exception as error:
            self._fall_back_later(deferred, error)
            return
        self.tell("settled", deferred, num_sampled, True)

    def undo(self, deferred: Deferred, requests: Sequence[int]) -> bool:
        """Before the blocks of requests of an earlier step are given away, by their places in its batch. Whether that
        step still waits for its verdict."""
        try:
            self._in_flight.undo(deferred, requests)
        except Exception as error:
            self._fall_back_later(deferred, error)
            return False
        self.tell("undone", deferred, requests)
        return True

    def cancel_deferred(self, deferred: Deferred) -> None:
        """Nobody will say what was sampled in that step: undo all its drafts."""
        try:
            self._in_flight.cancel_deferred(deferred)
        except Exception as error:
            self._fall_back_later(deferred, error)
            return
        self._count("cancelled", "a step ended without sampling; its drafts were undone")
        self.tell("settled", deferred, None, True)

    @property
    def _in_flight(self) -> InFlightManager:
        assert isinstance(self.manager, InFlightManager)
        return self.manager

    def _fall_back_later(self, deferred: Deferred, error: Exception) -> None:
        """As :meth:`_fall_back`: the drafts of that step stay."""
        with contextlib.suppress(RuntimeError):  # it is forgotten already
            self._in_flight.forget(deferred)
        self.tell("settled", deferred, None, False)
        self._fall_back("commit", error)

    def after_failure(self, close: Callable[[], None]) -> None:
        """Close the window of a step that failed. It is that failure which goes up, not one of closing."""
        try:
            close()
            self.skip()
        except Exception:
            self._logger.exception("nwor: closing the window of a step that failed")

    def close_interrupted(self) -> None:
        """A window that is still open belongs to a step that failed: undo every draft it wrote."""
        self._step = None
        if self.manager is None or self.manager.state is not State.OPEN:
            self.tell("drop")
            return
        if self._cancel(self.manager):
            self.tell("commit", None, True)
            self.tell("ended")

    def _cancel(self, manager: DraftCommitManager) -> bool:
        """Whether the drafts of the open window are undone."""
        try:
            manager.cancel()
        except Exception as error:
            self.tell("drop")
            self._fall_back("cancel", error)
            return False
        self.skip()
        self._count("cancelled", "a step ended without sampling; its drafts were undone")
        return True

    # ------------------------------------------------------------ reporting

    @property
    def in_window(self) -> bool:
        """Whether this step is a transaction that is still open."""
        return self._step is not None

    def stats(self) -> Stats:
        """Totals so far; waits for the device."""
        return self.manager.stats() if self.manager is not None else Stats(0, 0, 0, 0, 0, 0, 0)

    def describe(self) -> str:
        if self.manager is None:
            return f"watching {len(self._layers)} layers, no transaction"
        if self.spare is not None:
            return (
                f"{len(self._layers)} layers, at most {self.manager.launches_per_window} launches per step and none in "
                f"a layer; {self.spare.describe()}"
            )
        fused = sum(layer.fused for layer in self._layers.values())
        waiting = f", {self.windows} steps may wait for their verdict" if self.windows > 1 else ""
        return (
            f"{len(self._layers)} layers ({fused} through the fused writer), "
            f"{self.manager.max_draft_tokens} log rows, log {self.manager.log_bytes / 2**20:.1f} MiB, "
            f"at most {self.manager.launches_per_window} launches per step beyond the writers{waiting}"
        )

    # ------------------------------------------------------------ inside

    def _log(self, layer: TargetLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> bool:
        """Log what a layer is about to overwrite, and where our kernel does both, write. True if it wrote."""
        assert self.manager is not None
        name = layer.name
        try:
            if kv_cache.data_ptr() != self._addresses[name]:
                raise RuntimeError(f"the cache of layer {name} is not where it was when the engine started")
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
            self._fall_back("write", error)
            return False

    def _token_offset(self, group: str, slot_mapping: Tensor) -> int:
        """Where in the batch a slot mapping begins: 0, or the start of a micro-batch's slice. Both are views
        of one persistent buffer, so the addresses tell."""
        batch = self.slot_mappings[group]
        start, batch_start = slot_mapping.data_ptr(), batch.data_ptr()
        if start == batch_start:
            return 0
        token_offset = (start - batch_start) // slot_mapping.element_size()
        if not 0 <= token_offset <= batch.numel() - slot_mapping.shape[0]:
            raise RuntimeError(
                f"a layer of group {group} must be given a slice of its group's {batch.numel()} slot mappings, got "
                f"{slot_mapping.shape[0]} from number {token_offset} on"
            )
        return token_offset

    def _fall_back(self, moment: str, error: Exception) -> None:
        """Strict: stop with the reason. Else: this step ends as it would without the library. A commit that
        failed half-way has undone some rejected drafts and no accepted one, so that is safe too."""
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
