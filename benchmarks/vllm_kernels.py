"""Load the kernels of vLLM and SGLang that ours are measured and tested against, if possible without the rest."""

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
SGLANG_REPLAY = "kernels/ops/attention/linear/gdn_replayssm_spec_decode.py"


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


def load_alone(package: str, path: str, **stand_ins: dict[str, Any]) -> Any:
    """Import one file of a package that need not be importable, with `stand_ins` for modules that it imports."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not on the path", name=package)
    files = [file for folder in spec.submodule_search_locations if (file := pathlib.Path(folder, path)).is_file()]
    if not files:
        raise ModuleNotFoundError(f"{package} has no file {path}", name=package)
    missing = [name for name in stand_ins if name not in sys.modules]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(stand_ins[name])
    try:
        source = importlib.util.spec_from_file_location(f"{package}_{files[0].stem}", files[0])
        assert source is not None
        assert source.loader is not None
        module = importlib.util.module_from_spec(source)
        source.loader.exec_module(module)
    finally:
        for name in missing:
            del sys.modules[name]
    return module


def recurrent_update() -> Callable[..., Any]:
    """Return `fused_sigmoid_gating_delta_rule_update`, a Triton kernel of vLLM. Only its file is needed."""
    import triton
    import triton.language

    modules = {"vllm.triton_utils": {"triton": triton, "tl": triton.language}}
    update: Callable[..., Any] = load_alone("vllm", RECURRENT_UPDATE, **modules).fused_sigmoid_gating_delta_rule_update
    return update


def sglang_replay() -> Any:
    """Return SGLang's module of Triton kernels for the verification with a ring. Only its file is needed."""
    modules = {
        "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": torch.cuda.is_available()},
        "sglang.srt.utils": {"is_gfx95_supported": lambda: False},
    }
    return load_alone("sglang", SGLANG_REPLAY, **modules)
