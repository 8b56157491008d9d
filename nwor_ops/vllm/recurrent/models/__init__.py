"""The hybrid models that keep one recurrent state per request: one file for each class of recurrent layers in vLLM.

A new model is one more file, and one more entry in ``ALL``. Nothing here imports vLLM at the top.
"""

from __future__ import annotations

from typing import Any

from nwor_ops.vllm.recurrent.models import bailing, glm, kimi, olmo, qwen, qwen4
from nwor_ops.vllm.recurrent.models.model import Model
from nwor_ops.vllm.support.refusals import OTHER_MODEL

ALL = (qwen.MODEL, qwen4.MODEL, kimi.MODEL, bailing.MODEL, olmo.MODEL, glm.MODEL)
# The model of each supported architecture.
MODELS: dict[str, Model] = {architecture: model for model in ALL for architecture in model.architectures}


def model_of(vllm_config: Any) -> Model:
    """Return the model of an engine.

    Raises:
        Unsupported: its architecture is not in the table.
    """
    architecture = vllm_config.model_config.architecture
    if architecture not in MODELS:
        raise OTHER_MODEL.because(architecture=architecture, supported=", ".join(MODELS))
    return MODELS[architecture]
