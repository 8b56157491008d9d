"""Add the totals in the files of an engine's processes to vLLM's ``/metrics`` and to ``nwor_ops.stats()``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import EngineStats
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.metrics import transport, worker

if TYPE_CHECKING:
    from nwor_ops.vllm.transaction.session import Session


_patches = Patches("metrics")


def patch_loggers_module(module: ModuleType) -> None:
    """Patch vLLM's Prometheus logger so that it also exports our metrics."""

    def decorator(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            config = NworConfig.load(vllm_config.additional_config)
            if config.emit_metrics and config.wants_feature:
                with Errors(module.logger, "without our metrics").survived("export of counters failed"):
                    export(module.logger)

        return __init__

    _patches.put_once(getattr(module, "PrometheusStatLogger", None), "__init__", decorator)


@functools.cache
def export(logger: Any) -> None:
    """Add a collector for the files to vLLM's registry, unless vLLM collects them itself."""
    import prometheus_client

    if transport.SHARED_VARIABLE not in os.environ:
        transport.make_directory()
        prometheus_client.REGISTRY.register(FileCollector(logger))


class FileCollector:
    """Collect the counters of the files at each scrape.

    A file may be invalid, or removed during the scrape. ``/metrics`` then lacks our counters, and shows all others.
    """

    def __init__(self, logger: Any) -> None:
        from prometheus_client.multiprocess import MultiProcessCollector

        self._files = MultiProcessCollector(None, path=str(transport.directory()))
        self._errors = Errors(logger, "without our counters in this scrape")

    def collect(self) -> list[Any]:
        """Return the metrics of all files."""
        with self._errors.survived("reading counters failed"):
            return list(self._files.collect())
        return []


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
        draft_eager_passes=sum(total.eager_passes.values()),
        draft_eager_reasons=dict(total.eager_passes),
        errors=dict(total.errors),
        engines=len(asked) + sum(path not in here for path in transport.files("worker")),
    )
