"""A pipeline stage of the V2 runner that samples nothing: when its drafts are judged.

The last stage samples, commits, and sends the others what it sampled: vLLM's ``PPHandler`` receives it on a stream of
its own and hands it to the runner as many steps later as there are stages, before that step writes anything. A window
is settled there, with the very counts that the last stage committed.

Until then its requests are in no other batch: vLLM schedules a decode again when as many steps have passed. But a
request may end or be preempted meanwhile, and then its blocks are another's in the very step that says so. Its drafts
are undone at once, before that step's forward; the verdict still counts them. Only where the scheduler may know already
what was sampled, and so may have kept blocks of accepted drafts for its prefix cache, does the stream wait for the
verdict: where a step between had its sampling deferred for a grammar, and where the engine took results without
scheduling (a pause), so that this step is empty, or the verdict is here already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nwor_ops.transaction.in_flight import Deferred
from nwor_ops.vllm.session import Session
from nwor_ops.vllm.support import Hook

_MODULE = "vllm.v1.worker.gpu.pp_utils"
HOOKS = (
    Hook(_MODULE, "PPHandler.receive", "input_batch, recv_drafts"),
    Hook(_MODULE, "PPHandler.get_prev_sampled_outputs", ""),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.finish_requests", "scheduler_output"),
)


@dataclass
class _Flight:
    """A step whose verdict is on its way.

    Attributes:
        received: vLLM's ``PendingRecv``.
        deferred: what the manager knows its window by.
        places: in its batch, of the requests that have drafts.
        known: whether the scheduler may have seen what was sampled.
    """

    received: Any
    deferred: Deferred
    places: dict[str, int] = field(default_factory=dict)
    known: bool = False


class PipelineStage:
    """What stands around the ``PPHandler`` of a runner, and around the runner's ``finish_requests``.

    Args:
        session: with windows that wait for their verdict.
        handler: vLLM's.
    """

    wrapped = ("receive", "get_prev_sampled_outputs")

    def __init__(self, session: Session, handler: Any) -> None:
        self.session, self._handler = session, handler
        self._flights: deque[_Flight] = deque()

    def receive(self, receive: Callable[..., bool], input_batch: Any, recv_drafts: bool) -> bool:
        """At the end of a step: vLLM asks for what will be sampled, if any of it is needed."""
        result = receive(input_batch, recv_drafts)
        received = self._handler.queue[-1]  # this step's place, None if nothing was asked for
        deferred = self.session.defer()
        if deferred is None:
            return result
        if received is None:  # no draft of this step will ever be anybody's token
            self.session.cancel_deferred(deferred)
            return result
        drafts = input_batch.num_draft_tokens_per_req
        places = {name: place for place, name in enumerate(input_batch.req_ids) if drafts[place] > 0}
        self._flights.append(_Flight(received, deferred, places))
        return result

    def get_prev_sampled_outputs(self, get: Callable[[], Any]) -> Any:
        """At the beginning of a step: what was sampled as many steps ago as there are stages."""
        due = self._handler.queue[0] if self._handler.queue else None
        outputs = get()
        if due is not None and self._flights and self._flights[0].received is due:
            self._settle(self._flights[0])
        return outputs

    def finish_requests(self, finish: Callable[[Any], None], scheduler_output: Any) -> None:
        """Behind that, before blocks are cleared, copied or written: which requests are no more."""
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for flight in [flight for flight in self._flights if not gone.isdisjoint(flight.places)]:
            if flight.known or not scheduler_output.total_num_scheduled_tokens or flight.received.event.query():
                self._settle(flight)
                continue
            ended = [flight.places.pop(name) for name in gone & flight.places.keys()]
            if not self.session.undo(flight.deferred, ended):
                self._flights.remove(flight)
        if scheduler_output.pending_structured_output_tokens:
            for flight in self._flights:
                flight.known = True
        finish(scheduler_output)

    def schedule(self, requests: Iterable[str]) -> None:
        """These run in the step that begins: what they drafted before is judged first."""
        for flight in [flight for flight in self._flights if not flight.places.keys().isdisjoint(requests)]:
            self._settle(flight)

    def _settle(self, flight: _Flight) -> None:
        self._flights.remove(flight)
        received = flight.received
        self._handler.main_stream.wait_event(received.event)
        self.session.settle(flight.deferred, received.num_rejected, received.num_sampled.tolist)
