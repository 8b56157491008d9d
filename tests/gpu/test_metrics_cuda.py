"""The plugin's counters on their way from the device: nothing waits, and a graph capture is not disturbed."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
from counted_session import CountedSession

from nwor_ops.vllm.metrics import exporter as metrics
from nwor_ops.vllm.metrics import transport as boards


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(boards.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(boards, "PERIOD", 0.001)
    return boards.new_path("worker", "i", 0)


def _published(path: Path, windows: int) -> int:
    deadline = time.monotonic() + 5
    while (found := boards.read()[path].counts["windows"]) != windows and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def test_the_last_step_arrives_and_nobody_waits(path: Path) -> None:
    session = CountedSession("cuda")
    publisher = metrics.Publisher(session, boards.Board("worker", "i", 0, "tiny", {}), path, logging.getLogger())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            torch.cuda._sleep(100_000)
            session.step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert _published(path, 100) == 100
    publisher.stop()


def test_a_capture_is_not_disturbed(path: Path) -> None:
    """In CUDA's strictest mode, which forbids other threads what could wait for the device. vLLM captures before the
    first request, with made-up steps between."""
    session, board = CountedSession("cuda"), boards.Board("worker", "i", 0, "tiny", {})
    warming_up = [True]
    publisher = metrics.Publisher(session, board, path, logging.getLogger(), lambda: warming_up[0])
    session.step(1)
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(50):
            x += 1
            time.sleep(0.002)  # the publisher looks meanwhile
    graph.replay()
    assert x.sum().item() == 400
    warming_up[0] = False
    for _ in range(20):
        session.step(1)
    assert _published(path, 20) == 20
    publisher.stop()
