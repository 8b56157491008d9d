"""Do we count what the scheduler counts?

vLLM's scheduler counts proposed and accepted drafts for itself, from token ids on the host; our counters come
from kernels. Two independent books of the same steps must agree, and this module compares them where vLLM's
book is kept: in the process of the engine core.

- Both sides see the same steps in the same order, and each step's drafts make the total grow. So the pair
  (drafts, accepted) that the worker published must be one of the pairs that the scheduler went through. That
  needs no common clock and no moment of rest: steps in flight only make the scheduler reach the pair later.
- Its count of a step is in the statistics that the step returns: nothing is added to what vLLM does for each request.
- The scheduler does not count the drafts of a request that ended while the step ran: aborted, or stopped in
  the step before under async scheduling. We do: they were written and undone. So a step of which it counted fewer
  requests than were scheduled, or none as statistics are off, is counted from the tokens that the step returned.
- vLLM subtracts drafts that a grammar forbids; the worker still verified them. So drafts are counted as scheduled.
- The comparison ends with the first step that ran without the transaction: only the scheduler counts it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.transport import CounterFile, Totals
from nwor_ops.vllm.support import wrap_once

_UPDATE = ("scheduler_output", "model_runner_output")
_MOST_STEPS = 1 << 16  # remembered while nothing is published


@dataclass(frozen=True)
class Total:
    """Drafts the scheduler has seen so far. It may not know how many were accepted: between two numbers."""

    drafted: int
    accepted: int
    accepted_at_most: int


class Agreement:
    """Compares the worker's totals with the scheduler's.

    Attributes:
        comparisons: how often both numbers were known.
        disagreements: how often they differed.
    """

    def __init__(self) -> None:
        self.comparisons = 0
        self.disagreements = 0
        self._totals = deque([Total(0, 0, 0)], maxlen=_MOST_STEPS)
        self._pending: tuple[int, int] | None = None

    def step(self, drafted: int, accepted: int, accepted_at_most: int) -> None:
        """The scheduler has processed one more step with drafts."""
        last = self._totals[-1]
        self._totals.append(
            Total(last.drafted + drafted, last.accepted + accepted, last.accepted_at_most + accepted_at_most)
        )

    @property
    def waiting(self) -> bool:
        """Whether the scheduler has yet to reach the totals that were published last."""
        return self._pending is not None

    def published(self, drafted: int, accepted: int) -> None:
        """What the worker says; ignored while it is waiting."""
        if self._pending is None:
            self._pending = drafted, accepted

    def compare(self) -> str | None:
        """Both numbers as a sentence if they disagree, None if they agree or cannot be compared yet."""
        if self._pending is None or self._totals[-1].drafted < self._pending[0]:
            return None
        (drafted, accepted), self._pending = self._pending, None
        forgotten = len(self._totals) == _MOST_STEPS
        while len(self._totals) > 1 and self._totals[1].drafted <= drafted:
            self._totals.popleft()
        total = self._totals[0]
        if total.drafted > drafted and forgotten:
            return None
        self.comparisons += 1
        if total.drafted == drafted and total.accepted <= accepted <= total.accepted_at_most:
            return None
        self.disagreements += 1
        at_most = f" to {total.accepted_at_most}" if total.accepted_at_most > total.accepted else ""
        return (
            f"nwor counted {drafted} drafts and {accepted} accepted, the scheduler {total.drafted} and "
            f"{total.accepted}{at_most} (and {self._totals[-1].drafted} drafts by now)"
        )


class SchedulerWatch:
    """Keeps the scheduler's book of one engine, and compares it with what the worker has published.

    Args:
        scheduler: vLLM's, before its first step. One method of this instance is wrapped.
        logger: vLLM's.
    """

    def __init__(self, scheduler: Any, logger: Any) -> None:
        self._logger = logger
        self._agreement = Agreement()
        self._next_look = time.monotonic()
        self._file = CounterFile("scheduler", scheduler.vllm_config)
        self._active = True
        self._guarded(self._wrap, scheduler)
        if self._active:
            self._guarded(self._publish)

    def _wrap(self, scheduler: Any) -> None:
        update = scheduler.update_from_output
        if tuple(inspect.signature(update).parameters) != _UPDATE:
            self._stop("this vLLM counts in another way")
            return

        @functools.wraps(update)
        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            sampled = model_runner_output.sampled_token_ids
            # vLLM cuts the tokens of a request that stops out of these very lists.
            lengths = [len(tokens) for tokens in sampled] if self._active and sampled else []
            outputs = update(scheduler_output, model_runner_output)
            if self._active:
                self._guarded(self._after_step, scheduler_output, model_runner_output.req_id_to_index, lengths, outputs)
            return outputs

        scheduler.update_from_output = update_from_output

    def _guarded(self, action: Any, *args: Any, **kwargs: Any) -> None:
        """A check that fails must not take the engine with it."""
        try:
            action(*args, **kwargs)
        except Exception:
            self._stop("an error in the comparison")
            self._logger.exception("nwor: the comparison with the scheduler's counters failed")

    def _stop(self, reason: str) -> None:
        self._active = False
        self._logger.info("nwor: counters are no longer compared with the scheduler's: %s", reason)

    # ------------------------------------------------------------ the scheduler's book

    def _after_step(self, scheduler_output: Any, places: dict[str, int], lengths: list[int], outputs: Any) -> None:
        """`lengths`: of the tokens that the step returned, at the place of each request."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        if scheduled:
            counted = _counted(outputs)
            if counted is not None and counted.num_drafts == len(scheduled):
                low = high = counted.num_accepted_tokens
            else:
                accepted = (
                    _accepted(lengths[places[request]] if lengths and request in places else 0, len(drafts))
                    for request, drafts in scheduled.items()
                )
                low, high = map(sum, zip(*accepted, strict=True))
            self._agreement.step(sum(map(len, scheduled.values())), low, high)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + transport.PERIOD
            self._look()

    # ------------------------------------------------------------ the comparison

    def _look(self) -> None:
        agreement = self._agreement
        if not agreement.waiting:
            worker = self._of_worker()
            if worker is None:
                return
            if worker.vanilla_steps or worker.counts["abandoned"]:
                self._stop("a step ran without the transaction")
                return
            agreement.published(worker.counts["drafted"], worker.counts["accepted"])
        disagreement = agreement.compare()
        if disagreement is not None and agreement.disagreements == 1:
            self._logger.warning("nwor: counters disagree: %s (further ones are counted, not logged)", disagreement)
        if not agreement.waiting:
            self._publish()

    def _of_worker(self) -> Totals | None:
        found = self._file.of_same_engine("worker")
        if len(found) > 1:
            self._stop("the worker has bound a new cache")
        return transport.read(found) if len(found) == 1 else None

    def _publish(self) -> None:
        counted = self._agreement
        self._file.write(Totals(Counter(comparisons=counted.comparisons, disagreements=counted.disagreements)))


def _counted(outputs: Any) -> Any:
    """The scheduler's own statistics of a step's drafts, or None."""
    found = [output.scheduler_stats for output in outputs.values() if output.scheduler_stats is not None]
    return found[0].spec_decoding_stats if found else None


def _accepted(sampled: int, drafts: int) -> tuple[int, int]:
    """Least and most drafts of a request that were accepted, by the number of tokens that the step returned for it."""
    return (sampled - 1, sampled - 1) if sampled else (0, drafts)


def _comparable(scheduler: Any) -> bool:
    """Whether each draft that is scheduled is verified, and each token but one of a step is an accepted draft."""
    speculative = scheduler.vllm_config.speculative_config
    return (
        speculative is not None
        and getattr(scheduler, "num_sampled_tokens_per_step", 1) == 1
        and not getattr(speculative, "enable_adaptive_verification", False)
        and not speculative.use_ngram_gpu()
    )


def wrap_scheduler_module(module: ModuleType) -> None:
    """Make a new scheduler look at its engine's configuration."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            config = NworConfig.load(self.vllm_config.additional_config)
            if config.mode != "off" and config.emit_metrics and transport.directory() and _comparable(self):
                SchedulerWatch(self, module.logger)

        return __init__

    wrap_once(getattr(module, "Scheduler", None), "__init__", wrapper)
