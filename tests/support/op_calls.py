"""Modes that see the calls of our ops: their names, and a stand-in for a CUDA graph on a CPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("nwor::")


class Calls(TorchDispatchMode):
    """Records the names of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nwor":
            self.names.append(_name(func))
        return func(*args, **(kwargs or {}))


class RecordedGraph(TorchDispatchMode):
    """Records calls of our ops, and replays them on the same tensors.

    It is a context for the capture. As in a real capture, our ops do not run there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "nwor":
            return func(*args, **(kwargs or {}))
        assert not kwargs
        self.calls.append((func, args))
        return None

    @property
    def names(self) -> list[str]:
        """The names of the recorded ops."""
        return [_name(func) for func, _ in self.calls]

    def replay(self) -> None:
        for func, args in self.calls:
            func(*args)
