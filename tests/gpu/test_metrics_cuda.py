"""Test how the plugin reads its counters: nothing synchronizes, and the counts of a step arrive with a later output."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from counted_session import CountedSession, step_output
from no_sync import no_waits

from nwor_ops.vllm.metrics.publisher import MESSAGE, Publisher


def windows_sent(publisher: Publisher) -> int:
    """Return the number of windows in the message on the next output."""
    publisher._next = 0.0
    output: Any = step_output()
    publisher.attach(output)
    return json.loads(getattr(output, MESSAGE, '{"counts": {}}'))["counts"].get("windows", 0)


def test_counts_arrive_without_a_sync() -> None:
    """The host is far ahead of the device. Each output has what has arrived, and all of it arrives in order."""
    session, windows = CountedSession("cuda"), 0
    publisher = session.publisher()
    session.step()
    publisher.forget()  # the warm-up; it synchronizes
    with no_waits():
        for _ in range(100):
            torch.cuda._sleep(1_000_000)  # half a millisecond
            session.step()
            windows += windows_sent(publisher)
            assert publisher._copy is None or all(copy.is_pinned() for _, copy in publisher._copy[1])
    assert windows < 100
    deadline = time.monotonic() + 60
    while windows < 100:
        assert time.monotonic() < deadline
        windows += windows_sent(publisher)
    assert windows == 100
    assert publisher.totals()["windows"] == 100
