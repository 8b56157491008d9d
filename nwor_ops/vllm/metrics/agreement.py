"""Compare the worker's counters with the scheduler's.

vLLM's scheduler counts proposed and accepted drafts from token ids on the host; our counters come from kernels. Both
count the same steps, so they must agree. This module compares them in the process of the engine core, because the
scheduler's counts are there.

- Both sides see the same steps in the same order, and the drafts of each step increase the total. The pair (drafted,
  accepted) that the worker published must therefore be one of the pairs that the scheduler went through. The comparison
  needs neither a common clock nor an idle engine: if the scheduler lags, it reaches the pair later.
- The scheduler's count of a step is taken from the statistics that the step returns. No work is added per request.
- The scheduler does not count the drafts of a request that ended while the step ran: it was aborted, or it stopped in
  the previous step under async scheduling. Our counters include them, because these drafts were written and undone. If
  the scheduler counted fewer requests than were scheduled, or has statistics switched off, the step is counted from the
  tokens that it returned.
- vLLM subtracts drafts that a grammar forbids, although the worker verified them. Drafts are therefore counted as
  scheduled.
- The comparison ends with the first vanilla step, because only the scheduler counts it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.transport import CounterFile, Totals
from nwor_ops.vllm.support.refusals import Unsupported

_UPDATE = "scheduler_output, model_runner_output"
_patches = Patches("comparison of counters")
_MOST_STEPS = 1 << 16  # maximum number of totals to keep while nothing is published


@dataclass(frozen=True)
class Total:
    """The number of drafts that the scheduler has seen so far.

    The scheduler may not know how many of them were accepted; then the number lies between ``accepted`` and
    ``accepted_at_most``.
    """

    drafted: int
    accepted: int
    accepted_at_most: int


class Agreement:
    """Compare the worker's totals with the scheduler's.

    Attributes:
        comparisons: number of comparisons.
        disagreements: number of comparisons in which the totals differed.
    """

    def __init__(self) -> None:
        self.comparisons = 0
        self.disagreements = 0
        self._totals = deque([Total(0, 0, 0)], maxlen=_MOST_STEPS)
        self._pending: tuple[int, int] | None = None

    def step(self, drafted: int, accepted: int, accepted_at_most: int) -> None:
        """Add one step with drafts to the scheduler's totals."""
        last = self._totals[-1]
        self._totals.append(
            Total(last.drafted + drafted, last.accepted + accepted, last.accepted_at_most + accepted_at_most)
        )

    @property
    def waiting(self) -> bool:
        """Whether the scheduler has not reached the last published totals yet."""
        return self._pending is not None

    def published(self, drafted: int, accepted: int) -> None:
        """Set the worker's totals, which are compared next. Ignored while :attr:`waiting`."""
        if self._pending is None:
            self._pending = drafted, accepted

    def compare(self) -> str | None:
        """Compare the totals if the scheduler has reached those of the worker.

        Returns:
            A sentence with both totals if they differ. None if they agree or cannot be compared yet.
        """
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
            f"{total.accepted}{at_most} (the scheduler is now at {self._totals[-1].drafted} drafts)"
        )


class SchedulerWatch:
    """Count the drafts of one engine's scheduler, and compare them with the totals that the worker published.

    Args:
        scheduler: vLLM's scheduler, before its first step. One method of this instance is patched.
        logger: vLLM's logger.
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
        try:
            _patches.put_methods(scheduler, self, ["update_from_output"], signature=_UPDATE)
        except Unsupported:
            self._stop("Scheduler.update_from_output has another signature in this vLLM")

    def update_from_output(self, update: Callable[..., Any], scheduler_output: Any, model_runner_output: Any) -> Any:
        """Run vLLM's update of a step, and count the step."""
        lengths: list[int] = []
        if self._active:
            # Read the lengths first: vLLM removes tokens of a request that stops from these very lists.
            self._guarded(lambda: lengths.extend(map(len, model_runner_output.sampled_token_ids or ())))
        outputs = update(scheduler_output, model_runner_output)
        if self._active:
            self._guarded(lambda: self._after_step(scheduler_output, model_runner_output, lengths, outputs))
        return outputs

    def _guarded(self, action: Any, *args: Any, **kwargs: Any) -> None:
        """Run an action and stop comparing if it raises. A failed comparison must not stop the engine."""
        try:
            action(*args, **kwargs)
        except Exception:
            self._stop("an error in the comparison")
            self._logger.exception("nwor: the comparison with the scheduler's counters failed")

    def _stop(self, reason: str) -> None:
        self._active = False
        self._logger.info("nwor: counters are no longer compared with the scheduler's: %s", reason)

    # ------------------------------------------------------------ the scheduler's counts

    def _after_step(self, scheduler_output: Any, model_runner_output: Any, lengths: list[int], outputs: Any) -> None:
        """Add one step to the scheduler's counts. `lengths` is the number of tokens returned for each request, by its
        position."""
        places: dict[str, int] = model_runner_output.req_id_to_index
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
        found = self._file.of_workers()
        if len(found) > 1:
            self._stop("the worker bound a new cache")
        return transport.read(found) if len(found) == 1 else None

    def _publish(self) -> None:
        counted = self._agreement
        self._file.write(Totals(Counter(comparisons=counted.comparisons, disagreements=counted.disagreements)))


def _counted(outputs: Any) -> Any:
    """Return the scheduler's own statistics of a step's drafts, or None."""
    found = [output.scheduler_stats for output in outputs.values() if output.scheduler_stats is not None]
    return found[0].spec_decoding_stats if found else None


def _accepted(sampled: int, drafts: int) -> tuple[int, int]:
    """Return the minimum and maximum number of accepted drafts of a request that got ``sampled`` tokens."""
    return (sampled - 1, sampled - 1) if sampled else (0, drafts)


def _comparable(scheduler: Any) -> bool:
    """Return whether every scheduled draft is verified, and every token of a step except one is an accepted draft."""
    speculative = scheduler.vllm_config.speculative_config
    return (
        speculative is not None
        and getattr(scheduler, "num_sampled_tokens_per_step", 1) == 1
        and not getattr(speculative, "enable_adaptive_verification", False)
        and not speculative.use_ngram_gpu()
    )


def patch_scheduler_module(module: ModuleType) -> None:
    """Patch vLLM's scheduler so that each new one starts a comparison, if its engine publishes metrics."""

    def decorator(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            config = NworConfig.load(self.vllm_config.additional_config)
            if config.mode != "off" and config.emit_metrics and transport.directory() and _comparable(self):
                with Errors(module.logger, "without comparing counters").survived("comparison of counters failed"):
                    SchedulerWatch(self, module.logger)

        return __init__

    _patches.put_once(getattr(module, "Scheduler", None), "__init__", decorator)
