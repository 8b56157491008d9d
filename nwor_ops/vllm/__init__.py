"""The vLLM plugin.

It is off unless a setting turns it on: ``VLLM_NWOR_MODE``, ``VLLM_NWOR_DRAFT_GRAPHS``, ``VLLM_NWOR_RECURRENT``, or
``additional_config={"nwor": {...}}``. ``VLLM_NWOR=off`` switches everything off.

- ``plugin``: decides what is attached to which engine.
- ``hooks``: the one way to patch vLLM; :func:`unload` undoes all patches.
- ``step_listener``: the events of a step.
- ``support``: lists the supported and the refused configurations.
- ``transaction``: runs the transaction of each step. It describes the target's layers and their attention back ends,
  and handles KV connectors. It withholds the shadow pages of mode ``"stage"`` from the scheduler. Its ``runners`` find
  the start and the end of a step in vLLM's two model runners.
- ``audit``: checks every byte at every step.
- ``recurrent``: keeps one recurrent state per request.
- ``draft_graphs``: runs a draft model in CUDA graphs.
- ``draft_vocabulary``: computes a drafter's logits only of tokens that recent requests used.
- ``metrics``: publishes the counters, and compares them with the scheduler's.
- ``feature_report``: asks the workers at start-up whether the features that the engine asked for are active.
- ``check``: predicts which features an engine will have, before it starts.
"""

from nwor_ops.vllm.draft_graphs.plugin import draft_graph_reports
from nwor_ops.vllm.draft_graphs.report import DraftGraphReport
from nwor_ops.vllm.draft_vocabulary.plugin import draft_vocabularies
from nwor_ops.vllm.plugin import check_hooks, register, sessions, unload
from nwor_ops.vllm.recurrent.plugin import RecurrentEngine, recurrent_engines

__all__ = [
    "DraftGraphReport",
    "RecurrentEngine",
    "check_hooks",
    "draft_graph_reports",
    "draft_vocabularies",
    "recurrent_engines",
    "register",
    "sessions",
    "unload",
]
