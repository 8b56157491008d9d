"""A Ray cluster for vLLM's CPU engine, with several nodes on this host.

vLLM's Ray executors place workers by a resource that the platform names, but its CPU platform names none. This package
provides a platform plugin: the CPU platform with such a name. Ray does not check whether a node really has its declared
resources.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence

import pytest

_NAME = __name__
_SUPPORT = pathlib.Path(__file__).resolve().parents[1]


def platform() -> str:
    """Return the class; vLLM's entry point for the plugin. The class must not be imported yet."""
    return f"{_NAME}.platform.RayCpuPlatform"


@contextlib.contextmanager
def cluster(devices: Sequence[int]) -> Iterator[tuple[dict[str, str], Callable[[], list[str]]]]:
    """Start a Ray cluster.

    Args:
        devices: maximum number of workers on each node.

    Yields:
        The environment with which vLLM finds the cluster, and a function that returns what workers have written so far.
    """
    folder = tempfile.mkdtemp(prefix="nwor-ray-", dir="/tmp")  # it contains sockets, whose paths must be short
    installed = pathlib.Path(folder, f"{_NAME}-0.dist-info")
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{_NAME} = {_NAME}:platform\n")
    environment = {
        "PYTHONPATH": os.pathsep.join([folder, str(_SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",  # otherwise, Ray writes a token to the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        # Ray's processes, and therefore vLLM's workers, inherit this environment. Their files are removed with the
        # folder.
        for name, value in {**environment, "TMPDIR": folder}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        try:
            for number in devices:  # the first node is the head
                nodes.add_node(num_cpus=1, num_gpus=number, include_dashboard=False)
            yield environment | {"RAY_ADDRESS": nodes.address}, lambda: _logs(folder)
        finally:
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _logs(folder: str) -> list[str]:
    files = pathlib.Path(folder, "ray").glob("session_2*/logs/worker-*.out")  # session_latest is a link to one of these
    return [file.read_text(errors="replace") for file in files]
