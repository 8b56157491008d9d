"""A plugin of vLLM for the test of ``nwor-ops verify``: it plants a wrong byte in a cache, and logs what is private.

vLLM loads it in each of its processes if :func:`install` put its entry point on the path.
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

SECRET_VARIABLE = "PLANTED_TOKEN"
WINDOW = 3  # the wrong byte is planted at the end of this window


def install(folder: pathlib.Path) -> None:
    """Write the entry point to a folder that is on the path."""
    info = folder / "planted_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted_plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted_plugin = planted_plugin:plant\n")


def plant() -> None:
    from vllm.logger import init_logger
    from vllm.v1.engine.llm_engine import LLMEngine

    from nwor_ops import DraftCommitManager

    logger = init_logger("vllm.planted_plugin")
    logger.warning("the secret is %s, home is %s", os.environ.get(SECRET_VARIABLE), pathlib.Path.home() / "models")
    add_request, commit = LLMEngine.add_request, DraftCommitManager.commit
    if hasattr(add_request, "__wrapped__"):
        return
    windows = 0

    @functools.wraps(add_request)
    def logging(self: Any, request_id: str, prompt: Any, *rest: Any, **named: Any) -> Any:
        logger.info("request %s: %s", request_id, prompt)
        logger.info("its ids: %s", " ".join(map(str, prompt["prompt_token_ids"])))
        return add_request(self, request_id, prompt, *rest, **named)

    @functools.wraps(commit)
    def spoiling(self: Any, *arguments: Any) -> None:
        nonlocal windows
        commit(self, *arguments)
        windows += 1
        if windows == WINDOW:
            storage = self.recovery.launches[0].planes.views[0].untyped_storage()
            storage[len(storage) - 1] = storage[len(storage) - 1] ^ 1

    LLMEngine.add_request = logging
    if os.environ.get("PLANTED_BYTE"):
        DraftCommitManager.commit = spoiling  # type: ignore[method-assign]
