"""KV connectors: when and what each of them reads from the cache, and which of its settings matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Connector:
    """Describe when and what a KV connector reads from the cache.

    Attributes:
        reads: when it reads, and which blocks.
        in_order: it reads on the main stream, or after an event on that stream. It reads rows of a step only after the
            forward of that step. If False, it may read at any time after a request ends.
        layer_wise: it may export a layer from inside the attention op.
        partial_tails: for a hybrid model, it also stores the partial last block of a prompt. This read is not ordered
            before the next step.
        loads_any_time: it may load rows while vLLM runs other requests. This is the default, also for custom
            connectors, unless vLLM's source rules it out. An audit reports unexpected rows as stray writes.
        refused: the reason that the transaction refuses the connector. Empty: it is supported.
        recurrent: the reason that an engine with one recurrent state per request refuses the connector. Empty: it is
            supported. A supported connector exports only complete states. It reads them in a block with a cache key,
            or in the last block of a request that generates one token, after the forward of that step.
    """

    reads: str
    in_order: bool = True
    layer_wise: bool = False
    partial_tails: bool = False
    loads_any_time: bool = True
    refused: str = ""
    recurrent: str = ""


_AT_THE_END = "after a request ends, by RDMA and not in stream order: its blocks, with the partial tail"
_NIXL = Connector(_AT_THE_END, in_order=False)
_NOT_HYBRID = "vLLM starts no hybrid model with it (it is not `SupportsHMA`)"

# All connectors of vLLM 0.33, by their name in vLLM's factory.
CONNECTORS = {
    "ExampleConnector": Connector(
        "in attention: whole blocks of prompts", layer_wise=True, loads_any_time=False,
        recurrent=_NOT_HYBRID),
    "MultiConnector": Connector(
        "as its inner connectors do; all of them must be supported", loads_any_time=False),
    "OffloadingConnector": Connector(
        "in the next step, on a stream that waits for the main one: full chunks, for a hybrid model partial ones too",
        partial_tails=True),
    "SimpleCPUOffloadConnector": Connector(
        "at `wait_for_save`, after an event: full blocks, at the end of a hybrid request a partial one"),
    "LMCacheMPConnector": Connector(
        "at `wait_for_save`, after an event: full chunks",
        recurrent="keys of the `lmcache` package name the model, but not the layout of a page with a record"),
    "LMCacheConnectorV1": Connector(
        "at `wait_for_save`, or in attention: full chunks", layer_wise=True, loads_any_time=False,
        recurrent=_NOT_HYBRID),
    "MooncakeStoreConnector": Connector(
        "at `wait_for_save`, after an event: full blocks, for a hybrid model partial ones too", partial_tails=True),
    "HF3FSKVConnector": Connector("at `wait_for_save`: full blocks", recurrent=_NOT_HYBRID),
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
    "MooncakeConnector": _NIXL,
    "HiSparseConnector": Connector("", refused="it writes to its own slots"),
    "FlexKVConnectorV1": Connector("", refused="it reads from another process when the scheduler asks; not tested"),
    "MoRIIOConnector": Connector("", refused="it writes to other engines from inside attention; not tested"),
    "DecodeBenchConnector": Connector("", refused="it fills the cache with made-up rows for benchmarks; not tested"),
    "ExampleHiddenStatesConnector": Connector("", refused="it exports hidden states, not keys and values; not tested"),
}  # fmt: skip
# A custom connector class sets these attributes to True to declare that it reads in order, and that each recurrent
# state that it reads is complete. docs/guides/kv-connectors.md says what both mean.
IN_ORDER, COMPLETE_STATES = "reads_kv_cache_in_order", "reads_complete_states"
# Tiers of OffloadingConnector whose keys contain the model's name. recurrent/connectors.py adds the layout to it.
NAMED_TIERS = ("fs", "obj", "p2p")


def connectors_of(kv_transfer: Any) -> Iterator[tuple[str, Connector]]:
    """Yield the name and the description of each KV connector of an engine, including nested connectors.

    Args:
        kv_transfer: vLLM's ``KVTransferConfig``, or a dict with its settings, or None without a connector.
    """
    if kv_transfer is None:
        return
    if isinstance(kv_transfer, dict):
        from vllm.config import KVTransferConfig

        kv_transfer = KVTransferConfig(**kv_transfer)
    name = kv_transfer.kv_connector
    if name is None:
        return
    if kv_transfer.kv_connector_module_path or name not in CONNECTORS:
        yield name, _own_connector(kv_transfer)
        return
    if name == "OffloadingConnector" and kv_transfer.kv_connector_extra_config.get("spec_module_path"):
        yield name, Connector("", refused="a custom spec does not declare when it reads the cache")
        return
    connector = CONNECTORS[name]
    setting = _setting_without_recurrent(name, kv_transfer.kv_connector_extra_config)
    yield name, replace(connector, recurrent=setting) if setting and not connector.recurrent else connector
    if name == "MultiConnector":
        for inner in kv_transfer.kv_connector_extra_config.get("connectors", ()):
            yield from connectors_of(inner)


def _setting_without_recurrent(name: str, extra: Mapping[str, Any]) -> str:
    """Return why one recurrent state per request refuses these settings of a vLLM connector, or an empty string."""
    if name == "OffloadingConnector":
        if extra.get("sync_load_budget_bytes"):
            return (
                "with sync_load_budget_bytes vLLM copies a state to the request's next block before the load of that "
                "state: set it to 0"
            )
        for tier in extra.get("secondary_tiers") or ():
            if tier.get("type") not in NAMED_TIERS:
                return f"the keys of a tier of type {tier.get('type')} are the same for pages with and without a record"
    if name.startswith("Nixl") and extra.get("bidirectional_kv_xfer"):
        return (
            "with bidirectional_kv_xfer a decoder exports its last block, in which the accepted tokens of the last "
            "window are pending: set it to false"
        )
    return ""


def _own_connector(kv_transfer: Any) -> Connector:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector_class = KVConnectorFactory.get_connector_class(kv_transfer)
    if getattr(connector_class, IN_ORDER, False):
        unknown = (
            "it does not declare which states it reads; a class that reads only complete states sets "
            f"{COMPLETE_STATES} = True"
        )
        complete = getattr(connector_class, COMPLETE_STATES, False)
        return Connector("in order, as the class declares", layer_wise=True, recurrent="" if complete else unknown)
    return Connector(
        "",
        refused=f"it does not declare when it reads the cache; a class that reads in order sets {IN_ORDER} = True",
    )
