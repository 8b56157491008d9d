"""A plugin of vLLM for the tests of a server: while a file exists, each step adds counts that its engine cannot make.

vLLM loads it in each of its processes if :func:`install` put its entry point on the path.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

VARIABLE = "PLANTED_FILE"  # the path of the file
REASON = "planted"
GROWING = ("draft_graph_replays", "draft_vocabulary_tokens", "draft_vocabulary_missed", "recurrent_steps",
           f"vanilla_steps:{REASON}", f"draft_eager_reasons:{REASON}", f"errors:{REASON}")  # fmt: skip


def install(folder: pathlib.Path, module: str = "planted_server") -> None:
    """Write the entry point of a module's ``plant`` to a folder that is on the path."""
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:plant\n")


def plant() -> None:
    """Plant the counts once."""
    from nwor_ops.vllm import plugin
    from nwor_ops.vllm.metrics import publisher

    start, steps, file = plugin._start_metrics, 0, pathlib.Path(os.environ[VARIABLE])
    if hasattr(start, "__wrapped__"):
        return

    def counts(_: Any) -> dict[str, float]:
        nonlocal steps
        steps += file.exists()
        return dict.fromkeys(GROWING, steps) | {"recurrent_skipped_requests": 0} if steps else {}

    def starting(runner: Any) -> None:
        start(runner)
        publisher.publish(runner, runner, counts)

    starting.__wrapped__ = start  # type: ignore[attr-defined]
    plugin._start_metrics = starting
