"""A pipeline rank that does not sample, with a runner and a ``PPHandler`` that act in the order of vLLM 0.33's.

Requests of random lengths end, are aborted or preempted, and other requests get their blocks right away.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from packed_rows import write_rows

from nwor_ops.config import NworConfig
from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.audit.engine import audit_cache
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.runners.v2 import V2
from nwor_ops.vllm.transaction.session import Session

BLOCKS, BLOCK_SIZE, HEADS, WIDTH, K = 24, 4, 1, 4, 3
REQUESTS, MOST_TOKENS = 4, 32
NOT_THERE_YET = 99


class Event:
    """An event that the main stream waits for. Its query is False until then, unless a test sets it."""

    def __init__(self, arrive: Any) -> None:
        self._arrive, self.happened = arrive, False

    def __call__(self) -> None:
        self._arrive()

    def query(self) -> bool:
        return self.happened


class Handler:
    """The ``PPHandler`` of a rank that is not the last. The counts of a step exist after its event was waited for."""

    def __init__(self, ranks: int, outcomes: Any) -> None:
        self.queue: deque[Any] = deque([None] * ranks)
        self.main_stream = SimpleNamespace(wait_event=lambda event: event())
        self._outcomes = outcomes

    def receive(self, input_batch: Any, recv_drafts: bool) -> bool:
        assert recv_drafts
        if not input_batch.needed:
            return False
        sampled, rejected = (torch.full((input_batch.num_reqs,), NOT_THERE_YET, dtype=torch.int32) for _ in range(2))

        def arrive() -> None:
            drafts = torch.tensor(input_batch.drafts)
            accepted = torch.tensor([self._outcomes[input_batch.number, name] for name in input_batch.req_ids])
            sampled.copy_(accepted + 1)
            rejected.copy_(drafts - accepted)

        self.queue[-1] = SimpleNamespace(event=Event(arrive), num_sampled=sampled, num_rejected=rejected)
        return True

    def get_prev_sampled_outputs(self) -> dict[str, Any] | None:
        received = self.queue.popleft()
        self.queue.append(None)
        if received is None:
            return None
        received.event()
        return {}


class Runner:
    """The first of several ranks. Its scheduler knows what a step sampled after ``ranks + 1`` later steps have begun.

    Attributes:
        should: the expected cache after all windows are settled.
    """

    adaptive_verification = None

    def __init__(self, ranks: int, seed: int, audit: bool) -> None:
        self.ranks, self.random = ranks, random.Random(seed)
        self.kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 2 * WIDTH)
        self.slots = torch.full((1, MOST_TOKENS), -1, dtype=torch.int64)
        self.block_tables = SimpleNamespace(
            slot_mappings=self.slots, input_block_tables=[torch.zeros(REQUESTS, 8, dtype=torch.int32)]
        )
        self.outcomes: dict[tuple[int, str], int] = {}
        self.pp_handler = Handler(ranks, self.outcomes)
        layer = TargetLayer("target", "0", self.kv_cache, LayerCache.packed(self.kv_cache), write_rows, fused=True)
        config = NworConfig.load({"nwor": {"mode": "cow", "audit": audit}}, {})
        self.session = Session(
            config, [layer], {"0": self.slots[0]}, max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * K,
            max_drafts_per_request=K, shadow_blocks=None, logger=logging.getLogger("nwor"), windows=ranks,
        )  # fmt: skip
        if audit:
            audit_cache(self.session)
        self.attachment = V2(self)
        self.attachment.patch(self.session)
        self.should = self.kv_cache.clone()
        self.number = 0

    # ------------------------------------------------------------ vLLM's runner

    def finish_requests(self, scheduler_output: Any) -> None:
        """Do nothing: vLLM's own work does not matter here."""

    def prepare_attn(self, input_batch: Any) -> None:
        self.slots.fill_(-1)
        self.slots[0, : len(input_batch.slots)] = torch.tensor(input_batch.slots)

    def execute_model(self, scheduler_output: Any) -> None:
        self.pp_handler.get_prev_sampled_outputs()
        self.finish_requests(scheduler_output)
        batch = scheduler_output.batch
        if batch is None:
            return
        for block in scheduler_output.cleared:
            self.kv_cache[block] = 0
            self.should[block] = 0
        self.prepare_attn(batch)
        tokens = len(batch.slots)
        self.session.writer("target")(None, batch.rows[0], batch.rows[1], self.kv_cache, self.slots[0, :tokens])

    def sample_tokens(self, batch: Any) -> None:
        self.pp_handler.receive(batch, recv_drafts=True)

    def sample(self) -> None:
        """Do nothing: such a rank never samples."""


class Engine:
    """A scheduler, the runner, and the outcomes that a last rank would send."""

    def __init__(self, ranks: int, seed: int, audit: bool = True, defers: bool = False) -> None:
        self.runner, self.random = Runner(ranks, seed, audit), random.Random(seed)
        self.ranks, self._defers = ranks, defers
        self.free = list(range(1, BLOCKS))
        self.running: dict[str, SimpleNamespace] = {}
        # The batch, the requests that ended, and whether the scheduler may know what was sampled.
        self.steps: list[list[Any]] = []
        self.names = self.known = 0

    def step(self, idle: bool = False) -> None:
        number, runner = len(self.steps), self.runner
        if number >= self.ranks:
            self._settle(number - self.ranks)
        gone: set[str] = set()
        for name, request in list(self.running.items()):
            ended = request.known >= request.most and self.random.random() < 0.7
            if ended or self.random.random() < 0.06:  # aborted or preempted
                gone.add(name)
                self.free += request.blocks
                del self.running[name]
        self._lose(gone)
        batch = None if idle else self._schedule(number)
        cleared = batch.new_blocks if batch is not None and self.random.random() < 0.5 else []
        defers = self._defers and self.random.random() < 0.3
        half = {name for name in gone if self.random.random() < 0.5}
        for step in self.steps[1 - self.ranks :] if defers else ():
            step[2] = True
        self.steps.append([batch, set(), False])
        runner.execute_model(
            SimpleNamespace(
                batch=batch, total_num_scheduled_tokens=1, finished_req_ids=half,
                preempted_req_ids=gone - half or None, cleared=cleared,
                pending_structured_output_tokens=defers, scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
            )
        )  # fmt: skip
        if batch is not None:
            runner.sample_tokens(batch)

    def run(self, steps: int, idle: bool = False) -> None:
        for _ in range(steps):
            self.step(idle)

    def _schedule(self, number: int) -> Any:
        while len(self.running) < REQUESTS and len(self.free) >= 4:
            self.random.shuffle(self.free)
            blocks = [self.free.pop() for _ in range(4)]
            self.names += 1
            self.running[f"r{self.names}"] = SimpleNamespace(
                blocks=blocks, new=True, length=0, known=0, next=number, most=self.random.randrange(4, 12)
            )
        starts, drafts, names, slots, new_blocks = [0], [], [], [], []
        for name, request in self.running.items():
            if number < request.next or request.length + K + 1 > 4 * BLOCK_SIZE:
                continue
            given = self.random.randrange(2, 5) if request.new else 1
            proposed = 0 if request.new else self.random.randrange(0, K + 1)
            if request.new:
                new_blocks += request.blocks
            positions = range(request.length, request.length + given + proposed)
            slots += [request.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions]
            accepted = self.random.randrange(0, proposed + 1)
            self.runner.outcomes[number, name] = accepted
            request.length += given + accepted
            request.known += 1
            request.new, request.next = False, number + self.ranks
            starts.append(starts[-1] + given + proposed)
            drafts.append(proposed)
            names.append(name)
        if not names:
            return None
        loc = torch.tensor(starts, dtype=torch.int32)
        logits = torch.tensor([0, *numpy.cumsum([count + 1 for count in drafts])], dtype=torch.int32)
        rows = torch.rand(2, starts[-1], HEADS, WIDTH) + 1
        return SimpleNamespace(
            number=number, req_ids=names, num_reqs=len(names), num_draft_tokens=sum(drafts), slots=slots, rows=rows,
            drafts=drafts, num_draft_tokens_per_req=numpy.array(drafts) if any(drafts) else None, query_start_loc=loc,
            query_start_loc_np=numpy.array(starts), cu_num_logits=logits, new_blocks=new_blocks, seq_lens=None,
            idx_mapping=None,
            needed=not any(drafts) or self.random.random() < 0.95,
        )  # fmt: skip

    # ------------------------------------------------------------ the expected cache

    def _lose(self, gone: set[str]) -> None:
        """Drop the drafts of requests that ended from deferred windows; their other tokens stay.

        If the scheduler may know the outcome already, accepted drafts stay too.
        """
        for number in range(max(len(self.steps) - self.ranks + 1, 0), len(self.steps)):
            batch, lost, known = self.steps[number]
            for place, name in enumerate(batch.req_ids if batch is not None else ()):
                if name in gone and name not in lost and batch.needed:
                    self.known += known
                    self._keep(batch, place, self.runner.outcomes[number, name] if known else 0)
                    lost.add(name)

    def _settle(self, number: int) -> None:
        batch, lost, _ = self.steps[number]
        for place, name in enumerate(batch.req_ids if batch is not None else ()):
            if name not in lost:
                accepted = self.runner.outcomes[number, name] if batch.needed else 0
                self._keep(batch, place, accepted)

    def _keep(self, batch: Any, place: int, accepted: int) -> None:
        start, end = batch.query_start_loc_np[place : place + 2]
        end -= batch.drafts[place] - accepted
        slots = torch.tensor(batch.slots[start:end])
        write_rows(batch.rows[0, start:end], batch.rows[1, start:end], self.runner.should, slots)
