"""The command ``nwor-ops``. Its packages (typer, rich, matplotlib) are optional: ``nwor_ops[cli]``."""

from __future__ import annotations

import importlib.util
import sys

# Package -> the extra of nwor_ops that brings it.
_EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "cli", "vllm": "vllm"}


def main() -> None:
    require("typer", "rich")
    from nwor_ops.cli.app import app

    app()


def require(*packages: str) -> None:
    """Exit with a sentence if one of these packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.exit(
                f"nwor-ops: {package} is not installed; install it with: pip install 'nwor_ops[{_EXTRAS[package]}]'"
            )
