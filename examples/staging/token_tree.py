"""Verify trees of drafts: several continuations at a time, of which at most one path reaches the KV cache.

    python examples/staging/token_tree.py --branches 3 --depth 4

If a text has several earlier places to continue from, a chain of drafts must choose one, and a tree uses them all. All
its nodes are in one batch. Each node sees the cache, the tokens of this step before the tree, and its own ancestors
(the tree mask). Two nodes of the same depth would need the same slot, so none can be written before it is known which
is accepted. The library therefore keeps the step's keys and values in a staging buffer:

    begin      one record for all layers: the slot that each row would get (siblings have the same one);
    stage      at each layer one kernel copies keys and values to the buffer, and attention reads them there;
    commit     two kernels decide for all layers, and one kernel per layer writes the accepted path.

The accepted path is written to consecutive slots. Nothing else is ever written to the cache. `tree_in_pages.py`
verifies the same trees with an attention that reads only pages.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_ops import LayerCache, StagingBuffer

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # the folder of the next two modules

from paged_llama import Attention, Batch, LlamaConfig, PagedLlama, init_weights, make_caches
from speculative_decoding import BLOCK_SIZE, Request, make_prompts

NO_PARENT = -1


@dataclass
class TreeBatch(Batch):
    """A flat batch with the parent of every token. Prompt tokens form a chain, and a tree starts at the last one."""

    context_lens: Tensor  # int64 [T]: number of tokens of the request that are in the cache
    tree_mask: Tensor  # bool [T, T]: which tokens of this step each token sees: itself and its ancestors
    parents: Tensor  # int64 [T]: index of its parent in the batch; its own index if the parent is in the cache
    is_draft: Tensor  # bool [T]


class TreeAttention(Attention):
    """Stage this step's keys and values, and read them together with the pages."""

    def forward(self, x: Tensor, batch: TreeBatch) -> Tensor:
        query, key, value = self.project(x, batch.positions)

        # The KV-write site: write row t of the staging buffer for token t. No page is changed.
        self.manager.stage(self.layer_name, key, value)
        staged = (
            rows[: len(x)].transpose(0, 1).expand(len(x), -1, -1, -1) for rows in self.manager.rows(self.layer_name)
        )

        pages = self.cache[batch.block_tables[batch.requests]].flatten(1, 2).transpose(1, 2)
        halves = pages[..., : self.config.head_size], pages[..., self.config.head_size :]
        keys, values = (torch.cat((page, fresh), dim=2) for page, fresh in zip(halves, staged, strict=True))
        in_cache = torch.arange(pages.shape[2], device=x.device) < batch.context_lens[:, None]
        return self.attend(query, keys, values, torch.cat((in_cache, batch.tree_mask), dim=1))


def lookup_tree(tokens: list[int], branches: int, depth: int) -> list[tuple[int, int]]:
    """Return the tokens that followed the last token at its latest earlier places, as a tree.

    Each node is (token, parent), and parents precede their children. A parent is an index in this list, or NO_PARENT
    for a child of the last token.
    """
    places = [place for place in range(len(tokens) - 2, -1, -1) if tokens[place] == tokens[-1]][:branches]
    nodes: list[tuple[int, int]] = []
    for place in places:
        parent = NO_PARENT
        for token in tokens[place + 1 : place + 1 + depth]:
            if (token, parent) not in nodes:  # branches share their common prefix
                nodes.append((token, parent))
            parent = nodes.index((token, parent))
    return nodes


class TreeVerifier:
    """A batch of greedy requests whose drafts are trees. `branches=0` is plain decoding."""

    attention: type[Attention] = TreeAttention

    def __init__(
        self,
        config: LlamaConfig,
        *,
        branches: int,
        depth: int,
        max_requests: int = 4,
        max_context: int = 96,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.branches, self.depth, self.max_requests, self.device = branches, depth, max_requests, device
        self.max_context = max_context
        self.max_blocks = -(-self.slots_needed(max_context) // BLOCK_SIZE)
        self.num_blocks = max_requests * self.max_blocks
        self.free_blocks = list(range(self.num_blocks))
        self.most_blocks = 0  # the largest number of pages that were in use
        self.caches = make_caches(config, self.num_blocks, BLOCK_SIZE, device)
        layer_names = [f"layers.{index}" for index in range(config.num_layers)]
        model = PagedLlama(config, layer_names, self.caches, self.set_up(layer_names), self.attention)
        init_weights(model, seed, config.init_scale)
        self.model = model.to(device)

    def set_up(self, layer_names: list[str]) -> StagingBuffer | None:
        """Register every layer's cache, then allocate the rows: `most` per layer, and nothing more later."""
        most = self.max_requests * (1 + self.branches * self.depth) + self.max_context  # a prompt and trees
        self.buffer = StagingBuffer(max_num_tokens=most, max_num_rows=most, device=self.device)
        for name, cache in zip(layer_names, self.caches, strict=True):
            self.buffer.register_layer(name, LayerCache.packed(cache))
        self.buffer.allocate()
        return self.buffer

    def slots_needed(self, length: int) -> int:
        """Return the number of slots for a text of this length, which contains the longest path of the tree."""
        return length

    @torch.no_grad()
    def step(self, running: list[Request]) -> None:
        """Run one step for every running request. Its tokens grow by the accepted path and one more token."""
        batch, ends = self.build_batch(running)
        # Siblings have the same slot; at most one of them will be accepted.
        self.buffer.begin(batch.slot_mapping)
        try:
            best = self.model(batch).argmax(dim=-1)
            accepted = self.accept(batch, best)
            self.buffer.commit(accepted)
        except BaseException:
            if self.buffer.state.name == "OPEN":
                self.buffer.reject()  # no row of this step has reached the cache
            raise
        # The only place where the host waits for the device, because it needs the text to draft from it.
        self.take_over(running, ends, batch, accepted.tolist(), best.tolist())

    def accept(self, batch: TreeBatch, best: Tensor) -> Tensor:
        """Accept a draft if its parent is accepted and the model chooses this token there.

        Siblings have different tokens, so at most one per depth is accepted.
        """
        accepted = ~batch.is_draft
        for _ in range(self.depth):
            accepted = accepted | (accepted[batch.parents] & (batch.token_ids == best[batch.parents]))
        return accepted

    def build_batch(self, running: list[Request]) -> tuple[TreeBatch, list[int]]:
        """Build the batch: each request's uncached tokens, then its tree. Also return where each request ends."""
        token_ids, positions, slots, tables, requests, contexts, parents, is_draft, ends = ([] for _ in range(9))
        for number, request in enumerate(running):
            room = request.max_tokens - len(request.tokens) - 1  # a step gives one token in addition to the drafts
            decoding = request.num_cached > 0
            tree = lookup_tree(request.tokens, self.branches, min(self.depth, room)) if decoding else []
            while len(request.blocks) * BLOCK_SIZE < self.slots_needed(len(request.tokens) + min(self.depth, room)):
                request.blocks.append(self.free_blocks.pop(0))
            self.most_blocks = max(self.most_blocks, self.num_blocks - len(self.free_blocks))
            first = len(token_ids)
            for position in range(request.num_cached, len(request.tokens)):
                parents.append(max(len(token_ids) - 1, first))
                token_ids.append(request.tokens[position])
                positions.append(position)
            root = len(token_ids) - 1
            for token, parent in tree:
                parents.append(root if parent == NO_PARENT else root + 1 + parent)
                token_ids.append(token)
                positions.append(positions[parents[-1]] + 1)
            is_draft += [False] * (root + 1 - first) + [True] * len(tree)
            slots += [request.slot(position) for position in positions[first:]]
            tables.append(request.blocks + [0] * (self.max_blocks - len(request.blocks)))
            requests += [number] * (len(token_ids) - first)
            contexts += [request.num_cached] * (len(token_ids) - first)
            ends.append(len(token_ids))
        batch = TreeBatch(
            *(self.tensor(values) for values in (token_ids, positions, slots, tables, requests, contexts)),
            tree_mask=self.tree_mask(parents), parents=self.tensor(parents), is_draft=self.tensor(is_draft),
        )  # fmt: skip
        return batch, ends

    def tree_mask(self, parents: list[int]) -> Tensor:
        """Let every token see itself and everything that its parent sees. A parent precedes its children."""
        mask = torch.eye(len(parents), dtype=torch.bool)
        for token, parent in enumerate(parents):
            mask[token] |= mask[parent]
        return mask.to(self.device)

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values, device=self.device)

    def take_over(
        self, running: list[Request], ends: list[int], batch: TreeBatch, accepted: list[bool], best: list[int]
    ) -> None:
        token_ids, is_draft = batch.token_ids.tolist(), batch.is_draft.tolist()
        for request, start, end in zip(running, [0, *ends], ends, strict=False):
            path = [token for token in range(start, end) if accepted[token]]  # from the root to a leaf
            request.tokens += [token_ids[token] for token in path if is_draft[token]]
            request.num_cached = len(request.tokens)
            request.tokens.append(best[path[-1]])

    def generate(self, prompts: list[list[int]], num_output_tokens: int) -> list[list[int]]:
        """Decode every prompt. New prompts join the running batch as others finish."""
        waiting = [Request(list(p), len(p) + num_output_tokens, i) for i, p in enumerate(prompts)]
        running: list[Request] = []
        outputs: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            if waiting and len(running) < self.max_requests:
                running.append(waiting.pop(0))
            self.step(running)
            for request in [r for r in running if len(r.tokens) >= r.max_tokens]:
                running.remove(request)
                self.free_blocks += request.blocks
                outputs[request.index] = request.tokens[-num_output_tokens:]
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"][: 1 + torch.cuda.is_available()])
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=48)
    arguments = parser.parse_args()

    config = LlamaConfig()
    prompts = make_prompts(arguments.num_prompts, config.vocab_size)

    def run(name: str, branches: int) -> list[list[int]]:
        verifier = TreeVerifier(config, branches=branches, depth=arguments.depth, device=arguments.device)
        outputs = verifier.generate(prompts, arguments.output_tokens)
        stats = verifier.buffer.stats()
        print(
            f"{name:8} {stats.windows:4} steps, {stats.staged} tokens staged ({stats.stage_operations} stage "
            f"operations in {config.num_layers} layers), {stats.committed} committed, {stats.rejected} rejected"
        )
        return outputs

    plain, chain = run("plain", 0), run("chain", 1)
    tree = run("tree", arguments.branches)
    same = plain == chain == tree
    print(f"same output as plain greedy decoding: {'yes' if same else 'NO'}")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
