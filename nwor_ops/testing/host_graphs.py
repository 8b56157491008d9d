"""A draft loop with stand-ins for CUDA graphs, for a CPU, which has none.

:class:`HostGraphLoop` takes the path of a captured loop: it chooses a graph, checks that no tensor has moved
(``debug=True``), and replays. A replay runs the body from the host. It refuses operations that a CUDA graph cannot
capture because they wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nwor_ops.drafter import DraftLoop

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not func.is_view and "empty" not in func.__name__
        return func(*args, **(kwargs or {}))


class HostGraph:
    """A stand-in for a CUDA graph. Its replays are one launch each.

    Raises:
        RuntimeError: in :meth:`replay`, if the host must read a result.
    """

    def __init__(self, body: Callable[[], object], launches: Launches | None = None) -> None:
        self._body, self._launches = body, launches or Launches()

    def replay(self) -> None:
        kernels = self._launches.kernels
        with _Capturable():
            self._body()
        self._launches.kernels = kernels
        self._launches.graphs += 1


class HostGraphLoop(DraftLoop):
    """A draft loop that captures stand-ins, and counts launches inside ``with loop.launches:``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.launches = Launches()

    def _capture_stream(self) -> Any:
        return None

    def _warm_up(self, body: Callable[[], object], stream: Any) -> None:
        HostGraph(body).replay()

    def _graph(self, body: Callable[[], object], stream: Any) -> HostGraph:
        return HostGraph(body, self.launches)


class _Capturable(TorchDispatchMode):
    """Refuse operations whose result or shape the host must read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = bool(_WAITS & set(func.tags))
        if func is torch.ops.aten.index.Tensor:  # the shape depends on data only if an index is a mask
            waits = any(index is not None and index.dtype in _MASKS for index in args[1])
        if waits:
            raise RuntimeError(f"{func} cannot be captured in a CUDA graph: the host must read its result")
        return func(*args, **(kwargs or {}))
