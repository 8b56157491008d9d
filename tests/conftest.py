"""Settings of all tests, and the devices they run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Must be set before torch is imported. Tensors are small and processes run concurrently, so tests that need threads ask
# for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import processor
import pytest
import state_machines
from hypothesis import settings

processor.separate_compiler_cache()

# Compilation and thread start-up make single examples slow. The same examples every time keep a failing test failing.
# Nightly runs use more examples, and other ones each time.
settings.register_profile("nwor", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("nwor")

GPU = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="tests marked nightly too, and more examples of properties")
    parser.addoption(
        "--device", choices=("cpu", "cuda"), help="tests of this device alone (default: of those that torch finds)"
    )

    parser.addoption("--transitions", type=int, help="random transitions of each state machine (without: a share)")
    parser.addoption("--soak-seconds", type=float, default=120.0, help="length of each soak test (nightly)")
    parser.addoption("--first-seed", type=int, default=0, help="of the seeds of --transitions")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        settings.load_profile("nightly")


def _devices(config: pytest.Config) -> tuple[str, ...]:
    if asked := config.getoption("--device"):
        return (asked,)
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the argument `device` once on each device. A test in gpu/, or marked so, runs only on CUDA."""
    if "device" in metafunc.fixturenames:
        needs_gpu = GPU in metafunc.definition.path.parents or metafunc.definition.get_closest_marker("gpu")
        devices = ("cuda",) if needs_gpu else _devices(metafunc.config)
        marked = [pytest.param(device, marks=[pytest.mark.gpu] if device == "cuda" else []) for device in devices]
        metafunc.parametrize("device", marked, scope="module")
    if "machine_seed" in metafunc.fixturenames:
        metafunc.parametrize("machine_seed", state_machines.seeds_of(metafunc.config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "when")]
    counts = [dict(report.user_properties).get("transitions", 0) for report in reports if report.when == "call"]
    if any(counts):
        terminalreporter.write_line(f"state machines: {sum(counts):,} transitions")


def pytest_itemcollected(item: pytest.Item) -> None:
    if GPU in item.path.parents:
        item.add_marker(pytest.mark.gpu)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests without their device. If the device was requested, skip them with the reason."""
    devices = _devices(config)

    def is_selected(item: pytest.Item) -> bool:
        nightly = item.get_closest_marker("nightly") and not config.getoption("--nightly")
        return not nightly and ("cuda" if item.get_closest_marker("gpu") else "cpu") in devices

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    # Long tests first, so that no process is left with one at the end. Within both parts the order does not change.
    items[:] = sorted(filter(is_selected, items), key=lambda item: item.get_closest_marker("long") is None)
    if "cuda" in devices and (reason := _why_no_cuda()):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup() -> None:
    os.environ.pop("VLLM_LOGGING_LEVEL", None)  # a command of an earlier test may have silenced vLLM's log


def _why_no_cuda() -> str | None:
    import torch

    import nwor_ops

    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    return next(library.problem for library in nwor_ops.LIBRARIES if library.kind == "cuda")


@pytest.fixture
def four_threads() -> Iterator[None]:
    """Use four threads for torch's ops and ours, on any number of cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)
