"""Speculative decoding of a hybrid model: each request has one recurrent state per linear layer.

    python examples/recurrent_decoding.py --compile --num-drafts 4
    python examples/recurrent_decoding.py --form chunk
    python examples/recurrent_decoding.py --num-drafts 0 --form chunk

Three of four layers are Gated DeltaNets, as in Qwen3-Next. Instead of keys and values of all tokens, a request has one
matrix per head, which every token changes. The effect of a rejected draft cannot be undone, so engines usually keep the
matrix after each of the K + 1 tokens of a step. Here the tokens of a step never reach it:

    begin      one kernel finds the rows of each request's record that were accepted;
    verify     at each layer one kernel applies them to the state, runs this step's tokens, and records them;
    commit     tells how many tokens are kept.

In the chunk form accepted rows of several steps stay in the record, and only a step that finds 16 of them stores the
state. It computes outputs from the stored state and the pending rows. This gains most without drafts.

The other layers have a paged KV cache, and their drafts are a transaction as in `speculative_decoding.py`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from paged_llama import Attention, Batch, Block, LlamaConfig, PagedLlama, init_weights, make_caches
from speculative_decoding import BLOCK_SIZE, Request, make_prompts, prompt_lookup
from torch import Tensor, nn

from nwor_ops import DraftCommitManager, LayerCache, Layout, RecurrentCache, RecurrentStates, Window
from nwor_ops.recurrent.cache import CHUNK
from nwor_ops.transaction.manager import DEFAULT_GROUP, State


@dataclass(frozen=True)
class HybridConfig(LlamaConfig):
    attention_every: int = 4  # the other layers are linear
    linear_key_heads: int = 1
    linear_value_heads: int = 2
    linear_head_size: int = 64
    # How much the weights favor one successor of each token. Real texts repeat themselves, but texts of a random model
    # do not, and then no draft from the text would be right.
    repetition: float = 8.0

    def is_attention(self, layer: int) -> bool:
        return layer % self.attention_every == self.attention_every - 1


class GatedDeltaNet(nn.Module):
    """A layer of linear attention. (Real layers start with a short convolution, and an engine keeps its few rows.)"""

    def __init__(self, config: HybridConfig, layer_name: str, cache: RecurrentCache, states: RecurrentStates) -> None:
        super().__init__()
        self.layer_name, self.dtype, self.states = layer_name, cache.record_keys.dtype, states
        self.head_size, key_heads, value_heads = (
            config.linear_head_size, config.linear_key_heads, config.linear_value_heads,
        )  # fmt: skip
        self.heads = [key_heads, key_heads, value_heads, value_heads]  # queries, keys, values, gates
        self.qkvg = nn.Linear(config.hidden_size, sum(self.heads) * self.head_size, bias=False)
        self.ab = nn.Linear(config.hidden_size, 2 * value_heads, bias=False)
        self.A_log = nn.Parameter(torch.linspace(0.0, 2.0, value_heads))
        self.dt_bias = nn.Parameter(torch.full((value_heads,), -3.0))
        self.norm = nn.Parameter(torch.ones(self.head_size))
        self.out = nn.Linear(value_heads * self.head_size, config.hidden_size, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return query, key, value and gate of each token, ``[T, heads, D]``, and decay and step, ``[T,
        value heads]``."""
        packed = self.qkvg(x).to(self.dtype).view(len(x), -1, self.head_size)
        return *packed.split(self.heads, dim=1), *self.ab(x).chunk(2, dim=-1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v, gate, a, b = self.project(x)
        # The only call. It reads and writes the state once, without this step's tokens. begin() has written to the
        # states' device buffers which tokens of the last step were accepted, as for manager.write.
        attended = self.states.verify(
            self.layer_name, q, k, v, a, b, self.A_log, self.dt_bias, gate=gate, norm_weight=self.norm
        )
        return self.out(attended.flatten(1).to(x.dtype))


class HybridLlama(PagedLlama):
    def __init__(
        self, config: HybridConfig, caches: dict[str, Tensor | RecurrentCache], manager: DraftCommitManager,
        states: RecurrentStates,
    ) -> None:  # fmt: skip
        super().__init__(config, [], [], manager)
        for name, cache in caches.items():
            kind, owner = (GatedDeltaNet, states) if isinstance(cache, RecurrentCache) else (Attention, manager)
            self.blocks.append(Block(config, name, cache, owner, kind))
        self.repetition = config.repetition

    @torch.no_grad()
    def favour_repetition(self) -> None:
        vocabulary, hidden = self.head.weight.shape
        self.embedding.weight *= hidden**0.5
        successors = (torch.arange(vocabulary) + 8) % vocabulary
        self.head.weight[successors] += self.repetition / hidden * self.embedding.weight


@dataclass
class HybridRequest(Request):
    state_slot: int = 0
    num_given: int = 0  # number of tokens of this step before the drafts


@dataclass
class Step:
    batch: Batch
    window: Window  # slots of the attention layers
    state_slots: Tensor  # int64 [Q]: 0 = padding
    num_given: Tensor  # int32 [Q]
    draft_token_ids: Tensor
    sample_indices: Tensor
    drafts: Tensor


class HybridEngine:
    """A continuous batch of greedy requests. A step takes up to ``num_drafts + 1`` tokens of each."""

    def __init__(
        self,
        config: HybridConfig,
        *,
        num_drafts: int,
        max_requests: int = 4,
        max_context: int = 96,
        device: str = "cpu",
        compile: bool = False,
        seed: int = 0,
        form: str = "exact",
    ) -> None:
        self.num_drafts, self.max_requests, self.device = num_drafts, max_requests, device
        self.max_window = num_drafts + 1
        self.num_tokens = max_requests * self.max_window  # size of every batch: one shape, one graph
        self.max_blocks = -(-max_context // BLOCK_SIZE)
        num_blocks = max_requests * self.max_blocks
        self.free_blocks, self.free_slots = list(range(num_blocks)), list(range(1, max_requests + 1))

        # Set-up of the attention layers, as in speculative_decoding.py ...
        self.manager = DraftCommitManager(
            max_num_tokens=self.num_tokens,
            max_num_requests=max_requests,
            max_draft_tokens=max(max_requests * num_drafts, 1),
            device=device,
        )
        # ... and of the linear layers: a state and a record for each request. Slot 0 belongs to no request.
        chunk = CHUNK if form == "chunk" else 0
        self.states = RecurrentStates(max_num_requests=max_requests, device=device)
        paged = replace(config, num_layers=sum(map(config.is_attention, range(config.num_layers))))
        kv_caches = iter(make_caches(paged, num_blocks, BLOCK_SIZE, device))
        self.caches: dict[str, Tensor | RecurrentCache] = {}
        for index in range(config.num_layers):
            name = f"layers.{index}"
            if config.is_attention(index):
                self.caches[name] = next(kv_caches)
                self.manager.register_layer(name, LayerCache.packed(self.caches[name]))
            else:
                self.caches[name] = RecurrentCache.new(
                    num_slots=max_requests + 1,
                    max_window=self.max_window,
                    num_key_heads=config.linear_key_heads,
                    num_value_heads=config.linear_value_heads,
                    key_size=config.linear_head_size,
                    value_size=config.linear_head_size,
                    chunk=chunk,
                    dtype=torch.float32 if device == "cpu" else torch.bfloat16,
                    device=device,
                )
                self.states.register_layer(name, self.caches[name])
        self.manager.allocate()
        self.states.allocate()

        model = HybridLlama(config, self.caches, self.manager, self.states)
        init_weights(model, seed, config.init_scale)
        model.favour_repetition()
        self.model = model.to(device)
        # fullgraph: neither manager.write nor states.verify is a graph break, and no state is copied.
        self.forward = torch.compile(self.model, fullgraph=True, dynamic=False) if compile else self.model

    @torch.no_grad()
    def step(self, running: list[HybridRequest]) -> Tensor:
        """Run one step for every running request. Return the sampled tokens, int64 [Q, K + 1], -1 = none."""
        step = self.build_step(running)
        self.manager.bind(Layout({DEFAULT_GROUP: step.batch.slot_mapping}))  # new tensors in each step
        self.manager.begin(step.window)
        try:
            self.states.begin(step.state_slots, step.window.query_start_loc)
            logits = self.forward(step.batch)
            sampled, num_accepted = self.sample(logits, step)
            self.manager.commit(step.draft_token_ids, sampled)
            self.states.commit(step.num_given + num_accepted)  # tokens that are kept; the others never reach a state
        except BaseException:
            for transaction in (self.manager, self.states):  # the engine can run the step again, or drop the request
                if transaction.state is State.OPEN:
                    transaction.cancel()
            raise
        return sampled

    def sample(self, logits: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Sample greedily with rejection, on the device: the accepted drafts and one more token, and the number of
        accepted drafts."""
        best = logits.argmax(dim=-1)[step.sample_indices]
        num_accepted = (best[:, :-1] == step.drafts).long().cumprod(dim=1).sum(dim=1)
        columns = torch.arange(best.shape[1], device=best.device)
        return torch.where(columns <= num_accepted[:, None], best, -1), num_accepted.int()

    def build_step(self, running: list[HybridRequest]) -> Step:
        """Flatten the requests into one batch. Each has its next tokens, then its drafts.

        A prompt is also processed in windows, of which all tokens are kept. A real engine has a kernel for prompts that
        writes the state itself, and sets ``is_window=False`` for such a request.
        """
        token_ids, positions, slots, tables, requests, sample_indices = [], [], [], [], [], []
        for number, request in enumerate(running):
            tokens = request.tokens[: request.num_cached + request.num_given] + request.drafts
            while len(request.blocks) * BLOCK_SIZE < len(tokens):
                request.blocks.append(self.free_blocks.pop(0))
            tables.append(request.blocks + [0] * (self.max_blocks - len(request.blocks)))
            for position in range(request.num_cached, len(tokens)):
                token_ids.append(tokens[position])
                positions.append(position)
                slots.append(request.slot(position))
                requests.append(number)
            first = len(token_ids) - len(request.drafts) - 1  # its logits verify the first draft
            sample_indices.append([min(first + j, len(token_ids) - 1) for j in range(self.max_window)])

        absent, missing = self.max_requests - len(running), self.num_tokens - len(token_ids)
        batch = Batch(
            self.tensor(token_ids + [0] * missing),
            self.tensor(positions + [0] * missing),
            self.tensor(slots + [-1] * missing),
            self.tensor(tables + [[0] * self.max_blocks] * absent, torch.int32),
            self.tensor(requests + [0] * missing),
        )
        num_given = [request.num_given for request in running] + [0] * absent
        drafts = [request.drafts for request in running] + [[]] * absent
        num_tokens = [given + len(row) for given, row in zip(num_given, drafts, strict=True)]
        flat = [token for row in drafts for token in row]
        window = Window(
            query_start_loc=self.tensor([0, *accumulate(num_tokens)], torch.int32),
            cu_num_draft_tokens=self.tensor(list(accumulate(map(len, drafts))), torch.int32),
            num_draft_tokens=len(flat),
        )
        return Step(
            batch,
            window,
            self.tensor([request.state_slot for request in running] + [0] * absent),
            self.tensor(num_given, torch.int32),
            self.tensor(flat + [-1] * (self.manager.max_draft_tokens - len(flat))),
            self.tensor(sample_indices + [[0] * self.max_window] * absent),
            self.tensor([row + [-1] * (self.num_drafts - len(row)) for row in drafts]),
        )

    def tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def generate(self, prompts: list[list[int]], num_output_tokens: int, speculate: bool) -> list[list[int]]:
        """Decode every prompt. New prompts join the running batch as others finish, and reuse their slots."""
        waiting = [HybridRequest(list(p), len(p) + num_output_tokens, i) for i, p in enumerate(prompts)]
        running: list[HybridRequest] = []
        outputs: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            if waiting and len(running) < self.max_requests:
                running.append(waiting.pop(0))
                running[-1].state_slot = self.free_slots.pop(0)
                self.states.reset(self.tensor([running[-1].state_slot]))
            for request in running:
                self.schedule(request, speculate)
            for request, row in zip(running, self.step(running).tolist(), strict=False):
                request.num_cached += request.num_given
                if request.num_cached == len(request.tokens):  # otherwise, its prompt continues
                    sampled = [token for token in row if token >= 0]
                    request.num_cached += len(sampled) - 1
                    request.tokens += sampled
            for request in [r for r in running if len(r.tokens) >= r.max_tokens]:
                running.remove(request)
                self.free_blocks += request.blocks
                self.free_slots.append(request.state_slot)
                outputs[request.index] = request.tokens[-num_output_tokens:]
        return outputs

    def schedule(self, request: HybridRequest, speculate: bool) -> None:
        """Choose the tokens of this step: known tokens that are not computed yet, followed by drafts after the last of
        them."""
        known = len(request.tokens) - request.num_cached
        request.num_given = min(known, self.max_window)
        room = request.max_tokens - len(request.tokens) - 1  # a step gives one token in addition to the drafts
        decoding = speculate and request.num_cached > 0 and known == request.num_given
        most = min(self.max_window - request.num_given, room)
        request.drafts = prompt_lookup(request.tokens, most) if decoding else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"][: 1 + torch.cuda.is_available()])
    parser.add_argument("--num-drafts", type=int, default=4, help="0: decode without drafts")
    parser.add_argument("--form", choices=("exact", "chunk"), default="exact", help="form of the recurrent windows")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=48)
    arguments = parser.parse_args()

    config = HybridConfig(linear_head_size=128 if arguments.form == "chunk" else 64)  # chunks need heads of 128
    prompts = make_prompts(arguments.num_prompts, config.vocab_size)

    def make_engine(**options: Any) -> HybridEngine:
        engine = HybridEngine(
            config, num_drafts=arguments.num_drafts, device=arguments.device, compile=arguments.compile, **options
        )
        engine.generate(prompts[:1], 2, speculate=False)  # the warm-up compiles
        return engine

    def run(name: str, engine: HybridEngine, speculate: bool) -> list[list[int]]:
        before, start = engine.manager.stats(), time.perf_counter()
        outputs = engine.generate(prompts, arguments.output_tokens, speculate)
        seconds, after = time.perf_counter() - start, engine.manager.stats()
        counts = {what: n - before.as_dict()[what] for what, n in after.as_dict().items()}
        print(
            f"{name:12} {counts['windows']:4} steps, {sum(map(len, outputs)) / seconds:7.0f} tokens/s, "
            f"{counts['drafted']} drafted, {counts['accepted']} accepted, {counts['rejected']} rejected"
        )
        return outputs

    engine = make_engine(form=arguments.form)
    if arguments.num_drafts:  # one engine decodes both ways, so that only the drafts differ
        plain, shown = run("plain", engine, False), run("speculative", engine, True)
    else:  # the plain engine stores the states at every step
        plain, shown = run("plain", make_engine(), False), run(arguments.form, engine, False)
    print(f"same output as plain greedy decoding: {'yes' if shown == plain else 'NO'}")
    raise SystemExit(shown != plain)


if __name__ == "__main__":
    main()
