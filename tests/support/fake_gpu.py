"""An ``nvidia-smi`` that answers as on a machine with a GPU."""

from __future__ import annotations

import os
import pathlib

ANSWER = "GPU 0: NVIDIA H200 (UUID: GPU-5d6e1b52-7a1c-0b6b-5b3e-0a3f9d0f2f61)"
NAME = "GPU 0: NVIDIA H200"


def add_nvidia_smi(folder: pathlib.Path, script: str = f'[ "$1" = -L ] && echo "{ANSWER}"') -> dict[str, str]:
    """Write the program to a folder, and return the environment variables with which it is found first."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
