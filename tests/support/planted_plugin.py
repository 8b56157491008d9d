"""A plugin of vLLM for the test of ``nwor-ops verify``: it plants a wrong byte in a cache.

vLLM loads it in each of its processes if :func:`planted_server.install` put its entry point on the path.
"""

from __future__ import annotations

import functools
import os
from typing import Any

WINDOW = 3  # the wrong byte is planted at the end of this window


def plant() -> None:
    from nwor_ops import DraftCommitManager

    commit, windows = DraftCommitManager.commit, 0
    if hasattr(commit, "__wrapped__") or not os.environ.get("PLANTED_BYTE"):
        return

    @functools.wraps(commit)
    def spoiling(self: Any, *arguments: Any) -> None:
        nonlocal windows
        commit(self, *arguments)
        windows += 1
        if windows == WINDOW:
            storage = self.recovery.launches[0].planes.views[0].untyped_storage()
            storage[len(storage) - 1] = storage[len(storage) - 1] ^ 1

    DraftCommitManager.commit = spoiling  # type: ignore[method-assign]
