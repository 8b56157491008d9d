"""Files with the totals of an engine's processes, read by its other processes and by ``/metrics``.

Each writer (worker, drafter, scheduler) has a file in the format of ``prometheus_client``'s multiprocess mode. Its
``MultiProcessCollector`` adds them up at every scrape, and an engine that ended keeps its share. A file is always
replaced as a whole. Readers therefore see numbers of one moment without a lock, and a writer that dies leaves its last
numbers. The files lie in a private folder. If vLLM uses the multiprocess mode itself (several API servers), they lie in
vLLM's folder, and vLLM collects them.

vLLM 0.32 and 0.33 and ``prometheus_client`` lack the following, so it is implemented here:

- vLLM sends to Prometheus only the parts of a step's output that ``make_stats`` (``v1/core/sched/scheduler.py``)
  selects. A plugin's values are not among them, and neither is what the device counts after its last step. A plugin of
  the group ``vllm.stat_logger_plugins`` receives no more than that, and nothing with ``LLM``. It also enables
  statistics despite ``--disable-log-stats`` (``v1/engine/async_llm.py``, ``load_stat_logger_plugin_factories``).
- A ``Counter`` writes to a file only if ``PROMETHEUS_MULTIPROC_DIR`` was set when ``prometheus_client`` was imported.
  All metrics of the process then do the same (``values.py``, ``get_value_class``), one value at a time, and a full disk
  causes SIGBUS. :class:`CounterFile` therefore writes the file, with that library's ``MmapedDict``.
- vLLM has no folder that belongs to one engine. The first process chooses ours and names it in an environment variable
  before it starts others. The name does not start with ``VLLM_``, because vLLM would warn about it. That process
  removes the folder. If it was killed, the next engine start does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import multiprocessing.util
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "NWOR_METRICS_DIR"
SHARED_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # of prometheus_client; vLLM sets it for several API servers
PERIOD = 0.5  # seconds between two reads of a counter

# Field of EngineStats: Prometheus name (without the suffix "_total") and help text.
METRICS = {
    "windows": ("nwor_windows", "Number of steps with drafts that ran as a transaction."),
    "drafted": ("nwor_draft_tokens", "Number of draft tokens in these steps, logged (mode cow) or staged."),
    "accepted": ("nwor_committed_tokens", "Number of draft tokens accepted and kept."),
    "rejected": ("nwor_rejected_tokens", "Number of draft tokens rejected or cancelled: undone, or never written."),
    "cancelled": ("nwor_cancelled_windows", "Number of windows whose drafts were all undone because the step failed."),
    "abandoned": ("nwor_abandoned_windows", "Number of windows that ended without an undo, leaving rows of drafts."),
    "host_seconds": (
        "nwor_host_seconds",
        "Seconds of host time to begin and commit the windows.",
    ),
    "comparisons": ("nwor_comparisons", "Number of comparisons with the scheduler's counts of drafts."),
    "disagreements": ("nwor_disagreements", "Number of comparisons in which the scheduler's counts differed."),
    # Only for engines with draft graphs.
    "draft_graph_replays": ("nwor_draft_graph_replays", "Number of draft model passes that ran as one graph launch."),
    "draft_host_seconds": ("nwor_draft_host_seconds", "Seconds of host time of these passes, to launch their graphs."),
    "one_state_steps": (
        "nwor_one_state_steps",
        "Number of steps with decodes and one recurrent state per request.",
    ),
    "one_state_host_seconds": (
        "nwor_one_state_host_seconds",
        "Seconds of host time to plan windows and to fold states before prompts.",
    ),
    "one_state_skipped_requests": (
        "nwor_one_state_skipped_requests",
        "Number of requests skipped because their counts are invalid, per KV-cache group. Should be 0.",
    ),
}
VANILLA_STEPS = ("nwor_vanilla_steps", "Number of steps with drafts that ran without the transaction, by reason.")
EAGER_PASSES = (
    "nwor_draft_eager_passes",
    "Number of draft model passes that ran without a graph, with draft graphs on, by reason.",
)
ERRORS = ("nwor_errors", "Number of errors of nwor_ops after which the engine went on, by reason. Should be 0.")
BY_REASON = VANILLA_STEPS, EAGER_PASSES, ERRORS  # in the order of Totals
# Gauges.
INFO = (
    "nwor_info",
    "State of each feature of nwor_ops: off; on, its mode or its form; or missing (asked for, but not active in every "
    "worker).",
)
MEMORY = ("nwor_memory_bytes", "Memory of the features of nwor_ops in bytes: of the rank that has most, by part.")

_PREFIX = f"nwor-metrics-{os.getuid()}-"
_ROOM = 1 << 14  # bytes of a new file: about 70 values
_numbers = itertools.count()


@dataclass(frozen=True)
class Totals:
    """The totals of one writer, or of several.

    Attributes:
        counts: by field of :class:`nwor_ops.EngineStats`; they only grow.
        vanilla_steps: number of steps that ran without the transaction, by reason.
        eager_passes: number of passes of the drafter that ran without a graph, by reason.
        errors: number of errors after which the engine went on, by reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    vanilla_steps: Counter[str] = field(default_factory=Counter)
    eager_passes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def parts(self) -> tuple[Counter[str], ...]:
        return self.counts, self.vanilla_steps, self.eager_passes, self.errors

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(mine + its for mine, its in zip(self.parts, other.parts, strict=True)))


class CounterFile:
    """The file of one writer's totals.

    Args:
        role: ``"worker"`` (the transactions), ``"drafter"`` (draft graphs), ``"states"`` (one recurrent state per
            request) or ``"scheduler"`` (comparisons).
        vllm_config: the engine's configuration, for the labels and for the ``instance_id`` that the processes of an
            engine share.
    """

    def __init__(self, role: str, vllm_config: Any) -> None:
        self._labels = _labels(vllm_config)
        self._engine = _engine(vllm_config)
        self.path = _path(f"{role}-{self._engine}-{os.getpid()}-{next(_numbers)}")  # no name is used twice

    def of_workers(self) -> list[Path]:
        """Return the files of the workers of this engine.

        Workers of Ray have another private folder name, but their files may lie in the same folder; they are included.
        """
        return sorted(self.path.parent.glob(f"counter_*-worker-{self._engine}-*.db"))

    def write(self, totals: Totals) -> None:
        """Replace the file. Raises OSError."""
        series = [
            (METRICS[counted], f"{METRICS[counted][0]}_total", self._labels, float(count))
            for counted, count in totals.counts.items()
        ]
        for metric, by_reason in zip(BY_REASON, totals.parts[1:], strict=True):
            for reason, count in by_reason.items():
                series.append((metric, f"{metric[0]}_total", self._labels | {"reason": reason}, float(count)))
        _write(self.path, series)


class GaugeFile:
    """The file of one writer's gauges. If an engine has several, each gauge has the value that was written last.

    Args:
        role: ``"core"`` (the engine core).
        vllm_config: as in :class:`CounterFile`.
    """

    def __init__(self, role: str, vllm_config: Any) -> None:
        self._labels = _labels(vllm_config)
        self.path = _path(f"{role}-{_engine(vllm_config)}-{os.getpid()}-{next(_numbers)}", "gauge_mostrecent")

    def write(self, samples: Iterable[tuple[tuple[str, str], dict[str, str], float]]) -> None:
        """Replace the file. Raises OSError.

        Args:
            samples: name and help text of a metric, labels, value.
        """
        _write(self.path, [(metric, metric[0], self._labels | labels, value) for metric, labels, value in samples])


def _labels(vllm_config: Any) -> dict[str, str]:
    """Return the labels that vLLM's own metrics have."""
    engine = str(int(vllm_config.parallel_config.data_parallel_index))
    return {"model_name": str(vllm_config.model_config.served_model_name), "engine": engine}


def _engine(vllm_config: Any) -> str:
    """Return the part of a file's name that the processes of an engine share."""
    instance = re.sub("[^A-Za-z0-9_.]", "_", str(vllm_config.instance_id))
    return f"{instance}-{int(vllm_config.parallel_config.data_parallel_index)}"


def _write(path: Path, series: Iterable[tuple[tuple[str, str], str, dict[str, str], float]]) -> None:
    """Replace a file of ``prometheus_client``.

    Args:
        path: the file.
        series: name and help text of a metric, name of the sample, labels, value.
    """
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    make_directory()
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(bytes(_ROOM))  # a full disk raises here, and would cause SIGBUS below
    values = MmapedDict(str(unfinished))
    try:
        for (name, text), sample, labels, value in series:
            values.write_value(mmap_key(name, sample, [*labels], [*labels.values()], text), value, time.time())
    finally:
        values.close()
    unfinished.replace(path)


def files(whose: str = "*") -> list[Path]:
    """Return the files of this process's engines, of one role or of all roles."""
    if directory() is None:
        return []
    pattern = _path(f"{whose}-*")
    return sorted(pattern.parent.glob(pattern.name))


def read(paths: Iterable[Path]) -> Totals:
    """Return the sum of the totals in some files."""
    from prometheus_client.multiprocess import MultiProcessCollector

    fields = {name: counted for counted, (name, _) in METRICS.items()}
    totals = Totals()
    by_reason = {name: part for (name, _), part in zip(BY_REASON, totals.parts[1:], strict=True)}
    for metric in MultiProcessCollector.merge([str(path) for path in paths]):
        for sample in metric.samples:
            value = int(sample.value) if sample.value.is_integer() else sample.value
            if metric.name in by_reason:
                by_reason[metric.name][sample.labels["reason"]] += value
            else:
                totals.counts[fields[metric.name]] += value
    return totals


@functools.cache
def choose_directory() -> None:
    """Choose the private folder and name it in the environment, unless a parent process has done so.

    Call this in every process before it starts others. All vLLM processes are children of Python's ``multiprocessing``,
    and share their parent's folder. Any other process starts its own engines, and must ignore an inherited variable.
    """
    if DIRECTORY_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        return
    folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[DIRECTORY_VARIABLE] = str(folder)
    # Python's atexit does not run in a multiprocessing child. This finalizer runs there too, but not in a forked
    # process.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)


def directory() -> Path | None:
    """Return the folder of the files. None if no process has chosen one yet."""
    own = os.environ.get(DIRECTORY_VARIABLE)
    return Path(os.environ.get(SHARED_VARIABLE, own)) if own else None


def make_directory() -> None:
    """Create the private folder if it is needed and does not exist. Raises OSError."""
    folder = directory()
    if folder is not None and SHARED_VARIABLE not in os.environ and not folder.is_dir():
        _remove_leftovers()
        folder.mkdir(mode=0o700, exist_ok=True)


def _path(name: str, kind: str = "counter") -> Path:
    """Return the path of a file, or a pattern for several. ``kind`` is how ``prometheus_client`` adds files up.

    The private folder's name is part of the file name, so engines can be told apart in a shared folder too.
    """
    own = Path(os.environ[DIRECTORY_VARIABLE])
    return Path(os.environ.get(SHARED_VARIABLE, own)) / f"{kind}_{own.name}-{name}.db"


def _remove_leftovers() -> None:
    """Remove the private folders of processes that no longer exist.

    A process may exist without being visible here. Its writers then create the folder again, and nothing is lost,
    because each file holds totals.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError, PermissionError):
            try:
                os.kill(int(folder.name.removeprefix(_PREFIX).split("-")[0]), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
