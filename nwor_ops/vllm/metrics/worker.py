"""Publish the totals of a worker in a file (:mod:`nwor_ops.vllm.metrics.transport`).

1. Kernels count on the device. After a step, at most four times a second, its stream copies the counters (40 bytes) to
a host tensor, pinned for CUDA. Nothing waits for this copy. Draft graphs are counted on the host.
2. A thread checks every half second, and replaces the file if a count changed. If no step has followed for half a
second, the thread fetches the counts of the last step itself.

A publisher never stops a step, and its thread survives any exception: the counters are then late or missing, and the
log says so.

In a tensor-parallel group only rank 0 publishes, because all ranks verify the same drafts and replay the same graphs.
With pipeline parallelism only the last rank publishes, because it learns right away what was accepted.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import Stats
from nwor_ops.vllm.errors import Errors, errors_of
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.relay import Sender, is_remote
from nwor_ops.vllm.metrics.transport import CounterFile, Totals
from nwor_ops.vllm.step_listener import StepListener

if TYPE_CHECKING:
    from nwor_ops.vllm.transaction.session import Session

_NOT_VANILLA = "cancelled"  # the session counts it with its vanilla steps, but it has its own metric
_OVERFLOW = "more drafts than log rows"
_WITHOUT = "without publishing counters"

publishers: weakref.WeakKeyDictionary[Any, Publisher] = weakref.WeakKeyDictionary()  # by owner of the counts


def start(runner: Any, session: Session, logger: Any) -> None:
    """Publish a session's counters from now on. A session without a transaction has none."""
    with Errors(logger, _WITHOUT).survived("starting to count failed"):
        if session.manager is not None and session.windows == 1 and _publishes():
            runner_of = weakref.ref(runner)  # a strong reference would live as long as the publisher's thread
            file = CounterFile("worker", runner.vllm_config)
            publisher = SessionPublisher(session, file, logger, lambda: _warming_up(runner_of()))
            publishers[session] = publisher
            if is_remote(runner.vllm_config):
                Sender(publisher.arrived, session, publisher.errors)


def start_counting(owner: Any, role: str, vllm_config: Any, logger: Any) -> None:
    """Publish the result of ``owner.counted()`` from now on, if the engine publishes metrics. Calling it again is safe.

    Args:
        owner: a speculator with draft graphs, or an engine's recurrent states. The latter's ``counted()`` synchronizes,
            so it also has ``counted_lately()``.
        role: as in :class:`CounterFile`.
        vllm_config: as in :class:`CounterFile`.
        logger: vLLM's logger.
    """
    wanted = NworConfig.load(vllm_config.additional_config).emit_metrics
    with Errors(logger, _WITHOUT).survived("starting to count failed"):
        if wanted and owner not in publishers and _publishes():
            publishers[owner] = Publisher(owner, CounterFile(role, vllm_config), logger)


def stop(session: Session) -> None:
    """Publish a session's counters one last time."""
    if session in publishers:
        publishers.pop(session).stop()


def _publishes() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank

    return transport.directory() is not None and get_tensor_model_parallel_rank() == 0


def _warming_up(runner: Any) -> bool:
    """Return whether the V2 runner is running its warm-up, which uses invented requests."""
    requests = getattr(getattr(runner, "req_states", None), "req_id_to_index", ())
    return any(request.startswith("_") and "warmup" in request for request in requests)


class Publisher:
    """Keep a file up to date with its owner's counts, for as long as the owner lives. Checks twice a second.

    Args:
        owner: an object with ``counted()``, which returns totals by field of :class:`nwor_ops.EngineStats`. A drafter
            also has ``eager_passes()``, which returns its passes without a graph by reason. If it has ``errors``, they
            are published too.
        file: the file to write.
        logger: vLLM's logger.

    Attributes:
        errors: counts the errors of this publisher.
    """

    def __init__(self, owner: Any, file: CounterFile, logger: Any) -> None:
        self.file = file
        self.errors = Errors(logger, _WITHOUT)
        self._owner = weakref.ref(owner)
        self._written: Totals | None = None
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self.publish()
        threading.Thread(target=self._run, name="nwor-publisher", daemon=True).start()

    def now(self, owner: Any) -> Totals:
        """Return the exact totals. May synchronize with the device."""
        return self._totals_of(owner, owner.counted)

    def latest(self, owner: Any) -> Totals:
        """Return the totals that are known without synchronizing."""
        return self._totals_of(owner, getattr(owner, "counted_lately", owner.counted))

    def _totals_of(self, owner: Any, counted: Callable[[], dict[str, float]]) -> Totals:
        eager_passes: dict[str, int] = getattr(owner, "eager_passes", dict)()
        return Totals(
            Counter[str](counted()), eager_passes=Counter(eager_passes), errors=errors_of(owner) + self.errors.counts
        )

    def publish(self) -> None:
        """Write the file if the totals changed. Never raises."""
        with self._lock, self.errors.survived("publishing counters failed"):
            owner = self._owner()
            if owner is None or (totals := self.latest(owner)) == self._written:
                return
            self.file.write(totals)
            self._written = totals

    def stop(self) -> None:
        """Publish one last time. Never raises."""
        self._stopped.set()
        self.publish()

    def _run(self) -> None:
        while not self._stopped.wait(transport.PERIOD) and self._owner() is not None:
            self.publish()


class SessionPublisher(Publisher, StepListener):
    """Publish the totals of a session with a manager, whose counters are on the device.

    Args:
        session: the owner of the counters.
        file: as in :class:`Publisher`.
        logger: as in :class:`Publisher`.
        warming_up: returns whether the step that just ended belongs to the warm-up and is not counted. No longer called
            after it has returned False once.
    """

    def __init__(
        self, session: Session, file: CounterFile, logger: Any, warming_up: Callable[[], bool] = lambda: False
    ) -> None:
        counters = session.counters
        self._host = torch.zeros(counters.shape, dtype=counters.dtype, pin_memory=counters.is_cuda)
        self._warm_up = torch.zeros_like(self._host, pin_memory=counters.is_cuda)  # counts of the warm-up
        self._fetched = self._host.clone()
        self._warming_up: Callable[[], bool] | None = warming_up
        self._ended = 0  # number of windows begun when the last step ended
        self._copied = -float("inf")  # time of the last copy
        self._stale = False  # whether a step has ended since the last copy
        self._stream: torch.cuda.Stream | None = None  # the CUDA stream of the steps
        super().__init__(session, file, logger)
        session.subscribe(self)

    def ended(self) -> None:
        """Copy the counters to the host after a step. Never raises."""
        try:
            self._copy()
        except Exception as error:
            self.errors.go_on("copying counters failed", error)

    def _copy(self) -> None:
        """Copy the counters to the host, on the stream that counted.

        Does not synchronize, and usually does nothing: one copy per write of the file is enough, and :meth:`latest`
        fetches the counts of the last step.
        """
        session = self._owner()
        if session is None:
            return
        self._ended = session.begun
        if self._warming_up is not None:
            if self._warming_up():
                self._warm_up.copy_(session.counters, non_blocking=True)
                return
            self._warming_up = None
        now = time.monotonic()
        self._stale = now - self._copied < transport.PERIOD / 2
        if not self._stale:
            self._copied, counters = now, session.counters
            self._host.copy_(counters, non_blocking=True)
            if counters.is_cuda:
                self._stream = torch.cuda.current_stream(counters.device)

    def latest(self, owner: Session) -> Totals:
        """Return the device's counts as of the last copy that arrived."""
        if self._stale and time.monotonic() - self._copied >= transport.PERIOD:
            self._fetch(owner)
        return self.arrived(owner)

    def arrived(self, owner: Session) -> Totals:
        """Return the same totals as :meth:`latest`, without any request to the device."""
        values = self._host.clone()
        while not torch.equal(again := self._host.clone(), values):  # the device is writing to it
            values = again
        return self._totals(owner, torch.maximum(values, self._fetched))  # the counts of the later of two moments

    def _fetch(self, session: Session) -> None:
        """Fetch the counts of the last steps, because no step has followed for a while.

        It may call CUDA: graphs are captured before the first request, and earlier steps do not get here.
        """
        ended = self._ended
        if session.begun == ended and (self._stream is None or self._stream.query()):
            self._stale = False
            counters = session.counters.to("cpu", copy=True)
            if session.begun == ended:
                self._fetched = counters
            else:  # a step that began meanwhile may have counted its drafts, but not their outcome
                self._stale = True

    def now(self, owner: Session) -> Totals:
        return self._totals(owner, owner.counters.cpu())

    def sleeping(self) -> None:
        """Wait until the thread has finished a fetch. Later ones get the session's copy on the host."""
        with self._lock:
            pass

    def stop(self) -> None:
        """Publish one last time, with exact totals. Synchronizes with the device. Never raises."""
        session = self._owner()
        if session is not None:
            session.unsubscribe(self)
            self._stale = False
            with self.errors.survived("copying counters failed"):
                self._fetched = session.counters.to("cpu", copy=True)
        super().stop()

    def _totals(self, session: Session, counters: Tensor) -> Totals:
        assert session.manager is not None
        # Until the first copy has arrived, the host's counts are lower than those of the warm-up.
        totals = session_totals(session, session.manager.stats((counters - self._warm_up).clamp_(min=0)))
        return replace(totals, errors=errors_of(session) + self.errors.counts)


def session_totals(session: Session, stats: Stats) -> Totals:
    """Return a session's totals: the given counts of the device, and the host's counts.

    The host's counts are read after the device's, so they are never older.
    """
    counts, vanilla_steps = Counter[str](stats.as_dict()), Counter(session.vanilla_steps)
    counts["host_seconds"] = session.host_seconds  # type: ignore[assignment]  # the only count with a fraction
    del vanilla_steps[_NOT_VANILLA]
    vanilla_steps[_OVERFLOW] += counts.pop("overflowed")
    return Totals(counts, +vanilla_steps, errors=errors_of(session))
