"""The command ``nwor-ops``. It is outside the package, whose import takes seconds and must end at Ctrl-C too."""

from __future__ import annotations

import os
import signal


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell's background jobs ignore the signal
        # An exception could be caught or replaced by a module that is being imported.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from nwor_ops.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()
