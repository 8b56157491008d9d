"""The ops of family drafter give what vLLM's own kernels give. In a process of its own: Triton must be told to
interpret before it is imported."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from processes import SUPPORT, environment


def test_ops_are_vllm_s_kernels(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    script = SUPPORT / "draft_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "vllm_kernels.py")], capture_output=True, text=True, timeout=600,
        env={**environment(), "TRITON_INTERPRET": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "30 batches equal"
