"""The vLLM plugin.

It is off unless a setting turns it on: ``VLLM_NWOR_MODE``, ``VLLM_NWOR_DRAFT_GRAPHS``, ``VLLM_NWOR_RECURRENT``, or
``additional_config={"nwor": {...}}``. ``VLLM_NWOR=off`` switches everything off.

``plugin`` decides what is attached to which engine. ``hooks`` is the one way to patch vLLM, and :func:`unload` undoes
all patches. docs/internals/architecture.md lists the other modules.
"""

from nwor_ops.vllm.draft_graphs.plugin import draft_graph_reports
from nwor_ops.vllm.draft_vocabulary.plugin import draft_vocabularies
from nwor_ops.vllm.plugin import check_hooks, register, sessions, unload
from nwor_ops.vllm.recurrent.plugin import RecurrentEngine, recurrent_engines

__all__ = [
    "RecurrentEngine",
    "check_hooks",
    "draft_graph_reports",
    "draft_vocabularies",
    "recurrent_engines",
    "register",
    "sessions",
    "unload",
]
