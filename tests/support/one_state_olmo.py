"""Compare vLLM's layer of OLMo hybrid with ours, like one_state_layers.py. Keys have 96 elements and values 192. There
are fewer key heads than value heads, and beta is doubled. Run by test_one_state.py:

    TRITON_INTERPRET=1 python one_state_olmo.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import one_state_layers
import torch
from interpreter import use_interpreter
from one_state_layers import (
    CONVOLUTION,
    GROUPS,
    KEY_HEADS,
    VALUE_HEADS,
    Side,
    WholeHeads,
    furnished,
    install,
    report,
)
from torch import Tensor

KEY_WIDTH, VALUE_WIDTH = 96, 192
KEYS, VALUES = KEY_HEADS * KEY_WIDTH, VALUE_HEADS * VALUE_WIDTH


class OlmoSide(Side):
    output = (VALUE_HEADS, VALUE_WIDTH)

    def _layer(self, config: Any, name: str, one_state: bool, weights: dict[str, Tensor]) -> Any:
        from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention

        ranks = config.parallel_config.tensor_parallel_size
        layer = OlmoHybridGatedDeltaNetAttention.__new__(OlmoHybridGatedDeltaNetAttention)
        torch.nn.Module.__init__(layer)
        given = {
            "one_state": one_state, "prefix": name, "tp_size": ranks,
            "num_spec": config.num_speculative_tokens, "activation": "silu",
            "num_k_heads": KEY_HEADS * ranks, "num_v_heads": VALUE_HEADS * ranks, "head_k_dim": KEY_WIDTH,
            "head_v_dim": VALUE_WIDTH, "key_dim": KEYS * ranks, "value_dim": VALUES * ranks,
            "conv_kernel_size": CONVOLUTION, "allow_neg_eigval": weights["allow_neg_eigval"],
            "model_config": config.model_config, "cache_config": config.cache_config,
            "A_log": weights["A_log"], "dt_bias": weights["dt_bias"],
            "conv1d": SimpleNamespace(weight=weights["convolution"], bias=None),
        }  # fmt: skip
        return furnished(layer, given, config)

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        # One projection computes q, k, v and the gate of the norm.
        mixed_qkv, _ = given["qkvg"].split([2 * KEYS + VALUES, VALUES], 1)
        layer._forward_core(mixed_qkv=mixed_qkv, b=given["b"], a=given["a"], core_attn_out=out)


def weights_of(generator: torch.Generator) -> list[dict[str, Any]]:
    """Double the beta of the first layer."""
    return [
        {
            "A_log": torch.randn(VALUE_HEADS, generator=generator),
            "dt_bias": torch.randn(VALUE_HEADS, generator=generator),
            "convolution": torch.randn(2 * KEYS + VALUES, 1, CONVOLUTION, generator=generator) / 2,
            "allow_neg_eigval": group == 0,
        }
        for group in range(GROUPS)
    ]


def inputs_of(generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
    shapes = {"qkvg": 2 * (KEYS + VALUES), "b": VALUE_HEADS, "a": VALUE_HEADS}
    return [
        {name: torch.randn(tokens, width, generator=generator).to(torch.bfloat16) for name, width in shapes.items()}
        for _ in range(GROUPS)
    ]


def chunked(*, q: Tensor, k: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Run a prompt's tokens. This replaces an autotuned kernel."""
    query, key = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    return one_state_layers.chunked(query, key, **given)


def whole_heads(grid: tuple[int, ...], given: dict[str, Any]) -> tuple[int, ...]:
    assert grid[1] == -(-VALUE_WIDTH // 32)
    return 1, 1, grid[2]


def main() -> None:
    use_interpreter()
    import triton.language as tl
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    fused_recurrent.exp = lambda x: tl.exp(x)  # the name that the interpreter knows
    kernel = fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel
    fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel = WholeHeads(kernel, 256, whole_heads)
    install("olmo", chunk_gated_delta_rule=chunked)
    report(
        "olmo",
        lambda ranks: {
            "linear_num_key_heads": KEY_HEADS * ranks,
            "linear_num_value_heads": VALUE_HEADS * ranks,
            "linear_key_head_dim": KEY_WIDTH,
            "linear_value_head_dim": VALUE_WIDTH,
        },
        OlmoSide,
        weights_of,
        inputs_of,
        torch.bfloat16,
    )


if __name__ == "__main__":
    main()
