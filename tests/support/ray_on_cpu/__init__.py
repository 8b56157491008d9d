"""A cluster of Ray's for vLLM's CPU engine, of several nodes on this host.

vLLM's executors for Ray place workers by a resource that the platform names, and its CPU platform names none. So there
is a platform plugin, which is the CPU platform with a name. What a node is told that it has need not be there.
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
    """The plugin's entry point: the class, which cannot be imported yet."""
    return f"{_NAME}.platform.RayCpuPlatform"


@contextlib.contextmanager
def cluster(devices: Sequence[int]) -> Iterator[tuple[dict[str, str], Callable[[], list[str]]]]:
    """What vLLM needs in its environment to find the cluster, on whose first node it then is; and what workers have
    written so far.

    Args:
        devices: of each node: as many workers have room there.
    """
    folder = tempfile.mkdtemp(prefix="nwor-ray-", dir="/tmp")  # sockets are in it, whose paths must be short
    installed = pathlib.Path(folder, f"{_NAME}-0.dist-info")
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{_NAME} = {_NAME}:platform\n")
    environment = {
        "PYTHONPATH": os.pathsep.join([folder, str(_SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",  # else a token is written to the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        # Ray's processes, and so vLLM's workers, have it from this one; what they leave behind goes with the folder.
        for name, value in {**environment, "TMPDIR": folder}.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        try:
            for number in devices:  # the first one is the head
                nodes.add_node(num_cpus=1, num_gpus=number, include_dashboard=False)
            yield environment | {"RAY_ADDRESS": nodes.address}, lambda: _logs(folder)
        finally:
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _logs(folder: str) -> list[str]:
    files = pathlib.Path(folder, "ray").glob("session_2*/logs/worker-*.out")  # session_latest is one of them
    return [file.read_text(errors="replace") for file in files]
