"""Which graph serves which batch: padded request counts, one table per query length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nwor_ops import validation

Mode = Literal["eager", "step", "loop"]
MODES: tuple[Mode, ...] = ("eager", "step", "loop")


@dataclass(frozen=True)
class GraphKey:
    """The shape of a pass: what a graph is captured for, and what it is looked up by at run time.

    Attributes:
        num_reqs: rows, padded ones included, > 0.
        query_len: tokens of each row, > 0: 1 in the steps of the loop, more in the first pass.
    """

    num_reqs: int
    query_len: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_reqs", self.num_reqs), ("query_len", self.query_len)):
            if type(value) is not int or not 0 < value <= validation.INT32_MAX:
                validation.integer(f"GraphKey: {name}", value)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass: always a multiple of the query length."""
        return self.num_reqs * self.query_len


@dataclass(frozen=True)
class Dispatch:
    """How one batch will run.

    Attributes:
        key: the padded shape; with mode "eager" the batch's own.
        mode: "loop" (one graph; metadata updated in it), "step" (a graph per step; metadata built between them) or
            "eager".
        reason: why, in a sentence.
    """

    key: GraphKey
    mode: Mode
    reason: str


class DispatchTable:
    """Padding tables: for every query length the request counts that have a graph.

    Query lengths are apart on purpose: a graph of the first pass for 4 tokens (one request, K = 2) says nothing
    about the decode steps of one request, which pad to 1, not to 4.
    """

    def __init__(self, keys: Iterable[GraphKey] = ()) -> None:
        self._counts: dict[int, list[int]] = {}
        self.add(keys)

    def add(self, keys: Iterable[GraphKey]) -> None:
        """Take more keys in; those known stay."""
        keys = list(keys)
        for key in keys:
            validation.instance("DispatchTable: each of keys", key, GraphKey, "a GraphKey")
        for key in keys:
            counts = self._counts.setdefault(key.query_len, [])
            place = bisect_left(counts, key.num_reqs)
            if place == len(counts) or counts[place] != key.num_reqs:
                counts.insert(place, key.num_reqs)

    def clear(self) -> None:
        self._counts.clear()

    def smallest(self, num_reqs: int, query_len: int = 1) -> GraphKey | None:
        """The smallest key of this query length that holds ``num_reqs`` requests, or None."""
        counts = self._counts.get(query_len, [])
        place = bisect_left(counts, num_reqs)
        return GraphKey(counts[place], query_len) if place < len(counts) else None

    def largest(self, query_len: int = 1) -> int:
        """The largest request count of this query length; 0 where there is none."""
        return max(self._counts.get(query_len, [0]))


def keys_of_token_counts(token_counts: Iterable[int], query_len: int, max_num_reqs: int) -> list[GraphKey]:
    """The keys for an engine's capture sizes, which count tokens.

    Each size is rounded up to whole requests, so the tokens of a key are a multiple of ``query_len`` also where
    the sizes are not. Keys above ``max_num_reqs`` are left out.

    Args:
        token_counts: tokens per graph, each > 0, in any order.
        query_len: tokens of each request, > 0.
        max_num_reqs: the most requests of a batch.

    Returns:
        Distinct keys, largest first.

    Raises:
        ValueError, TypeError: a number that is no integer above 0.
    """
    validation.integer("keys_of_token_counts: query_len", query_len)
    validation.integer("keys_of_token_counts: max_num_reqs", max_num_reqs)
    token_counts = [validation.integer("keys_of_token_counts: each of token_counts", tokens) for tokens in token_counts]
    counts = {-(-tokens // query_len) for tokens in token_counts}
    return [GraphKey(count, query_len) for count in sorted(counts, reverse=True) if count <= max_num_reqs]
