"""Ports for servers that take half a minute to start, while other processes look for ports too."""

from __future__ import annotations

import itertools
import os
import socket

# Linux assigns ports from 32768 on by default, and vLLM's defaults begin at 29500. Below them no other program takes a
# port between the search for it and the start of its server.
FIRST, COUNT = 20000, 9000
_asked = itertools.count()


def free_port() -> int:
    """Return a port that is free on every address of this host.

    Two of our processes never get the same port. Each starts its search at a different place, and never returns a port
    twice.
    """
    for number in itertools.islice(_asked, COUNT):
        port = FIRST + (os.getpid() * 17 + number) % COUNT
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"free_port: one of the ports {FIRST} to {FIRST + COUNT - 1} must be free, all are taken")
