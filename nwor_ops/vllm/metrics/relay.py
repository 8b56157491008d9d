"""Send the totals of a worker to an engine core that does not share a folder with it.

This is the case on another host, and for workers started by Ray. vLLM carries the output of a step from the worker that
samples to the scheduler. The totals are an attribute of this ``ModelRunnerOutput``, at most twice a second. The engine
core writes the file. The counts of a step arrive with a later step.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.transport import CounterFile, Totals
from nwor_ops.vllm.step_listener import StepListener

TOTALS = "_nwor_totals"
_patches = Patches("relay of counters")


def is_remote(vllm_config: Any) -> bool:
    """Return whether the workers of an engine may run without access to the engine core's folder."""
    parallel = vllm_config.parallel_config
    return bool(parallel.nnodes_within_dp > 1 or parallel.use_ray)


class Sender(StepListener):
    """Attach the totals to the output of a step, in the worker.

    Args:
        arrived: returns the totals of the session that are known without asking the device.
        session: the session whose totals are sent.
        errors: counts the steps in which that failed.
    """

    def __init__(self, arrived: Callable[[Any], Totals], session: Any, errors: Errors) -> None:
        self._arrived, self._errors, self._next = arrived, errors, time.monotonic()
        # A strong reference would make the session keep itself and its undo log alive.
        self._session = weakref.ref(session)
        session.subscribe(self)

    def returned(self, output: Any) -> None:
        """Attach the totals to ``output``.

        With async scheduling, the ``ModelRunnerOutput`` is an attribute of ``output``. An output without requests is
        left unchanged, since it may be a shared constant of vLLM.
        """
        try:
            self._attach(output)
        except Exception as error:
            self._errors.go_on("sending counters failed", error)

    def _attach(self, output: Any) -> None:
        for name in ("model_runner_output", "_model_runner_output"):
            output = getattr(output, name, output)
        now = time.monotonic()
        if now < self._next or not getattr(output, "req_ids", None):
            return
        session = self._session()
        if session is None:
            return
        self._next = now + transport.PERIOD
        setattr(output, TOTALS, tuple(map(dict, self._arrived(session).parts)))


class Receiver:
    """Write the totals that arrive to a file, in the engine core, unless the worker writes its own file here.

    Args:
        scheduler: vLLM's scheduler. One method of this instance is patched.
        logger: vLLM's logger.
    """

    def __init__(self, scheduler: Any, logger: Any) -> None:
        self._file = CounterFile("worker", scheduler.vllm_config)
        self._errors = Errors(logger, "without publishing counters")
        _patches.put_methods(scheduler, self, ["update_from_output"])

    def update_from_output(self, update: Callable[..., Any], scheduler_output: Any, model_runner_output: Any) -> Any:
        """Write the totals of a step's output, if it has any."""
        totals = getattr(model_runner_output, TOTALS, None)
        if totals is not None:
            with self._errors.survived("publishing counters failed"):
                self._write(Totals(*map(Counter, totals)))
        return update(scheduler_output, model_runner_output)

    def _write(self, totals: Totals) -> None:
        if not any(path != self._file.path for path in self._file.of_workers()):
            self._file.write(totals)


def patch_scheduler_module(module: ModuleType) -> None:
    """Patch vLLM's scheduler so that each new one receives totals, if its engine has remote workers and publishes
    metrics."""

    def decorator(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            config = NworConfig.load(self.vllm_config.additional_config)
            wanted = config.mode != "off" and config.emit_metrics and self.vllm_config.speculative_config is not None
            if wanted and transport.directory() and is_remote(self.vllm_config):
                with Errors(module.logger, "without counters of other hosts").survived("receiving counters failed"):
                    Receiver(self, module.logger)

        return __init__

    _patches.put_once(getattr(module, "Scheduler", None), "__init__", decorator)
