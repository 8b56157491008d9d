"""Keys of graphs, how a batch runs, recorded graphs, and the check that the memory that they read has not moved."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from nwor_ops import validation
from nwor_ops.validation import BoundToMemory

Mode = Literal["eager", "step", "loop"]


@dataclass(frozen=True)
class GraphKey:
    """The shape of a pass. Graphs are captured for it, and looked up by it.

    Attributes:
        num_reqs: number of rows, padded rows included, > 0.
        query_len: number of tokens of each row, > 0. It is 1 in the steps of the loop, and larger in the first pass.

    Example:
        >>> GraphKey(4, 5).num_tokens
        20
    """

    num_reqs: int
    query_len: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_reqs", self.num_reqs), ("query_len", self.query_len)):
            if type(value) is not int or not 0 < value <= validation.INT32_MAX:
                validation.integer(f"GraphKey: {name}", value)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the pass, always a multiple of the query length."""
        return self.num_reqs * self.query_len


@dataclass(frozen=True)
class Dispatch:
    """How one batch will run.

    Attributes:
        key: the padded shape. In mode "eager" it is the shape of the batch.
        mode: "loop" (one graph, which updates the metadata), "step" (one graph per step; the metadata is built between
            them) or "eager".
        reason: the reason for this mode, as a sentence.

    Example:
        >>> Dispatch(GraphKey(4), "loop", "captured").key.num_tokens
        4
    """

    key: GraphKey
    mode: Mode
    reason: str


class Graph(Protocol):
    """A ``torch.cuda.CUDAGraph``, or a stand-in."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Recording(BoundToMemory):
    """A captured graph, the metadata of its capture, and the addresses of the buffers that it reads."""

    graph: Graph
    metadata: Any
    addresses: dict[str, int]


def addresses_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def require_unmoved(recorded: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise if a replay would read or write other memory than at capture time. The message names one tensor."""
    for name in recorded.keys() | now.keys():
        if recorded.get(name) != now.get(name):
            raise RuntimeError(
                f"DraftLoop: buffers[{name!r}] must not move after the capture; write into it in place, or "
                "invalidate() and capture() again"
            )


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
