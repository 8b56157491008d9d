"""Send the totals of a worker to an engine core that does not share a folder with it.

This is the case on another host, and for workers started by Ray. vLLM carries the output of a step from the worker that
samples to the scheduler. The totals travel with it as an attribute of the ``ModelRunnerOutput``, at most twice a
second, and the engine core writes the file. They lag by at least one step: the counts of a step arrive with a later
one.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.transport import CounterFile, Totals
from nwor_ops.vllm.support import wrap_once

if TYPE_CHECKING:
    from nwor_ops.vllm.metrics.worker import SessionPublisher

TOTALS = "_nwor_totals"
_MARK = "_nwor_relays"


def is_remote(vllm_config: Any) -> bool:
    """Return whether the workers of an engine may run without access to the engine core's folder."""
    parallel = vllm_config.parallel_config
    return bool(parallel.nnodes_within_dp > 1 or parallel.use_ray)


class Sender:
    """Attach the totals to the output of a step, in the worker.

    Args:
        publisher: the publisher of the session.
        session: the session whose totals are sent.
    """

    def __init__(self, publisher: SessionPublisher, session: Any) -> None:
        self._publisher, self._next = publisher, time.monotonic()
        # Hold the session weakly, so that it does not keep itself and its undo log alive.
        session.subscribe(returned=functools.partial(self.returned, weakref.ref(session)))

    def returned(self, owner: Callable[[], Any], output: Any) -> None:
        """Attach the totals to ``output``.

        With async scheduling, the ``ModelRunnerOutput`` is an attribute of ``output``. An output without requests is
        left unchanged, since it may be a shared constant of vLLM.
        """
        for name in ("model_runner_output", "_model_runner_output"):
            output = getattr(output, name, output)
        now = time.monotonic()
        if now < self._next or not getattr(output, "req_ids", None):
            return
        session = owner()
        if session is None:
            return
        self._next = now + transport.PERIOD
        totals = self._publisher.arrived(session)
        setattr(output, TOTALS, (dict(totals.counts), dict(totals.vanilla_steps)))


class Receiver:
    """Write the totals that arrive to a file, in the engine core, unless the worker writes its own file here.

    Args:
        scheduler: vLLM's scheduler. One method of this instance is patched.
        logger: vLLM's logger.
    """

    def __init__(self, scheduler: Any, logger: Any) -> None:
        self._file = CounterFile("worker", scheduler.vllm_config)
        self._logger, self._failed = logger, False
        update = scheduler.update_from_output

        @functools.wraps(update)
        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            totals = getattr(model_runner_output, TOTALS, None)
            if totals is not None:
                self._write(Totals(*map(Counter, totals)))
            return update(scheduler_output, model_runner_output)

        scheduler.update_from_output = update_from_output

    def _write(self, totals: Totals) -> None:
        if any(path != self._file.path for path in self._file.of_same_engine("worker")):
            return
        try:
            self._file.write(totals)
        except OSError as error:
            if not self._failed:
                self._logger.warning("nwor: counters are not published: %s", error)
            self._failed = True


def patch_scheduler_module(module: ModuleType) -> None:
    """Patch vLLM's scheduler so that each new one receives totals, if its engine has remote workers and publishes
    metrics."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            config = NworConfig.load(self.vllm_config.additional_config)
            wanted = config.mode != "off" and config.emit_metrics and self.vllm_config.speculative_config is not None
            if wanted and transport.directory() and is_remote(self.vllm_config):
                Receiver(self, module.logger)

        return __init__

    wrap_once(getattr(module, "Scheduler", None), "__init__", wrapper, _MARK)
