"""A plugin of vLLM for the test of a server: while a file exists, each step adds counts that its engine cannot make."""

from __future__ import annotations

import os
import pathlib
from typing import Any

FOLDER_VARIABLE = "PLANTED_FOLDER"
GROWING = ("draft_graph_replays", "draft_host_seconds", "draft_vocabulary_tokens", "draft_vocabulary_missed",
           "recurrent_steps", "recurrent_host_seconds", "vanilla_steps:planted", "draft_eager_reasons:planted",
           "errors:planted")  # fmt: skip


def plant() -> None:
    from nwor_ops.vllm import metrics, plugin

    if hasattr(plugin._start_metrics, "__wrapped__"):
        return
    start, file, steps = plugin._start_metrics, pathlib.Path(os.environ[FOLDER_VARIABLE], "count"), 0

    def counts(_: Any) -> dict[str, float]:
        nonlocal steps
        steps += file.exists()
        return dict.fromkeys(GROWING, steps) | {"recurrent_skipped_requests": 0} if steps else {}

    def starting(runner: Any) -> None:
        start(runner)
        metrics.publish(runner, runner, counts)

    starting.__wrapped__ = start  # type: ignore[attr-defined]
    plugin._start_metrics = starting
