"""Recorded graphs, and the check that the memory that they read has not moved."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nwor_ops.validation import BoundToMemory

# Address, shape, strides and dtype of a tensor: everything that a graph depends on.
Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
Places = dict[str, Place]


class Graph(Protocol):
    """A ``torch.cuda.CUDAGraph``, or a stand-in."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Recording(BoundToMemory):
    """A captured graph, the metadata of its capture, and the places of the buffers that it reads."""

    graph: Graph
    metadata: Any
    places: Places


def places_of(tensors: Mapping[str, Tensor]) -> Places:
    """Return the places of some tensors, by name."""
    return {name: (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}


def require_unmoved(recorded: Places, now: Places) -> None:
    """Refuse a replay that would read or write other memory than at capture time.

    Raises:
        RuntimeError: a tensor moved, changed its layout, appeared or disappeared. The message names the first one.
    """
    for path in recorded.keys() | now.keys():
        was, is_now = recorded.get(path), now.get(path)
        if was != is_now:
            raise RuntimeError(
                f"DraftLoop: buffers[{path!r}] must not move or change after the capture: captured with {_words(was)}, "
                f"got {_words(is_now)}; write into it in place, or invalidate() and capture() again"
            )


def _words(place: Place | None) -> str:
    if place is None:
        return "no tensor"
    address, shape, stride, dtype = place
    return f"{dtype} {list(shape)} with strides {list(stride)} at {address:#x}"


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
