"""Test begins inside FULL graphs (`graph_begin`) with vLLM's own `ModelCudaGraphManager`.

On a CPU a recorded list of our ops stands for a CUDA graph. tests/gpu/vllm has audited engines with real graphs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from op_calls import Calls, RecordedGraph
from torch import Tensor

from nwor_ops import LayerCache, ops
from nwor_ops.config import NworConfig
from nwor_ops.transaction import manager as manager_module
from nwor_ops.transaction import state as state_module
from nwor_ops.vllm.errors import CannotContinue
from nwor_ops.vllm.runners.v2 import V2
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction import graph_begin
from nwor_ops.vllm.transaction import session as session_module
from nwor_ops.vllm.transaction.audit.shadow import StageAudit
from nwor_ops.vllm.transaction.audit.undo import AuditError
from nwor_ops.vllm.transaction.graph_begin import GraphBegin
from nwor_ops.vllm.transaction.layers import back_ends
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks

BLOCKS, BLOCK_SIZE, HEADS, WIDTH = 16, 4, 1, 4  # the last 8 are the shadow pages of mode "stage"
REQUESTS, DRAFTS, TOKENS = 4, 2, 12
OLD = 5.0  # content of every slot before a step
COMMITTED = 1  # tokens of each request before a step
STATES = [2, 0, 3, 1]  # of the requests of a batch


class Requests(tuple[tuple[int, int, int], ...]):
    """Tokens and drafts of each request, and the drafts that are rejected. It is also the output of a scheduler."""

    scheduled_new_reqs: Any = ()
    scheduled_cached_reqs = SimpleNamespace(new_block_ids=[], resumed_req_ids=set())
    scheduled_spec_decode_tokens: Any = MappingProxyType({})
    has_sync_kv_loads = False


DECODE = Requests([(3, 2, 1), (3, 2, 0)])
UNEVEN = Requests([(1, 0, 0), (3, 2, 2)])
ONE = Requests([(3, 2, 1)])
MIXED = Requests([(3, 1, 1), (2, 1, 0)])  # more tokens than drafts and one per request: begin is called
PLAIN = Requests([(1, 0, 0), (1, 0, 0)])


class CapturedGraph(RecordedGraph):
    """Has the methods that vLLM calls of a `torch.cuda.CUDAGraph`."""

    capturing = False
    failure: BaseException | None = None

    def __enter__(self) -> Any:
        CapturedGraph.capturing = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        CapturedGraph.capturing = False
        super().__exit__(*exception)

    def replay(self) -> None:
        if self.failure is not None:
            raise self.failure
        super().replay()


class Model(torch.nn.Module):
    """Writes the rows of persistent buffers, as the layers of a captured model do."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.runner = [runner]

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        runner, tokens = self.runner[0], len(input_ids)
        rows = runner.key[:tokens], runner.value[:tokens]
        if runner.session.mode == "cow":
            runner.session.write("target", *rows, runner.kv_cache, runner.slots[0, :tokens])
        else:
            scale, caches = torch.ones(1), runner.kv_cache.split(WIDTH, -1)
            ops.write_kv(*rows, *caches, runner.slots[0, :tokens], scale, scale, "auto")
        return torch.ones(tokens, 1)


class Unhooked(Model):
    """As a model that is compiled itself: its class replaces __call__."""

    def __call__(self, **inputs: Any) -> Any:
        return self.forward(**inputs)


class Runner:
    """Calls vLLM's functions in the order of `GPUModelRunner.execute_model`."""

    adaptive_verification: Any = None
    pcp_manager: Any = None

    def __init__(self, manager: Any, model: type[Model] = Model, mode: str = "cow", on_error: str = "continue") -> None:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder as Builder

        self.cudagraph_manager, self.model = manager, model(self)
        self.kv_cache = torch.full((BLOCKS, BLOCK_SIZE, HEADS, 2 * WIDTH), OLD)
        self.key, self.value = torch.zeros(2, TOKENS, HEADS, WIDTH)
        self.slots = torch.full((1, TOKENS), -1, dtype=torch.int64)
        self.block_tables = SimpleNamespace(
            slot_mappings=self.slots, input_block_tables=[torch.zeros(REQUESTS, 8, dtype=torch.int32)]
        )
        self.input_buffers = SimpleNamespace(
            query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32), input_ids=torch.zeros(TOKENS),
            seq_lens=torch.zeros(REQUESTS, dtype=torch.int32),
            positions=torch.zeros(TOKENS), is_padding=torch.zeros(TOKENS, dtype=torch.bool),
        )  # fmt: skip
        self.attn_groups = [[SimpleNamespace(kernel_block_size=None, metadata_builders=[Builder.__new__(Builder)])]]
        self.order = STATES
        self.layer = TargetLayer("target", "0", self.kv_cache, LayerCache.packed(self.kv_cache), self.write, fused=True)
        self.session = Session(
            NworConfig.load({"nwor": {"mode": mode, "on_error": on_error}}, {}), [self.layer], {"0": self.slots[0]},
            max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * DRAFTS, max_drafts_per_request=DRAFTS,
            shadow_blocks=ShadowBlocks(BLOCKS, (0,), 8, 4) if mode == "stage" else None,
            logger=logging.getLogger("nwor"),
        )  # fmt: skip
        self.attachment = V2(self)
        self.attachment.patch(self.session)
        self.next = 100.0  # value of the rows of the next step
        self.before_forward: Callable[[], None] = lambda: None  # as a KV connector

    def write(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                kv_cache.flatten(0, 1)[slot] = torch.cat((key[token], value[token]), -1)

    def capture(self) -> None:
        self.cudagraph_manager.capture(
            self.model, SimpleNamespace(prepare_dummy_inputs=lambda *_: {}), self.input_buffers, None, None, [], None
        )

    def prepare_inputs(self, requests: Any, state: Any, desc: Any, loras: int) -> Any:
        tokens, drafts = [r[0] for r in requests], [r[1] for r in requests]
        starts = numpy.cumsum([0, *tokens])
        padded = desc.num_reqs or len(requests)
        own = self.input_buffers.query_start_loc
        own.fill_(int(starts[-1]))[: len(starts)] = torch.tensor(starts)
        seq_lens = self.input_buffers.seq_lens.fill_(0)
        seq_lens[: len(requests)] = torch.tensor(tokens, dtype=torch.int32) + COMMITTED
        logits = [0, *numpy.cumsum([d + 1 for d in drafts])]
        return SimpleNamespace(
            req_ids=[str(q) for q in range(len(requests))], num_reqs=len(requests), num_tokens=int(starts[-1]),
            num_draft_tokens=sum(drafts), query_start_loc=own[: padded + 1], query_start_loc_np=starts,
            cu_num_logits=torch.tensor(logits, dtype=torch.int32), num_draft_tokens_per_req=numpy.array(drafts),
            seq_lens=seq_lens[:padded], idx_mapping=torch.tensor(self.order[: len(requests)]),
            idx_mapping_np=numpy.array(self.order[: len(requests)]),
        )  # fmt: skip

    def prepare_attn(self, batch: Any) -> None:
        """Give each request a separate page."""
        self.slots.fill_(-1)[0, : batch.num_tokens] = self.slots_of(self.requests)
        self.block_tables.input_block_tables[0].zero_()[: batch.num_reqs, 0] = torch.arange(batch.num_reqs) + 1

    @staticmethod
    def slots_of(requests: Any) -> Tensor:
        slots = [BLOCK_SIZE * (q + 1) + COMMITTED + t for q, r in enumerate(requests) for t in range(r[0])]
        return torch.tensor(slots)

    def execute_model(self, requests: Any, desc: Any, dummy_run: bool = False) -> None:
        if dummy_run:
            self.input_buffers.query_start_loc.copy_(torch.tensor([0, 3, 6, 6, 6]))
            self.slots.fill_(-1)
        else:
            self.requests = requests
            self.batch = self.prepare_inputs(requests, None, desc, 0)
            self.prepare_attn(self.batch)
            self.before_forward()
        if desc.cg_mode.name == "FULL":
            self.cudagraph_manager.run_fullgraph(desc)
        else:
            self.model(input_ids=self.input_buffers.input_ids[: desc.num_tokens])

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        rejected = torch.tensor([r[2] for r in self.requests], dtype=torch.int32)
        return None, torch.tensor([r[1] + 1 - r[2] for r in self.requests], dtype=torch.int32), rejected

    def sample_tokens(self, grammar_output: Any) -> None:
        self.sample(None, self.batch, None)

    def step(self, requests: list[tuple[int, int, int]], desc: Any) -> list[str]:
        """Run a step over the first slots. Return the names of the ops that the host called before sampling."""
        self.refill()
        with Calls() as calls:
            self.execute_model(requests, desc)
        if self.session.in_window and self.session.mode == "stage":
            self.assert_attention_sees_all(requests)
        self.sample_tokens(None)
        return calls.names

    def refill(self) -> None:
        """All pages hold old rows before a step. The shadow pages stay, unless the step before has ended early."""
        own = self.kv_cache[: BLOCKS // 2] if self.session.mode == "stage" else self.kv_cache
        own.fill_(OLD)
        self.next += 1
        self.key.fill_(self.next)
        self.value.fill_(self.next)

    def assert_attention_sees_all(self, requests: Any) -> None:
        """By its table a request has its committed rows, and then those of the step. They are in shadow pages if it has
        drafts."""
        for q, (tokens, drafts, _) in enumerate(requests):
            block = int(self.block_tables.input_block_tables[0][q, 0])
            assert (block >= BLOCKS // 2) == (drafts > 0)
            expected = torch.tensor([OLD] * COMMITTED + [self.next] * tokens)
            assert torch.equal(self.kv_cache[block, : len(expected), 0, 0], expected)

    def rows(self) -> list[bool]:
        """Whether the slots of the step's tokens hold its rows. The others must be as before, shadow pages excepted."""
        own = self.kv_cache[: BLOCKS // 2] if self.session.mode == "stage" else self.kv_cache
        rows, slots = own.flatten(0, 1).flatten(1), self.slots_of(self.requests)
        new, old = (rows == self.next).all(1), (rows == OLD).all(1)
        assert (new | old).all()
        assert new.sum() == new[slots].sum()
        assert torch.equal(self.slots[0, : len(slots)], slots)
        assert self.block_tables.input_block_tables[0].max() < BLOCKS // 2
        return new[slots].tolist()


def kept(requests: list[tuple[int, int, int]]) -> list[bool]:
    return [token < r[0] - r[2] for r in requests for token in range(r[0])]


def descriptor(mode: str = "FULL", **fields: Any) -> Any:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    return BatchExecutionDescriptor(CUDAGraphMode[mode], **({"num_tokens": 6, "num_reqs": 2} | fields))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A graph manager of vLLM, whose CUDA graphs are recorded ones. The switch is on."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils as vllms

    monkeypatch.setenv(graph_begin.SWITCH, "1")
    nothing = contextlib.nullcontext
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CapturedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: graph)
    for name, value in {
        "graph_capture": lambda device: nothing(),
        "capture_pool": lambda pool, config: nothing(),
        "set_forward_context": lambda *_, **__: nothing(),
        "is_global_first_rank": lambda: False,
        "current_stream": lambda: None,
        "prepare_inputs_to_capture": lambda *_, **__: (None, {}),
    }.items():
        monkeypatch.setattr(vllms, name, value)
    for module in (graph_begin, manager_module, session_module, state_module):
        monkeypatch.setattr(module, "is_capturing", lambda tensor: CapturedGraph.capturing)
    manager = vllms.ModelCudaGraphManager.__new__(vllms.ModelCudaGraphManager)
    vars(manager).update(
        device=torch.device("cpu"), ubatch_runner=None, _max_full_descs_to_capture=None, use_breakable_cg=False,
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, graphs={}, pool=None, _capture_mem_samples=None,
        _capture_descs={CUDAGraphMode.FULL: [descriptor()]}, max_num_reqs=REQUESTS, hidden_states=None,
        breakable_cg_runner=None, is_first_pp_rank=True, is_last_pp_rank=True, aux_hidden_states=[],
        use_aux_hidden_state_outputs=False,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)),
    )  # fmt: skip
    return manager


def counted(runner: Runner) -> tuple[int, int, int]:
    stats = runner.session.stats()
    return stats.windows, stats.accepted, stats.rejected


def flag_writes(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    begin, written = runner.attachment.graph_begin, []
    assert begin is not None
    enable = begin._enable

    def noted(begins: bool) -> None:
        written.append(begins)
        enable(begins)

    monkeypatch.setattr(begin, "_enable", noted)
    return written


@pytest.fixture(params=["cow", "stage"])
def mode(request: Any) -> str:
    return request.param


GRAPHS = {"cow": ["plan_decode_window", "write_kv_logged"], "stage": ["plan_decode_window", "open_window", "write_kv"]}
CALLED = ("plan_window", "_bind_plan_window", "_begin_bound", "_begin_redirected_bound")


def captured(graphs: Any, mode: str) -> tuple[Runner, Any]:
    """Return a runner that has captured the graph of a descriptor, and the descriptor."""
    runner, desc = Runner(graphs, mode=mode), descriptor()
    runner.capture()
    return runner, desc


def test_the_graph_begins_the_windows_of_decodes(graphs: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, desc = captured(graphs, mode)
    assert graphs.graphs[desc].names == GRAPHS[mode]
    assert counted(runner) == (0, 0, 0)
    written, accepted, rejected = flag_writes(runner, monkeypatch), 0, 0
    for number, requests in enumerate([DECODE, DECODE, DECODE, ONE, UNEVEN, DECODE]):
        calls = runner.step(requests, desc)
        assert runner.rows() == kept(requests)
        if number > 2:  # the calls of commit are bound by then
            assert calls == GRAPHS[mode]  # both by the replay
        assert not set(CALLED) & (set(calls) - {"_bind_plan_window"})
        rejected += sum(r[2] for r in requests)
        accepted += sum(r[1] - r[2] for r in requests)
        assert counted(runner) == (number + 1, accepted, rejected)
    assert written == [True]
    assert (runner.session.begun, runner.session.begun_in_graph) == (6, 6)
    assert not runner.session.vanilla_steps


def test_batches_that_grow(graphs: Any, mode: str) -> None:
    """The calls of commit are bound for one request, and then serve two."""
    runner, desc = captured(graphs, mode)
    for number, requests in enumerate([ONE, ONE, ONE, DECODE, DECODE, UNEVEN, DECODE], 1):
        runner.step(requests, desc)
        assert runner.rows() == kept(requests)
        assert counted(runner)[0] == number


def test_replays_without_a_window_of_the_graph(graphs: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy runs, steps without drafts, and steps whose begin is called: the graph's begin does nothing."""
    runner, desc = captured(graphs, mode)
    written = flag_writes(runner, monkeypatch)
    runner.step(DECODE, desc)
    runner.execute_model(Requests(), desc, dummy_run=True)
    assert counted(runner) == (1, 3, 1)
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert runner.step(PLAIN, desc) == GRAPHS[mode]
    assert runner.rows() == kept(PLAIN)
    assert counted(runner) == (2, 6, 2)
    assert runner.step(MIXED, desc)[0] in CALLED
    assert runner.rows() == kept(MIXED)
    assert counted(runner) == (3, 7, 3)
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert counted(runner) == (4, 10, 4)
    assert written == [True, False, True, False, True]
    assert (runner.session.begun, runner.session.begun_in_graph) == (4, 3)


def test_other_forwards_call_begin(graphs: Any, mode: str) -> None:
    """Eager and piecewise forwards, and a graph that holds no begin. The flag on the device does not matter there."""
    runner, desc = captured(graphs, mode)
    for _ in range(3):
        runner.step(DECODE, desc)
    for other in (descriptor("NONE"), descriptor("PIECEWISE", num_reqs=None)):
        assert runner.step(DECODE, other)[0] in CALLED
        assert runner.rows() == kept(DECODE)
    assert counted(runner) == (5, 15, 5)


def test_a_model_that_runs_no_hooks(graphs: Any, mode: str) -> None:
    runner, desc = Runner(graphs, Unhooked, mode), descriptor()
    runner.capture()
    assert graphs.graphs[desc].names == GRAPHS[mode][-1:]
    for number in range(1, 4):
        assert "plan_decode_window" not in runner.step(DECODE, desc)
        assert runner.rows() == kept(DECODE)
        assert counted(runner) == (number, 3 * number, number)


def test_graphs_that_hold_no_begin(graphs: Any, mode: str) -> None:
    """Micro-batches call begin. A capture that failed leaves no hook in the model."""
    runner = Runner(graphs, mode=mode)
    begin = runner.attachment.graph_begin
    assert begin is not None
    begin._capture_stream(lambda desc: None, descriptor(num_ubatches=2))
    assert begin._capturing is None

    def fail(*_: Any, **__: Any) -> None:
        begin._capturing = descriptor()
        raise ValueError("capture")

    with pytest.raises(ValueError, match="capture"):
        begin.capture(fail, runner.model)
    assert begin._capturing is None
    assert not runner.model._forward_pre_hooks


def test_a_second_capture_without_a_begin(graphs: Any, mode: str) -> None:
    """The graphs of the first capture held a begin. Those of the second do not, so begin is called."""
    runner, desc = captured(graphs, mode)
    runner.step(DECODE, desc)
    assert runner.session.begun_in_graph == 1
    graphs.graphs.clear()
    runner.model = Unhooked(runner)
    runner.capture()
    assert graphs.graphs[desc].names == GRAPHS[mode][-1:]
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert (runner.session.begun, runner.session.begun_in_graph) == (2, 1)


def test_an_eager_forward_before_a_capture_plans_nothing(graphs: Any, mode: str) -> None:
    """No graph holds the begin of such a forward."""
    runner = Runner(graphs, mode=mode)
    begin = runner.attachment.graph_begin
    assert begin is not None

    def forward_without_graph(*_: Any, **__: Any) -> None:
        begin._capture_stream(lambda desc: None, descriptor())
        with Calls() as calls:
            runner.model(input_ids=runner.input_buffers.input_ids[:6])
        assert "plan_decode_window" not in calls.names

    begin.capture(forward_without_graph, runner.model)
    assert not begin.captured


def test_a_begin_that_cannot_be_captured(graphs: Any, mode: str) -> None:
    """It stops the start, before the capture."""
    runner = Runner(graphs, mode=mode)
    begin = runner.attachment.graph_begin
    assert begin is not None
    begin._query_start_loc = begin._query_start_loc.long()
    with pytest.raises(TypeError, match="plan_in_graph: query_start_loc must have dtype"):
        runner.capture()
    assert not graphs.graphs


def test_a_replay_that_fails(graphs: Any, mode: str) -> None:
    """No row of the window before is restored again, and the next steps run."""
    runner, desc = captured(graphs, mode)
    for _ in range(3):
        runner.step(DECODE, desc)
    before = runner.kv_cache.clone()
    graphs.graphs[desc].failure = RuntimeError("replay")
    with pytest.raises(RuntimeError, match="replay"):
        runner.execute_model(DECODE, desc)
    assert torch.equal(runner.kv_cache, before)
    assert counted(runner) == (3, 9, 3)
    graphs.graphs[desc].failure = None
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert counted(runner) == (4, 12, 4)


def test_a_forward_that_fails_after_the_replay(graphs: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts of its window are undone."""
    runner, desc = captured(graphs, mode)
    runner.step(DECODE, desc)
    replay = CapturedGraph.replay

    def failing(graph: CapturedGraph) -> None:
        replay(graph)
        raise RuntimeError("after the replay")

    runner.refill()
    with monkeypatch.context() as patch:
        patch.setattr(CapturedGraph, "replay", failing)
        with pytest.raises(RuntimeError, match="after the replay"):
            runner.execute_model(DECODE, desc)
    assert runner.rows() == [True, False, False, True, False, False]
    assert counted(runner) == (2, 3, 5)
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)


def test_another_forward_than_the_prepared_graph(graphs: Any, mode: str) -> None:
    """The step goes on without the transaction: rejected drafts stay, and nothing else changes."""
    runner, desc = captured(graphs, mode)
    runner.step(DECODE, desc)
    runner.refill()
    batch = runner.prepare_inputs(DECODE, None, desc, 0)
    runner.prepare_attn(batch)
    runner.model(input_ids=runner.input_buffers.input_ids[:6])
    runner.batch = batch
    runner.sample_tokens(None)
    assert runner.rows() == [True] * 6
    assert runner.session.errors.counts == {"begin failed": 1}
    runner.refill()
    other = descriptor(num_active_loras=1)
    graphs.graphs[other] = graphs.graphs[desc]
    batch = runner.prepare_inputs(DECODE, None, desc, 0)
    runner.prepare_attn(batch)
    graphs.run_fullgraph(other)
    assert runner.session.errors.counts == {"begin failed": 2}
    assert not runner.session.in_window
    runner.sample_tokens(None)
    assert runner.rows() == [True] * 6
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert counted(runner) == (2, 6, 2)


def test_a_flag_that_cannot_be_written(graphs: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stops under any setting, because the effect of a replay is unknown."""
    runner, desc = captured(graphs, mode)
    begin = runner.attachment.graph_begin
    assert begin is not None
    with monkeypatch.context() as patch:
        patch.setattr(begin, "enabled", None)
        with pytest.raises(CannotContinue, match=r"begin failed: .*; a replay may begin a window"):
            runner.execute_model(DECODE, desc)
    written = flag_writes(runner, monkeypatch)
    runner.execute_model(Requests(), desc, dummy_run=True)
    assert written == [False]  # written again although it was False before


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_begin_that_fails(graphs: Any, mode: str, on_error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, desc = Runner(graphs, mode=mode, on_error=on_error), descriptor()
    runner.capture()
    runner.step(DECODE, desc)
    monkeypatch.setattr(manager_module.DraftCommitManager, "begin_in_graph", lambda *_: [][0])
    if on_error == "stop":
        with pytest.raises(RuntimeError, match="begin failed"):
            runner.step(DECODE, desc)
        return
    runner.step(DECODE, desc)
    assert runner.rows() == [True] * 6
    assert counted(runner) == (1, 3, 1)
    assert runner.session.errors.counts == {"begin failed": 1}


def test_unloading(graphs: Any, mode: str) -> None:
    """The hooks go, and no later replay begins a window."""
    runner, desc = captured(graphs, mode)
    runner.step(DECODE, desc)
    names = {patch.name for patch in runner.session.patches}
    assert {"prepare_inputs", "capture", "_capture_stream", "run_fullgraph"} <= names
    assert runner.session.at_unload is not None
    runner.session.at_unload()
    runner.session.patches.undo()
    for name in ("capture", "_capture_stream", "run_fullgraph"):
        assert name not in vars(graphs)
    assert "prepare_inputs" not in vars(runner)
    runner.step(DECODE, desc)
    assert runner.rows() == [True] * 6
    assert counted(runner) == (1, 3, 1)


def test_graphs_that_are_captured_again(graphs: Any, mode: str) -> None:
    """vLLM releases its graphs when experts move. The new ones begin windows too."""
    runner, desc = captured(graphs, mode)
    runner.step(DECODE, desc)
    graphs.release_graphs()
    runner.capture()
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert counted(runner) == (2, 6, 2)


@pytest.mark.parametrize("why", ["the switch", "adaptive verification", "prefill context", "deferred windows"])
def test_where_begin_is_called(graphs: Any, mode: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(graphs, mode=mode)
    runner.session.patches.undo()
    assert GraphBegin.of_runner(runner.session, runner) is not None
    runner.session.patches.undo()
    if why == "the switch":
        monkeypatch.delenv(graph_begin.SWITCH)
    elif why == "adaptive verification":
        runner.adaptive_verification = object()
    elif why == "prefill context":
        runner.pcp_manager = object()
    else:
        runner.session.windows = 2
    assert GraphBegin.of_runner(runner.session, runner) is None
    assert not list(runner.session.patches)


# ---------------------------------------------------------------- mode stage


def begin_of(runner: Runner) -> GraphBegin:
    assert runner.attachment.graph_begin is not None
    return runner.attachment.graph_begin


def test_states_are_written_only_for_another_batch(graphs: Any) -> None:
    """Padded requests have none. The shadow pages follow their requests, in whatever row of the batch they are."""
    runner, desc = captured(graphs, "stage")
    states, written = begin_of(runner).states, []
    for order, requests in (
        (STATES, DECODE), (STATES, DECODE), (STATES, UNEVEN), (STATES, ONE), (STATES[::-1], DECODE),
        (STATES[::-1], DECODE), (STATES, DECODE),
    ):  # fmt: skip
        before, runner.order = states._version, order
        runner.step(requests, desc)
        assert runner.rows() == kept(requests)
        assert states.tolist() == order[: len(requests)] + [-1] * (REQUESTS - len(requests))
        written.append(states._version != before)
    assert written == [True, False, False, True, True, False, True]
    assert runner.session.begun_in_graph == 7


def test_states_that_cannot_be_written(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs without the transaction, and the next one writes them again."""
    runner, desc = captured(graphs, "stage")
    begin = begin_of(runner)
    with monkeypatch.context() as patch:
        patch.setattr(begin, "states", None)
        runner.step(DECODE, desc)
    assert runner.rows() == [True] * 6
    assert runner.session.errors.counts == {"begin failed": 1}
    runner.step(DECODE, desc)
    assert runner.rows() == kept(DECODE)
    assert begin.states.tolist() == [*STATES[:2], -1, -1]


def test_rows_that_a_connector_loads_before_the_replay(graphs: Any) -> None:
    """The replay copies them to the shadow pages of new requests. Nothing is launched for them on the host."""
    runner, desc = captured(graphs, "stage")
    for _ in range(2):
        runner.step(DECODE, desc)

    class New(Requests):
        scheduled_new_reqs: Any = (SimpleNamespace(req_id="0", block_ids=[[1]]),)
        scheduled_spec_decode_tokens: Any = MappingProxyType({"0": [1, 2], "1": [1, 2]})
        has_sync_kv_loads = True

    launched: list[str] = []

    def load() -> None:
        assert runner.session.in_window
        runner.kv_cache[1, 0] = OLD
        with Calls() as calls:
            runner.session.loading()
            runner.session.loaded()
        launched.extend(calls.names)

    runner.before_forward = load
    refill = runner.refill

    def not_loaded_yet() -> None:
        refill()
        runner.kv_cache[1] = -1.0

    runner.refill = not_loaded_yet  # type: ignore[method-assign]
    requests = New(DECODE)
    runner.requests = requests
    not_loaded_yet()
    runner.execute_model(requests, desc)
    runner.assert_attention_sees_all(requests)
    runner.sample_tokens(None)
    assert launched == []


class Opened(StepListener):
    """Notes the slots that a listener sees."""

    def __init__(self) -> None:
        self.slots: list[Sequence[int]] = []

    def opened(self, slot_mappings: Any) -> None:
        self.slots.append(slot_mappings["0"][:6].tolist())


def test_listeners_see_the_redirected_slots(graphs: Any) -> None:
    """They are told of the window after the replay. A replay that fails opens none."""
    runner, desc = captured(graphs, "stage")
    listener = Opened()
    runner.session.subscribe(listener)
    for number, other in enumerate((desc, desc, descriptor("NONE")), 1):
        runner.step(DECODE, other)
        assert len(listener.slots) == number
        assert min(listener.slots[-1]) >= BLOCKS // 2 * BLOCK_SIZE
    graphs.graphs[desc].failure = RuntimeError("replay")
    with pytest.raises(RuntimeError, match="replay"):
        runner.execute_model(DECODE, desc)
    assert len(listener.slots) == 3


def test_the_known_builders_are_vllms() -> None:
    for name in back_ends._TABLE_BUILDERS:
        module, _, builder = name.rpartition(".")
        spec = find_spec(module)  # some of them can be imported only on a GPU
        assert spec is not None
        assert f"class {builder}(" in Path(str(spec.origin)).read_text()


def test_audited_steps(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit finds every draft in a shadow page, and the committed rows next to it, after the replay."""
    runner, desc = captured(graphs, "stage")
    audit = StageAudit([runner.layer], TOKENS, {"0": range(BLOCKS // 2, BLOCKS)})
    runner.session.subscribe(audit)
    for requests, other in (
        (DECODE, desc), (DECODE, descriptor("NONE")), (UNEVEN, desc), (MIXED, desc), (PLAIN, desc), (DECODE, desc),
    ):  # fmt: skip
        runner.step(requests, other)
        assert runner.rows() == kept(requests)
    assert runner.session.begun_in_graph == 3
    summary = audit.summary()
    assert (summary["steps"], summary["exposed_rows"], summary["stale_rows"]) == (5, 0, 0)
    assert summary["tail_rows"] > 0 < summary["committed_rows"]
    monkeypatch.setattr(CapturedGraph, "replay", lambda graph: None)
    with pytest.raises(AuditError, match="the slots of these tokens must be in blocks 8 to 15"):
        runner.step(DECODE, desc)


def test_metadata_that_are_made_of_tables(graphs: Any) -> None:
    """They would name the real pages. Only back ends that read the table in the graph have their begin there."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadataBuilder
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLAMetadataBuilder

    class Chunked(FlashAttentionMetadataBuilder):
        """vLLM makes such subclasses, whose tables are copies."""

    runner = Runner(graphs, mode="stage")
    for builders, kernel_block_size, in_graph in (
        ([FlashAttentionMetadataBuilder], None, True),
        ([TritonMLAMetadataBuilder], None, True),
        ([FlashAttentionMetadataBuilder], 2, False),
        ([FlashAttentionMetadataBuilder, FlexAttentionMetadataBuilder], None, False),
        ([Chunked], None, False),
    ):
        of_back_ends = [
            SimpleNamespace(kernel_block_size=kernel_block_size, metadata_builders=[builder.__new__(builder)])
            for builder in builders
        ]
        runner.attn_groups = [of_back_ends]
        runner.session.patches.undo()
        assert (GraphBegin.of_runner(runner.session, runner) is not None) is in_graph
    runner = Runner(graphs, mode="cow")
    runner.attn_groups = []
    runner.session.patches.undo()
    assert GraphBegin.of_runner(runner.session, runner) is not None
