"""What a benchmark's worker needs before it builds its model: vLLM imports this as its ``worker_extension_cls``.

Qwen3-Next without experts, which is the shape of the dense Qwen3.5 models: vLLM's classes for it would look for a layer
with experts, and find none. And of the kernels that Triton tunes, which are those of a prompt's Gated DeltaNet, the
first configuration without tuning: prompts are not what is measured, and tuning takes minutes.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.autotuner import Autotuner
from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts

run_tuned = Autotuner.run
set_moe_parameters = QwenNextMixtureOfExperts.set_moe_parameters


def run_first(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
    self.configs = self.configs[:1]
    return run_tuned(self, *args, **kwargs)


def set_if_any(self: QwenNextMixtureOfExperts) -> None:
    if getattr(self.config, "num_experts", 0):
        set_moe_parameters(self)


Autotuner.run = run_first
QwenNextMixtureOfExperts.set_moe_parameters = set_if_any


class Worker:
    """Adds nothing to vLLM's."""
