"""A plugin of vLLM for the tests of a server: it plants errors of this package, or counts, while a file exists.

vLLM loads it in each of its processes if :func:`install` put its entry point on the path. The faults are in code of the
engine's process. The folder of :data:`FOLDER_VARIABLE` has the files.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from planted_errors import Fault, Planted

FOLDER_VARIABLE = "PLANTED_FOLDER"
# While this file exists, begin, write, commit and the publisher fail.
ERRORS = "errors"
# While this file exists, vLLM's forward fails, and then cancel fails.
INTERRUPTED = "interrupted"
# While this file exists, each step adds counts that its engine cannot make, with this reason.
COUNT, REASON = "count", "planted"
GROWING = ("draft_graph_replays", "draft_host_seconds", "draft_vocabulary_tokens", "draft_vocabulary_missed",
           "recurrent_steps", "recurrent_host_seconds", f"vanilla_steps:{REASON}", f"draft_eager_reasons:{REASON}",
           f"errors:{REASON}")  # fmt: skip
# The number of planted errors by reason, and the number of those that are still alive.
FOUND = "found.json"


def install(folder: pathlib.Path, module: str = "planted_server") -> None:
    """Write the entry point of a module's ``plant`` to a folder that is on the path."""
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:plant\n")


def found(folder: pathlib.Path) -> dict[str, Any]:
    """Return what the engine's process wrote after its last step without planted errors."""
    answer: dict[str, Any] = json.loads((folder / FOUND).read_text())
    return answer


def plant() -> None:
    """Plant all of them once."""
    from nwor_ops import DraftCommitManager

    if not hasattr(DraftCommitManager.begin, "__wrapped__"):
        folder = pathlib.Path(os.environ[FOLDER_VARIABLE])
        _plant_errors(folder)
        _plant_counts(folder / COUNT)


def _plant_errors(folder: pathlib.Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    import nwor_ops.vllm
    from nwor_ops import DraftCommitManager
    from nwor_ops.transaction.writer import LayerWriter
    from nwor_ops.vllm.metrics.publisher import Publisher

    def only(name: str) -> Callable[..., bool]:
        return lambda *_, **__: (folder / name).exists()

    def in_window(*_: Any, **__: Any) -> bool:
        return (folder / INTERRUPTED).exists() and any(session.in_window for session in nwor_ops.vllm.sessions())

    planted = Planted(
        [
            Fault(DraftCommitManager, "begin", 9, "begin failed", only=only(ERRORS)),
            Fault(LayerWriter, "write", 23, "write failed", only=only(ERRORS)),
            Fault(LayerWriter, "log", 23, "write failed", only=only(ERRORS)),  # with AMX
            Fault(DraftCommitManager, "commit", 6, "commit failed", only=only(ERRORS)),
            Fault(Publisher, "_message", 1, "sending counters failed", only=only(ERRORS)),
            Fault(CPUAttentionBackendImpl, "forward", 1, "", after=True, only=in_window),
            Fault(DraftCommitManager, "cancel", 1, "cancel failed", only=only(INTERRUPTED)),
        ]
    )
    commit, written = DraftCommitManager.commit, None

    def reporting(self: DraftCommitManager, *arguments: Any) -> None:
        nonlocal written
        commit(self, *arguments)
        if not (folder / ERRORS).exists() and planted.counts != written:
            written = planted.counts.copy()
            unfinished = folder / f"{FOUND}.unfinished"
            unfinished.write_text(json.dumps({"planted": written, "alive": planted.alive()}))
            unfinished.replace(folder / FOUND)

    DraftCommitManager.commit = reporting  # type: ignore[method-assign]


def _plant_counts(file: pathlib.Path) -> None:
    from nwor_ops.vllm import plugin
    from nwor_ops.vllm.metrics import publisher

    start, steps = plugin._start_metrics, 0

    def counts(_: Any) -> dict[str, float]:
        nonlocal steps
        steps += file.exists()
        return dict.fromkeys(GROWING, steps) | {"recurrent_skipped_requests": 0} if steps else {}

    def starting(runner: Any) -> None:
        start(runner)
        publisher.publish(runner, runner, counts)

    plugin._start_metrics = starting
