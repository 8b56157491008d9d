"""A cluster of Ray's for vLLM's CPU engine, of several nodes on this host.

vLLM's executors for Ray place workers by a resource that the platform names, and its CPU platform names none. So there
is a platform plugin, which is the CPU platform with a name. What a node is told that it has need not be there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

import pytest

_NAME = __name__
_SUPPORT = pathlib.Path(__file__).resolve().parents[1]


def platform() -> str:
    """The plugin's entry point: the class, which cannot be imported yet."""
    return f"{_NAME}.platform.RayCpuPlatform"


@contextlib.contextmanager
def cluster(folder: str, devices: Sequence[int]) -> Iterator[dict[str, str]]:
    """What vLLM needs in its environment to find the cluster, on whose first node it then is.

    Args:
        folder: for all that is written. Its path must be short, as sockets are in it.
        devices: of each node: as many workers have room there.
    """
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
        for name, value in environment.items():  # Ray's processes, and so vLLM's workers, have it from this one
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        nodes = Cluster()
        try:
            for number in devices:  # the first one is the head
                nodes.add_node(num_cpus=1, num_gpus=number, include_dashboard=False)
            yield environment | {"RAY_ADDRESS": nodes.address}
        finally:
            nodes.shutdown()
