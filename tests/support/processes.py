"""Processes that tests start: their environment and module path."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def environment(*folders: Path) -> dict[str, str]:
    """Return this process's environment, with a path to these folders, tests/support, the examples and the checkout."""
    path = map(str, (*folders, SUPPORT, ROOT / "examples", ROOT))
    return os.environ | {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}


def interpreted(script: str, *arguments: str, timeout: int = 600) -> str:
    """Return the output of a script of tests/support.

    It runs in a separate process, because Triton's interpreter must be enabled before the import.
    """
    pytest.importorskip("triton")
    server = _interpreter()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        job = (str(SUPPORT / script), arguments, output.name, errors.name, timeout)
        print(json.dumps(job), file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        assert code == "0", f"{script} ended with {code or 'its server'}:\n{errors.read()[-3000:]}"
        return output.read()


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """Start interpreter_server.py, which ends with this process."""
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "interpreter_server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**environment(), "TRITON_INTERPRET": "1"}, text=True,
    )  # fmt: skip
