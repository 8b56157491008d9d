"""Tests' servers get a port that is still free after they have started."""

from __future__ import annotations

import os
import socket

import pytest

from nwor_ops.testing import ports


def test_the_ports_are_outside_the_ranges_of_others() -> None:
    found = {ports.free_port() for _ in range(20)}
    assert len(found) == 20
    # vLLM's default ports begin at 29500, and those of Linux at 32768.
    assert all(ports.FIRST <= port < 29500 for port in found)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "_asked", iter(range((port - ports.FIRST - os.getpid() * 17) % ports.COUNT, 10**6)))
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))  # one address of this host is enough
        assert ports.free_port() != port


def test_processes_that_look_at_once_find_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in range(50):
        monkeypatch.setattr(ports, "_asked", iter(range(17)))
        monkeypatch.setattr(os, "getpid", lambda number=number: 4321 + number)
        found.append(ports.free_port())
    assert len(set(found)) == 50
