"""A draft loop without a GPU: what its graphs would hold runs from the host, in the shapes that they would have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nwor_ops.drafter import Dispatch, DraftLoop, GraphKey

PADDED = (1, 2, 5)  # request counts that "have a graph"


class HostLoop(DraftLoop):
    """A loop becomes one by its ``__class__``."""

    padded_loop = PADDED  # of the loop alone

    def dispatch(self, num_reqs: int, query_len: int = 1, num_drafts: int | None = None) -> Dispatch:
        counts = self.padded_loop if query_len == 1 else PADDED
        rows = min(count for count in counts if count >= num_reqs)
        return Dispatch(GraphKey(rows, query_len), "loop", "as if captured")

    def run(self, num_reqs: int, inert_tails: bool = False, num_drafts: int | None = None, **_: Any) -> Tensor:
        how: dict[str, Any] = {"replay": False, "inert_tails": inert_tails, "num_drafts": num_drafts}
        return super().run(num_reqs, "loop", key=self.dispatch(num_reqs).key, **how)

    def run_first_pass(self, num_reqs: int, query_len: int, **_: Any) -> Tensor:
        key = self.dispatch(num_reqs, query_len).key
        return super().run_first_pass(num_reqs, query_len, "loop", key=key, replay=False)
