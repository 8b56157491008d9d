"""Checks that an engine supports the transaction. Each raises :class:`Unsupported`."""

from __future__ import annotations

from typing import Any

from nwor_ops.vllm.support.connectors import connectors_of
from nwor_ops.vllm.support.refusals import CONNECTOR, PARTIAL_TAILS, UNORDERED, check_engine


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


def check_partial_tails(vllm_config: Any, kv_cache_config: Any, mode: str) -> None:
    """Check that no KV connector reads partial blocks of this cache while the next step may write drafts there."""
    if mode != "cow" or not any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        return
    for name, connector in connectors_of(vllm_config.kv_transfer_config):
        if connector.partial_tails:
            raise PARTIAL_TAILS.because(name=name)


def is_recurrent(spec: Any) -> bool:
    """Return whether a KV-cache spec is for recurrent states.

    Mamba, Gated DeltaNet, short convolutions and linear attention have such states: a few per request, and every token
    overwrites them. The transaction ignores them; vLLM keeps one for each draft.
    """
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    return all(isinstance(of_layer, MambaSpec) for of_layer in iter_layer_specs(spec))
