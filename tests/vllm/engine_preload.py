"""What the fork server of engines.py does before its first engine: it imports what every engine imports, and compiles
vLLM's n-gram lookup. That takes half the time of a test's engine otherwise."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import compressed_tensors  # noqa: F401  vLLM asks it while it loads whichever model
import numba
import numpy
import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker
from vllm.triton_utils import dispatcher
from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

import nwor_ops.vllm


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
