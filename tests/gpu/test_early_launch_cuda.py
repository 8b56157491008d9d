"""Test which kernels of a captured graph may start before their predecessor has ended: see csrc/cuda/launch.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from nwor_ops import log_slots, reject_rows, write_kv

PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class EdgeData(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")] + [
        ("reserved", ctypes.c_ubyte * 5)
    ]


def _edges(graph: torch.cuda.CUDAGraph) -> list[bool]:
    """For a graph whose nodes are a sequence: whether each may start early, in order."""
    driver, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert driver.cuGraphGetEdges_v2(raw, None, None, None, ctypes.byref(count)) == 0
    ends = ctypes.c_void_p * count.value
    before, after, data = ends(), ends(), (EdgeData * count.value)()
    assert driver.cuGraphGetEdges_v2(raw, before, after, data, ctypes.byref(count)) == 0
    next_of = {start: (end, edge.type == PROGRAMMATIC) for start, end, edge in zip(before, after, data, strict=True)}
    [node] = set(before) - set(after)
    found = []
    while node in next_of:
        node, early = next_of[node]
        found.append(early)
    return found


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="launches early from 9.0 on"
)
@pytest.mark.parametrize("writer", ["write_kv", "log_slots"])
def test_a_captured_kernel_is_early_only_after_one_of_ours(writer: str, device: str) -> None:
    rows = torch.randn(4, 2, 8, device=device)
    caches = torch.zeros(2, 3, 16, 2, 8, device=device)
    slots, one = torch.arange(4, device=device), torch.ones(1, device=device)
    log_rows, log = torch.arange(4, dtype=torch.int32, device=device), torch.zeros(4, 2, 8, device=device)
    counts, accepted = torch.zeros(2, 2, dtype=torch.int32, device=device)
    rejected, counters = (
        torch.zeros(4, dtype=torch.bool, device=device),
        torch.zeros(5, dtype=torch.int64, device=device),
    )
    write: Callable[[], None] = {
        "write_kv": lambda: write_kv(rows, rows, *caches, slots, one, one, "auto"),
        "log_slots": lambda: log_slots(caches[0], slots, log_rows, log),
    }[writer]
    reject = lambda: reject_rows(slots, slots.view(1, 4), counts, rejected, accepted, counters)  # noqa: E731
    write()
    reject()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        one += 1
        write()
        write()
        one += 1
        write()
        one += 1
        reject()
        write()
    # one, write, write, one, write, one, reject, write
    assert _edges(graph) == [False, True, False, False, False, False, True]
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
