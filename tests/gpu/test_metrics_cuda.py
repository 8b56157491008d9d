"""Test how the plugin reads its counters: nothing synchronizes, and a graph capture is not disturbed."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from counted_session import CountedSession
from no_sync import no_waits

from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.transport import Totals
from nwor_ops.vllm.metrics.worker import SessionPublisher


class Written:
    """Replaces a file: records what a publisher writes, without prometheus_client."""

    def __init__(self) -> None:
        self.path, self.totals = None, Totals()

    def write(self, totals: Totals) -> None:
        self.totals = totals


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.setattr(transport, "PERIOD", 0.001)
    return Written()


def _published(file: Written, windows: int) -> int:
    deadline = time.monotonic() + 5
    while (found := file.totals.counts["windows"]) != windows and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def test_the_last_step_arrives_without_a_sync(file: Written) -> None:
    session = CountedSession("cuda")
    publisher = SessionPublisher(session, file, logging.getLogger())
    with no_waits():
        for _ in range(100):
            torch.cuda._sleep(100_000)
            session.step(1)
    assert _published(file, 100) == 100
    publisher.stop()


def test_a_capture_is_not_disturbed(file: Written) -> None:
    """The strictest capture mode of CUDA forbids synchronization in other threads too. vLLM captures before the
    first request, with dummy steps in between."""
    session, warming_up = CountedSession("cuda"), [True]
    publisher = SessionPublisher(session, file, logging.getLogger(), lambda: warming_up[0])
    session.step(1)
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(50):
            x += 1
            time.sleep(0.002)  # the publisher reads meanwhile
    graph.replay()
    assert x.sum().item() == 400
    warming_up[0] = False
    for _ in range(20):
        session.step(1)
    assert _published(file, 20) == 20
    publisher.stop()
