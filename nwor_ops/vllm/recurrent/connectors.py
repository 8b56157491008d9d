"""Keep pages with a record apart from vanilla vLLM's pages when KV connectors share pages between engines.

A page with one state per request has another size than vLLM's page. A request has one page instead of K + 1. In vLLM,
keys of shared stores and handshakes of transfers include neither fact. Engines with one state therefore add the form
(``chunk``), rows and bytes of a record to each of them. An engine then never finds a page with another layout. A
transfer between engines with different layouts fails when they connect.

This module does not import vLLM at the top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from nwor_ops.vllm.hooks import ModulePatch
from nwor_ops.vllm.recurrent.page import RecordGeometry
from nwor_ops.vllm.recurrent.supported import CONNECTOR_HOOKS, uses_recurrent


def layout_of(vllm_config: Any) -> str:
    """Return a name for the layout of an engine's pages, or an empty string for vLLM's layout.

    Engines with the same name share pages, also if they run different versions of this package. A change that moves the
    states in a page must change the name. Records may change: a page in a store has no pending rows.
    """
    if not uses_recurrent(vllm_config):
        return ""
    geometry = RecordGeometry.of(vllm_config)
    form = "chunk-" if geometry.chunk else ""
    return f"recurrent-{form}{geometry.rows}x{geometry.num_bytes}"


def _offloading(build: Callable[..., Any]) -> Callable[..., Any]:
    def build_offloading_config(vllm_config: Any, kv_cache_config: Any) -> Any:
        config, layout = build(vllm_config, kv_cache_config), layout_of(vllm_config)
        if not layout:
            return config
        model = dataclasses.replace(config.model, name=f"{config.model.name}+{layout}")
        return dataclasses.replace(config, model=model)

    return build_offloading_config


def _nixl(compute: Callable[..., str]) -> Callable[..., str]:
    def compute_nixl_compatibility_hash(vllm_config: Any, *args: Any, **kwargs: Any) -> str:
        layout = layout_of(vllm_config)
        key = compute(vllm_config, *args, **kwargs)
        return f"{key}+{layout}" if layout else key

    return compute_nixl_compatibility_hash


def _store(initialize: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        layout = layout_of(vllm_config)
        if layout:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            prefix = str(extra.get("cache_prefix", ""))
            if not prefix.endswith(layout):  # a second worker of the same configuration
                extra["cache_prefix"] = "+".join(filter(None, [prefix, layout]))
        initialize(self, vllm_config, kv_cache_config)

    return __init__


def _mooncake(register: Callable[..., None]) -> Callable[..., None]:
    def register_kv_caches(self: Any, kv_caches: Any) -> None:
        register(self, kv_caches)
        layout = layout_of(self.vllm_config)
        if layout:
            self.registered_layer_names[:] = [f"{name}+{layout}" for name in self.registered_layer_names]

    return register_kv_caches


# Made in engines with one state, once vLLM has imported the connector's module.
PATCHES = tuple(
    ModulePatch(CONNECTOR_HOOKS[connector], decorator, "recurrent: connectors", lambda config: bool(config.recurrent))
    for connector, decorator in (
        ("OffloadingConnector", _offloading),
        ("NixlConnector", _nixl),
        ("MooncakeStoreConnector", _store),
        ("MooncakeConnector", _mooncake),
    )
)
