"""Verify trees of drafts with an attention that reads only pages, and compare this with the staging buffer.

    python examples/staging/tree_in_pages.py

`token_tree.py` reads a step's keys and values from a staging buffer. Many paged attention kernels cannot do this. Here
each node of a tree has a separate slot after the context of its request:

    write      at each layer one kernel writes all nodes to these slots;
    attention  reads the pages; the tree mask hides all nodes except the ancestors of a token;
    move       one kernel moves the accepted path to consecutive slots, in all layers at the same time.

The output is the same. The costs differ: a request needs pages for its whole tree, and rows of rejected nodes stay in
the cache until later tokens overwrite them. Choose the staging buffer if your attention can read rows outside the
cache. Choose `move_slots` if it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from token_tree import BLOCK_SIZE, Attention, LlamaConfig, Request, TreeBatch, TreeVerifier, make_prompts
from torch import Tensor

import nwor_ops


@dataclass
class PagesBatch(TreeBatch):
    """A batch whose nodes are in the pages."""

    node_slots: Tensor  # int64 [T]: the slot of each token during this step; `slot_mapping` is that of its position
    visible: Tensor  # bool [T, max_blocks * BLOCK_SIZE]: which rows of its request's pages each token sees


class PagesAttention(Attention):
    """Write this step's keys and values to the pages of the nodes, and read only pages."""

    def forward(self, x: Tensor, batch: PagesBatch) -> Tensor:
        query, key, value = self.project(x, batch.positions)
        size, scale = self.config.head_size, torch.ones(1, device=x.device)
        caches = self.cache[..., :size], self.cache[..., size:]
        nwor_ops.write_kv(key, value, *caches, batch.node_slots, scale, scale, "auto")
        pages = self.cache[batch.block_tables[batch.requests]].flatten(1, 2).transpose(1, 2)
        return self.attend(query, pages[..., :size], pages[..., size:], batch.visible)


class PagesVerifier(TreeVerifier):
    """The same engine without a staging buffer. `rejected_rows` counts the rejected rows that were written to pages."""

    attention = PagesAttention
    rejected_rows = 0

    def set_up(self, layer_names: list[str]) -> None:
        """Allocate nothing."""

    def slots_needed(self, length: int) -> int:
        return length + self.branches * self.depth

    def build_batch(self, running: list[Request]) -> tuple[PagesBatch, list[int]]:
        """Give each token the slot of its place in the step, not the slot of its position."""
        batch, ends = super().build_batch(running)
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        in_request = torch.cat([torch.arange(count) for count in counts]).to(self.device)
        rows = batch.context_lens + in_request
        node_slots = [
            running[request].slot(row) for request, row in zip(batch.requests.tolist(), rows.tolist(), strict=True)
        ]
        visible = torch.arange(self.max_blocks * BLOCK_SIZE, device=self.device) < batch.context_lens[:, None]
        token, seen = batch.tree_mask.nonzero(as_tuple=True)
        visible[token, rows[seen]] = True
        return PagesBatch(**vars(batch), node_slots=self.tensor(node_slots), visible=visible), ends

    @torch.no_grad()
    def step(self, running: list[Request]) -> None:
        batch, ends = self.build_batch(running)
        best = self.model(batch).argmax(dim=-1)
        accepted = self.accept(batch, best)
        # The moves are simultaneous, so a source may be the destination of another move. A negative slot is no move.
        nwor_ops.move_slots(self.caches, batch.node_slots, torch.where(accepted, batch.slot_mapping, -1))
        self.rejected_rows += int((~accepted).sum())
        self.take_over(running, ends, batch, accepted.tolist(), best.tolist())


def main() -> None:
    config = LlamaConfig()
    prompts = make_prompts(4, config.vocab_size)
    sides = {
        "plain": TreeVerifier(config, branches=0, depth=4),
        "staging buffer": TreeVerifier(config, branches=3, depth=4),
        "move_slots": PagesVerifier(config, branches=3, depth=4),
    }
    outputs = {name: verifier.generate(prompts, 24) for name, verifier in sides.items()}
    for name, verifier in sides.items():
        staged = 0 if isinstance(verifier, PagesVerifier) else verifier.buffer.buffer_bytes
        rejected = verifier.rejected_rows if isinstance(verifier, PagesVerifier) else 0
        print(
            f"{name:14} at most {verifier.most_blocks} pages, {staged} bytes outside the cache, "
            f"{rejected} rejected rows written to pages"
        )
    same = outputs["plain"] == outputs["staging buffer"] == outputs["move_slots"]
    print(f"same output as plain greedy decoding: {'yes' if same else 'NO'}")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
