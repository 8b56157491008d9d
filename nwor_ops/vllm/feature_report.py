"""Report which features are active in an engine: the labels of ``nwor_info``, and ``nwor_memory_bytes``.

A refusal stops the engine by default. A feature can also be missing without a refusal. For example, the engine does not
speculate, or ``on_unsupported`` is ``"vanilla"``. The report of the worker that samples is part of its first message
(:mod:`nwor_ops.vllm.metrics.publisher`).
"""

from __future__ import annotations

from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.support.features import LABELS

OFF, ON, MISSING = "off", "on", "missing"
TRANSACTION, DRAFT_GRAPHS, RECURRENT, DRAFT_VOCABULARY = LABELS.values()
# Parts of nwor_memory_bytes.
UNDO_LOG, SHADOW_PAGES, GRAPHS, RECORDS = "undo_log", "shadow_pages", "draft_graphs", "records"
VOCABULARY = "draft_vocabulary"


def switched_on(config: NworConfig) -> dict[str, str]:
    """Return the state of each feature that the settings ask for."""
    return {
        TRANSACTION: config.mode,
        DRAFT_GRAPHS: ON if config.draft_graphs else OFF,
        RECURRENT: config.form,
        DRAFT_VOCABULARY: ON if config.draft_vocabulary else OFF,
    }


def report(config: NworConfig, active: dict[str, str], memory: dict[str, int]) -> dict[str, Any]:
    """Return the report of an engine.

    Args:
        config: the settings.
        active: the states of the active features: ``"on"``, the mode of the transaction, or the form of recurrent
            states.
        memory: bytes that the active features take, by part.
    """
    import vllm

    import nwor_ops

    states = {name: state if active.get(name, OFF) == state else MISSING for name, state in switched_on(config).items()}
    return {"features": {"version": nwor_ops.__version__, "vllm": vllm.__version__} | states, "memory": memory}
