"""Begin inside the target's FULL graphs, with Model Runner V2. Such a begin costs the host no call.

A graph is captured with :func:`nwor_ops.plan_decode_window` at its head. The op needs no counts of drafts. vLLM
asserts that a request has at least as many tokens as logits. So if a batch has as many tokens as logits,
``query_start_loc`` gives the drafts. This tensor, the slot mappings and our buffers have fixed addresses.

In mode ``"stage"`` the calls of :func:`nwor_ops.open_window` follow. The lengths and block tables have fixed addresses
too. vLLM's states of a batch do not, so they are copied to a buffer of ours. This happens only if the batch has other
requests, or another order, than the last batch that was copied.

A flag on the device decides whether a replay begins a window. It is False for captures, dummy runs, steps without
drafts, and steps whose begin was called. The host writes it only if it must change, so hardly ever while requests
decode.

Eager and piecewise steps, micro-batches, and batches with other tokens than drafts and one per request call begin. In
mode ``"stage"`` engines do so whose metadata are computed from block tables before the replay
(:func:`~nwor_ops.vllm.transaction.layers.back_ends.read_tables_in_graphs`). They would miss the shadow pages.

Set ``NWOR_BEGIN_IN_GRAPH=1`` to switch it on. This internal switch is off. In mode ``"cow"``, an engine that waits for
the host was not measurably faster with it (docs/benchmarks.md). In mode ``"stage"`` the speed was not measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nwor_ops.transaction.state import is_capturing
from nwor_ops.transaction.window import Window
from nwor_ops.vllm.errors import CannotContinue
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.transaction.layers.back_ends import read_tables_in_graphs
from nwor_ops.vllm.transaction.session import Session

SWITCH = "NWOR_BEGIN_IN_GRAPH"

_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
HOOKS = (
    Hook(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner.prepare_inputs",
        "scheduler_output, batch_req_state, batch_desc, num_active_loras",
    ),
    Hook(
        _GRAPHS,
        "ModelCudaGraphManager.capture",
        "model, model_state, input_buffers, intermediate_tensors, block_tables, attn_groups, kv_cache_config, "
        "pcp_manager, has_lora, use_aux_hidden_state_outputs, lora_capture_hook, progress_bar_desc",
    ),
    Hook(_GRAPHS, "ModelCudaGraphManager._capture_stream", "desc"),
    Hook(_GRAPHS, "ModelCudaGraphManager.run_fullgraph", "desc"),
)


class GraphBegin:
    """The begin of one engine inside its graphs. Its methods replace those of the runner and of its graph manager.

    Args:
        session: the engine's session, in mode ``"cow"`` or ``"stage"``.
        query_start_loc: int32 ``[max_num_requests + 1]``: the runner's persistent buffer.
        seq_lens: int32 ``[max_num_requests]``: the same. It is 0 for padded requests.
        block_tables: the runner's persistent table of each group of the session.

    Attributes:
        enabled: bool ``[1]`` on the device: whether a replay begins a window.
        states: int64 ``[max_num_requests]`` on the device: the state of each request; -1 for padded ones. Used in mode
            ``"stage"``.
        captured: descriptors of the graphs that hold a begin.
        replayed: whether the graph of the current step was replayed with its begin.
    """

    patched_runner = ("prepare_inputs",)
    patched_graphs = ("capture", "_capture_stream", "run_fullgraph")

    def __init__(
        self, session: Session, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Mapping[str, Tensor]
    ) -> None:
        assert session.manager is not None
        self._session, self._manager = session, session.manager
        self._query_start_loc, self._seq_lens, self._block_tables = query_start_loc, seq_lens, block_tables
        self._is_stage = session.mode == "stage"
        self.states = torch.full((len(seq_lens),), -1, device=query_start_loc.device)
        self._states: bytes | None = b""  # states of the last batch that was copied; None if a copy failed
        self.enabled = torch.zeros(1, dtype=torch.bool, device=query_start_loc.device)
        self._is_enabled: bool | None = False  # last value that the host wrote to `enabled`; None if a write failed
        self.captured: set[Any] = set()
        self._capturing: Any = None  # descriptor of the graph whose capture is about to start
        self._prepared: Any = None  # descriptor of the step that was prepared last
        self.replayed = False

    @classmethod
    def of_runner(cls, session: Session, runner: Any) -> GraphBegin | None:
        """Return the begin of a runner's graphs, or None if its begins are called."""
        if os.environ.get(SWITCH) != "1" or session.mode not in ("cow", "stage") or session.windows > 1:
            return None
        if runner.adaptive_verification is not None or runner.pcp_manager is not None:
            return None  # query_start_loc is another tensor there
        if session.mode == "stage" and not read_tables_in_graphs(runner, session.slot_mappings):
            return None
        if any(hook.problem() is not None for hook in HOOKS):
            return None
        buffers, tables = runner.input_buffers, runner.block_tables.input_block_tables
        of_groups = {group: tables[int(group)] for group in session.slot_mappings}
        made = cls(session, buffers.query_start_loc, buffers.seq_lens, of_groups)
        session.at_unload = made.switch_off
        session.patches.put_methods(runner, made, cls.patched_runner)
        session.patches.put_methods(runner.cudagraph_manager, made, cls.patched_graphs)
        return made

    def serves(self, input_batch: Any) -> bool:
        """Return whether the graph of a prepared step begins its window. Each token is a draft or its request's only
        other one."""
        return (
            input_batch.num_tokens == input_batch.num_draft_tokens + input_batch.num_reqs
            and self._prepared in self.captured
        )

    def described(self, window: Window, input_batch: Any) -> Window:
        """Return the window of a prepared step with the tensors that the graph reads.

        In mode ``"stage"`` this writes the states of the batch to their buffer, if they are others than before. The
        stream orders it before the replay and after all earlier ones.
        """
        if not self._is_stage:
            return window
        states: bytes = input_batch.idx_mapping_np.tobytes()
        if states != self._states:
            self._states = None
            num_requests = input_batch.num_reqs
            self.states[:num_requests].copy_(input_batch.idx_mapping)
            self.states[num_requests:].fill_(-1)
            self._states = states
        return window._replace(request_states=self.states)

    def switch_off(self) -> None:
        """Let no later replay begin a window, because nothing would end it."""
        self._enable(False)
        self.captured.clear()

    # ------------------------------------------------------------ methods that replace vLLM's

    def prepare_inputs(
        self, prepare: Callable[..., Any], scheduler_output: Any, batch_req_state: Any, batch_desc: Any, *rest: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        self._prepared, self.replayed = batch_desc, False
        return prepare(scheduler_output, batch_req_state, batch_desc, *rest, **named)

    def capture(self, capture: Callable[..., Any], model: torch.nn.Module, *rest: Any, **named: Any) -> Any:
        self.captured.clear()
        self._enable(False)
        self._plan(1)  # changes nothing: it loads the kernel, which a capture should not, and checks the arguments
        # A model whose class replaces __call__ may not run the hook. Its graphs then hold no begin.
        handle = model.register_forward_pre_hook(self._before_forward)
        try:
            return capture(model, *rest, **named)
        finally:
            handle.remove()
            self._capturing = None

    def _capture_stream(self, stream: Callable[..., Any], desc: Any) -> Any:
        # Called right before a FULL graph is captured.
        self._capturing = desc if desc.num_ubatches == 1 and desc.num_reqs is not None else None
        return stream(desc)

    def _before_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        desc, self._capturing = self._capturing, None
        if desc is None or not is_capturing(self.enabled):
            return
        self._plan(desc.num_reqs)
        self.captured.add(desc)

    def _plan(self, num_requests: int) -> None:
        starts, slot_mappings = self._query_start_loc[: num_requests + 1], self._session.slot_mappings
        if self._is_stage:
            lengths_and_tables = (self._seq_lens, self._block_tables, self.states)
            self._manager.plan_in_graph(starts, slot_mappings, self.enabled, *lengths_and_tables)
        else:
            self._manager.plan_in_graph(starts, slot_mappings, self.enabled)

    def run_fullgraph(self, replay: Callable[..., Any], desc: Any) -> Any:
        begins = self._session.begins_in_graph
        if begins and desc is not self._prepared:
            begins = False
            error = RuntimeError(f"run_fullgraph: desc must be that of prepare_inputs, {self._prepared}, got {desc}")
            self._session.go_on_without("begin", error)
        if begins is not self._is_enabled:
            self._enable(begins)
        output = replay(desc)
        self.replayed = begins
        if begins:
            self._session.opened()
        return output

    def _enable(self, begins: bool) -> None:
        self._is_enabled = None
        try:
            self.enabled.fill_(begins)
        except Exception as error:
            raise CannotContinue.because(
                f"begin failed: {error}", "a replay may begin a window that nothing would end, or may begin none"
            ) from error
        self._is_enabled = begins
