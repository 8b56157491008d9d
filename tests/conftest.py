"""What all tests share: settings, and the devices they run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: tensors are small, and processes run beside each other. What needs threads asks for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import processor
import pytest
from hypothesis import settings

processor.separate_compiler_cache()

# Compiling and thread start-up make single examples slow; the same examples every time keep a red test red. At night
# there are more, and others each time.
settings.register_profile("nwor", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("nwor")

GPU = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="tests marked nightly too, and more examples of properties")
    parser.addoption(
        "--device", choices=("cpu", "cuda"), help="tests of this device alone (default: of those that torch finds)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        settings.load_profile("nightly")
    try:
        processor.limit_compiler()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _devices(config: pytest.Config) -> tuple[str, ...]:
    if asked := config.getoption("--device"):
        return (asked,)
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `device` runs once on each; one in gpu/, or marked so, on CUDA alone."""
    if "device" in metafunc.fixturenames:
        needs_gpu = GPU in metafunc.definition.path.parents or metafunc.definition.get_closest_marker("gpu")
        devices = ("cuda",) if needs_gpu else _devices(metafunc.config)
        marked = [pytest.param(device, marks=[pytest.mark.gpu] if device == "cuda" else []) for device in devices]
        metafunc.parametrize("device", marked, scope="module")


def pytest_itemcollected(item: pytest.Item) -> None:
    if GPU in item.path.parents:
        item.add_marker(pytest.mark.gpu)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What has no device here is left out, or skipped with the reason where it was asked for."""
    devices = _devices(config)

    def is_selected(item: pytest.Item) -> bool:
        nightly = item.get_closest_marker("nightly") and not config.getoption("--nightly")
        return not nightly and ("cuda" if item.get_closest_marker("gpu") else "cpu") in devices

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = [item for item in items if is_selected(item)]
    if "cuda" in devices and (reason := _why_no_cuda()):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    import torch

    import nwor_ops

    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    return next(library.problem for library in nwor_ops.LIBRARIES if library.kind == "cuda")


@pytest.fixture
def four_threads() -> Iterator[None]:
    """For torch's ops and ours, however many cores there are."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)
