"""Record a CUDA graph, and check that the memory that it reads has not moved."""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from nwor_ops.validation import BoundToMemory

# Address, shape, strides and dtype of a tensor: everything that a graph depends on.
Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
Places = dict[str, Place]


_WITHOUT_TENSORS = (
    type, str, bytes, int, float, ModuleType, FunctionType, BuiltinFunctionType, MethodType, type(None), torch.device,
)  # fmt: skip


class Graph(Protocol):
    """A ``torch.cuda.CUDAGraph``, or a stand-in."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Recording(BoundToMemory):
    """A captured graph, the metadata of its capture, and the places of the tensors that it reads."""

    graph: Graph
    metadata: Any
    buffer_places: Places
    metadata_places: Places


def tensors_in(value: Any, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a tree of mappings, lists, tuples, sets and objects with attributes, each with its path.

    An object that occurs several times is listed at the first place. Functions, methods and modules are left out.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, _WITHOUT_TENSORS):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from tensors_in(entry, f"{name}[{key!r}]", seen)
    elif isinstance(value, (list, tuple, deque)):
        for number, entry in enumerate(value):
            yield from tensors_in(entry, f"{name}[{number}]", seen)
    elif isinstance(value, Set):  # in the order of addresses, which is that of a set with the same tensors
        for number, entry in enumerate(sorted(value, key=_address)):
            yield from tensors_in(entry, f"{name}{{{number}}}", seen)
    else:
        if isinstance(value, functools.partial):
            yield from tensors_in(value.args, f"{name}.args", seen)
            yield from tensors_in(value.keywords, f"{name}.keywords", seen)
        for attribute, entry in _attributes(value).items():
            yield from tensors_in(entry, f"{name}.{attribute}", seen)


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, Tensor) else id(value)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its ``__dict__`` and the ``__slots__`` of its classes."""
    found = dict(getattr(value, "__dict__", {}))
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{owner.__name__.lstrip('_')}{slot}" if private else slot
            if name != "__dict__" and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def places_of(value: Any, name: str, device: torch.device) -> Places:
    """Return the places of the tensors in ``value``. Tensors on another device (host copies) are left out: no graph
    reads them."""
    return {
        path: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for path, tensor in tensors_in(value, name)
        if tensor.device.type == device.type
    }


def require_unmoved(recorded: Places, now: Places) -> None:
    """Refuse a replay that would read or write other memory than at capture time.

    Raises:
        RuntimeError: a tensor moved, changed its layout, appeared or disappeared. The message names the first one.
    """
    for path in recorded.keys() | now.keys():
        was, is_now = recorded.get(path), now.get(path)
        if was != is_now:
            raise RuntimeError(
                f"DraftLoop: {path} must not move or change after the capture: captured with {_words(was)}, "
                f"got {_words(is_now)}; write into it in place, or invalidate() and capture() again"
            )


def _words(place: Place | None) -> str:
    if place is None:
        return "no tensor"
    address, shape, stride, dtype = place
    return f"{dtype} {list(shape)} with strides {list(stride)} at {address:#x}"


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream, or a new side stream if the current one is the default stream, which
    cannot capture."""
    current = torch.cuda.current_stream(device)
    return torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector off while graphs are recorded.

    It may destroy an unreachable graph. CUDA does not permit this while a stream is capturing, and invalidates the
    capture. ``torch.cuda.graph`` collects before a capture only with ``torch.compiler.config.force_cudagraph_gc``.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def warm_up(body: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run once what will be recorded, so that libraries create their handles and workspaces and make their
    choices now."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream(stream.device).wait_stream(stream)


def record(
    body: Callable[[], object], stream: torch.cuda.Stream, pool: Any | Callable[[], AbstractContextManager[Any]]
) -> torch.cuda.CUDAGraph:
    """Record ``body`` on ``stream`` into a graph whose memory comes from ``pool``."""
    graph = torch.cuda.CUDAGraph()
    with pool() if callable(pool) else nullcontext(pool) as handle, torch.cuda.graph(graph, handle, stream):
        body()
    return graph
