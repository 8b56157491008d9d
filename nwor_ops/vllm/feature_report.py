"""Report which features are active in an engine: the labels of ``nwor_info``, and ``nwor_memory_bytes``.

A refusal stops the engine by default. A feature can also be missing without a refusal. For example, the engine does not
speculate, or ``on_unsupported`` is ``"vanilla"``. The report of the worker that samples is part of its first message
(:mod:`nwor_ops.vllm.metrics.publisher`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.support.features import DRAFT_GRAPHS, DRAFT_VOCABULARY, LABELS, RECURRENT, TRANSACTION

OFF, ON, MISSING = "off", "on", "missing"
# Parts of nwor_memory_bytes.
UNDO_LOG, SHADOW_PAGES, GRAPHS, RECORDS = "undo_log", "shadow_pages", "draft_graphs", "records"
VOCABULARY = "draft_vocabulary"


def switched_on(config: NworConfig) -> dict[str, str]:
    """Return the state of each feature that the settings ask for, by label."""
    return {
        LABELS[TRANSACTION]: config.mode,
        LABELS[DRAFT_GRAPHS]: ON if config.draft_graphs else OFF,
        LABELS[RECURRENT]: config.form,
        LABELS[DRAFT_VOCABULARY]: ON if config.draft_vocabulary else OFF,
    }


def report(config: NworConfig, active: Iterable[tuple[str, str, str, int]]) -> dict[str, Any]:
    """Return the report of an engine.

    Args:
        config: the settings.
        active: label and state of each active feature (``"on"``, the mode of the transaction, or the form of recurrent
            states), and part and bytes of its memory.
    """
    import vllm

    import nwor_ops

    states = {label: state for label, state, _, _ in active}
    features = {"version": nwor_ops.__version__, "vllm": vllm.__version__}
    for label, wanted in switched_on(config).items():
        features[label] = wanted if states.get(label, OFF) == wanted else MISSING
    return {"features": features, "memory": {part: size for _, _, part, size in active}}
