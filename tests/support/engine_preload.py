"""Prepare the fork server of engines.py before its first engine: import what every engine imports, and compile vLLM's
n-gram lookup.

Without this, the preparation takes half the time of a test's engine.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub reads it: no test needs a network

import numba
import numpy
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import dispatcher
from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

for _name in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "compressed_tensors",  # checked while any model is loaded
    "nwor_ops.vllm",
):
    importlib.import_module(_name)

# vLLM inspects a model class in a separate process before it imports it, unless an engine on this machine has done so.
# This takes longer than the engine.
for _name in (
    "LlamaForCausalLM",
    "EagleLlamaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "MedusaModel",
    "MiMoForCausalLM",
    "MiMoMTPModel",
    "Gemma3ForCausalLM",
    "Qwen3NextForCausalLM",
    "ExtractHiddenStatesModel",
):
    ModelRegistry.register_model(_name, ModelRegistry.models[_name].load_model_cls())


def _namespace(thing: Any) -> Mapping[str, Any]:
    namespace = thing.__dict__
    return namespace if isinstance(namespace, Mapping) else {}


# vLLM searches all members of imported modules for kernels, and an object of llvmlite invents its `__dict__`. Without
# this, no engine starts after numba was imported.
dispatcher.vars = _namespace  # type: ignore[attr-defined]

_ints, _table = numpy.zeros(1, numpy.int32), numpy.zeros((1, 1), numpy.int32)
batch_propose_numba.compile(tuple(map(numba.typeof, ([0], _ints, _table, 1, 1, 1, 1, _table, _ints))))

# Each engine replaces Triton's kernels by functions of the CPU, and searches all members of imported modules for them.
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)  # type: ignore[assignment]

# vLLM collects garbage several times while an engine starts. The objects that exist now are not garbage.
gc.collect()
gc.freeze()
# An engine that ends makes these objects visible again. The process ends too, and a collection would copy its memory.
gc.unfreeze = lambda: None
