"""Session: runs the transaction of each step, for both model runners of vLLM.

A runner attachment (``runners.v1``, ``runners.v2``) turns its runner's objects into a :class:`Step` and calls
:meth:`Session.begin` and :meth:`Session.commit`. In mode ``"cow"``, :meth:`Session.writer` replaces the writer of each
target layer. In mode ``"stage"``, ``begin`` redirects the step to shadow pages, and the writers stay as they are.

The session notifies its listeners, for example an audit, of each event of a step
(:class:`~nwor_ops.vllm.step_listener.StepListener`).

After an error of ours the step goes on without the transaction, and is counted, unless ``on_error="stop"``. It cannot
go on if the window could not be closed: slots and block tables may then name shadow pages. The engine stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import Stats
from nwor_ops.transaction.manager import DraftCommitManager
from nwor_ops.transaction.protocol import State, is_capturing
from nwor_ops.transaction.window import Layout, Window
from nwor_ops.vllm.errors import CannotContinue, Errors
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.metrics.names import by_reason
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.support.features import TRANSACTION
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks


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


_TOO_MANY, _CANCELLED = "more drafts than log rows", "cancelled"  # reasons of vanilla steps
_EVENTS = tuple(name for name, member in vars(StepListener).items() if callable(member))


class Session:
    """Hold the transaction state of one model runner.

    Args:
        slot_mappings: int64 ``[max_num_tokens]`` per group: the engine's persistent buffers. Each forward takes slices.
        max_num_requests, max_draft_tokens, max_drafts_per_request: the largest numbers, in one batch and per request.
        shadow_blocks: the shadow pages in mode ``"stage"``, otherwise None.
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
    ) -> None:
        self.mode = config.mode
        self.shadow_blocks = shadow_blocks
        self.layers = {layer.name: layer for layer in layers}
        self._logger = logger
        self._step: Step | None = None
        self.begun = 0  # number of windows, counted on the host before the device counts them
        self.loads = True  # whether a connector loads rows for the current step within that step
        self._pages_stay = False  # whether shadow pages may hold rows for the next window
        self._slept: tuple[int, Tensor] | None = None  # `begun` and the counters when the engine went to sleep
        self.slot_mappings = slot_mappings
        self.max_num_tokens = min(slots.numel() for slots in slot_mappings.values())
        self.vanilla_steps: Counter[str] = Counter()
        self.errors = Errors.by_setting(config, logger, "without the transaction in this step")
        self._set_listeners(())
        self.patches = Patches(TRANSACTION)
        self.manager: DraftCommitManager | None = None
        if config.mode == "off":
            return
        shadow = None
        if shadow_blocks is not None:
            shadow = {layer.group: shadow_blocks.of_group(int(layer.group)).start for layer in layers}
        self.manager = DraftCommitManager(
            max_num_tokens=self.max_num_tokens,
            max_num_requests=max_num_requests,
            max_draft_tokens=max_draft_tokens,
            max_drafts_per_request=max_drafts_per_request,
            device=layers[0].kv_cache.device,
            mode=config.mode,
            shadow_blocks=shadow,
        )
        for layer in layers:
            self.manager.register_layer(layer.name, layer.cache, layer.group)
        self.manager.allocate()

    def bind(self, layout: Layout) -> None:
        """Bind the runner's persistent slot mappings and block tables, with its conventions for counts."""
        if self.manager is not None:
            self.manager.bind(layout)

    def subscribe(self, listener: StepListener) -> None:
        """Notify a listener of each event from now on, after all earlier listeners."""
        self._set_listeners((*self.listeners, listener))

    def _set_listeners(self, listeners: tuple[StepListener, ...]) -> None:
        self.listeners = listeners
        # In a cold cache each call of an empty method costs the host some us. A listener hears few events.
        self._listeners_of = {
            event: tuple(one for one in listeners if getattr(type(one), event) is not getattr(StepListener, event))
            for event in _EVENTS
        }

    def notifies(self, event: str) -> bool:
        """Return whether a listener overrides this method of :class:`StepListener`."""
        return bool(self._listeners_of[event])

    @property
    def patches_writers(self) -> bool:
        """Whether the writes of the target layers must go through :meth:`writer`."""
        return self.mode != "stage" or self.notifies("record")

    # ------------------------------------------------------------ one step

    def begin(self, describe: Callable[..., Step], *inputs: Any) -> None:
        """Open the window of the step that ``describe(*inputs)`` returns.

        Call it after the runner prepared its inputs and before the forward.
        """
        try:
            step = describe(*inputs)
        except Exception as error:
            self.close_interrupted()
            self.go_on_without("begin", error)
            return
        self._notify_begin(step)
        manager = self.manager
        if manager is None:
            return
        self.begun += 1
        try:
            if step.new_states:
                manager.forget_shadow_pages(step.new_states)
            self._pages_stay = self.shadow_blocks is not None
            manager.begin(step.window)
        except Exception as error:
            self.go_on_without("begin", error)
            return
        self._step = step
        for listener in self._listeners_of["opened"]:
            listener.opened(self.slot_mappings)

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

    def loading(self) -> None:
        """Notify the listeners that a KV connector is about to load rows. Call it before :meth:`loaded`."""
        for listener in self._listeners_of["loading"]:
            listener.loading()

    def loaded(self) -> None:
        """Copy the rows that a connector loaded since the step began into the shadow pages.

        They belong to new requests, and some of those already have drafts.
        """
        if self._step is not None and self._step.new_states and self.loads:
            assert self.manager is not None
            try:
                self.manager.refresh_shadow_pages()
            except Exception as error:
                self.go_on_without("load", error)
                for listener in self._listeners_of["abandoned"]:
                    listener.abandoned()
        for listener in self._listeners_of["loaded"]:
            listener.loaded()

    def writer(self, name: str) -> Callable[..., None]:
        """Return the function that replaces a layer's own writer.

        Its arguments are the layer, which it ignores, and those of the own writer. Python runs it at each step of an
        eager or piecewise-compiled forward. For a graph of the whole forward it runs once, at capture time and outside
        any window: each replay inside a window then logs the rows. A replay in a step without drafts logs rows that are
        never restored.
        """
        layer, address = self.layers[name], self.layers[name].kv_cache.data_ptr()
        log = self.manager.writer(name) if self.manager is not None and self.mode == "cow" else None

        def write(
            attention: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *rest: Any
        ) -> None:
            for listener in self._listeners_of["record"]:
                listener.record(name, key, value, slot_mapping, self._token_offset(layer.group, slot_mapping), rest)
            if log is not None and (self._step is not None or is_capturing(slot_mapping)):
                try:
                    if kv_cache.data_ptr() != address:
                        raise RuntimeError(
                            f"the KV cache of layer {name} moved to another address after the engine started"
                        )
                    offset = self._token_offset(layer.group, slot_mapping)
                    if layer.fused:
                        k_scale, v_scale = layer.scales() if layer.scales is not None else (None, None)
                        log.write(key, value, slot_mapping, k_scale, v_scale, layer.kv_cache_dtype, offset)
                        return
                    log.log(slot_mapping, offset)
                except Exception as error:
                    if is_capturing(slot_mapping):
                        raise CannotContinue.because(
                            f"write failed while a CUDA graph was captured: {error}",
                            f"no replay of this graph would log the drafts of layer {name}",
                        ) from error
                    self.go_on_without("write", error)
            layer.own_writer(key, value, kv_cache, slot_mapping, *rest)

        return write

    def forwarded(self, moment: str) -> None:
        """Notify the listeners that the forward is over. Call it after the forward, and again before sampling."""
        for listener in self._listeners_of["forwarded"]:
            listener.forwarded(moment)

    def commit(self, close: Callable[[DraftCommitManager], None], num_sampled: Callable[[], list[int]]) -> None:
        """Commit the window. Call it right after sampling: before the tokens are published and before the drafter runs.

        Args:
            close: commits the window of the manager, with the sampler's outcome.
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
                self.go_on_without("commit", error)
        self._notify_end(num_sampled, committed)

    def _notify_begin(self, step: Step) -> None:
        """Notify the listeners that a step began."""
        self.close_interrupted()
        if not self.notifies("begin"):
            return
        query_start_loc, num_draft_tokens = step.on_host()
        for listener in self._listeners_of["begin"]:
            listener.begin(query_start_loc, num_draft_tokens, self.slot_mappings)

    def after_failure(self) -> None:
        """Close the window of a step that failed. The original exception propagates; an error while closing is only
        logged."""
        try:
            self.close_interrupted()
            self.skip()
        except Exception:
            self._logger.exception("nwor: closing the window of a step that failed")

    def close_interrupted(self) -> None:
        """Undo the drafts of a window that is still open: its step failed before it could end."""
        self._step = None
        if self.manager is None or self.manager.state is not State.OPEN:
            self._notify_drop()
            return
        try:
            self.manager.cancel()
        except Exception as error:
            self._notify_drop()
            self.go_on_without("cancel", error)
            return
        self.skip()
        if self.vanilla_steps[_CANCELLED] == 0:
            self._logger.warning("nwor: a step ended without sampling; its drafts were undone (others are counted)")
        self.vanilla_steps[_CANCELLED] += 1
        self._notify_end(None, True)

    # ------------------------------------------------------------ reporting

    @property
    def in_window(self) -> bool:
        """Whether the window of the current step is still open."""
        return self._step is not None

    def go_to_sleep(self) -> None:
        """Copy the counters to the host, because vLLM is about to release their memory (``Worker.sleep``)."""
        if self.manager is not None:
            self._slept = self.begun, self.manager.buffers.counters.to("cpu", copy=True)

    @property
    def counters(self) -> Tensor:
        """The manager's counters. After :meth:`go_to_sleep` and until the next window, their copy on the host."""
        assert self.manager is not None
        if self._slept is not None and self._slept[0] == self.begun:
            return self._slept[1]
        return self.manager.buffers.counters

    def counts(self, *values: int) -> dict[str, float]:
        """Return the totals for the metrics. ``values`` are those of :attr:`counters`. Only with a transaction."""
        assert self.manager is not None
        counts = self.manager.stats(values).as_dict()
        steps = self.vanilla_steps + Counter({_TOO_MANY: counts.pop("overflowed")})
        del steps[_CANCELLED]  # it has its own metric
        return {**counts, **by_reason("vanilla_steps", steps), **by_reason("errors", self.errors.counts)}

    def stats(self) -> Stats:
        """Return the totals so far. Synchronizes with the device."""
        return self.manager.stats(self.counters.tolist()) if self.manager is not None else Stats(0, 0, 0, 0, 0, 0, 0)

    def describe(self) -> str:
        """Return the session's part of the log line ``nwor: active, ...``."""
        if self.manager is None:
            return f"audits {len(self.layers)} layers, no transaction"
        if self.shadow_blocks is not None:
            return f"{len(self.layers)} layers; {self.shadow_blocks.describe()}"
        fused = sum(layer.fused for layer in self.layers.values())
        return (
            f"{len(self.layers)} layers ({fused} with the fused writer), "
            f"{self.manager.max_draft_tokens} log rows, log {self.manager.log_bytes / 2**20:.1f} MiB"
        )

    # ------------------------------------------------------------ inside

    def _notify_end(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        for listener in self._listeners_of["commit"]:
            listener.commit(num_sampled, undone)

    def _notify_drop(self) -> None:
        for listener in self._listeners_of["drop"]:
            listener.drop()

    def _token_offset(self, group: str, slot_mapping: Tensor) -> int:
        """Return the position in the batch at which a slot mapping starts: 0, or the start of a micro-batch's slice.

        Both are int64 views of one persistent buffer, so the position follows from the addresses. The writer checks it.
        """
        return (slot_mapping.data_ptr() - self.slot_mappings[group].data_ptr()) // 8

    def go_on_without(self, moment: str, error: Exception) -> None:
        """Finish the step without the transaction, unless the settings ask to stop.

        This is safe after a commit that failed part of the way: it has restored only rejected drafts, never accepted
        ones. If the window cannot be closed, nothing is safe. ``moment`` is the part of the step that failed.
        """
        self._step = None
        try:
            if self.manager is not None and self.manager.state is State.OPEN:
                self.manager.abandon()
            self.skip()
        except Exception as second:
            raise CannotContinue.because(
                f"{moment} failed: {error}; then the window could not be closed: {second}",
                "drafts may be undone too late, and slots and block tables may name shadow pages",
            ) from second
        self.errors.go_on(f"{moment} failed", error)
        self.vanilla_steps[f"{moment} failed"] += 1
