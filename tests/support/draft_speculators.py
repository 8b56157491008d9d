"""Compare vLLM's speculator for a draft model with ours, on random batches. Run by test_draft_graphs.py:

    TRITON_INTERPRET=1 python draft_speculators.py

Both are real classes of the installed vLLM, and Triton's interpreter runs vLLM's kernels on the CPU. The bodies of the
graphs run from the host, padded as a graph is, with the draft model of `hashing_drafter`. The caches are compared too,
because padded rows must write nothing.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from hashing_drafter import BATCHES, LONGEST, MAX_TOKENS, ROWS, VOCABULARY, K, Model
from host_loop import FAILED, PADDED, HostLoop, failing
from interpreter import use_interpreter
from torch import Tensor

from nwor_ops.testing.oracle import drafter as oracle

BLOCKS = 96
BLOCK_SIZES = (4, 8)
# A dynamic number of drafts. With none or one, only the first pass runs.
SCHEDULE = [[1, 2, K], [3, 3, 1], [4, 4, 0], [5, 6, K - 1]]
FAILING = ("_copy_inputs", "_draft")


class OtherLoopCounts(HostLoop):
    """The loop pads to other request counts than the first pass."""

    padded_loop = (1, 3, 5)


class Group:
    def __init__(self, number: int) -> None:
        self.layer_names, self.kv_cache_group_id = [f"draft.{number}"], number
        self.kv_cache_spec, self.backend = None, SimpleNamespace(get_name=lambda: "TRITON_ATTN")
        self.supports_draft_decode_metadata_update = True

    def get_metadata_builder(self, ubatch_id: int = 0) -> Any:
        return SimpleNamespace(supports_update_block_table=False)

    def build_metadata(self, common: Any, ubatch_idx: int = 0) -> Any:
        return common

    def update_draft_decode_metadata(self, attn_metadata: Any) -> None:
        pass

    def map_to_kernel_block_table(self, block_table: Tensor) -> Tensor:
        return block_table


class BlockTables:
    """The parts that a drafter uses of a class in vLLM. The oracle computes the slots."""

    cp_size = 1

    def __init__(self) -> None:
        self.block_sizes, self.num_kv_cache_groups = list(BLOCK_SIZES), len(BLOCK_SIZES)
        columns = [LONGEST // size + 2 for size in BLOCK_SIZES]
        self.states = [torch.zeros(ROWS, count, dtype=torch.int32) for count in columns]
        self.input_block_tables = [torch.zeros(ROWS, count, dtype=torch.int32) for count in columns]
        self.slot_mappings = torch.zeros(len(BLOCK_SIZES), MAX_TOKENS, dtype=torch.int64)

    def gather(self, idx_mapping: Tensor) -> None:
        for table, state in zip(self.input_block_tables, self.states, strict=True):
            table.zero_()
            table[: len(idx_mapping)] = state[idx_mapping]

    def compute_slot_mappings(
        self, idx_mapping: Tensor, starts: Tensor, positions: Tensor, num_tokens: int, out: Tensor | None = None
    ) -> Tensor:
        slots = self.slot_mappings if out is None else out
        oracle.compute_slot_mappings(idx_mapping, starts, positions, self.states, self.block_sizes, slots)
        return slots[:, :num_tokens]


def make_config(probabilistic: bool, schedule: list[list[int]] | None = None) -> Any:
    draft = SimpleNamespace(get_hidden_size=lambda: 1, get_vocab_size=lambda: VOCABULARY)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.float32,
            head_dtype=torch.float32,
            use_fp64_gumbel=False,
            max_model_len=LONGEST,
            get_vocab_size=lambda: VOCABULARY,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_rank=0,
            decode_context_parallel_size=1,
            use_sequence_parallel_moe=False,
            is_moe_model=False,
        ),
        speculative_config=SimpleNamespace(
            method="draft_model",
            num_speculative_tokens=K,
            num_speculative_tokens_per_batch_size=schedule,
            draft_model_config=draft,
            use_local_argmax_reduction=False,
            enable_adaptive_verification=False,
            draft_sample_method="probabilistic" if probabilistic else "greedy",
            kv_cache_dtype=None,
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={}, fast_moe_cold_start=False, static_all_moe_layers=None
        ),
        watermark_config=None,
        additional_config={},
    )


class Side:
    """One speculator with its own cache, block tables and runner buffers."""

    def __init__(self, kind: Any, config: Any, *more: Any) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        device = torch.device("cpu")
        self.speculator = kind(config, device, *more)
        self.speculator.model = Model(BLOCK_SIZES, BLOCKS)
        self.tables = BlockTables()
        self.target = InputBuffers(ROWS, MAX_TOKENS, device)
        s = self.speculator
        s.attn_groups = [[Group(number)] for number in range(len(BLOCK_SIZES))]
        s.block_tables, s.target_input_buffers = self.tables, self.target
        groups = [SimpleNamespace(layer_names=[f"draft.{number}"]) for number in range(len(BLOCK_SIZES))]
        s.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        s.expanded_slot_mappings = torch.zeros(len(BLOCK_SIZES), MAX_TOKENS + ROWS, dtype=torch.int64)


class Batch:
    """R requests in the step after the target verified their drafts; some may be prompts."""

    def __init__(self, rng: random.Random, uniform: bool, near_end: bool, verified: int, drafts: list[int]) -> None:
        self.rows = rng.randint(1, ROWS)
        self.drafts = drafts[self.rows]
        self.states = rng.sample(range(ROWS), self.rows)
        self.lengths = [verified + 1 if uniform else rng.randint(1, K + 1) for _ in range(self.rows)]
        if not uniform:
            self.lengths[rng.randrange(self.rows)] = rng.randint(K + 2, 12)  # a chunk of a prompt
        first = LONGEST - K - 4 if near_end else 0
        self.first = [
            rng.randint(min(first, LONGEST - length), LONGEST - length - (0 if near_end else 2 * K + 2))
            for length in self.lengths
        ]
        self.rejected = [rng.randint(0, min(K, length - 1)) for length in self.lengths]
        self.logits = [min(length, K + 1) for length in self.lengths]
        self.ids = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in self.lengths]
        self.last_sampled = torch.tensor([[rng.randrange(VOCABULARY)] for _ in range(ROWS)])
        self.uniform = uniform
        self.tables = []
        for size in BLOCK_SIZES:
            columns = LONGEST // size + 2
            # No two requests share a block: a pass may run twice, and the second must read none of the first's rows.
            self.tables.append(torch.tensor(rng.sample(range(1, BLOCKS), ROWS * columns)).view(ROWS, columns))
        self.caches = [torch.tensor([rng.randrange(9999) for _ in range(BLOCKS * size)]) for size in BLOCK_SIZES]
        self.temperature = torch.tensor([rng.choice([0.0, 0.7, 1.3]) for _ in range(ROWS)])
        self.seeds = torch.tensor([rng.randrange(2**40) for _ in range(ROWS)])

    def propose(self, side: Side) -> Tensor:
        for table, state in zip(self.tables, side.tables.states, strict=True):
            state.copy_(table)
        for cache, wanted in zip(side.speculator.model.caches, self.caches, strict=True):
            cache.copy_(wanted)
        idx_mapping = torch.tensor(self.states)
        side.tables.gather(idx_mapping)
        batch = self._input_batch(side.target, idx_mapping)
        rejected = torch.tensor(self.rejected, dtype=torch.int32)
        num_sampled = torch.tensor(self.logits, dtype=torch.int32) - rejected
        last_sampled = self.last_sampled
        if hasattr(side.speculator, "last_sampled"):  # the runner's buffer, at its address
            last_sampled = side.speculator.last_sampled.view(-1, 1).copy_(last_sampled)
        drafts = side.speculator.propose(
            batch, {}, {}, torch.empty(0), None, num_sampled, rejected, last_sampled, torch.empty(0),
            self.temperature, self.seeds,
            num_speculative_tokens=self.drafts,
        )  # fmt: skip
        wanted = drafts[:, : self.drafts].clone()
        drafts[:, self.drafts :] = -1  # as the runner does
        return wanted

    def _input_batch(self, target: Any, idx_mapping: Tensor) -> Any:
        starts = numpy.concatenate(([0], numpy.cumsum(self.lengths))).astype(numpy.int32)
        tokens = int(starts[-1])
        target.query_start_loc.fill_(tokens)
        target.query_start_loc[: self.rows + 1] = torch.from_numpy(starts)
        target.seq_lens.zero_()
        target.seq_lens[: self.rows] = torch.tensor(self.first) + torch.tensor(self.lengths)
        target.input_ids[:tokens] = torch.tensor([token for ids in self.ids for token in ids])
        target.positions[:tokens] = torch.cat(
            [torch.arange(first, first + length) for first, length in zip(self.first, self.lengths, strict=True)]
        )
        return SimpleNamespace(
            num_reqs=self.rows,
            num_tokens=tokens,
            num_scheduled_tokens=numpy.array(self.lengths),
            decode_graph_eligible=self.uniform,
            idx_mapping=idx_mapping,
            query_start_loc=target.query_start_loc[: self.rows + 1],
            query_start_loc_np=starts,
            cu_num_logits=torch.tensor([0, *self.logits], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            has_prefill=not self.uniform,
            seq_lens=target.seq_lens[: self.rows],
            seq_lens_cpu_upper_bound=torch.full((self.rows,), LONGEST, dtype=torch.int32),
            input_ids=target.input_ids[:tokens],
            positions=target.positions[:tokens],
        )


def sample(
    logits: Tensor, idx_mapping: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, **more: Any
) -> Tensor:
    """Replace vLLM's kernel, whose masks the interpreter does not accept: same inputs, other noise."""
    cache, column = more["logits_cache"], int(more["logits_cache_col"])
    tokens = []
    for row, state in enumerate(idx_mapping.tolist()):
        if state < 0:
            tokens.append(0)
            continue
        cache[state, column] = logits[row]
        key = int(seeds[state]) ^ (column << 32)
        noise = random.Random(key * 1_000_033 + int(positions[row]))
        heat = float(temperature[state])
        tokens.append(int((logits[row] + heat * torch.tensor([noise.random() for _ in range(VOCABULARY)])).argmax()))
    return torch.tensor(tokens)


def make_sides(config: Any) -> tuple[Side, Side]:
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    from nwor_ops.vllm.draft_graphs.speculator import GraphedDraftModelSpeculator

    vanilla = Side(StandaloneARSpeculator, config)
    ours = Side(GraphedDraftModelSpeculator, config, torch.zeros(ROWS, 1, dtype=torch.int64), logging.getLogger("nwor"))
    loop = ours.speculator.make_loop(None)
    loop.__class__ = OtherLoopCounts
    ours.speculator.graphs = SimpleNamespace(loop=loop, most_requests=max(PADDED), keys={}, seconds=0.0, bytes=0)
    return vanilla, ours


def compare(probabilistic: bool, schedule: list[list[int]] | None) -> str:
    rng = random.Random(5 + probabilistic)
    vanilla, ours = make_sides(make_config(probabilistic, schedule))
    drafts = ours.speculator.drafts_by_requests
    assert drafts[1:] == ([K] * ROWS if schedule is None else [K, K, 1, 0, K - 1, K - 1])
    columns: Counter[int] = Counter()
    failed: list[str | None] = []
    for number in range(BATCHES):
        verified = rng.choice(drafts[1:])
        batch = Batch(rng, number % 4 != 3, near_end=number % 5 == 4, verified=verified,
                      drafts=drafts)  # fmt: skip
        # Vanilla always drafts K. Here it drafts the requested number, or only the first, because the caches are
        # compared.
        ran_vanilla = batch.rows > max(PADDED)
        # Each part of ours fails in turn. Then vLLM's code drafts, over what ours has written.
        fails = FAILING[sum(map(bool, failed)) % len(FAILING)] if number % 4 == 2 and not ran_vanilla else None
        ran_vanilla |= fails is not None
        vanilla.speculator.num_speculative_steps = K if ran_vanilla else max(batch.drafts, 1)
        wanted = batch.propose(vanilla)
        with failing(ours.speculator, fails):
            found = batch.propose(ours)
        failed.append(fails)
        columns[found.shape[1]] += 1
        where = f"batch {number}: {vars(batch)}"
        assert torch.equal(wanted, found), f"{where}\nvLLM {wanted.tolist()}\nours {found.tolist()}"
        for ours_now, theirs in zip(ours.speculator.model.caches, vanilla.speculator.model.caches, strict=True):
            assert torch.equal(ours_now, theirs), f"{where}: the caches differ"
        if probabilistic:
            states = torch.tensor(batch.states)
            logits = (side.speculator.draft_logits[states, : max(batch.drafts, 1)] for side in (vanilla, ours))
            assert torch.equal(*logits), f"{where}: the logits kept for the verification differ"
    assert set(columns) == set(drafts[1:])
    report = ours.speculator.report()
    assert set(failed) == {None, *FAILING}
    assert ours.speculator.errors.counts[FAILED] == report["eager"][FAILED] == BATCHES - failed.count(None)
    repeated = report["eager"][FAILED] - failed.count(FAILING[0])  # first passes
    return json.dumps({"replays": report["replays"], "eager": report["eager"], "repeated": repeated})


def use_speculators() -> None:
    """Enable the interpreter, and replace what it cannot run of vLLM's speculators."""
    use_interpreter()
    from vllm.v1.worker.gpu.spec_decode import speculator

    speculator._target_feeds_hc_residual = lambda _: False
    speculator.gumbel_sample = sample


def main() -> None:
    use_speculators()
    for probabilistic in (False, True):
        for schedule in (None, SCHEDULE):
            name = ("probabilistic" if probabilistic else "greedy") + ("-dynamic" if schedule else "")
            print(name, compare(probabilistic, schedule))


if __name__ == "__main__":
    main()
