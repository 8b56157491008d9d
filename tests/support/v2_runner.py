"""A runner that acts in the same order as vLLM's V2 runner, with our patches, and the batches that it runs."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from packed_rows import write_rows
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.audit.engine import audit_cache
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.runners.v2 import V2
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks

BLOCKS, BLOCK_SIZE, HEADS, WIDTH = 16, 4, 2, 8
# Mode stage: 4 requests with at most 2 drafts each, which may lie in two blocks.
SHADOW = ShadowBlocks(num_blocks=BLOCKS, groups=(0,), per_group=8, block_bytes=1)
# One request: a token and two drafts at positions 2 to 4. The first draft is accepted.
TABLE = [1, 3]
SLOTS = [6, 7, 12]
BATCH = SimpleNamespace(
    query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
    cu_num_logits=torch.tensor([0, 3], dtype=torch.int32),
    req_ids=["a"],
    idx_mapping=torch.tensor([2]),
    idx_mapping_np=numpy.array([2]),
    num_reqs=1,
    num_draft_tokens=2,
    query_start_loc_np=numpy.array([0, 3]),
    num_draft_tokens_per_req=numpy.array([2]),
    seq_lens=torch.tensor([5], dtype=torch.int32),
)
SCHEDULER_OUTPUT = SimpleNamespace(
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(new_block_ids=[], resumed_req_ids=set()),
    scheduled_spec_decode_tokens={"a": [-1] * 2, "b": [-1] * 2},
    has_sync_kv_loads=False,
)

# Adaptive verification: four drafts are scheduled and three are verified. The host distributes them evenly over its
# requests. The device says that the first request has one, at position 3, and the second has two, at positions 1 and 2.
ADAPTIVE_TABLES = [[1, 3], [2, 4]]
ADAPTIVE_SLOTS = [6, 7, 8, 9, 10]
ADAPTIVE_BATCH = SimpleNamespace(
    query_start_loc=torch.tensor([0, 2, 5], dtype=torch.int32),
    cu_num_logits=torch.tensor([0, 2, 5], dtype=torch.int32),
    req_ids=["a", "b"],
    idx_mapping=torch.tensor([1, 3]),
    idx_mapping_np=numpy.array([1, 3]),
    num_reqs=2,
    num_draft_tokens=3,
    query_start_loc_np=numpy.array([0, 3, 5]),
    num_draft_tokens_per_req=numpy.array([2, 2]),
    seq_lens=torch.tensor([4, 3], dtype=torch.int32),
)


class Runner:
    adaptive_verification: Any = None

    def __init__(self, audit: bool, mode: str = "cow") -> None:
        self.kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 2 * WIDTH)
        self.kv_cache[TABLE[0], :2] = 5
        self.slots = torch.full((1, 16), -1, dtype=torch.int64)
        self.table = torch.zeros(4, 8, dtype=torch.int32)
        self.block_tables = SimpleNamespace(slot_mappings=self.slots, input_block_tables=[self.table])
        self.drafted_with: list[list[int]] = []
        self.told: list[bool] = []
        self.failure: BaseException | None = None
        layer = TargetLayer("target", "0", self.kv_cache, LayerCache.packed(self.kv_cache), write_rows, fused=True)
        config = NworConfig.load({"nwor": {"mode": mode, "audit": audit}}, {})
        self.session = Session(
            config,
            [layer],
            {"0": self.slots[0]},
            max_num_requests=4,
            max_draft_tokens=8,
            max_drafts_per_request=2,
            shadow_blocks=SHADOW if mode == "stage" else None,
            logger=logging.getLogger("nwor"),
        )
        if audit:
            audit_cache(self.session)
        V2(self).patch(self.session)

    def prepare_attn(self, input_batch: Any) -> None:
        self.slots[0, :3] = torch.tensor(SLOTS)
        self.table[0, :2] = torch.tensor(TABLE)

    def execute_model(self, scheduler_output: Any) -> None:
        self.prepare_attn(BATCH)
        rows = torch.ones(3, HEADS, WIDTH)
        self.session.writer("target")(None, rows, rows, self.kv_cache, self.slots[0, :3])
        seen = self.kv_cache[self.table[0, :2].long()].flatten(0, 1)[:5, 0, 0]  # the pages that attention would read
        assert seen.tolist() == [5, 5, 1, 1, 1]

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> tuple[None, Tensor, Tensor]:
        return None, torch.tensor([2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)

    def sample_tokens(self, grammar_output: Any) -> str:
        self.sample(None, BATCH, None)
        self.told = self.written()  # results reach the host and connectors after the commit
        self.drafted_with = [self.slots[0, :3].tolist(), self.table[0, :2].tolist()]
        self.slots.fill_(9)  # the drafter reuses the buffer
        if self.failure is not None:
            raise self.failure
        return "output"

    def written(self) -> list[bool]:
        return self.kv_cache.flatten(0, 1).flatten(1).any(-1)[SLOTS].tolist()


class AdaptiveRunner(Runner):
    """The draft of the first request is rejected. The second request has its first draft accepted."""

    adaptive_verification = object()

    def prepare_attn(self, input_batch: Any) -> None:
        self.slots[0, :5] = torch.tensor(ADAPTIVE_SLOTS)
        self.table[:2, :2] = torch.tensor(ADAPTIVE_TABLES)

    def execute_model(self, scheduler_output: Any) -> None:
        self.prepare_attn(ADAPTIVE_BATCH)
        rows = torch.ones(5, HEADS, WIDTH)
        self.session.writer("target")(None, rows, rows, self.kv_cache, self.slots[0, :5])

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> tuple[None, Tensor, Tensor]:
        return None, torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)

    def sample_tokens(self, grammar_output: Any) -> str:
        self.sample(None, ADAPTIVE_BATCH, None)
        return "output"
