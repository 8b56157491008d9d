"""Prepare a benchmark's worker before it builds its model: vLLM imports this as its ``worker_extension_cls``.

- Qwen3-Next runs without experts, which is the shape of the dense Qwen3.5 models. The classes in vLLM require a layer
  with experts.
- OLMo hybrid gets a repaired loader. vLLM 0.33.0 cannot load its checkpoints, because the loader of its convolutions
  does not look for the part in a weight's name (https://github.com/vllm-project/vllm/pull/55858).
- Triton would tune the kernels of Gated DeltaNet for prompts. They use the first configuration without tuning. Prompts
  are not measured, and tuning takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime.autotuner import Autotuner
from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn
from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts

run_tuned = Autotuner.run
make_loader = olmo_gdn_linear_attn._make_fused_conv1d_weight_loader
set_moe_parameters = QwenNextMixtureOfExperts.set_moe_parameters


def run_first(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
    self.configs = self.configs[:1]
    return run_tuned(self, *args, **kwargs)


def set_if_any(self: QwenNextMixtureOfExperts) -> None:
    if getattr(self.config, "num_experts", 0):
        set_moe_parameters(self)


def make_loader_of_parts(*sizes: Any) -> Callable[..., None]:
    load = make_loader(*sizes)

    def load_part(parameter: Any, weight: Any, part: int | None = None) -> None:
        load(parameter, weight, getattr(weight, "shard_id", None) if part is None else part)

    return load_part


Autotuner.run = run_first
olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = make_loader_of_parts
QwenNextMixtureOfExperts.set_moe_parameters = set_if_any


class Worker:
    """An empty extension of the worker."""
