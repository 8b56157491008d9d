"""Draft loops that count what the host launches, with stand-ins for CUDA graphs on a CPU.

A CPU has no graphs. :class:`HostGraphLoop` takes the path of a captured loop: it chooses a graph, checks that no tensor
has moved (``debug=True``), and replays. The replay of a stand-in runs the body from the host. It refuses operations
that a CUDA graph cannot capture because they wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nwor_ops.drafter import DraftLoop
from nwor_ops.drafter.graphs import Graph

_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)


class Launches(TorchDispatchMode):
    """Count what the host launches inside a ``with`` block. Views and allocations launch nothing.

    Attributes:
        kernels: number of operations outside graphs. Most of them are one kernel on a GPU.
        graphs: number of replays. Each is one launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.graphs = 0
        self._replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._replaying and not func.is_view and "empty" not in func.__name__:
            self.kernels += 1
        return func(*args, **(kwargs or {}))

    def replay(self, graph: Graph) -> None:
        self.graphs += 1
        self._replaying = True
        try:
            graph.replay()
        finally:
            self._replaying = False


class _CountedGraph:
    def __init__(self, graph: Graph, launches: Launches) -> None:
        self._graph, self._launches = graph, launches

    def replay(self) -> None:
        self._launches.replay(self._graph)


class CountedLoop(DraftLoop):
    """A draft loop that counts launches inside ``with loop.launches:``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.launches = Launches()

    def _graph(self, body: Callable[[], object], stream: Any) -> Graph:
        return _CountedGraph(self._uncounted(body, stream), self.launches)

    def _uncounted(self, body: Callable[[], object], stream: Any) -> Graph:
        return super()._graph(body, stream)


class HostGraphLoop(CountedLoop):
    """A draft loop that captures stand-ins, on any device."""

    def _capture_stream(self) -> Any:
        return None

    def _warm_up(self, body: Callable[[], object], stream: Any) -> None:
        HostGraph(body).replay()

    def _uncounted(self, body: Callable[[], object], stream: Any) -> Graph:
        return HostGraph(body)


class HostGraph:
    """A stand-in for a CUDA graph.

    Raises:
        RuntimeError: in :meth:`replay`, if the host must read a result.
    """

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body

    def replay(self) -> None:
        with _Capturable():
            self._body()


class _Capturable(TorchDispatchMode):
    """Refuse operations whose result or shape the host must read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = bool(_WAITS & set(func.tags))
        if func is torch.ops.aten.index.Tensor:  # the shape depends on data only if an index is a mask
            waits = any(index is not None and index.dtype in _MASKS for index in args[1])
        if waits:
            raise RuntimeError(f"{func} cannot be captured in a CUDA graph: the host must read its result")
        return func(*args, **(kwargs or {}))
