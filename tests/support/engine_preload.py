"""What the fork server of engines.py does before its first engine: it imports what every engine imports, and compiles
vLLM's n-gram lookup. That takes half the time of a test's engine otherwise."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from typing import Any

import numba
import numpy
from vllm.model_executor.models.registry import ModelRegistry
from vllm.triton_utils import dispatcher
from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

for _name in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors",  # asked while any model is loaded
    "nwor_ops.vllm",
):
    importlib.import_module(_name)

# vLLM looks at a class of models in a process of its own before it imports it, if no engine has on this machine: that
# takes longer than the engine.
for _name in (
    "LlamaForCausalLM",
    "EagleLlamaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "MedusaModel",
    "MiMoForCausalLM",
    "MiMoMTPModel",
    "Qwen3NextForCausalLM",
    "ExtractHiddenStatesModel",
):
    ModelRegistry.register_model(_name, ModelRegistry.models[_name].load_model_cls())


def _namespace(thing: Any) -> Mapping[str, Any]:
    namespace = thing.__dict__
    return namespace if isinstance(namespace, Mapping) else {}


# vLLM looks for kernels in everything that imported modules hold, and an object of llvmlite makes up its `__dict__`:
# without this no engine starts where numba was imported before.
dispatcher.vars = _namespace  # type: ignore[attr-defined]

_ints, _table = numpy.zeros(1, numpy.int32), numpy.zeros((1, 1), numpy.int32)
batch_propose_numba.compile(tuple(map(numba.typeof, ([0], _ints, _table, 1, 1, 1, 1, _table, _ints))))

# vLLM collects garbage several times as an engine starts: what is here already is none.
gc.collect()
gc.freeze()
