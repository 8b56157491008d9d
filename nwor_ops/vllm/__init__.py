"""The vLLM plugin. Off unless ``VLLM_NWOR_MODE``, ``VLLM_NWOR_DRAFT_GRAPHS``, ``VLLM_NWOR_RECURRENT`` or
``additional_config={"nwor": {...}}`` asks for it.

``plugin`` decides, ``runners`` know where the steps of vLLM's two model runners begin and end, ``session`` is what they
share and says what happens in a step, ``layers`` knows the target's layers and attention back ends, ``audit`` checks
every byte, ``metrics`` publishes what was counted, ``support`` has the table of what is supported and refused,
``spare_blocks`` what mode ``"stage"`` keeps from the scheduler, ``connectors`` what KV connectors export and load.
``drafter`` puts a draft model into CUDA graphs, ``recurrent`` keeps one recurrent state per request.
"""

from nwor_ops.vllm.drafter.plugin import draft_graph_reports
from nwor_ops.vllm.drafter.report import DraftGraphReport
from nwor_ops.vllm.plugin import check, register, sessions
from nwor_ops.vllm.recurrent.plugin import OneState, one_states

__all__ = ["DraftGraphReport", "OneState", "check", "draft_graph_reports", "one_states", "register", "sessions"]
