"""The vLLM plugin.

It is off unless a setting turns it on: ``VLLM_NWOR_MODE``, ``VLLM_NWOR_DRAFT_GRAPHS``, ``VLLM_NWOR_RECURRENT``, or
``additional_config={"nwor": {...}}``.

- ``plugin``: decides what is attached to which engine.
- ``runners``: finds the start and the end of a step in vLLM's two model runners.
- ``session``: runs the transaction of each step, and notifies the listeners.
- ``layers``: describes the target's layers and their attention back ends.
- ``audit``: checks every byte of the KV cache.
- ``metrics``: publishes the counters.
- ``support``: lists the supported and the refused configurations.
- ``spare_blocks``: withholds the shadow pages of mode ``"stage"`` from the scheduler.
- ``connectors``: handles the rows that KV connectors export and load.
- ``drafter``: runs a draft model in CUDA graphs.
- ``recurrent``: keeps one recurrent state per request.
"""

from nwor_ops.vllm.drafter.plugin import draft_graph_reports
from nwor_ops.vllm.drafter.report import DraftGraphReport
from nwor_ops.vllm.plugin import check, register, sessions
from nwor_ops.vllm.recurrent.plugin import OneState, one_states

__all__ = ["DraftGraphReport", "OneState", "check", "draft_graph_reports", "one_states", "register", "sessions"]
