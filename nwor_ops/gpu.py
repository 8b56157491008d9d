"""Find the NVIDIA GPU of this machine, without torch and without a CUDA context.

The library's build (setup.py) reads this file before anything of the package can be imported, so it needs only Python.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess


def find_gpu() -> str | None:
    """Return the first NVIDIA GPU of this machine in words, or None.

    ``nvidia-smi`` is asked first. If it is missing or does not answer, the driver's device files decide. A GPU that
    ``CUDA_VISIBLE_DEVICES`` hides is not found.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    if name := next((line for line in _nvidia_smi("-L") if line.startswith("GPU ")), None):
        return name.partition(" (UUID")[0]
    return next((str(path) for path in sorted(pathlib.Path("/dev").glob("nvidia[0-9]*"))), None)


def compute_capabilities() -> list[str]:
    """Return the different compute capabilities of this machine's GPUs, such as ``["9.0"]``. Empty if unknown."""
    lines = _nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")
    return sorted({line.strip() for line in lines if re.fullmatch(r"\d+\.\d", line.strip())}, key=float)


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that it prints. There are none if it is missing or does not answer."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines()
