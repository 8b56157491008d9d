"""Optional packages of the command line, and the message if one is missing."""

from __future__ import annotations

import importlib.util
import sys

# Package: the extra of nwor_ops that installs it.
_EXTRAS = {"typer": "cli", "rich": "cli", "matplotlib": "cli", "vllm": "vllm"}


def require(*packages: str) -> None:
    """Exit with a message if one of these packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.exit(
                f"nwor-ops: {package} is not installed; install it with: pip install 'nwor_ops[{_EXTRAS[package]}]'"
            )
