"""The vLLM plugin. Off unless ``VLLM_NWOR_MODE``, ``VLLM_NWOR_DRAFT_GRAPHS`` or ``additional_config={"nwor": {...}}``
asks for it.

``plugin`` decides, ``runner`` attaches, ``runner_v1`` and ``runner_v2`` know where the steps of vLLM's two model
runners begin and end, ``layers`` knows the attention back ends, ``session`` is what every runner shares,
``cpu_pages`` knows the CPU cache, ``support`` what is refused, ``audit`` checks every byte. ``draft_graphs`` decides
about graphs for a draft model; ``draft_model`` is the speculator that has them, ``draft_metadata`` its metadata.
"""

from nwor_ops.vllm.drafter.plugin import DraftGraphReport, draft_graph_reports
from nwor_ops.vllm.plugin import check, register, sessions

__all__ = ["DraftGraphReport", "check", "draft_graph_reports", "register", "sessions"]
