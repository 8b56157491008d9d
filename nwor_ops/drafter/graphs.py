"""Recording a CUDA graph, and knowing whether what it reads is still where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Where a tensor lies and how it is laid out: all that a graph knows of it.
Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
Places = dict[str, Place]


@dataclass(frozen=True)
class Recording:
    """A captured graph, the metadata that it was captured with, and what it may assume to find in place."""

    graph: torch.cuda.CUDAGraph
    metadata: Any
    buffer_places: Places
    metadata_places: Places


def tensors_in(value: Any, name: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree of dicts, lists, tuples and objects with attributes, each with its path.

    An object that several places share is listed at the first one.
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
    """Where the tensors in ``value`` lie; those on another device (host copies) are no business of a graph."""
    return {
        path: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for path, tensor in tensors_in(value, name)
        if tensor.device.type == device.type
    }


def require_unmoved(recorded: Places, now: Places) -> None:
    """Refuse a replay that would read or write memory which is not what it was at the capture.

    Raises:
        RuntimeError: names the first tensor that moved, changed its layout, came or went.
    """
    for path in recorded.keys() | now.keys():
        was, is_now = recorded.get(path), now.get(path)
        if was != is_now:
            raise RuntimeError(
                f"DraftLoop: {path} must stay what it was when the graph was captured, {_words(was)}, "
                f"got {_words(is_now)}; write into it in place, or invalidate() and capture() again"
            )


def _words(place: Place | None) -> str:
    if place is None:
        return "no tensor"
    address, shape, stride, dtype = place
    return f"{dtype} {list(shape)} with strides {list(stride)} at {address:#x}"


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream, or a side stream if that is the default one, which cannot record."""
    current = torch.cuda.current_stream(device)
    return torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current


def warm_up(body: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run once what will be recorded: libraries make their handles, workspaces and choices now."""
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
