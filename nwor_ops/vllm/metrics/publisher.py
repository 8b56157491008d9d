"""Send the counts of an engine from its worker to the engine core.

vLLM carries the output of each step from the worker that samples to the engine core. At most twice a second a
:class:`Publisher` puts the increments since its last message on this output. When a message is due, the counters of
kernels are copied to pinned memory. The message leaves with the first output that finds the copy complete. Nothing
waits for the device.

A feature adds its counters when the engine's cache is bound (:func:`publish`). Each name is a key of ``METRICS``, and a
field of :class:`nwor_ops.EngineStats`.
"""

from __future__ import annotations

import json
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.metrics.names import by_reason

MESSAGE = "_nwor_message"  # attribute of a ModelRunnerOutput
_OUTPUT = ("model_runner_output", "_model_runner_output")  # with async scheduling: where the ModelRunnerOutput is
PERIOD = 0.5  # seconds between two messages, and between two copies of the counters

publishers: weakref.WeakKeyDictionary[Any, Publisher] = weakref.WeakKeyDictionary()  # by runner


class _Source:
    """The counts of one owner (:meth:`Publisher.add`).

    Attributes:
        values: the device's counters in the last copy that arrived.
        sent: the counts that were sent or left out.
    """

    def __init__(
        self, owner: Any, counts: Callable[..., Mapping[str, float]], counters: Callable[[Any], Tensor] | None
    ) -> None:
        self._owner, self._counts, self._counters = weakref.ref(owner), counts, counters
        self.values = [0] * counters(owner).numel() if counters is not None else []
        self.sent: Counter[str] = Counter()

    def counters(self) -> Tensor | None:
        owner = self._owner()
        return None if owner is None or self._counters is None else self._counters(owner)

    def increments(self, exact: bool = False) -> dict[str, float]:
        """Return the counts that were not sent. ``exact`` synchronizes with the device. A dead owner has none."""
        owner, counters = self._owner(), self.counters() if exact else None
        if owner is None:
            return {}
        values = self.values if counters is None else counters.tolist()
        return {name: count - self.sent[name] for name, count in self._counts(owner, *values).items()}


class Publisher:
    """Put the counts of one runner's engine on its outputs.

    ``report`` returns ``features`` and ``memory`` for the first message. ``name`` identifies this publisher in all
    processes. ``errors`` counts the outputs without our counts because of an error.
    """

    def __init__(self, vllm_config: Any, report: Callable[[], Mapping[str, Any]], logger: Any) -> None:
        self.name = secrets.token_hex(8)
        self.errors = Errors(logger, "without publishing counters")
        engine = str(int(vllm_config.parallel_config.data_parallel_index))
        self._labels = [str(vllm_config.model_config.served_model_name), engine]
        self._report = report
        self._sources: list[_Source] = []
        self._copy: tuple[Any, list[tuple[_Source, Tensor]]] | None = None  # with the event of its arrival
        self._is_copied = True  # whether a copy was started after the last output
        self._sent: Counter[str] = Counter()  # the sum of all messages
        self._reported = False
        self._next = 0.0  # time of the next message
        self.add(self, lambda publisher: by_reason("errors", publisher.errors.counts))

    def add(
        self,
        owner: Any,
        counts: Callable[..., Mapping[str, float]],
        counters: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Publish the counts of an owner for as long as it lives.

        Args:
            owner: any object; it is not kept alive.
            counts: returns totals that only grow, by key of ``METRICS`` or by :func:`by_reason`. Its arguments are the
                owner and the values of ``counters``. It must not synchronize.
            counters: returns the owner's counters, int64 ``[N]`` on the device.
        """
        self._sources.append(_Source(owner, counts, counters))

    def forget(self) -> None:
        """Leave out all counts so far: those of vLLM's warm-up, whose outputs reach no engine core. Synchronizes."""
        with self.errors.survived("leaving out the warm-up failed"):
            left_out = [source.increments(exact=True) for source in self._sources]
            for source, counts in zip(self._sources, left_out, strict=True):
                source.sent.update(counts)
                if (counters := source.counters()) is not None:
                    source.values = counters.tolist()
            self._sent.clear()
            self._copy = None
            self._reported, self._next = False, 0.0

    def totals(self) -> Counter[str]:
        """Return the exact counts. Synchronizes with the device."""
        return sum_of([self._sent, *(source.increments(exact=True) for source in self._sources)])

    def attach(self, output: Any) -> None:
        """Put the increments since the last message on the output of a step, if a message is due. Never raises.

        The first output has a message at once, so that the engine core knows that there is a publisher. An output
        without requests stays as it is, since it may be a shared constant of vLLM.
        """
        with self.errors.survived("sending counters failed"):
            for name in _OUTPUT:
                output = getattr(output, name, output)
            if not getattr(output, "req_ids", None):
                return
            self._is_copied, now = False, time.monotonic()
            if now < self._next:
                return
            if self._copy is None:
                self._start_copy()
            if self._copy_arrived() or not self._reported:
                self._next = now + PERIOD
                if message := self._message():
                    setattr(output, MESSAGE, json.dumps(message))
                    self._reported = True

    def rest(self) -> None:
        """Copy the counters of the last step, so that the next output brings all counts: no request is scheduled."""
        with self.errors.survived("sending counters failed"):
            if not self._is_copied:
                self._start_copy()

    def _start_copy(self) -> None:
        sources = [(source, counters) for source in self._sources if (counters := source.counters()) is not None]
        copies = [(source, counters.to("cpu", non_blocking=True, copy=True)) for source, counters in sources]
        event = None
        if any(counters.is_cuda for _, counters in sources):
            event = torch.cuda.Event()
            event.record()
        self._copy, self._is_copied = (event, copies), True

    def _copy_arrived(self) -> bool:
        """Return whether the copy has arrived. If so, read it."""
        assert self._copy is not None
        event, copies = self._copy
        if event is not None and not event.query():
            return False
        self._copy = None
        for source, copy in copies:
            source.values = copy.tolist()
        return True

    def _message(self) -> dict[str, Any]:
        """Return the next message, empty if nothing changed. The first one has every count, and the report."""
        changes = [(source, source.increments()) for source in self._sources]
        if self._reported:
            changes = [(source, {name: n for name, n in counts.items() if n > 0}) for source, counts in changes]
        counts = sum_of(counts for _, counts in changes)
        message = {"publisher": self.name, "labels": self._labels, "counts": counts}
        if not self._reported:
            message |= self._report()
        elif not counts:
            return {}
        for source, sent in changes:
            source.sent.update(sent)
        self._sent.update(counts)
        return message


def sum_of(counts: Iterable[Mapping[str, float]]) -> Counter[str]:
    """Return the sum of some counts. Unlike ``+`` of counters, it keeps counts of 0."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return total


def publish(
    runner: Any,
    owner: Any,
    counts: Callable[..., Mapping[str, float]],
    counters: Callable[[Any], Tensor] | None = None,
) -> None:
    """Call :meth:`Publisher.add` of a runner's publisher, if it has one."""
    if runner in publishers:
        publishers[runner].add(owner, counts, counters)


def attaching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of a runner's ``sample_tokens``: its publisher gets the output of each step that sampled."""

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if self in publishers:
            publishers[self].attach(output)
        return output

    return sample_tokens


def resting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of a runner's ``execute_model``: its publisher learns of each empty step."""

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens == 0 and self in publishers:
            publishers[self].rest()
        return output

    return execute_model
