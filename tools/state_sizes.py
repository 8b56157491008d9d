"""Write the table of docs/guides/hybrid-models.md that gives the bytes of recurrent states per request.

The sizes are computed from the default configurations of transformers and vLLM, on one GPU with bfloat16 weights. They
contain states, rows of the convolutions and records, but no padding of pages.

    python tools/state_sizes.py
"""

from __future__ import annotations

import importlib
import pathlib
from math import prod
from typing import Any

import made_tables
import torch

from nwor_ops.vllm.recurrent.models import MODELS
from nwor_ops.vllm.recurrent.models.model import Heads
from nwor_ops.vllm.recurrent.page import RecordGeometry

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "guides" / "hybrid-models.md"
DRAFTS = 3
_BAILING = "vllm.transformers_utils.configs.bailing_moe_v3_vl"
# Model, architecture, module and class of its configuration.
CONFIGURATIONS = (
    ("Qwen3-Next", "Qwen3NextForCausalLM", "transformers", "Qwen3NextConfig"),
    ("Qwen3.5, dense", "Qwen3_5ForCausalLM", "transformers", "Qwen3_5TextConfig"),
    ("Qwen3.5 with experts", "Qwen3_5MoeForCausalLM", "transformers", "Qwen3_5MoeTextConfig"),
    ("MiniCPM-V 4.6", "MiniCPMV4_6ForConditionalGeneration", "transformers", "MiniCPMV4_6Config"),
    ("Qwen3.8-Flash-Next", "Qwen4ExpForCausalLM", "transformers", "Qwen4ExpTextConfig"),
    ("OLMo hybrid", "OlmoHybridForCausalLM", "transformers", "OlmoHybridConfig"),
    ("GLM-5.3-Flash", "Glm5NextForCausalLM", "transformers", "Glm5NextTextConfig"),
    ("Bailing V3", "BailingMoeV3ForCausalLM", _BAILING, "BailingMoeV3TextConfig"),
)


def states_of(config: Any, heads: Heads, state: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a request in all recurrent layers: with vLLM's states, and with one state and a record."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    keys, values, key_width, value_width, is_kda = heads
    convolution = getattr(config, "linear_conv_kernel_dim", None) or config.short_conv_kernel_size
    if is_kda:
        shapes = MambaStateShapeCalculator.kda_state_shape(
            1, keys, key_width, conv_kernel_size=convolution, num_spec=DRAFTS
        )
    else:
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            1, keys, values, key_width, value_width, convolution, DRAFTS
        )
    rows, matrix = (prod(shape) for shape in shapes)
    page = rows * torch.bfloat16.itemsize + matrix * state.itemsize
    record = RecordGeometry(DRAFTS + 1, keys, values, key_width, value_width, torch.bfloat16, is_kda).num_bytes
    layers = config.layer_types.count("linear_attention")
    return layers * (DRAFTS + 1) * page, layers * (page + record)


def table() -> str:
    """Return the rows of the document."""
    rows = [
        "| model | configuration | layers | fp32: vLLM | here | bf16: vLLM | here |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, architecture, module, kind in CONFIGURATIONS:
        config = getattr(importlib.import_module(module), kind)().get_text_config()
        heads = MODELS[architecture].heads(config)
        dtypes = (torch.float32,) if heads.per_channel else (torch.float32, torch.bfloat16)
        cells = [f"{size / 2**20:.1f}" for dtype in dtypes for size in states_of(config, heads, dtype)]
        cells += ["-"] * (4 - len(cells))
        layers = config.layer_types.count("linear_attention")
        rows.append(f"| {name} | `{kind}` | {layers} | {' | '.join(cells)} |")
    return "\n".join(rows)


def filled(text: str) -> str:
    """Return the document with the table between its marks."""
    return made_tables.filled(DOCUMENT, text, "state_sizes.py", {"sizes": table()})


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
