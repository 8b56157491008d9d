"""Find the NVIDIA GPU of this machine, without torch and without a CUDA context.

The library's build (setup.py) reads this file before anything of the package can be imported, so it needs only Python.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess


def find_gpu() -> str | None:
    """Return the first NVIDIA GPU of this machine in words, or None.

    ``nvidia-smi`` is asked first. If it is missing or does not answer, the driver's device files decide. A GPU that
    ``CUDA_VISIBLE_DEVICES`` hides is not found.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    if (program := shutil.which("nvidia-smi")) is not None:
        try:
            answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            answer = None
        lines = answer.stdout.splitlines() if answer is not None else []
        if found := next((line for line in lines if line.startswith("GPU ")), None):
            return found.partition(" (UUID")[0]
    return next((str(path) for path in sorted(pathlib.Path("/dev").glob("nvidia[0-9]*"))), None)
