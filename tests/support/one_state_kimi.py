"""Compare vLLM's layer of Kimi Linear with ours, like one_state_layers.py. It has a decay per channel of a key. Run by
test_one_state.py:

    TRITON_INTERPRET=1 python one_state_kimi.py
"""

from __future__ import annotations

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

KDA = {"num_heads": HEADS, "head_dim": WIDTH, "short_conv_kernel_size": CONVOLUTION}


class KimiSide(Side):
    def _layer(self, config: Any, name: str, one_state: bool, weights: dict[str, Tensor]) -> Any:
        from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

        ranks = config.parallel_config.tensor_parallel_size
        layer = KimiGatedDeltaNetAttention.__new__(KimiGatedDeltaNetAttention)
        torch.nn.Module.__init__(layer)

        def normed(x: Tensor, gate: Tensor) -> Tensor:
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
            return (x.float() * scale * weights["norm"] * gate.float().sigmoid()).to(x.dtype)

        given = {
            "one_state": one_state, "prefix": name, "tp_size": ranks, "num_spec": config.num_speculative_tokens,
            "head_dim": WIDTH, "num_heads": HEADS * ranks, "local_num_heads": HEADS, "conv_size": CONVOLUTION,
            "projection_size": SIZE * ranks, "local_projection_size": SIZE, "gate_lower_bound": None,
            "model_config": config.model_config, "cache_config": config.cache_config,
            "A_log": weights["A_log"], "dt_bias": weights["dt_bias"], "o_norm": normed,
            "conv1d": SimpleNamespace(weight=weights["convolution"], bias=None),
        }  # fmt: skip
        return furnished(layer, given, config)

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        # One projection computes q, k, v and beta.
        projected = torch.cat((given["mixed_qkv"], given["beta"]), 1)
        mixed_qkv, beta = projected.split([3 * SIZE, HEADS], 1)
        layer._forward(mixed_qkv, given["g1"][None], given["g2"], beta[None], out[None])


def weights_of(generator: torch.Generator) -> list[dict[str, Tensor]]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        {
            "A_log": normal(HEADS),
            "dt_bias": normal(SIZE),
            "convolution": normal(3 * SIZE, 1, CONVOLUTION) / 2,
            "norm": 1 + normal(WIDTH) / 10,
        }
        for _ in range(GROUPS)
    ]


def inputs_of(generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
    shapes = {"mixed_qkv": (3 * SIZE,), "beta": (HEADS,), "g1": (HEADS, WIDTH), "g2": (HEADS, WIDTH)}
    return [
        {name: torch.randn(tokens, *shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
        for _ in range(GROUPS)
    ]


def chunked(q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, g_bias: Tensor,
            initial_state: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate = torch.nn.functional.softplus(raw_g[0].float() + g_bias.view(HEADS, WIDTH))
    decay, beta = (-A_log.exp()[:, None] * gate).exp(), raw_beta[0].float().sigmoid()
    return run_prompts(q, k, v, decay, beta, initial_state, cu_seqlens)


def main() -> None:
    use_interpreter()
    import triton.language as tl
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent

    # The names that the interpreter knows.
    fused_recurrent.exp, fused_recurrent.log = (lambda x: tl.exp(x)), (lambda x: tl.log(x))
    kernel = fused_recurrent.fused_recurrent_kda_fwd_kernel
    whole = WholeHeads(kernel, WIDTH, lambda grid, given: (given["N"] * given["H"],))
    fused_recurrent.fused_recurrent_kda_fwd_kernel = whole
    install("kimi", gather_initial_states=initial_states)
    kda.chunk_kda_with_fused_gate = chunked
    report(
        "kimi",
        lambda ranks: {"linear_attn_config": KDA | {"num_heads": HEADS * ranks}},
        KimiSide,
        weights_of,
        inputs_of,
    )


if __name__ == "__main__":
    main()
