"""Pass the messages of a :class:`~nwor_ops.vllm.metrics.publisher.Publisher` on to ``/metrics`` and to
``nwor_ops.stats()``.

A message is the text of a JSON object: ``publisher``, ``labels``, the increments ``counts``, and once ``features`` and
``memory``. The scheduler finds it on the output of a step. vLLM's engine core sends ``SchedulerStats`` to a process of
the front end in most steps. The text travels there as a key of ``waiting_lora_adapters``. vLLM fills this field only in
the front end, so the key reaches no metric of vLLM, not even if the front end does not have this plugin.

Each message arrives in one process. Its increments are added to counters of ``prometheus_client`` there. With several
API servers vLLM adds up the counters of all of them, as its own.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from nwor_ops.transaction.counters import EngineStats
from nwor_ops.vllm.environment import settings_of, vllm_logger
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.metrics.names import BY_REASON, INFO, MEMORY, METRICS
from nwor_ops.vllm.metrics.publisher import MESSAGE, publishers, sum_of

_KEY = "nwor:"
_LABELS = ("model_name", "engine")  # as vLLM's own metrics
UPDATE_HOOK = Hook(
    "vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", "scheduler_output, model_runner_output"
)
_received: dict[str, Counter[str]] = {}  # by name of the publisher

# ---------------------------------------------------------------- engine core


def relaying(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of the scheduler's update after a step: it passes the message of the output on."""
    logger = vllm_logger()
    errors, served = Errors(logger, "without publishing counters"), weakref.WeakSet[Any]()

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = update(self, scheduler_output, model_runner_output)
        message = getattr(model_runner_output, MESSAGE, None)
        with errors.survived("passing on counters failed"):
            if message is not None:
                _put(outputs, message)
            if self not in served and model_runner_output.req_ids:
                served.add(self)
                if message is None and settings_of(self.vllm_config).wants_feature:
                    logger.warning("nwor: no feature is active: nwor_ops is not loaded in the worker that samples. Is "
                                   "the package installed on its node?")  # fmt: skip
        return outputs

    return update_from_output


def _put(outputs: dict[int, Any], message: str) -> None:
    """Put a message on the statistics of a step, or on new ones if vLLM makes none."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    if not outputs:
        outputs[0] = EngineCoreOutputs()
    chosen = next((one for one in outputs.values() if one.scheduler_stats is not None), next(iter(outputs.values())))
    if chosen.scheduler_stats is None:
        chosen.scheduler_stats = SchedulerStats()
    chosen.scheduler_stats.waiting_lora_adapters[_KEY + message] = 0


# ---------------------------------------------------------------- front end


def receiving(original: Callable[..., None]) -> Callable[..., None]:
    """Return a patch of the method that gets the engine core's outputs in the front end. It takes our messages out."""
    errors = Errors(vllm_logger(), "without our metrics")

    def update_scheduler_stats(self: Any, scheduler_stats: Any) -> None:
        adapters = scheduler_stats.waiting_lora_adapters if scheduler_stats is not None else {}
        for key in [key for key in adapters if key.startswith(_KEY)]:
            del adapters[key]
            with errors.survived("receiving counters failed"):
                receive(key.removeprefix(_KEY))
        original(self, scheduler_stats)

    return update_scheduler_stats


def receive(message: str) -> None:
    """Add a message to the totals of this process, and to its ``/metrics``."""
    content = json.loads(message)
    _received.setdefault(content["publisher"], Counter()).update(content["counts"])
    for name, count in content["counts"].items():
        metric, _, reason = name.partition(":")
        _counter(metric).labels(*content["labels"], *([reason] if reason else [])).inc(count)
    if "features" in content:
        _gauge(INFO, tuple(content["features"])).labels(*content["labels"], *content["features"].values()).set(1)
        for part, size in content["memory"].items():
            _gauge(MEMORY, ("part",)).labels(*content["labels"], part).set(size)


@functools.cache
def _counter(name: str) -> Any:
    import prometheus_client

    return prometheus_client.Counter(*METRICS[name], (*_LABELS, *(["reason"] if name in BY_REASON else [])))


@functools.cache
def _gauge(metric: tuple[str, str], labels: tuple[str, ...]) -> Any:
    import prometheus_client

    return prometheus_client.Gauge(*metric, (*_LABELS, *labels), multiprocess_mode="mostrecent")


def totals() -> EngineStats:
    """Return the totals for :func:`nwor_ops.stats`: exact ones of this process's engines, received ones of others."""
    here = {publisher.name: publisher.totals() for publisher in list(publishers.values())}
    engines = _received | here
    counts: dict[str, Any] = {name: {} if name in BY_REASON else 0 for name in METRICS}
    for key, count in sum_of(engines.values()).items():
        name, _, reason = key.partition(":")
        if reason:
            counts[name][reason] = count
        else:
            counts[name] = count
    return EngineStats(len(engines), **counts)
