"""Keys of graphs, and how a batch runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nwor_ops import validation

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
