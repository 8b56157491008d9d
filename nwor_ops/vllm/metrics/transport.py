"""Files in which the processes of an engine leave their totals, for each other and for ``/metrics``.

Each writer (workers, drafters, the scheduler) has a file in the format of ``prometheus_client``'s multiprocess mode,
whose ``MultiProcessCollector`` adds them up at every scrape: an engine that ended keeps its share. A file is replaced
as a whole: readers see numbers of one moment and need no lock, and a writer that dies leaves its last ones. The files
are in a private folder, or beside vLLM's own where it uses that mode itself (several API servers) and collects them.

What vLLM 0.32 and 0.33 and ``prometheus_client`` do not carry, and is therefore here:

- From a worker to Prometheus vLLM brings what a step returns and ``make_stats`` (``v1/core/sched/scheduler.py``) picks
  of it: nothing of a plugin's, and never what the device has counted after its last step. A plugin of the group
  ``vllm.stat_logger_plugins`` gets no more than that, not at all with ``LLM``, and switches statistics on against
  ``--disable-log-stats`` (``v1/engine/async_llm.py``, ``load_stat_logger_plugin_factories``).
- A ``Counter`` writes to a file only if ``PROMETHEUS_MULTIPROC_DIR`` was set when ``prometheus_client`` was imported,
  and so does then every metric of the process (``values.py``, ``get_value_class``), one value at a time, and a full
  disk is a SIGBUS. So :class:`CounterFile` writes, with that library's ``MmapedDict``.
- No folder of vLLM's is one engine's alone. Ours is in an environment variable that the first process sets before it
  starts others (not ``VLLM_...``: vLLM would warn of it). That process removes the folder; if it was killed, the next
  start does.
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
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "NWOR_METRICS_DIR"
SHARED_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's; vLLM sets it for several API servers
PERIOD = 0.5  # seconds between two looks at a counter

# Field of EngineStats: Prometheus name (which gets "_total"), and what is counted.
METRICS = {
    "windows": ("nwor_windows", "Verification steps whose draft writes were a transaction."),
    "drafted": ("nwor_draft_tokens", "Draft tokens in those steps, logged (mode cow) or staged."),
    "accepted": ("nwor_committed_tokens", "Draft tokens accepted and kept."),
    "rejected": ("nwor_rejected_tokens", "Draft tokens rejected, or of a cancelled window: undone, or never written."),
    "cancelled": ("nwor_cancelled_windows", "Windows of which every draft was undone because the step failed."),
    "abandoned": ("nwor_abandoned_windows", "Windows closed without an undo: the drafts' rows stayed."),
    "comparisons": ("nwor_comparisons", "Comparisons with the scheduler's count of proposed and accepted drafts."),
    "disagreements": ("nwor_disagreements", "Comparisons in which the scheduler had counted something else."),
    # Of engines with draft graphs.
    "draft_graph_replays": ("nwor_draft_graph_replays", "Passes of a draft model that were one graph launch."),
    "draft_eager_passes": ("nwor_draft_eager_passes", "Passes of a draft model with draft graphs that had no graph."),
    "one_state_steps": (
        "nwor_one_state_steps",
        "Steps with drafts and one recurrent state per request.",
    ),
    "one_state_refused_requests": (
        "nwor_one_state_refused_requests",
        "Requests left out of such a step, once per KV-cache group: their accepted counts cannot be. Should be 0.",
    ),
}
VANILLA_STEPS = ("nwor_vanilla_steps", "Steps with drafts that ran without the transaction, by reason.")

_PREFIX = f"nwor-metrics-{os.getuid()}-"
_ROOM = 1 << 14  # bytes of a new file: about 70 values
_numbers = itertools.count()


@dataclass(frozen=True)
class Totals:
    """What writers have counted since they began.

    Attributes:
        counts: by field of :class:`nwor_ops.EngineStats`; they only grow.
        vanilla_steps: steps that ran without the transaction, by reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    vanilla_steps: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.counts + other.counts, self.vanilla_steps + other.vanilla_steps)


class CounterFile:
    """Where one writer leaves its totals.

    Args:
        role: ``"worker"`` (the transactions), ``"drafter"`` (draft graphs), ``"states"`` (one recurrent state per
            request) or ``"scheduler"`` (comparisons).
        vllm_config: for the labels, and for an ``instance_id`` that worker and scheduler of an engine share.
    """

    def __init__(self, role: str, vllm_config: Any) -> None:
        engine = str(int(vllm_config.parallel_config.data_parallel_index))
        self._labels = {"model_name": str(vllm_config.model_config.served_model_name), "engine": engine}
        self._engine = f"{re.sub('[^A-Za-z0-9_.]', '_', str(vllm_config.instance_id))}-{engine}"
        self.path = _path(f"{role}-{self._engine}-{os.getpid()}-{next(_numbers)}")  # a name is not used twice

    def of_same_engine(self, role: str) -> list[Path]:
        """Files of this engine's writers of one role: of whichever set of processes, as Ray's workers are another, and
        may be in the same folder."""
        return sorted(self.path.parent.glob(f"counter_*-{role}-{self._engine}-*.db"))

    def write(self, totals: Totals) -> None:
        """Replace the file. Raises OSError."""
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        make_directory()
        unfinished = self.path.with_suffix(".new")
        unfinished.write_bytes(bytes(_ROOM))  # a full disk is an error here, and a SIGBUS below
        values = MmapedDict(str(unfinished))
        series = [(METRICS[counted], self._labels, count) for counted, count in totals.counts.items()]
        for reason, count in totals.vanilla_steps.items():
            series.append((VANILLA_STEPS, self._labels | {"reason": reason}, count))
        for (name, text), labels, count in series:
            values.write_value(mmap_key(name, f"{name}_total", [*labels], [*labels.values()], text), count, 0.0)
        values.close()
        unfinished.replace(self.path)


def files(whose: str = "*") -> list[Path]:
    """The files of one set of engines' processes, of one role or all."""
    if directory() is None:
        return []
    pattern = _path(f"{whose}-*")
    return sorted(pattern.parent.glob(pattern.name))


def read(paths: Iterable[Path]) -> Totals:
    """What files hold, added up."""
    from prometheus_client.multiprocess import MultiProcessCollector

    fields = {name: counted for counted, (name, _) in METRICS.items()}
    totals = Totals()
    for metric in MultiProcessCollector.merge([str(path) for path in paths]):
        for sample in metric.samples:
            if metric.name == VANILLA_STEPS[0]:
                totals.vanilla_steps[sample.labels["reason"]] += int(sample.value)
            else:
                totals.counts[fields[metric.name]] += int(sample.value)
    return totals


@functools.cache
def choose_directory() -> None:
    """In every process, before it starts others: name the folder, unless a parent has.

    A child process of Python's ``multiprocessing``, as all of vLLM's are, shares its parent's folder. Any
    other process starts its own set of engines, and inherits the variable by chance.
    """
    if DIRECTORY_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        return
    folder = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[DIRECTORY_VARIABLE] = str(folder)
    # Python's own atexit does not run in a multiprocessing child; this runs there too, and not in a fork.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=0)


def directory() -> Path | None:
    """Where the files are; None = no process has chosen yet."""
    own = os.environ.get(DIRECTORY_VARIABLE)
    return Path(os.environ.get(SHARED_VARIABLE, own)) if own else None


def make_directory() -> None:
    """Make the private folder where it is needed and not there (any more). Raises OSError."""
    folder = directory()
    if folder is not None and SHARED_VARIABLE not in os.environ and not folder.is_dir():
        _remove_leftovers()
        folder.mkdir(mode=0o700, exist_ok=True)


def _path(name: str) -> Path:
    """Of a file, or of several: the private folder's name tells sets of engines apart in a shared one, too."""
    own = Path(os.environ[DIRECTORY_VARIABLE])
    return Path(os.environ.get(SHARED_VARIABLE, own)) / f"counter_{own.name}-{name}.db"


def _remove_leftovers() -> None:
    """Folders whose first process is gone. Were it alive after all, where this process cannot see it, its
    writers would make their folder again: a file holds totals, so nothing is lost."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(ValueError, PermissionError):
            try:
                os.kill(int(folder.name.removeprefix(_PREFIX).split("-")[0]), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
