"""Checks that an engine supports draft graphs. Each raises :class:`Unsupported`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.support.features import DRAFT_BACK_ENDS, DRAFT_CACHE_SPECS, DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import GRAPH_MODE, Unsupported


def refuse(config: NworConfig, error: Unsupported, logger: Any) -> None:
    """Stop the engine with the reason. If the settings ask for it, log a warning instead and use vLLM's own drafter."""
    error.refuse(DRAFT_GRAPHS, config.strict, logger, "draft graphs were asked for", "without them")


def check_attention(attn_groups: Iterable[Iterable[Any]]) -> None:
    """Check that a graph can update the metadata of the drafter's attention groups."""
    problems = set()
    for group in (group for groups in attn_groups for group in groups):
        backend, spec = group.backend.get_name(), type(group.kv_cache_spec).__name__
        if backend not in DRAFT_BACK_ENDS:
            problems.add(f"attention back end {backend}: only {', '.join(DRAFT_BACK_ENDS)} are supported")
        elif spec not in DRAFT_CACHE_SPECS:
            problems.add(f"KV-cache spec {spec}: only {', '.join(DRAFT_CACHE_SPECS)} are supported")
        elif not group.supports_draft_decode_metadata_update:
            problems.add(f"attention back end {backend}: here it cannot update its metadata on the device")
    if problems:
        raise Unsupported("; ".join(sorted(problems)))


def check_graph_mode(cudagraph_mode: Any) -> None:
    """Check that the target's decode batches run as FULL graphs."""
    if cudagraph_mode.decode_mode().name != "FULL":
        raise GRAPH_MODE.because(mode=cudagraph_mode.name)
