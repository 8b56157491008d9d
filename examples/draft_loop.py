"""Run the loop of a draft model in two ways: eagerly, and with one CUDA graph for all steps.

    python examples/draft_loop.py                    # CPU: both bodies, launched from the host
    python examples/draft_loop.py --device cuda      # the graph

A separate draft model proposes K tokens for each request. Its first pass takes K + 2 tokens per request: the K + 1
tokens that the target verified in the last round, and the token that the target sampled. It ends with draft 0. Each
further step takes one token per request. Both passes are captured for padded request counts.

Read :class:`StandaloneFirstPass` (the device work around the first pass), ``PagedMetadataAdapter`` of ``paged_drafter``
(the attention metadata), and :class:`Drafter` (how the parts fit together). A random stand-in for the target accepts a
random number of drafts and samples a random token.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from paged_drafter import DrafterConfig, PagedDrafter, PagedMetadata, PagedMetadataAdapter
from paged_llama import init_weights, make_caches
from torch import Tensor

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftSampler, FirstPass, GraphKey


@dataclass
class TargetBatch:
    """The results of the target's last step, which are the input of a first pass.

    The tensors are allocated once and `load` fills them, so graphs may read them. The tokens of request i are
    ``[query_start_loc[i], query_start_loc[i + 1])``; the last ``num_rejected[i]`` of them were rejected.
    ``next_tokens`` holds the tokens that the target sampled, by request-state index.
    """

    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    query_start_loc: Tensor  # int32 [M + 1]
    seq_lens: Tensor  # int32 [M]
    num_rejected: Tensor  # int32 [M]
    next_tokens: Tensor  # int64 [S]

    @classmethod
    def allocate(cls, max_num_reqs: int, max_num_tokens: int, device: str) -> TargetBatch:
        ids, starts, lens, rejected = (
            torch.zeros(n, dtype=torch.int32, device=device)
            for n in (max_num_tokens, max_num_reqs + 1, max_num_reqs, max_num_reqs)
        )
        positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        return cls(ids, positions, starts, lens, rejected, torch.zeros_like(positions[:max_num_reqs]))

    def load(self, tokens: Tensor, first_positions: Tensor, num_rejected: Tensor, states: Tensor, next: Tensor) -> None:
        """Load one round: ``tokens`` [R, T] have the positions from ``first_positions`` [R] on."""
        rows, length = tokens.shape
        self.input_ids[: tokens.numel()].copy_(tokens.flatten())
        positions = first_positions[:, None] + torch.arange(length)
        self.positions[: tokens.numel()].copy_(positions.flatten())
        self.query_start_loc.copy_((torch.arange(len(self.query_start_loc)) * length).clamp(max=tokens.numel()))
        self.seq_lens[:rows].copy_(first_positions + length)
        self.num_rejected[:rows].copy_(num_rejected)
        self.next_tokens[states.to(self.next_tokens.device)] = next.to(self.next_tokens.device)


class StandaloneFirstPass(FirstPass):
    """Each request becomes: accepted tokens | the target's token | rejected tokens. Sample at the target's token."""

    def __init__(self, target: TargetBatch, buffers: DraftBuffers, max_num_tokens: int, max_len: int) -> None:
        self.target, self.buffers, self.max_len = target, buffers, max_len
        device = buffers.device
        self.unwritten, self.is_masked = torch.zeros(2, max_num_tokens, dtype=torch.bool, device=device)
        self.sample_indices = torch.zeros(buffers.max_num_reqs, dtype=torch.int64, device=device)
        self.sampler: DraftSampler
        buffers.register(**{f"target_{name}": tensor for name, tensor in vars(target).items()})

    def expand(self, key: GraphKey) -> None:
        target, buffers, rows, tokens = self.target, self.buffers, key.num_reqs, key.num_tokens
        idx_mapping = buffers.idx_mapping[:rows]
        ops.copy_expand_inputs(
            target.input_ids, target.positions, target.query_start_loc, target.num_rejected[:rows],
            target.next_tokens, buffers.input_ids[:tokens], buffers.positions[:tokens], self.unwritten[:tokens],
            self.is_masked[:tokens], self.sample_indices, idx_mapping=idx_mapping,
        )  # fmt: skip
        # A token after the end of the sequence gets no slot: at a clamped position it would share the slot of another
        # token.
        positions = buffers.positions[:tokens]
        self.unwritten[:tokens].logical_or_(positions >= self.max_len)
        positions.clamp_(max=self.max_len - 1)
        # Padded rows have no tokens: they start at the end of the last real row, and their length is 0.
        real = idx_mapping >= 0
        starts = torch.arange(rows + 1, device=positions.device)
        buffers.query_start_loc[: rows + 1].copy_(torch.minimum(starts, real.sum()) * key.query_len)
        buffers.seq_lens[:rows].copy_((target.seq_lens[:rows] + 1).clamp(max=self.max_len) * real)

    def finish(self, key: GraphKey, output: Tensor, next_hidden: Tensor | None) -> None:
        target, buffers, rows = self.target, self.buffers, key.num_reqs
        places = self.sample_indices[:rows]
        positions = buffers.positions[places]
        sampled = self.sampler(key, output[places], positions)
        buffers.draft_tokens[:rows, 0].copy_(sampled)
        buffers.positions[:rows].copy_(positions)
        # One more than the target's lengths, for the token that `expand` inserted. Clamped only at the end.
        ops.prepare_decode_inputs(
            buffers.draft_tokens[:rows], target.seq_lens + 1, target.num_rejected, buffers.input_ids,
            buffers.positions, buffers.query_start_loc, buffers.seq_lens, self.max_len, buffers.idx_mapping,
        )  # fmt: skip


class Drafter:
    """A draft model with its cache, buffers and loop.

    Args:
        num_drafts: K.
        max_num_reqs: number of rows of the buffers and of the block tables.
        max_len: maximum sequence length.
        prompt_len: maximum length of a prompt, which is one first pass.
        dtype: dtype of the model; its cache is float32.
    """

    def __init__(
        self,
        config: DrafterConfig,
        num_drafts: int,
        max_num_reqs: int,
        max_len: int,
        device: str = "cpu",
        *,
        prompt_len: int = 16,
        dtype: torch.dtype = torch.float32,
        adapter: type[PagedMetadataAdapter] = PagedMetadataAdapter,
        loop: type[DraftLoop] = DraftLoop,
        debug: bool = False,
    ) -> None:
        self.config, self.num_drafts, self.device = config, num_drafts, device
        columns = -(-max_len // config.block_size)
        tokens = max(max_num_reqs * (num_drafts + 2), prompt_len + 1)
        order = torch.randperm(max_num_reqs * columns, generator=torch.Generator().manual_seed(0))
        self.block_tables = order.int().view(max_num_reqs, columns).to(device)
        self.caches = make_caches(config, max_num_reqs * columns, config.block_size, device)
        self.model = PagedDrafter(config, self.caches, self.block_tables)
        init_weights(self.model, 0, config.init_scale)
        self.model.to(device=device, dtype=dtype)

        self.buffers = DraftBuffers.allocate(max_num_reqs, num_drafts, device, max_num_tokens=tokens)
        self.temperature = torch.zeros(max_num_reqs, device=device)
        self.seeds = torch.arange(max_num_reqs, device=device)
        self.target = TargetBatch.allocate(max_num_reqs, tokens, device)
        self.first_pass = StandaloneFirstPass(self.target, self.buffers, tokens, max_len)
        sampler = DraftSampler(self.buffers, self.temperature, self.seeds, self.model.compute_logits)
        self.first_pass.sampler = sampler
        metadata = adapter(config, self.buffers, self.block_tables, tokens, self.first_pass.unwritten)
        self.loop = loop(
            self.run_model,
            sampler,
            self.buffers,
            metadata,
            num_drafts,
            max_len,
            first_pass=self.first_pass,
            debug=debug,
        )

    def run_model(self, key: GraphKey, metadata: PagedMetadata) -> Tensor:
        return self.model(self.buffers.input_ids[: key.num_tokens], metadata)

    def capture(self, request_counts: list[int]) -> None:
        """Capture the first pass and the loop at start-up, for every padded request count."""
        keys = [GraphKey(count, length) for count in request_counts for length in (self.num_drafts + 2, 1)]
        self.loop.capture(keys)

    def propose(
        self,
        states: Tensor,
        num_tokens: int,
        mode: str = "auto",
        replay: bool = True,
        padded: int | None = None,
        num_drafts: int | None = None,
    ) -> Tensor:
        """Draft for the requests of `states`, after ``self.target.load``.

        Args:
            states: int64 ``[R]``: the rows of the requests in the block tables.
            num_tokens: number of target tokens of each request.
            mode: as in ``DraftLoop.run``.
            replay: as in ``DraftLoop.run``.
            num_drafts: as in ``DraftLoop.run``.
            padded: number of rows to run with. None means what the loop chooses.

        Returns:
            Drafts ``[R, K]``, or the requested number of columns: a view.
        """
        rows, query_len = len(states), num_tokens + 1
        first_key = None if padded is None else GraphKey(padded, query_len)
        key = None if padded is None else GraphKey(padded)
        self.buffers.idx_mapping[:rows].copy_(states)
        self.buffers.idx_mapping[rows:].fill_(-1)
        self.loop.run_first_pass(rows, query_len, mode, key=first_key, replay=replay)
        # prepare_decode_inputs has just made every row from `rows` on inert.
        return self.loop.run(rows, mode, key=key, replay=replay, inert_tails=True, num_drafts=num_drafts)


def play(
    drafter: Drafter, mode: str, rounds: int, temperature: float, seed: int = 0, **options: bool | int
) -> list[list[int]]:
    """Serve one batch of prompts for some rounds, and return every draft of every round."""
    random = torch.Generator().manual_seed(seed)
    drafter.temperature.fill_(temperature)
    num_reqs, num_drafts, vocab = drafter.buffers.max_num_reqs - 1, drafter.num_drafts, drafter.config.vocab_size
    states = torch.randperm(drafter.buffers.max_num_reqs, generator=random)[:num_reqs]
    lengths = torch.zeros(num_reqs, dtype=torch.int64)
    drafts = torch.zeros(num_reqs, num_drafts, dtype=torch.int64)
    last = torch.randint(vocab, (num_reqs,), generator=random)
    for row in range(num_reqs):  # prompts differ in length, so run them one at a time, eagerly
        length = int(torch.randint(4, 13, (1,), generator=random))
        prompt = torch.randint(vocab, (1, length), generator=random)
        only = states[row : row + 1]
        drafter.target.load(prompt, torch.zeros(1).long(), torch.zeros(1), only, last[row : row + 1])
        drafts[row] = drafter.propose(only, length, "eager")[0].cpu()
        lengths[row] = length
    proposed = [drafts.tolist()]
    for _ in range(rounds):
        verified = torch.cat((last[:, None], drafts), dim=1)
        num_rejected = torch.randint(num_drafts + 1, (num_reqs,), generator=random)
        last = torch.randint(vocab, (num_reqs,), generator=random)
        drafter.target.load(verified, lengths, num_rejected, states, last)
        drafts = drafter.propose(states, num_drafts + 1, mode, **options).cpu()
        lengths += num_drafts + 1 - num_rejected
        proposed.append(drafts.tolist())
    return [row for drafts_of_round in proposed for row in drafts_of_round]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"][: 1 + torch.cuda.is_available()])
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--num-reqs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    if min(arguments.num_drafts, arguments.num_reqs, arguments.rounds) < 1:
        parser.error("--num-drafts, --num-reqs and --rounds must be at least 1")
    max_len = 16 + (arguments.rounds + 1) * (arguments.num_drafts + 1)
    # One row more than requests, so that every replay has a padded row. The dtype is float64, because a padded batch
    # may add in another order than the eager one. This must not change which of two tokens wins.
    drafter = Drafter(
        DrafterConfig(),
        arguments.num_drafts,
        arguments.num_reqs + 1,
        max_len,
        arguments.device,
        dtype=torch.float64,
        debug=True,
    )
    rows = arguments.num_reqs + 1
    if arguments.device == "cpu":  # no graphs: the same bodies with the same padding
        options = {"replay": False, "padded": rows}
    else:
        options = {}
        drafter.capture([rows])
    outputs = {}
    for mode in ("eager", "loop"):
        start = time.perf_counter()
        outputs[mode] = play(drafter, mode, arguments.rounds, arguments.temperature, **(options if outputs else {}))
        print(f"{mode:<6} {1e3 * (time.perf_counter() - start) / arguments.rounds:7.1f} ms per round, prompts included")
    same = outputs["loop"] == outputs["eager"]
    print(f"the same {len(outputs['eager']) * arguments.num_drafts} drafts in both modes: {'yes' if same else 'NO'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
