"""Folders of Inductor's code. ``ATEN_CPU_CAPABILITY`` limits torch and Inductor to an older instruction set."""

from __future__ import annotations

import os
import pathlib

import processes


def separate_compiler_cache() -> None:
    """Give each checkout and each limited run its own folder for Inductor's cache. Call this before torch is imported.

    Inductor's cache key has neither the schemas of our ops nor the instruction set. torch's default folder serves all
    checkouts of a user. There a test finds code that another branch compiled, for other schemas. A limited run finds
    code that was compiled for a wider instruction set, and then results differ or the process crashes.
    ``TORCHINDUCTOR_CACHE_DIR`` of the user replaces the folder of the checkout.
    """
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    folder = pathlib.Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or processes.ROOT / "build" / "inductor")
    if limit and folder.name != limit:  # workers of pytest-xdist inherit the variable
        folder = folder / limit
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
