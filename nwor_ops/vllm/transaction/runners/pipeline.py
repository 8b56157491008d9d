"""Deferred windows on a pipeline rank of the V2 runner that does not sample.

The last rank samples, commits, and sends its samples to the other ranks. vLLM's ``PPHandler`` receives them on a
separate stream. With N ranks, it gives them to the runner N steps later, before that step writes anything. The window
is settled at that point, with the counts that the last rank committed.

The requests of a deferred window are in no other batch, since vLLM schedules their next decode N steps later. However,
a request may end or be preempted earlier. Its blocks may then belong to another request in the very step that reports
this. Its drafts are undone right away, before that step's forward; the outcome still counts them.

The stream waits for the outcome only if the scheduler may know it already, because then the scheduler may have kept
blocks of accepted drafts for its prefix cache. Three cases exist:

- Sampling of a step in between was deferred for a grammar.
- The engine took results without scheduling (a pause), so this step is empty.
- The outcome has arrived already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nwor_ops.transaction.in_flight import Deferred
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.transaction.session import Session

_MODULE = "vllm.v1.worker.gpu.pp_utils"
HOOKS = (
    Hook(_MODULE, "PPHandler.receive", "input_batch, recv_drafts"),
    Hook(_MODULE, "PPHandler.get_prev_sampled_outputs", ""),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.finish_requests", "scheduler_output"),
)


@dataclass
class _DeferredStep:
    """A step with a deferred window.

    Attributes:
        received: vLLM's ``PendingRecv``.
        deferred: the manager's handle of the window.
        positions: positions in its batch of the requests that have drafts.
        known: whether the scheduler may have seen what was sampled.
    """

    received: Any
    deferred: Deferred
    positions: dict[str, int] = field(default_factory=dict)
    known: bool = False


class PipelineRank:
    """Patch the ``PPHandler`` of a runner, and the runner's ``finish_requests``."""

    patched = ("receive", "get_prev_sampled_outputs")

    def __init__(self, session: Session, handler: Any) -> None:
        self.session, self._handler = session, handler
        self._deferred_steps: deque[_DeferredStep] = deque()

    def receive(self, receive: Callable[..., bool], input_batch: Any, recv_drafts: bool) -> bool:
        """Defer the window at the end of a step, when vLLM starts to receive the samples of that step."""
        result = receive(input_batch, recv_drafts)
        received = self._handler.queue[-1]  # the entry of this step, None if nothing is received
        deferred = self.session.defer()
        if deferred is None:
            return result
        if received is None:  # no draft of this step will ever be accepted
            self.session.cancel_deferred(deferred)
            return result
        drafts = input_batch.num_draft_tokens_per_req
        positions = {name: position for position, name in enumerate(input_batch.req_ids) if drafts[position] > 0}
        self._deferred_steps.append(_DeferredStep(received, deferred, positions))
        return result

    def get_prev_sampled_outputs(self, get: Callable[[], Any]) -> Any:
        """Settle the window whose samples have arrived. vLLM calls this at the beginning of a step."""
        due = self._handler.queue[0] if self._handler.queue else None
        outputs = get()
        if due is not None and self._deferred_steps and self._deferred_steps[0].received is due:
            self._settle(self._deferred_steps[0])
        return outputs

    def finish_requests(self, finish: Callable[[Any], None], scheduler_output: Any) -> None:
        """Undo the drafts of requests that ended or were preempted.

        vLLM calls this after ``get_prev_sampled_outputs``, and before blocks are cleared, copied or written.
        """
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for step in [step for step in self._deferred_steps if not gone.isdisjoint(step.positions)]:
            if step.known or not scheduler_output.total_num_scheduled_tokens or step.received.event.query():
                self._settle(step)
                continue
            ended = [step.positions.pop(name) for name in gone & step.positions.keys()]
            if not self.session.undo(step.deferred, ended):
                self._deferred_steps.remove(step)
        if scheduler_output.pending_structured_output_tokens:
            for step in self._deferred_steps:
                step.known = True
        finish(scheduler_output)

    def schedule(self, requests: Iterable[str]) -> None:
        """Settle the deferred windows of requests that run in the step that begins."""
        for step in [step for step in self._deferred_steps if not step.positions.keys().isdisjoint(requests)]:
            self._settle(step)

    def _settle(self, step: _DeferredStep) -> None:
        self._deferred_steps.remove(step)
        received = step.received
        self._handler.main_stream.wait_event(received.event)
        self.session.settle(step.deferred, received.num_rejected, received.num_sampled.tolist)
