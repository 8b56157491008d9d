"""Counters of the transactions, from the kernels that count to ``/metrics`` and ``nwor_ops.stats()``.

1. Kernels count on the device. After a step, at most four times a second, its stream copies the counters to a
   host tensor (pinned for CUDA): 40 bytes, nobody waits for them.
2. A thread of the worker looks at that tensor every half second, and publishes what is new on a board
   (``boards``). Where no step has followed for half a second, it fetches the last one's numbers by itself.
3. Where vLLM makes its own Prometheus counters, ours are made beside them, and a thread adds every half
   second what the boards have gained. Ordinary ``prometheus_client`` counters, so whatever serves
   vLLM's serves ours: also with several API servers, of which only the first counts.

Only rank 0 of a tensor-parallel group publishes: all ranks verify the same drafts.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import EngineStats, Stats
from nwor_ops.vllm.drafter import counters as draft_counters
from nwor_ops.vllm.metrics import transport as boards
from nwor_ops.vllm.metrics.transport import Board
from nwor_ops.vllm.session import Session
from nwor_ops.vllm.support import wrap_once

# Field of a board: Prometheus name (which gets "_total"), and what is counted.
METRICS = {
    "windows": ("nwor_windows", "Verification steps whose draft writes were a transaction."),
    "drafted": ("nwor_draft_tokens", "Draft tokens in those steps, logged (mode cow) or staged."),
    "accepted": ("nwor_committed_tokens", "Draft tokens accepted and kept."),
    "rejected": ("nwor_rejected_tokens", "Draft tokens rejected, or of a cancelled window: undone, or never written."),
    "cancelled": ("nwor_cancelled_windows", "Windows of which every draft was undone because the step failed."),
    "abandoned": ("nwor_abandoned_windows", "Windows closed without an undo: the drafts' rows stayed."),
    "comparisons": ("nwor_comparisons", "Comparisons with the scheduler's count of proposed and accepted drafts."),
    "disagreements": ("nwor_disagreements", "Comparisons in which the scheduler had counted something else."),
}
# Of engines with draft graphs.
DRAFT_METRICS = {
    "draft_graph_replays": ("nwor_draft_graph_replays", "Passes of a draft model that were one graph launch."),
    "draft_eager_passes": ("nwor_draft_eager_passes", "Passes of a draft model with draft graphs that had no graph."),
}
VANILLA_STEPS = ("nwor_vanilla_steps", "Steps with drafts that ran without the transaction, by reason.")

_NOT_VANILLA = "cancelled"  # a session counts it beside its vanilla steps; it has a counter of its own
_OVERFLOW = "more drafts than log rows"


_publishers: weakref.WeakKeyDictionary[Session, Publisher] = weakref.WeakKeyDictionary()
_exporter: Exporter | None = None


def prepare(config: NworConfig) -> None:
    """In every process of an engine, before it starts others."""
    if config.emit_metrics:
        boards.choose_directory()


# ---------------------------------------------------------------- the worker


def start(runner: Any, session: Session, logger: Any) -> None:
    """Publish a session's counters from now on.

    Args:
        runner: vLLM's model runner, for the labels.
        session: its session; one without a transaction has nothing to publish.
        logger: vLLM's.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    config = runner.vllm_config
    engine = int(config.parallel_config.data_parallel_index)
    path = boards.new_path("worker", str(config.instance_id), engine)
    if session.manager is None or path is None or get_tensor_model_parallel_rank() != 0:
        return
    board = Board("worker", str(config.instance_id), engine, str(config.model_config.served_model_name), {})
    # Whatever the publisher's thread held would live as long as the engine's process.
    runner_of = weakref.ref(runner)
    _publishers[session] = Publisher(session, board, path, logger, warming_up=lambda: _warming_up(runner_of()))


def stop(session: Session) -> None:
    """Publish a session's last counters, and no more."""
    publisher = _publishers.pop(session, None)
    if publisher is not None:
        publisher.stop()


def _warming_up(runner: Any) -> bool:
    """Whether this step is one of those that the V2 runner makes up before the first request."""
    requests = getattr(getattr(runner, "req_states", None), "req_id_to_index", ())
    return any(request.startswith("_") and "warmup" in request for request in requests)


class Publisher:
    """Brings one session's counters from the device to its board.

    Args:
        session: with a manager.
        board: the labels.
        path: the board's file.
        logger: vLLM's.
        warming_up: whether the step that just ended does not count. Not asked again once it did.
    """

    def __init__(
        self, session: Session, board: Board, path: Path, logger: Any, warming_up: Callable[[], bool] = lambda: False
    ) -> None:
        assert session.manager is not None
        self.path = path
        self._session = weakref.ref(session)
        self._counters = session.manager.buffers.counters
        self._host = _host_copy(self._counters)
        self._warm_up = _host_copy(self._counters)  # what the steps before the first request have counted
        self._warming_up: Callable[[], bool] | None = warming_up
        self._ended = 0  # windows begun when the last step ended
        self._copied = -float("inf")  # when
        self._behind = False  # steps have ended since then
        # Of CUDA: where steps run; behind all of them once `_marked` is what `_ended` is; where the thread copies.
        self._stream: torch.cuda.Stream | None = None
        self._reached = torch.cuda.Event() if self._counters.is_cuda else None
        self._marked = -1
        self._side: torch.cuda.Stream | None = None
        self._labels = board
        self._published: Board | None = None
        self._logger = logger
        self._failed = False
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.publish()
        session.after_step = self.copy
        threading.Thread(target=self._run, name="nwor-publisher", daemon=True).start()

    def copy(self) -> None:
        """After each step, on the stream that counted. Does not wait, and mostly does nothing: as often as boards
        are published is enough, and :meth:`flush` brings what the last step counted."""
        session = self._session()
        self._ended = session.begun if session is not None else 0
        if self._warming_up is not None:
            if self._warming_up():
                self._warm_up.copy_(self._counters, non_blocking=True)
                return
            self._warming_up = None
        now = time.monotonic()
        self._behind = now - self._copied < boards.PERIOD / 2
        if not self._behind:
            self._copied = now
            self._host.copy_(self._counters, non_blocking=True)
            if self._reached is not None:
                self._stream = torch.cuda.current_stream(self._counters.device)

    def flush(self) -> None:
        """Fetch what the last steps counted, if none has followed them for a while. In the thread. It may ask CUDA:
        graphs are captured before the first request, and steps before that do not get here."""
        session, ended = self._session(), self._ended
        if (
            not self._behind
            or session is None
            or session.begun != ended
            or time.monotonic() - self._copied < boards.PERIOD
        ):
            return
        if not self._has_counted(ended):
            return
        counters = self._fetch()
        # A step that began meanwhile may have counted its drafts and not yet what became of them.
        if session.begun == ended:
            self._behind = False
            self._host.copy_(counters)

    def _has_counted(self, ended: int) -> bool:
        """Whether the device is through with the steps that have ended. The event is recorded here, not after each
        step, which would cost the step several times what recording one costs a thread with nothing else to do."""
        if self._reached is None:
            return True
        if self._marked != ended:
            self._reached.record(self._stream)
            self._marked = ended
        return self._reached.query()

    def _fetch(self) -> Tensor:
        """The counters, on a stream that waits for no other."""
        if not self._counters.is_cuda:
            return self._counters.clone()
        if self._side is None:
            self._side = torch.cuda.Stream(self._counters.device)
        with torch.cuda.stream(self._side):
            return self._counters.cpu()

    def publish(self) -> None:
        """Write the board if there is anything new: what the device had counted when its last copy arrived."""
        with self._lock:
            session = self._session()
            if session is None:
                return
            board = self._board(session, _settled(self._host))
            if board == self._published:
                return
            try:
                boards.write(self.path, board)
            except OSError as error:
                if not self._failed:
                    self._logger.warning("nwor: counters are not published: %s", error)
                self._failed = True
            else:
                self._published = board

    def stop(self) -> None:
        """Publish what the device has counted by now, which waits for it, and no more."""
        self._stopped.set()
        session = self._session()
        if session is not None:
            session.after_step = None
            self._host.copy_(self._counters)
        self.publish()

    def now(self, session: Session) -> Board:
        """What the device has counted by now: waits for it."""
        return self._board(session, self._counters.cpu())

    def _run(self) -> None:
        while not self._stopped.wait(boards.PERIOD) and self._session() is not None:
            self.flush()
            self.publish()

    def _board(self, session: Session, counters: Tensor) -> Board:
        assert session.manager is not None
        if counters.any():  # else no step has arrived, and its warm-up may not have either
            counters = counters - self._warm_up
        return _board(self._labels, session, session.manager.stats(counters))


def _host_copy(counters: Tensor) -> Tensor:
    return torch.zeros(counters.shape, dtype=counters.dtype, device="cpu", pin_memory=counters.is_cuda)


def _settled(host: Tensor) -> Tensor:
    """The values of a tensor that the device may be writing: the same at two looks."""
    values = host.clone()
    while not torch.equal(again := host.clone(), values):
        values = again
    return values


def _board(labels: Board, session: Session, stats: Stats) -> Board:
    """The device's counters, and what the host counts: read after them, so never older."""
    counts = stats.as_dict()
    vanilla_steps = Counter(session.vanilla_steps)
    del vanilla_steps[_NOT_VANILLA]
    vanilla_steps[_OVERFLOW] += counts.pop("overflowed")
    return replace(labels, counts=counts, vanilla_steps=dict(+vanilla_steps))


# ---------------------------------------------------------------- the process with vLLM's Prometheus counters


class Exporter:
    """Adds what the boards gain to Prometheus counters of this process. One per process.

    Each board counts from 0, and its file's name is never used again. So what a board has gained is what it
    says now less what it said before, and nothing is lost or counted twice when an engine is started anew.

    Args:
        registry: where the counters belong; None = the one that vLLM uses.
    """

    def __init__(self, registry: Any = None) -> None:
        import prometheus_client

        make = functools.partial(prometheus_client.Counter, registry=registry or prometheus_client.REGISTRY)
        labels = ["model_name", "engine"]
        self._counters = {field: make(*names, labels) for field, names in (METRICS | DRAFT_METRICS).items()}
        self._vanilla_steps = make(*VANILLA_STEPS, [*labels, "reason"])
        self._seen: Counter[tuple[Path, str]] = Counter()

    def start(self) -> None:
        threading.Thread(target=self._run, name="nwor-exporter", daemon=True).start()

    def update(self) -> None:
        for path, board in boards.read().items():
            labels = board.model_name, str(board.engine)
            for field, value in board.counts.items():
                self._counters[field].labels(*labels).inc(self._gain(path, field, value))
            for reason, value in board.vanilla_steps.items():
                self._vanilla_steps.labels(*labels, reason).inc(self._gain(path, f"vanilla: {reason}", value))

    def _gain(self, path: Path, name: str, value: int) -> int:
        gain = max(0, value - self._seen[path, name])
        self._seen[path, name] += gain
        return gain

    def _run(self) -> None:
        while True:
            self.update()
            time.sleep(boards.PERIOD)


def _export(vllm_config: Any) -> None:
    """vLLM has made its Prometheus counters in this process: make ours, if the engine has any."""
    global _exporter
    config = NworConfig.load(vllm_config.additional_config)
    if (config.mode == "off" and not config.draft_graphs) or not config.emit_metrics or _exporter is not None:
        return
    if vllm_config.parallel_config._api_process_rank > 0:  # several API servers: vLLM adds up what they count
        return
    _exporter = Exporter()
    _exporter.start()


def wrap_loggers_module(module: ModuleType) -> None:
    """Make vLLM's Prometheus logger tell us when it is made."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            _export(vllm_config)

        return __init__

    wrap_once(getattr(module, "PrometheusStatLogger", None), "__init__", wrapper)


# ---------------------------------------------------------------- nwor_ops.stats()


def totals() -> EngineStats:
    """See :func:`nwor_ops.stats`."""
    from nwor_ops.vllm.plugin import sessions

    published = boards.read()
    found: list[Board] = []
    for session in sessions():
        publisher = _publishers.get(session)
        if publisher is not None:
            published.pop(publisher.path, None)
            found.append(publisher.now(session))
        elif session.manager is not None:
            found.append(_board(Board("worker", "", 0, "", {}), session, session.stats()))
    found += (published | draft_counters.here()).values()
    counts: Counter[str] = Counter()
    vanilla_steps: Counter[str] = Counter()
    for board in found:
        counts.update(board.counts)
        vanilla_steps.update(board.vanilla_steps)
    return EngineStats(
        **{field: counts[field] for field in METRICS | DRAFT_METRICS},
        vanilla_steps=dict(vanilla_steps),
        engines=sum(board.role == "worker" for board in found),
    )
