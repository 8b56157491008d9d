"""Qwen3.8-Flash-Next: Qwen's Gated DeltaNet, and in some layers PLE, a short convolution with its own KV-cache group.

vLLM requires one number of speculative blocks for all recurrent groups of a model. PLE has one state in any case: it
reads only the first block of a request and finds the accepted rows there. So its groups need no such blocks either.
"""

from __future__ import annotations

import dataclasses

from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.recurrent.models import qwen

_PLE = "vllm.models.qwen4_exp.nvidia.ple_layer"

MODEL = dataclasses.replace(
    qwen.MODEL,
    architectures=("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    hooks=(
        *qwen.HOOKS,
        Hook(_PLE, "Qwen4ExpPLELayer.get_kv_cache_spec", "vllm_config"),
        Hook(
            "vllm.v1.attention.backends.short_conv_attn",
            "PleShortConvAttentionMetadataBuilder.build",
            "common_prefix_len, common_attn_metadata, fast_build, num_accepted_tokens, num_decode_draft_tokens_cpu, "
            "kwargs",
            cuda=True,
        ),
    ),
    without_record=((_PLE, "Qwen4ExpPLELayer"),),
)
