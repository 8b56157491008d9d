"""Checks that an engine supports the transaction. Each raises :class:`Unsupported`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nwor_ops.vllm.hooks import Hook, check_library, check_vllm
from nwor_ops.vllm.support.connectors import connectors_of
from nwor_ops.vllm.support.refusals import CONNECTOR, PARTIAL_TAILS, SCHEDULER, UNORDERED, Check, check_engine


def checks_of(vllm_config: Any, device_type: str, mode: str, hooks: Iterable[Hook]) -> Iterator[Check]:
    """Yield the checks of a configuration, in order. Start-up and ``nwor-ops check`` make them.

    ``mode`` is ``"off"`` for an audit without a transaction. ``hooks`` are the functions that its runner patches or
    calls.
    """
    yield lambda: check_vllm(hooks)
    yield lambda: check_transaction(vllm_config, device_type, mode)
    if mode == "stage":
        yield lambda: check_scheduler(vllm_config)
    if mode != "off":
        yield lambda: check_library(device_type)


def check_transaction(vllm_config: Any, device_type: str, mode: str) -> None:
    """Check that an engine with this configuration, including its KV connectors, supports the transaction."""
    check_engine(vllm_config, device_type, mode=mode)
    check_connectors(vllm_config, mode)


def check_connectors(vllm_config: Any, mode: str) -> None:
    """Check that the KV connectors of an engine read no rejected rows in this mode."""
    for name, connector in connectors_of(vllm_config.kv_transfer_config):
        if connector.refused:
            raise CONNECTOR.because(name=name, why=connector.refused)
        if mode == "cow" and not connector.in_order and vllm_config.scheduler_config.async_scheduling:
            raise UNORDERED.because(name=name)
        if mode == "cow" and connector.partial_tails and vllm_config.model_config.is_hybrid:
            raise PARTIAL_TAILS.because(name=name)  # it reads them when the next step may write drafts there


def check_scheduler(vllm_config: Any) -> None:
    """Refuse a scheduler that does not derive from vLLM's, because it would give the shadow pages to requests."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
    if not issubclass(scheduler_class, Scheduler):
        raise SCHEDULER.because(name=scheduler_class.__qualname__)


def is_recurrent(spec: Any) -> bool:
    """Return whether a KV-cache spec is for recurrent states.

    Mamba, Gated DeltaNet, short convolutions and linear attention have such states: a few per request, and every token
    overwrites them. The transaction ignores them; vLLM keeps one for each draft.
    """
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    return all(isinstance(of_layer, MambaSpec) for of_layer in iter_layer_specs(spec))
