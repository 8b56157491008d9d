"""Record a CUDA graph, and check that the memory that it reads has not moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Address, shape, strides and dtype of a tensor: everything that a graph depends on.
Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
Places = dict[str, Place]


@dataclass(frozen=True)
class Recording:
    """A captured graph, the metadata of its capture, and the places of the tensors that it reads."""

    graph: torch.cuda.CUDAGraph
    metadata: Any
    buffer_places: Places
    metadata_places: Places


def tensors_in(value: Any, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a tree of dicts, lists, tuples and objects with attributes, each with its path.

    An object that occurs several times is listed at the first place.
    """
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (type, str, bytes, int, float)) or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from tensors_in(entry, f"{name}[{key!r}]", seen)
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from tensors_in(entry, f"{name}[{number}]", seen)
    elif hasattr(value, "__dict__"):
        for attribute, entry in vars(value).items():
            yield from tensors_in(entry, f"{name}.{attribute}", seen)


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
