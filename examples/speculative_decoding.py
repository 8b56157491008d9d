"""Speculative decoding of several prompts, with a KV cache that never keeps a rejected draft.

    python examples/speculative_decoding.py --compile --num-drafts 4

For every running request, each step verifies the last sampled token and a few drafts. The drafts come from prompt
lookup: the tokens that followed the same token earlier in the text. New prompts share the batch. nwor_ops makes the
cache writes of each step one transaction:

    begin      one kernel finds out which tokens of the batch are drafts;
    forward    at each layer one kernel writes keys and values, and saves the rows that drafts overwrite;
    commit     two kernels find the rejected drafts and restore the saved rows, in all layers at the same time.

With `--mode stage`, begin sends the drafts to shadow pages, and commit copies the accepted ones to their slots; nothing
else changes. No kernel allocates memory or waits for the device. After commit, the cache is as if no rejected row had
been written.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from paged_llama import Batch, LlamaConfig, PagedLlama, init_weights, make_caches
from torch import Tensor

from nwor_ops import DraftCommitManager, LayerCache, Layout, Window, num_shadow_blocks
from nwor_ops.transaction.manager import DEFAULT_GROUP

BLOCK_SIZE = 8


def prompt_lookup(tokens: list[int], num_drafts: int) -> list[int]:
    """Return up to `num_drafts` tokens that followed the last token at its latest earlier place; maybe none."""
    for place in range(len(tokens) - 2, -1, -1):
        if tokens[place] == tokens[-1]:
            return tokens[place + 1 : place + 1 + num_drafts]
    return []


@dataclass
class Request:
    tokens: list[int]  # the prompt, then the sampled tokens
    max_tokens: int  # maximum length of prompt and output
    index: int  # index of the prompt
    blocks: list[int] = field(default_factory=list)  # pages of the request
    num_cached: int = 0  # number of tokens whose keys and values are in the cache
    drafts: list[int] = field(default_factory=list)  # drafts of this step

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@dataclass
class Step:
    """One batch: the inputs of the model, of the window and of the sampler."""

    batch: Batch
    window: Window
    draft_token_ids: Tensor  # int64 [max_draft_tokens]: the drafts of all requests in order, then padding
    sample_indices: Tensor  # int64 [Q, K + 1]: the tokens whose logits verify the drafts and give one more token
    drafts: Tensor  # int64 [Q, K]: the drafts, one row per request, -1 = none


class Engine:
    """A continuous batch of greedy requests. `num_drafts=0` is plain decoding."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        num_drafts: int,
        max_requests: int = 4,
        max_context: int = 96,
        device: str = "cpu",
        layout: str = "NHD",
        compile: bool = False,
        mode: str = "cow",
        seed: int = 0,
    ) -> None:
        self.num_drafts, self.max_requests, self.device = num_drafts, max_requests, device
        self.max_blocks = -(-max_context // BLOCK_SIZE)
        # Compiled code sees only two batch sizes: decode steps, and steps with prompts.
        self.token_budgets = (max_requests * (num_drafts + 1), max_requests * (num_drafts + 1) + max_context)
        num_blocks = max_requests * self.max_blocks
        self.free_blocks = list(range(num_blocks))
        # Mode "stage" needs shadow pages after those of requests, which no request ever gets.
        most_drafts = max(1, num_drafts)
        shadow = num_shadow_blocks(max_requests, most_drafts, BLOCK_SIZE) if mode == "stage" else 0
        self.caches = make_caches(config, num_blocks + shadow, BLOCK_SIZE, device, layout)

        # Set-up: register every layer's cache, then allocate the undo log, max_draft_tokens rows per layer. nwor_ops
        # never allocates more. (Mode "stage" has no log, only records of its pages.)
        self.manager = DraftCommitManager(
            max_num_tokens=self.token_budgets[-1],
            max_num_requests=max_requests,
            max_draft_tokens=max_requests * most_drafts,
            device=device,
            mode=mode,
            max_drafts_per_request=most_drafts,
        )
        layer_names = [f"layers.{index}" for index in range(config.num_layers)]
        for name, cache in zip(layer_names, self.caches, strict=True):
            self.manager.register_layer(name, LayerCache.packed(cache))
        self.manager.allocate()

        model = PagedLlama(config, layer_names, self.caches, self.manager)
        init_weights(model, seed, config.init_scale)
        self.model = model.to(device)
        # fullgraph: manager.write is not a graph break. dynamic=False: one graph per batch size above.
        self.forward = torch.compile(self.model, fullgraph=True, dynamic=False) if compile else self.model

    @torch.no_grad()
    def step(self, running: list[Request]) -> Tensor:
        """Run one step for every running request. Return the sampled tokens, int64 [Q, K + 1], -1 = none."""
        step = self.build_step(running)

        # Open the window *before* the forward, and after the last change of the slot mapping. From here on, the
        # manager's device buffers tell which tokens are drafts.
        # Layers with different page numbers would form several groups; here there is one group. Mode "stage" redirects
        # the pages that drafts touch in these tensors, until commit. An engine with persistent tensors binds them once.
        batch = step.batch
        self.manager.bind(Layout({DEFAULT_GROUP: batch.slot_mapping}, {DEFAULT_GROUP: batch.block_tables}))
        self.manager.begin(step.window)
        try:
            logits = self.forward(step.batch)
            sampled = self.sample(logits, step)
            # Sampling tells which drafts are accepted. The device finds the rejected ones and restores their rows, so
            # the host does not wait.
            self.manager.commit(step.draft_token_ids, sampled)
        except BaseException:
            # After any error, undo every draft that was written. The engine can then run the step again, or drop the
            # request and continue with a clean cache.
            self.manager.cancel()
            raise
        return sampled

    def sample(self, logits: Tensor, step: Step) -> Tensor:
        """Sample greedily with rejection, on the device: the accepted drafts and one more token."""
        best = logits.argmax(dim=-1)[step.sample_indices]
        num_accepted = (best[:, :-1] == step.drafts).long().cumprod(dim=1).sum(dim=1)
        columns = torch.arange(best.shape[1], device=best.device)
        return torch.where(columns <= num_accepted[:, None], best, -1)

    def build_step(self, running: list[Request]) -> Step:
        """Flatten the requests into one batch. Each has its uncached tokens, then its drafts."""
        token_ids, positions, slots, tables, requests, sample_indices = [], [], [], [], [], []
        for number, request in enumerate(running):
            tokens = request.tokens + request.drafts
            while len(request.blocks) * BLOCK_SIZE < len(tokens):
                request.blocks.append(self.free_blocks.pop(0))
            tables.append(request.blocks + [0] * (self.max_blocks - len(request.blocks)))
            for position in range(request.num_cached, len(tokens)):
                token_ids.append(tokens[position])
                positions.append(position)
                slots.append(request.slot(position))
                requests.append(number)
            first = len(token_ids) - len(request.drafts) - 1  # its logits verify the first draft
            last = len(token_ids) - 1
            sample_indices.append([min(first + j, last) for j in range(self.num_drafts + 1)])

        absent = self.max_requests - len(running)
        # Pad to fixed shapes. A padded token has slot -1; a padded request has neither tokens nor drafts.
        missing = next(size for size in self.token_budgets if size >= len(token_ids)) - len(token_ids)
        batch = Batch(
            self.tensor(token_ids + [0] * missing),
            self.tensor(positions + [0] * missing),
            self.tensor(slots + [-1] * missing),
            self.tensor(tables + [[0] * self.max_blocks] * absent, torch.int32),
            self.tensor(requests + [0] * missing),
        )
        num_tokens = [len(r.tokens) + len(r.drafts) - r.num_cached for r in running] + [0] * absent
        drafts = [r.drafts for r in running] + [[]] * absent
        window = Window(
            # Drafts are the last tokens of a request, so two cumulative counts determine which tokens they are.
            query_start_loc=self.tensor([0, *accumulate(num_tokens)], torch.int32),
            cu_num_draft_tokens=self.tensor(list(accumulate(map(len, drafts))), torch.int32),
            # The host knows this number here; None is allowed too. If it is 0, commit launches no kernels.
            num_draft_tokens=sum(map(len, drafts)),
            seq_lens=self.tensor([len(r.tokens) + len(r.drafts) for r in running] + [0] * absent, torch.int32),
        )
        flat = [token for row in drafts for token in row]
        return Step(
            batch,
            window,
            self.tensor(flat + [-1] * (self.manager.max_draft_tokens - len(flat))),
            self.tensor(sample_indices + [[0] * (self.num_drafts + 1)] * absent),
            self.tensor([row + [-1] * (self.num_drafts - len(row)) for row in drafts]),
        )

    def tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def generate(self, prompts: list[list[int]], num_output_tokens: int) -> list[list[int]]:
        """Decode every prompt. New prompts join the running batch as others finish."""
        waiting = [Request(list(p), len(p) + num_output_tokens, i) for i, p in enumerate(prompts)]
        running: list[Request] = []
        outputs: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            if waiting and len(running) < self.max_requests:  # one prompt per step, in one batch with decodes
                running.append(waiting.pop(0))
            for request in running:
                room = request.max_tokens - len(request.tokens) - 1  # a step gives one token in addition to the drafts
                decoding = request.num_cached > 0
                request.drafts = prompt_lookup(request.tokens, min(self.num_drafts, room)) if decoding else []

            # The only place where the host waits for the device, because it needs the text to draft from it.
            for request, row in zip(running, self.step(running).tolist(), strict=False):
                request.num_cached = len(request.tokens)  # all known tokens are written now ...
                sampled = [token for token in row if token >= 0]
                request.num_cached += len(sampled) - 1  # ... and so are the accepted drafts, but not the last token
                request.tokens += sampled
            for request in [r for r in running if len(r.tokens) >= r.max_tokens]:
                running.remove(request)
                self.free_blocks += request.blocks
                outputs[request.index] = request.tokens[-num_output_tokens:]
        return outputs


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (5 + 3 * i,), generator=generator).tolist() for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"][: 1 + torch.cuda.is_available()])
    parser.add_argument("--layout", choices=["NHD", "HND"], default="NHD")
    parser.add_argument("--mode", choices=["cow", "stage"], default="cow")
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=48)
    arguments = parser.parse_args()

    config = LlamaConfig()
    prompts = make_prompts(arguments.num_prompts, config.vocab_size)

    def run(name: str, num_drafts: int) -> tuple[list[list[int]], Engine]:
        engine = Engine(
            config,
            num_drafts=num_drafts,
            device=arguments.device,
            layout=arguments.layout,
            compile=arguments.compile,
            mode=arguments.mode,
        )
        engine.generate(prompts, arguments.output_tokens)  # the warm-up compiles
        before = engine.manager.stats()
        start = time.perf_counter()
        outputs = engine.generate(prompts, arguments.output_tokens)
        seconds = time.perf_counter() - start
        after = engine.manager.stats()
        counts = {what: n - before.as_dict()[what] for what, n in after.as_dict().items()}
        print(
            f"{name:12} {counts['windows']:4} steps, {sum(map(len, outputs)) / seconds:7.0f} tokens/s, "
            f"{counts['drafted']} drafted, {counts['accepted']} accepted, {counts['rejected']} rejected"
        )
        return outputs, engine

    plain, _ = run("plain", 0)
    speculative, engine = run("speculative", arguments.num_drafts)
    print(f"undo log: {engine.manager.log_bytes} bytes")
    print(f"same output as plain greedy decoding: {'yes' if speculative == plain else 'NO'}")
    raise SystemExit(speculative != plain)


if __name__ == "__main__":
    main()
