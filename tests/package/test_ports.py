"""Servers get a port that is still free after they have started."""

from __future__ import annotations

import os
import socket

import pytest

from nwor_ops.testing import ports


def test_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    assert ports.FIRST <= port < 29500  # where vLLM's default ports begin; those of Linux begin at 32768
    monkeypatch.setattr(ports, "_asked", iter(range((port - ports.FIRST - os.getpid() * 17) % ports.COUNT, 10**6)))
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))  # one address of this host is enough
        assert ports.free_port() != port


def test_processes_find_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for number in range(50):
        monkeypatch.setattr(ports, "_asked", iter(range(17)))
        monkeypatch.setattr(os, "getpid", lambda number=number: 4321 + number)
        found.append(ports.free_port())
    assert len(set(found)) == 50
