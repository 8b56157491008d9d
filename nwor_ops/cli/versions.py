"""The versions that results of the commands have."""

from __future__ import annotations

import platform


def imported_versions() -> dict[str, str]:
    """Return the versions of nwor_ops, vLLM, torch and Python. Imports vLLM."""
    import torch
    import vllm

    import nwor_ops

    return {
        "nwor_ops": nwor_ops.__version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
