"""Qwen3.8-Flash-Next with one state per request: Qwen's Gated DeltaNet, and PLE, a short convolution.

vLLM requires one number of speculative blocks for all recurrent groups of a model. PLE has one state in any case: it
reads only the first block of a request and finds the accepted rows there. So its groups need no such blocks either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm.models.qwen4_exp.nvidia.ple_layer import Qwen4ExpPLELayer

from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.recurrent.models import qwen
from nwor_ops.vllm.recurrent.supported import has_one_state

_patches = Patches("one state: PLE")


def install() -> None:
    """Install Qwen's layer, and give PLE no speculative blocks. Safe to call again."""
    qwen.install()
    _patches.put_once(Qwen4ExpPLELayer, "get_kv_cache_spec", _without_speculative_blocks)


def _without_speculative_blocks(given: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = given(self, vllm_config)
        return dataclasses.replace(spec, num_speculative_blocks=0) if has_one_state(vllm_config) else spec

    return get_kv_cache_spec
