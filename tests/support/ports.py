"""Ports for servers that take half a minute to start, beside other processes that look for theirs."""

from __future__ import annotations

import itertools
import os
import socket

# Linux gives whoever asks for any port one from 32768 on, unless it is told otherwise, and vLLM's own defaults begin at
# 29500: nobody takes one of these unasked between the moment it is found free and the moment its server is there.
FIRST, COUNT = 20000, 9000
_asked = itertools.count()


def free_port() -> int:
    """A port that is free on every address of this host. Not the one that another process of ours found just now: each
    looks from a place of its own on, and never twice at the same."""
    for number in itertools.islice(_asked, COUNT):
        port = FIRST + (os.getpid() * 17 + number) % COUNT
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"free_port: one of the ports {FIRST} to {FIRST + COUNT - 1} must be free, all are taken")
