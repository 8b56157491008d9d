"""A worker's totals, from where they are counted to a file (:mod:`nwor_ops.vllm.metrics.transport`).

1. Kernels count on the device. After a step, at most four times a second, its stream copies the counters to a
   host tensor (pinned for CUDA): 40 bytes, and nothing waits for them. Draft graphs are counted on the host.
2. A thread looks every half second, and replaces the file if there is anything new. Where no step has followed for half
   a second, it fetches the last one's numbers by itself.

Only rank 0 of a tensor-parallel group publishes: all ranks verify the same drafts, and replay the same graphs. Of a
pipeline the stage that samples, which knows at once what was accepted.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import Stats
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.relay import Sender, is_remote
from nwor_ops.vllm.metrics.transport import CounterFile, Totals

if TYPE_CHECKING:
    from nwor_ops.vllm.session import Session

_NOT_VANILLA = "cancelled"  # a session counts it beside its vanilla steps; it has a counter of its own
_OVERFLOW = "more drafts than log rows"

publishers: weakref.WeakKeyDictionary[Any, Publisher] = weakref.WeakKeyDictionary()  # by owner


def start(runner: Any, session: Session, logger: Any) -> None:
    """Publish a session's counters from now on. One without a transaction has none."""
    if session.manager is not None and session.windows == 1 and _publishes():
        runner_of = weakref.ref(runner)  # what a publisher's thread holds lives as long as the engine's process
        file = CounterFile("worker", runner.vllm_config)
        publisher = SessionPublisher(session, file, logger, lambda: _warming_up(runner_of()))
        publishers[session] = publisher
        if is_remote(runner.vllm_config):
            Sender(publisher, session)


def start_counting(owner: Any, role: str, vllm_config: Any, logger: Any) -> None:
    """Publish what ``owner.counted()`` says from now on, if the engine wants metrics. Safe to call again.

    Args:
        owner: a speculator with draft graphs, or an engine's recurrent states, whose ``counted()`` waits for the
            device and which have ``counted_lately()`` too.
        role, vllm_config: as in :class:`CounterFile`.
        logger: vLLM's.
    """
    wanted = NworConfig.load(vllm_config.additional_config).emit_metrics
    if wanted and owner not in publishers and _publishes():
        publishers[owner] = Publisher(owner, CounterFile(role, vllm_config), logger)


def stop(session: Session) -> None:
    """Publish a session's last counters, and no more."""
    if session in publishers:
        publishers.pop(session).stop()


def _publishes() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank

    return transport.directory() is not None and get_tensor_model_parallel_rank() == 0


def _warming_up(runner: Any) -> bool:
    """Whether this step is one of those that the V2 runner makes up before the first request."""
    requests = getattr(getattr(runner, "req_states", None), "req_id_to_index", ())
    return any(request.startswith("_") and "warmup" in request for request in requests)


class Publisher:
    """Keeps a file at what its owner has counted, looking twice a second, as long as the owner lives.

    Args:
        owner: has ``counted()``, totals by field of :class:`nwor_ops.EngineStats`.
        file: where to.
        logger: vLLM's.
    """

    def __init__(self, owner: Any, file: CounterFile, logger: Any) -> None:
        self.file = file
        self._owner, self._logger = weakref.ref(owner), logger
        self._written: Totals | None = None
        self._failed = False
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self.publish()
        threading.Thread(target=self._run, name="nwor-publisher", daemon=True).start()

    def now(self, owner: Any) -> Totals:
        """Exact; may wait for the device."""
        return Totals(Counter(owner.counted()))

    def latest(self, owner: Any) -> Totals:
        """What is known without waiting."""
        return Totals(Counter(getattr(owner, "counted_lately", owner.counted)()))

    def publish(self) -> None:
        """Write the file if there is anything new."""
        with self._lock:
            owner = self._owner()
            if owner is None or (totals := self.latest(owner)) == self._written:
                return
            try:
                self.file.write(totals)
                self._written = totals
            except OSError as error:
                if not self._failed:
                    self._logger.warning("nwor: counters are not published: %s", error)
                self._failed = True

    def stop(self) -> None:
        """Publish once more, and then no more."""
        self._stopped.set()
        self.publish()

    def _run(self) -> None:
        while not self._stopped.wait(transport.PERIOD) and self._owner() is not None:
            self.publish()


class SessionPublisher(Publisher):
    """Of a session with a manager, whose counters are on the device.

    Args:
        session, file, logger: as above.
        warming_up: whether the step that just ended does not count. Not asked again once it did.
    """

    def __init__(
        self, session: Session, file: CounterFile, logger: Any, warming_up: Callable[[], bool] = lambda: False
    ) -> None:
        assert session.manager is not None
        counters = self._counters = session.manager.buffers.counters
        self._host = torch.zeros(counters.shape, dtype=counters.dtype, pin_memory=counters.is_cuda)
        self._warm_up = torch.zeros_like(self._host, pin_memory=counters.is_cuda)  # counted before the first request
        self._fetched = self._host.clone()
        self._warming_up: Callable[[], bool] | None = warming_up
        self._ended = 0  # windows begun when the last step ended
        self._copied = -float("inf")  # when
        self._behind = False  # steps have ended since then
        self._stream: torch.cuda.Stream | None = None  # of CUDA: where steps run
        super().__init__(session, file, logger)
        session.subscribe(ended=self.copy)

    def copy(self) -> None:
        """After each step, on the stream that counted. Does not wait, and mostly does nothing: as often as files
        are written is enough, and :meth:`latest` fetches what the last step counted."""
        session = self._owner()
        self._ended = session.begun if session is not None else 0
        if self._warming_up is not None:
            if self._warming_up():
                self._warm_up.copy_(self._counters, non_blocking=True)
                return
            self._warming_up = None
        now = time.monotonic()
        self._behind = now - self._copied < transport.PERIOD / 2
        if not self._behind:
            self._copied = now
            self._host.copy_(self._counters, non_blocking=True)
            if self._counters.is_cuda:
                self._stream = torch.cuda.current_stream(self._counters.device)

    def latest(self, owner: Session) -> Totals:
        """What the device had counted when its last copy arrived."""
        if self._behind and time.monotonic() - self._copied >= transport.PERIOD:
            self._fetch(owner)
        return self.arrived(owner)

    def arrived(self, owner: Session) -> Totals:
        """As :meth:`latest`, and asks the device for nothing."""
        values = self._host.clone()
        while not torch.equal(again := self._host.clone(), values):  # the device is writing it
            values = again
        return self._totals(owner, torch.maximum(values, self._fetched))  # of two moments, the later one

    def _fetch(self, session: Session) -> None:
        """Get what the last steps counted, as none has followed them for a while. It may ask CUDA: graphs are
        captured before the first request, and steps before that do not get here."""
        ended = self._ended
        if session.begun == ended and (self._stream is None or self._stream.query()):
            self._behind = False
            counters = self._counters.to("cpu", copy=True)
            if session.begun == ended:
                self._fetched = counters
            else:  # a step that began meanwhile may have counted its drafts and not yet what became of them
                self._behind = True

    def now(self, owner: Session) -> Totals:
        return self._totals(owner, self._counters.cpu())

    def stop(self) -> None:
        """As above; waits for the device."""
        session = self._owner()
        if session is not None:
            session.unsubscribe(ended=self.copy)
            self._behind = False
            self._fetched = self._counters.to("cpu", copy=True)
        super().stop()

    def _totals(self, session: Session, counters: Tensor) -> Totals:
        assert session.manager is not None
        # Before the first step has arrived there is less than was counted before it.
        return session_totals(session, session.manager.stats((counters - self._warm_up).clamp_(min=0)))


def session_totals(session: Session, stats: Stats) -> Totals:
    """What a session's device has counted, and what the host counts: read after it, so never older."""
    counts, vanilla_steps = Counter(stats.as_dict()), Counter(session.vanilla_steps)
    del vanilla_steps[_NOT_VANILLA]
    vanilla_steps[_OVERFLOW] += counts.pop("overflowed")
    return Totals(counts, +vanilla_steps)
