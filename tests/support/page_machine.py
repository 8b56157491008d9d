"""Small runners, which perform the steps of both vLLM runners in the same order, with our patches.

A state machine drives them at random in mode stage. Requests arrive, some with rows that a connector loads and with
drafts in their first step. They prefill in chunks, decode with and without drafts, are left out of a step, or are
preempted. They end, and the next request gets their blocks and states right away. Forwards fail. In every forward
each request reads its whole sequence through the block table, as attention does. This is compared with what was
written, and the audit compares the whole cache.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from copied_rows import CopiedRows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from packed_rows import write_rows
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.kv_cache import LayerCache
from nwor_ops.transaction.shadow_pages import num_shadow_blocks
from nwor_ops.vllm.audit.engine import audit_cache
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.runners import v1, v2
from nwor_ops.vllm.transaction.runners.base import RunnerAttachment
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks

SIZE, HEADS, WIDTH = 4, 1, 4
MOST, DRAFTS, LENGTH = 3, 2, 24  # maximum number of requests, of drafts per request and of tokens per request
COLUMNS = LENGTH // SIZE
LOG_ROWS = 5  # fewer than MOST * DRAFTS, so some steps run without a window
SHADOWS = num_shadow_blocks(MOST, DRAFTS, SIZE)
BLOCKS = 1 + MOST * COLUMNS + SHADOWS  # block 0 is vLLM's null block
SHADOW = ShadowBlocks(BLOCKS, groups=(0,), per_group=SHADOWS, block_bytes=1)


class ForwardFailed(Exception):
    pass


@dataclass(eq=False)
class Request:
    name: str
    waiting: int  # number of tokens that are not in the cache yet
    rows: list[float] = field(default_factory=list)  # number of tokens that are
    blocks: list[int] = field(default_factory=list)
    is_new: bool = True
    is_resumed: bool = False
    loaded: int = 0  # number of rows that are loaded in its first step


@dataclass
class Part:
    """One request's part of a step."""

    request: Request
    given: int
    drafts: int
    accepted: int


class Runner:
    """The parts that the runners of both generations share. Every token's row is one number."""

    attachment: type[RunnerAttachment]
    resumed_are_new: bool
    max_num_reqs = MOST
    device = torch.device("cpu")
    adaptive_verification = None

    def __init__(self, mode: str = "stage", audit: bool = True) -> None:
        self.kv_cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * WIDTH)
        self.slots = torch.full((1, MOST * LENGTH), -1, dtype=torch.int64)
        self.table = torch.zeros(MOST, COLUMNS, dtype=torch.int32)
        layer = TargetLayer("target", "0", self.kv_cache, LayerCache.packed(self.kv_cache), write_rows, fused=True)
        self.make_buffers()
        self.session = Session(
            NworConfig.load({"nwor": {"mode": mode, "audit": audit}}, {}),
            [layer],
            {"0": self.slots[0]},
            max_num_requests=MOST,
            max_draft_tokens=LOG_ROWS,
            max_drafts_per_request=DRAFTS,
            shadow_blocks=SHADOW if mode == "stage" else None,
            logger=logging.getLogger("nwor"),
        )
        if audit:
            audit_cache(self.session)
        self.attachment(self).patch(self.session)
        self.counter = itertools.count(1.0)
        if mode == "stage":
            self.copied = CopiedRows(self.session.manager)

    def make_buffers(self) -> None:
        """Create the buffers before the plugin reads them."""

    def remove(self, name: str) -> None:
        """Remove a request that ended or was preempted."""

    def run(self, parts: list[Part], fails: bool) -> None:
        """Run one step."""
        self.parts, self.fails = parts, fails
        entering = [part.request for part in parts if part.request.is_new]
        resumed = {request.name for request in entering if request.is_resumed and not self.resumed_are_new}
        new = [SimpleNamespace(req_id=r.name, block_ids=([],)) for r in entering if r.name not in resumed]
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[], resumed_req_ids=resumed),
            scheduled_spec_decode_tokens={p.request.name: [-1] * p.drafts for p in parts if p.drafts},
            has_sync_kv_loads=any(part.request.loaded for part in parts),
        )
        self.execute_model(output)
        self.sample_tokens(None)

    def draft(self) -> None:
        """Run the drafter. The results have left for the host and for connectors before."""

    def execute_model(self, scheduler_output: Any) -> None:
        raise NotImplementedError

    def sample_tokens(self, grammar_output: Any) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Write starts, lengths, slots and tables of the batch to the device."""
        counts = [part.given + part.drafts for part in self.batch]
        self.starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lengths = [len(p.request.rows) + count for p, count in zip(self.batch, counts, strict=True)]
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.slots.fill_(-1)
        self.table.zero_()
        slots = []
        for row, (part, length) in enumerate(zip(self.batch, lengths, strict=True)):
            blocks = part.request.blocks
            self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            slots += [blocks[p // SIZE] * SIZE + p % SIZE for p in range(len(part.request.rows), length)]
        self.slots[0, : len(slots)] = torch.tensor(slots, dtype=torch.int64)

    def forward(self) -> None:
        self.load()
        tokens = int(self.starts[-1])
        self.written = [next(self.counter) for _ in range(tokens)]
        rows = torch.tensor(self.written)[:, None, None].expand(-1, HEADS, WIDTH)
        if self.fails:
            raise ForwardFailed
        self.session.writer("target")(None, rows, rows, self.kv_cache, self.slots[0, :tokens])
        for row, part in enumerate(self.batch):
            seen = self.kv_cache[self.table[row].long()].flatten(0, 1)[: int(self.lengths[row]), 0, 0]
            own = slice(int(self.starts[row]), int(self.starts[row + 1]))
            assert seen.tolist() == part.request.rows + self.written[own], part

    def advance(self) -> None:
        for row, part in enumerate(self.batch):
            request, first = part.request, int(self.starts[row])
            request.rows += self.written[first : first + part.given + part.accepted]
            request.waiting = request.waiting - part.given or 1
            request.is_new = False

    def load(self) -> None:
        """Load rows of a connector while the step is prepared."""
        arriving = [part.request for part in self.batch if part.request.loaded]
        if not arriving:
            return
        self.session.loading()
        for request in arriving:
            for position, value in enumerate(request.rows[: request.loaded]):
                self.kv_cache[request.blocks[position // SIZE], position % SIZE] = value
            request.loaded = 0
        self.session.loaded()


class V1Runner(Runner):
    """Requests that are not scheduled leave the batch, the last one takes their place, and two more swap places."""

    attachment = v1.V1
    resumed_are_new = False

    def make_buffers(self) -> None:
        self.names: list[str] = []
        tables = SimpleNamespace(
            slot_mapping=SimpleNamespace(gpu=self.slots[0]), block_table=SimpleNamespace(gpu=self.table)
        )
        self.input_batch = SimpleNamespace(block_table=[tables], req_ids=self.names)
        self.query_start_loc = SimpleNamespace(gpu=None, np=None)
        self.seq_lens: Any = None

    def remove(self, name: str) -> None:
        if name in self.names:
            row, last = self.names.index(name), self.names.pop()
            if row < len(self.names):
                self.names[row] = last

    def arrange(self, parts: list[Part]) -> list[Part]:
        """Assign the requests to the rows of the batch."""
        of = {part.request.name: part for part in parts}
        for name in [name for name in self.names if name not in of]:
            self.remove(name)
        self.names += [name for name in of if name not in self.names]
        if len(self.names) > 1 and len(parts) % 2:
            self.names[0], self.names[1] = self.names[1], self.names[0]
        return [of[name] for name in self.names]

    def execute_model(self, scheduler_output: Any) -> None:
        self.batch = self.arrange(self.parts)
        self._prepare_inputs(scheduler_output, None)
        self.forward()

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> tuple[None, Any]:
        self.prepare()
        self.query_start_loc.gpu, self.query_start_loc.np = self.starts, self.starts.numpy()
        self.seq_lens, self.metadata = self.lengths, None
        drafts = [part.drafts for part in self.batch]
        if any(drafts):
            cumulated = torch.tensor(list(itertools.accumulate(drafts)), dtype=torch.int32)
            ids = torch.arange(sum(drafts))
            self.metadata = SimpleNamespace(
                num_draft_tokens=drafts, cu_num_draft_tokens=cumulated, draft_token_ids=ids
            )  # fmt: skip
        return None, self.metadata

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        sampled = torch.full((len(self.batch), DRAFTS + 1), -1)
        first = 0
        for row, part in enumerate(self.batch):
            sampled[row, : part.accepted] = torch.arange(first, first + part.accepted)
            sampled[row, part.accepted] = 7777
            first += part.drafts
        return SimpleNamespace(sampled_token_ids=sampled)

    def sample_tokens(self, grammar_output: Any) -> None:
        self._sample(None, self.metadata)


class V2Runner(Runner):
    """Every request that the runner knows has a state. The next request gets the state that was freed last."""

    attachment = v2.V2
    resumed_are_new = True

    def make_buffers(self) -> None:
        self.block_tables = SimpleNamespace(slot_mappings=self.slots, input_block_tables=[self.table])
        self.index: dict[str, int] = {}
        self.free_indices = list(range(MOST))

    def remove(self, name: str) -> None:
        if name in self.index:
            self.free_indices.append(self.index.pop(name))

    def execute_model(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            self.index[request.req_id] = self.free_indices.pop()
        self.batch = sorted(self.parts, key=lambda part: part.given + part.drafts)
        self.prepare()
        drafts = [part.drafts for part in self.batch]
        states = [self.index[part.request.name] for part in self.batch]
        on_host = drafts
        if self.adaptive_verification is not None:  # the host knows only the total, and distributes it evenly
            on_host = [-(-sum(drafts) // len(drafts))] * len(drafts)
        logits = torch.tensor([0, *itertools.accumulate(count + 1 for count in drafts)], dtype=torch.int32)
        self.input_batch = SimpleNamespace(
            req_ids=[part.request.name for part in self.batch],
            idx_mapping=torch.tensor(states),
            idx_mapping_np=numpy.array(states),
            query_start_loc=self.starts,
            query_start_loc_np=self.starts.numpy() if on_host is drafts else None,
            cu_num_logits=logits,
            num_reqs=len(states),
            num_draft_tokens=sum(drafts),
            num_draft_tokens_per_req=numpy.array(on_host),
            seq_lens=self.lengths,
        )
        self.prepare_attn(self.input_batch)
        self.forward()

    def prepare_attn(self, input_batch: Any) -> None:
        """Do nothing: `prepare` has done it."""

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> tuple[None, Tensor, Tensor]:
        sampled = torch.tensor([part.accepted + 1 for part in self.batch], dtype=torch.int32)
        rejected = torch.tensor([part.drafts - part.accepted for part in self.batch], dtype=torch.int32)
        return None, sampled, rejected

    def sample_tokens(self, grammar_output: Any) -> None:
        self.sample(None, self.input_batch, None)
        self.draft()


class Engine(RuleBasedStateMachine):
    runner_class: type[Runner]

    @initialize()
    def start(self) -> None:
        self.runner = self.runner_class()
        self.free = list(range(1, 1 + MOST * COLUMNS))
        self.requests: list[Request] = []
        self.names = (f"request-{number}" for number in itertools.count())

    def has_room(self) -> bool:
        return len(self.requests) < MOST

    def leave(self, data: st.DataObject) -> Request:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.runner.remove(request.name)
        self.free += reversed(request.blocks)
        return request

    @precondition(has_room)
    @rule(prompt=st.integers(1, 9))
    def come(self, prompt: int) -> None:
        self.requests.append(Request(next(self.names), prompt))

    @precondition(has_room)
    @rule(loaded=st.integers(1, 9))
    def come_with_rows(self, loaded: int) -> None:
        """Add a request with one token left to compute, to which the scheduler gives drafts."""
        rows = [next(self.runner.counter) for _ in range(loaded)]
        self.requests.append(Request(next(self.names), 1, rows, loaded=loaded))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.leave(data)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), loaded=st.booleans())
    def preempt(self, data: st.DataObject, loaded: bool) -> None:
        """Preempt a request. It returns under the same name, and computes all of its tokens again, or all but one are
        loaded."""
        request = self.leave(data)
        tokens = len(request.rows) + request.waiting
        rows = [next(self.runner.counter) for _ in range(tokens - 1 if loaded else 0)]
        back = Request(request.name, tokens - len(rows), rows, is_resumed=True, loaded=len(rows))
        self.requests.append(back)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), drafting=st.booleans(), fails=st.sampled_from([False] * 9 + [True]))
    def step(self, data: st.DataObject, drafting: bool, fails: bool) -> None:
        parts = []
        for request in self.requests:
            if data.draw(st.integers(0, 3), "left out") == 0:
                continue
            given = data.draw(st.sampled_from([request.waiting, -(-request.waiting // 2)]), "given")
            room = LENGTH - len(request.rows) - given
            drafts = 0
            if request.loaded or (drafting and request.rows and request.waiting == 1):
                drafts = min(DRAFTS, room)
            if room < 1:
                continue
            accepted = data.draw(st.integers(0, drafts), "accepted") if drafts else 0
            parts.append(Part(request, given, drafts, accepted))
            while len(request.blocks) * SIZE < len(request.rows) + given + drafts:
                request.blocks.append(self.free.pop())
        if not parts:
            return
        try:
            self.runner.run(parts, fails)
        except ForwardFailed:
            for part in parts:
                part.request.is_new = False
            return
        self.runner.advance()


SETTINGS = settings(deadline=None, derandomize=True, max_examples=60, stateful_step_count=40)


class V1Engine(Engine):
    runner_class = V1Runner


class V2Engine(Engine):
    runner_class = V2Runner
