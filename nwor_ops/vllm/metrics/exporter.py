"""Add the totals in the files of an engine's processes to vLLM's ``/metrics`` and to ``nwor_ops.stats()``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import EngineStats
from nwor_ops.vllm.metrics import transport, worker
from nwor_ops.vllm.support import wrap_once

if TYPE_CHECKING:
    from nwor_ops.vllm.session import Session


def patch_loggers_module(module: ModuleType) -> None:
    """Patch vLLM's Prometheus logger so that it also exports our metrics."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            config = NworConfig.load(vllm_config.additional_config)
            if config.emit_metrics and (config.mode != "off" or config.draft_graphs or config.recurrent):
                try:
                    export()
                except (OSError, ValueError) as error:  # no folder for the files; the engine runs without our metrics
                    module.logger.warning("nwor: counters are not exported: %s", error)

        return __init__

    wrap_once(getattr(module, "PrometheusStatLogger", None), "__init__", wrapper)


@functools.cache
def export() -> None:
    """Add a collector for the files to vLLM's registry, unless vLLM collects them itself."""
    import prometheus_client
    from prometheus_client.multiprocess import MultiProcessCollector

    if transport.SHARED_VARIABLE not in os.environ:
        transport.make_directory()
        MultiProcessCollector(prometheus_client.REGISTRY, path=str(transport.directory()))


def totals(sessions: list[Session]) -> EngineStats:
    """Return the totals for :func:`nwor_ops.stats`: those of this process's sessions, and those in all other files."""
    publishers = dict(worker.publishers)
    here = {publisher.file.path for publisher in publishers.values()}
    asked = [session for session in sessions if session.manager is not None]
    found = [publisher.now(owner) for owner, publisher in publishers.items()]
    found += [worker.session_totals(session, session.stats()) for session in asked if session not in publishers]
    total = sum(found, transport.read(path for path in transport.files() if path not in here))
    return EngineStats(
        **{counted: total.counts[counted] for counted in transport.METRICS},
        vanilla_steps=dict(total.vanilla_steps),
        engines=len(asked) + sum(path not in here for path in transport.files("worker")),
    )
