"""The command ``nwor-ops``. It needs typer, rich and matplotlib, the optional packages of ``nwor_ops[cli]``."""

import errno
import io
import os
import sys

from nwor_ops.cli.extras import require


def main() -> None:
    require("typer", "rich")
    from nwor_ops.cli.app import app

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may have letters that the encoding lacks
    try:
        try:
            app(prog_name="nwor-ops")
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest at its end
        print(f"nwor-ops: the result cannot be written: {error}", file=sys.stderr)
        sys.exit(1)
