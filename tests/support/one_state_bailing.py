"""Compare layers of Bailing V3 as one_state_layers.py does. vLLM gives their kernel decays and betas that it computed
before. Run by test_one_state.py:

    TRITON_INTERPRET=1 python one_state_bailing.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from interpreter import use_interpreter
from one_state_kda import HEADS, SIZE, WIDTH, run_prompts
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

INPUTS = ("q_proj_states", "k_proj_states", "v_proj_states")


class BailingSide(Side):
    def _layer(self, config: Any, name: str, one_state: bool, weights: dict[str, Tensor]) -> Any:
        from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

        ranks = config.parallel_config.tensor_parallel_size
        layer = BailingMoeV3KimiDeltaAttention.__new__(BailingMoeV3KimiDeltaAttention)
        torch.nn.Module.__init__(layer)
        given = {
            "one_state": one_state, "prefix": name, "tp_size": ranks,
            "num_speculative_tokens": config.num_speculative_tokens,
            "head_dim": WIDTH, "num_heads": HEADS * ranks, "local_num_heads": HEADS, "conv_size": CONVOLUTION,
            "safe_gate": True, "lower_bound": -5.0,
            "model_config": config.model_config, "cache_config": config.cache_config,
            **{f"{part}_conv1d": SimpleNamespace(weight=weights[part], bias=None) for part in "qkv"},
        }  # fmt: skip
        return furnished(layer, given, config)

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        projected = {name: given[name] for name in INPUTS}
        layer._forward(**projected, g1=given["g1"][None], beta=given["beta"][None], core_attn_out=out[None])


def weights_of(generator: torch.Generator) -> list[dict[str, Tensor]]:
    return [{part: torch.randn(SIZE, 1, CONVOLUTION, generator=generator) / 2 for part in "qkv"} for _ in range(GROUPS)]


def inputs_of(generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
    """Decays lie between exp(-5) and 1, as with the models' lower bound."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    return [
        {name: normal(SIZE).to(torch.bfloat16) for name in INPUTS}
        | {"g1": -5 * normal(HEADS, WIDTH).sigmoid(), "beta": normal(HEADS).sigmoid()}
        for _ in range(GROUPS)
    ]


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
            **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_prompts(q, k, v, g[0].exp(), beta[0], initial_state, cu_seqlens)


def main() -> None:
    use_interpreter()
    import triton.language as tl
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent, kda

    fused_recurrent.exp = lambda x: tl.exp(x)  # by the name that the interpreter knows
    kernel = kda.fused_recurrent_gated_delta_rule_fwd_kernel
    kda.fused_recurrent_gated_delta_rule_fwd_kernel = WholeHeads(kernel, WIDTH, lambda grid, given: (1, 1, grid[2]))
    install("bailing", chunk_kda=chunked)
    report(
        "bailing",
        lambda ranks: {"num_attention_heads": HEADS * ranks, "head_dim": WIDTH},
        BailingSide,
        weights_of,
        inputs_of,
    )


if __name__ == "__main__":
    main()
