"""Processes that tests start: their environment and module path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def environment(*folders: Path) -> dict[str, str]:
    """Return this process's environment, with a path to these folders, tests/support, the examples and the checkout."""
    path = map(str, (*folders, SUPPORT, ROOT / "examples", ROOT))
    return os.environ | {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}


def interpreted(script: str, *arguments: str, timeout: float = 600) -> str:
    """Return the output of a script of tests/support.

    It runs in a separate process, because Triton's interpreter must be enabled before the import.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), *arguments], capture_output=True, text=True, timeout=timeout,
        env={**environment(), "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
