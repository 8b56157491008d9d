"""A draft loop without a GPU: the bodies of its graphs run from the host, with the shapes of the graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nwor_ops.drafter import DraftLoop, GraphKey

FAILED = "draft graphs failed"
PADDED = (1, 2, 5)  # the request counts that "have a graph"


class HostLoop(DraftLoop):
    """Assign this class to the ``__class__`` of a loop."""

    padded_loop = PADDED  # graphs of the loop only

    def graph_for(self, num_reqs: int, query_len: int = 1, num_drafts: int | None = None) -> GraphKey:
        counts = self.padded_loop if query_len == 1 else PADDED
        return GraphKey(min(count for count in counts if count >= num_reqs), query_len)

    def run(self, num_reqs: int, inert_tails: bool = False, num_drafts: int | None = None, **_: Any) -> Tensor:
        how: dict[str, Any] = {"replay": False, "inert_tails": inert_tails, "num_drafts": num_drafts}
        return super().run(num_reqs, "loop", key=self.graph_for(num_reqs), **how)

    def run_first_pass(self, num_reqs: int, query_len: int, **_: Any) -> Tensor:
        key = self.graph_for(num_reqs, query_len)
        return super().run_first_pass(num_reqs, query_len, "loop", key=key, replay=False)


@contextmanager
def failing(drafter: Any, method: str | None) -> Iterator[None]:
    """Make a method of a drafter do its work and raise; None = no method."""
    if method is not None:
        work = getattr(drafter, method)

        def fails(*args: Any, **kwargs: Any) -> None:
            work(*args, **kwargs)
            raise RuntimeError(f"planted in {method}")

        setattr(drafter, method, fails)
    yield
    if method is not None:
        delattr(drafter, method)
