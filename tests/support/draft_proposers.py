"""Compare the drafters of the V1 runner with and without draft graphs, on random batches. Run by
test_draft_graphs.py:

    TRITON_INTERPRET=1 python draft_proposers.py

Both sides are real classes of the installed vLLM, and Triton's interpreter runs vLLM's kernels on the CPU. The bodies
of the graphs run from the host, padded as a graph is, with the draft model of `hashing_drafter`. The keys of a drafter
that follows the target also depend on its hidden states. The caches are compared too, because padded rows must write
nothing.
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

from nwor_ops.drafter import GraphKey

BLOCKS, BLOCK_SIZE = 100, 4
DRAFT_VOCABULARY = 113
COLUMNS = LONGEST // BLOCK_SIZE + 2
FAILING = ("_copy_inputs", "run_first_pass", "_draft")
NAMES = ("draft.0", "draft.1")


class Builder:
    """The metadata is the description of the batch itself: views of its inputs, as with Triton's back end."""

    supports_draft_decode_metadata_update = True

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return common_attn_metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        pass


class Backend:
    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"


def make_config(method: str, **speculation: Any) -> Any:
    from vllm.config.compilation import CUDAGraphMode

    hf_config = SimpleNamespace(architectures=["TinyForCausalLM"])
    draft = SimpleNamespace(
        get_hidden_size=lambda: 1, get_inputs_embeds_size=lambda: 1, hf_config=hf_config, uses_mrope=False
    )
    parallel = SimpleNamespace(tensor_parallel_size=1)
    settings: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": None,
        "draft_model_config": draft,
        "parallel_drafting": False,
        "use_local_argmax_reduction": False,
        "use_heterogeneous_vocab": False,
        "rejection_sample_method": "standard",
        "draft_sample_method": "greedy",
        "enforce_eager": None,
        "disable_padded_drafter_batch": False,
        "target_parallel_config": parallel,
        "draft_parallel_config": parallel,
        "verify_equal_vocab_size_if_draft_model": lambda: None,
        **speculation,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.float64,
            max_model_len=LONGEST,
            use_fp64_gumbel=False,
            supports_multimodal_inputs=False,
            uses_mrope=False,
            get_vocab_size=lambda: VOCABULARY,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=MAX_TOKENS),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, data_parallel_rank=0, use_sequence_parallel_moe=False, is_moe_model=False
        ),
        speculative_config=SimpleNamespace(**settings),
        compilation_config=SimpleNamespace(
            static_forward_context={},
            fast_moe_cold_start=False,
            static_all_moe_layers=None,
            cudagraph_mode=CUDAGraphMode.NONE,
            is_attention_compiled_piecewise=lambda: False,
            cudagraph_capture_sizes=[],
            max_cudagraph_capture_size=0,
            cudagraph_specialize_lora=False,
        ),
        num_speculative_tokens=K,
        lora_config=None,
        additional_config={},
    )


class Side:
    """One drafter with its own caches."""

    def __init__(self, method: str, **speculation: Any) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm.v1.spec_decode.draft_model import DraftModelProposer
        from vllm.v1.spec_decode.eagle import EagleProposer
        from vllm.v1.worker.utils import AttentionGroup

        is_own, hetero = method == "draft_model", speculation.pop("hetero", False)
        config = make_config(method, **speculation)
        self.drafter: Any = (DraftModelProposer if is_own else EagleProposer)(config, torch.device("cpu"))
        kind = _eagle3_model() if method == "eagle3" else Model
        drafter, vocabulary = self.drafter, DRAFT_VOCABULARY if hetero else VOCABULARY
        drafter.model = kind([BLOCK_SIZE] * len(NAMES), BLOCKS, not is_own, method in ("eagle", "eagle3"), vocabulary)
        if hetero:
            drafter.use_heterogeneous_vocab, drafter.vocab_mapping = True, _vocab_mapping()
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        group = AttentionGroup(Backend, list(NAMES), spec, 0, metadata_builders=[Builder()])  # type: ignore[arg-type]
        drafter.draft_attn_groups, drafter.block_size, drafter.kv_cache_gid = [group], BLOCK_SIZE, 0
        drafter._draft_attn_layer_names = set(NAMES)
        self.block_table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)


def _eagle3_model() -> Any:
    """Return an object of the class that vLLM requires."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    return type("Eagle3Model", (Model, Eagle3LlamaForCausalLM), {})


def _vocab_mapping() -> Any:
    """Return vLLM's mapping of two vocabularies that share every third token of the draft model, in another order."""
    from vllm.v1.spec_decode.vocab_mapping import VocabMapping

    mapping: Any = VocabMapping.__new__(VocabMapping)
    # Not an id of the target, so mapping it twice gives an invalid id.
    mapping.target_unk_token_id, mapping.draft_unk_token_id = 3, DRAFT_VOCABULARY - 1
    mapping.draft_to_target_ids = torch.full((DRAFT_VOCABULARY,), -1)
    mapping.target_to_draft_ids = torch.full((VOCABULARY,), -1)
    for draft in range(0, DRAFT_VOCABULARY, 3):
        target = (draft * 41 + 11) % VOCABULARY
        mapping.draft_to_target_ids[draft], mapping.target_to_draft_ids[target] = target, draft
    mapping.intersection_mask_draft = mapping.draft_to_target_ids >= 0
    return mapping


class Batch:
    """R requests in the step after the target verified their drafts; some may be prompts."""

    def __init__(self, rng: random.Random, method: str, k: int, uniform: bool, drafted: bool, near_end: bool) -> None:
        self.rows, self.uniform, self.drafted = rng.randint(1, ROWS), uniform, drafted
        self.lengths = [k + 1 if uniform else rng.randint(1, k + 1) for _ in range(self.rows)]
        if not uniform:
            self.lengths[rng.randrange(self.rows)] = rng.randint(k + 2, 12)  # a chunk of a prompt
        room = 0 if near_end else K
        least = LONGEST - K - 3 if near_end else 0
        self.first = [
            rng.randint(min(least, LONGEST - length - room), LONGEST - length - room) for length in self.lengths
        ]
        most = k if drafted else 0
        self.rejected = [rng.randint(0, min(most, length - 1)) for length in self.lengths]
        tokens = sum(self.lengths)
        self.ids = torch.tensor([rng.randrange(VOCABULARY) for _ in range(tokens)], dtype=torch.int32)
        self.next = torch.tensor([rng.randrange(VOCABULARY) for _ in range(self.rows)], dtype=torch.int32)
        width = 3 if method == "eagle3" else 1  # the drafter combines them
        hidden = torch.tensor([[float(rng.randrange(500))] for _ in range(tokens)]).double()
        self.hidden = hidden * torch.arange(1, width + 1)
        blocks = rng.sample(range(1, BLOCKS), ROWS * COLUMNS)
        self.table = torch.tensor(blocks, dtype=torch.int32).view(ROWS, COLUMNS)
        self.caches = [torch.tensor([rng.randrange(9999) for _ in range(BLOCKS * BLOCK_SIZE)]) for _ in NAMES]
        self.all_greedy = rng.random() < 0.5

    def undefined_slots(self) -> set[int]:
        """Return slots whose keys may differ.

        EAGLE's tokens are the target's without the first. If the last one was rejected, the next position keeps its
        previous id, and the key in its slot depends on that id.
        """
        if not self.rejected[-1]:
            return set()
        position = self.first[-1] + self.lengths[-1] - 1
        return {int(self.table[self.rows - 1, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE}

    def propose(self, side: Side, num_drafts: int) -> Tensor:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        for cache, wanted in zip(side.drafter.model.caches, self.caches, strict=True):
            cache.copy_(wanted)
        side.block_table.copy_(self.table)
        lengths, first = torch.tensor(self.lengths, dtype=torch.int32), torch.tensor(self.first, dtype=torch.int32)
        starts = torch.from_numpy(numpy.concatenate(([0], numpy.cumsum(self.lengths))).astype(numpy.int32))
        seq_lens, rejected = first + lengths, torch.tensor(self.rejected, dtype=torch.int32)
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(self.first, self.lengths, strict=True)])
        block = side.block_table[: self.rows].long()
        requests = torch.repeat_interleave(torch.arange(self.rows), lengths.long())
        slots = block[requests, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            num_reqs=self.rows,
            num_actual_tokens=len(positions),
            max_query_len=max(self.lengths),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=side.block_table[: self.rows],
            slot_mapping=slots,
            causal=True,
        )
        with torch.inference_mode():
            drafts = side.drafter.propose(
                num_speculative_tokens=num_drafts,
                target_token_ids=self.ids,
                target_positions=positions,
                target_hidden_states=self.hidden,
                next_token_ids=self.next,
                token_indices_to_sample=starts[1:] - 1 - rejected if self.drafted else None,
                common_attn_metadata=common,
                sampling_metadata=SimpleNamespace(
                    all_greedy=self.all_greedy, all_random=False, temperature=torch.zeros(self.rows)
                ),
                mm_embed_inputs=None,
                num_rejected_tokens_gpu=rejected if self.drafted else None,
                slot_mappings=None,
            )
        return drafts.clone()


def with_graphs(side: Side) -> Any:
    """Replace a side's drafter by ours, and return the object that did so."""
    from vllm.config.compilation import CUDAGraphMode

    from nwor_ops.vllm.draft_graphs.proposer import GraphedProposer

    runner = SimpleNamespace(
        drafter=side.drafter,
        cudagraph_dispatcher=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        input_batch=SimpleNamespace(block_table=[SimpleNamespace(block_table=SimpleNamespace(gpu=side.block_table))]),
        capture_model=lambda: 0,
    )
    proposer: Any = GraphedProposer(runner, logging.getLogger("nwor"))
    proposer.graphs.loop.__class__ = HostLoop
    keys = [GraphKey(count, length) for count in PADDED for length in (1, *proposer._first_pass_lengths)]
    proposer.graphs.keys = {proposer.num_drafts: keys}
    return proposer


def compare(method: str, **speculation: Any) -> str:
    rng = random.Random(f"{method} {sorted(speculation)}")
    vanilla, ours = Side(method, **speculation), Side(method, **speculation)
    proposer = with_graphs(ours)
    num_drafts = vanilla.drafter.num_speculative_tokens
    failed: Counter[str | None] = Counter()
    for number in range(BATCHES):
        kind = {"uniform": number % 4 != 3, "drafted": number % 7 != 6, "near_end": number % 9 == 8}
        batch = Batch(rng, method, num_drafts, **kind)
        asked = num_drafts - 1 if number % 20 == 9 else num_drafts
        # Each part of ours fails in turn. Then vLLM's code drafts, over what ours has written.
        fails, before = FAILING[number // 5 % len(FAILING)] if number % 5 == 2 else None, proposer._eager[FAILED]
        wanted = batch.propose(vanilla, asked)
        with failing(proposer.graphs.loop if fails == "run_first_pass" else proposer, fails):
            found = batch.propose(ours, asked)
        failed[fails] += proposer._eager[FAILED] - before
        shown = {name: value for name, value in vars(batch).items() if name not in ("caches", "table", "hidden")}
        where = f"{method}, batch {number}: {shown}"
        assert found.dtype == wanted.dtype
        assert torch.equal(wanted, found), f"{where}\nvLLM {wanted.tolist()}\nours {found.tolist()}"
        for ours_now, theirs in zip(ours.drafter.model.caches, vanilla.drafter.model.caches, strict=True):
            differ = set((ours_now != theirs).nonzero().flatten().tolist()) - batch.undefined_slots()
            assert not differ, f"{where}: the caches differ at {differ}, of block table {batch.table.tolist()}"
    report = proposer.report()
    assert proposer.errors.counts[FAILED] == report["eager"][FAILED] == sum(failed[part] for part in FAILING)
    return json.dumps({"replays": report["replays"], "eager": report["eager"], "failed": failed})


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model": ("draft_model", {}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "mtp": ("mtp", {}),
    "heterogeneous": ("draft_model", {"hetero": True}),
    "one": ("eagle", {"num_speculative_tokens": 1}),
    "probabilistic": ("eagle", {"draft_sample_method": "probabilistic"}),
}


def main() -> None:
    use_interpreter()
    for name, (method, speculation) in KINDS.items():
        print(name, compare(method, **speculation))


if __name__ == "__main__":
    main()
