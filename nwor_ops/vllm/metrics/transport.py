"""Boards: small files on which the processes of an engine publish their counters for each other.

The worker that keeps the counters, the scheduler that has counters of its own and the process that serves
``/metrics`` are up to three processes, and vLLM offers no way between them that a plugin may use. So each
writer has a file of its own in a private folder, which it replaces as a whole: a reader never sees half of
one, needs no lock, and a writer that dies leaves its last totals behind.

The folder's name is in an environment variable that the first process sets before it starts the others. It
is not named ``VLLM_...``: vLLM would warn of it.
The first process removes the folder when it ends; one that was killed leaves its folder to the next start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import multiprocessing.util
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

DIRECTORY_VARIABLE = "NWOR_METRICS_DIR"
PERIOD = 0.5  # seconds between two looks at a counter, and between two looks at a board

_own_directory: Path | None = None
_numbers = itertools.count()


@dataclass(frozen=True)
class Board:
    """What one writer has counted since it began.

    Attributes:
        role: ``"worker"`` (the transactions), ``"drafter"`` (draft graphs) or ``"scheduler"`` (comparisons with the
            scheduler's numbers).
        instance: vLLM's ``instance_id``: equal in the worker and the scheduler of an engine.
        engine: vLLM's index of the engine, the ``engine`` label.
        model_name: vLLM's ``model_name`` label.
        counts: totals by name; they only grow.
        vanilla_steps: steps that ran without the transaction, by reason.
    """

    role: str
    instance: str
    engine: int
    model_name: str
    counts: dict[str, int]
    vanilla_steps: dict[str, int] = field(default_factory=dict)


def choose_directory() -> None:
    """In every process, before it starts others: name the folder, unless a parent has.

    A child process of Python's ``multiprocessing``, as all of vLLM's are, shares its parent's folder. Any
    other process starts its own set of engines, and inherits the variable by chance.
    """
    global _own_directory
    inherited = DIRECTORY_VARIABLE in os.environ
    if _own_directory is not None or (inherited and multiprocessing.parent_process() is not None):
        return
    _own_directory = Path(tempfile.gettempdir()) / f"{_prefix()}{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[DIRECTORY_VARIABLE] = str(_own_directory)
    # Python's own atexit does not run in a multiprocessing child; this runs there too, and not in a fork.
    multiprocessing.util.Finalize(None, shutil.rmtree, (_own_directory,), {"ignore_errors": True}, exitpriority=0)


def directory() -> Path | None:
    """The folder of this process and its relatives; None = nobody has named one."""
    name = os.environ.get(DIRECTORY_VARIABLE)
    return Path(name) if name else None


def new_path(role: str, instance: str, engine: int) -> Path | None:
    """A file for a new writer; its name is not used twice."""
    folder = directory()
    if folder is None:
        return None
    return folder / f"{_stem(role, instance, engine)}-{os.getpid()}-{next(_numbers)}.json"


def write(path: Path, board: Board) -> None:
    """Replace the file. Raises OSError."""
    if not path.parent.is_dir():
        _remove_leftovers()
        path.parent.mkdir(mode=0o700, exist_ok=True)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(asdict(board)))
    unfinished.replace(path)


def read(pattern: str = "*") -> dict[Path, Board]:
    """Every board whose file name, without ``.json``, matches."""
    folder = directory()
    found: dict[Path, Board] = {}
    for path in sorted(folder.glob(f"{pattern}.json")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError, TypeError):  # it went away, or is not ours
            found[path] = Board(**json.loads(path.read_text()))
    return found


def read_engine(role: str, instance: str, engine: int) -> dict[Path, Board]:
    """The boards of one role of one engine."""
    return read(f"{_stem(role, instance, engine)}-*")


def _stem(role: str, instance: str, engine: int) -> str:
    return f"{role}-{re.sub('[^A-Za-z0-9_.]', '_', instance)}-{engine}"


def _prefix() -> str:
    return f"nwor-metrics-{os.getuid()}-"


def _remove_leftovers() -> None:
    """Folders whose first process is gone. Were it alive after all, where this process cannot see it, its
    writers would make their folder again: a board holds totals, so nothing is lost."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        with contextlib.suppress(ValueError, PermissionError):
            try:
                os.kill(int(folder.name.removeprefix(_prefix()).split("-")[0]), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
