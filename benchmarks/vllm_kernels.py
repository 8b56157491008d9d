"""Load vLLM's kernels that ours are measured and tested against, if possible without the rest of vLLM."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

RECURRENT_UPDATE = "third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"


def load_core() -> None:
    """Load vLLM's compiled ops, from the library that VLLM_CORE names or from an installed vLLM."""
    if "VLLM_CORE" in os.environ:
        torch.ops.load_library(os.environ["VLLM_CORE"])
    else:
        import vllm._custom_ops  # noqa: F401


def olmo_update() -> Callable[..., Any]:
    """Return a function that computes a window as the OLMo hybrid layer of vLLM does. Needs an installed vLLM.

    The function is called like the result of `recurrent_update`, with the additional argument ``allow_neg_eigval``.
    """
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as olmo

    def update(
        A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, *, allow_neg_eigval: bool, is_kda: bool, **more: Any,
    ) -> Any:  # fmt: skip
        assert not is_kda
        g, beta = olmo.fused_olmo_hybrid_gdn_gating(A_log, a, b, dt_bias, allow_neg_eigval)
        return olmo.fused_recurrent_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, inplace_final_state=True, **more)

    return update


def glm_update() -> Callable[..., Any]:
    """Return vLLM's kernel for the layer of GLM-5.3-Flash, with the arguments of `recurrent_update`'s function and
    ``gate_lower_bound``. Needs an installed vLLM."""
    from vllm.models.glm5next.nvidia.ops.third_party.kda import fused_recurrent_kda

    def update(
        A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, *, gate_lower_bound: float, is_kda: bool, **more: Any,
    ) -> Any:  # fmt: skip
        assert is_kda
        return fused_recurrent_kda(
            q=q, k=k, v=v, g=a[None], beta=b[None], a_log=A_log, g_bias=dt_bias, sigmoid_beta=True, compute_gate=True,
            lower_bound=gate_lower_bound, **more,
        )  # fmt: skip

    return update


def recurrent_update() -> Callable[..., Any]:
    """Return `fused_sigmoid_gating_delta_rule_update`, a Triton kernel.

    Only its file is needed: a vLLM tree on the path, whose other parts need not be importable.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("vLLM is not on the path", name="vllm")
    import triton
    import triton.language

    name = "vllm.triton_utils"
    stand_in: Any = types.ModuleType(name)
    stand_in.triton, stand_in.tl = triton, triton.language
    before = sys.modules.setdefault(name, stand_in)
    try:
        spec = importlib.util.spec_from_file_location(
            "vllm_recurrent_update", pathlib.Path(found.origin).parent / RECURRENT_UPDATE
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        if before is stand_in:
            del sys.modules[name]
    return module.fused_sigmoid_gating_delta_rule_update
