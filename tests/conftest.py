"""Settings that all tests share."""

import os
from collections.abc import Iterator

# Before torch is imported: tensors are small, and processes run beside each other. What needs threads asks for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# Compiling and thread start-up make single examples slow; the same examples every time keep a red test red. At night
# there are more, and others each time.
settings.register_profile("nwor", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("nwor")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="tests marked nightly too, and more examples of properties")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        settings.load_profile("nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if item not in nightly]


@pytest.fixture
def four_threads() -> Iterator[None]:
    """For torch's ops and ours, however many cores there are."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)
