"""Real vLLM CPU engines, each in a separate process.

A fork server has imported and compiled what engines need (engine_preload.py), so a fresh process is cheap. Vanilla
engines with the same arguments give the same results, so each of them runs only once.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from types import MappingProxyType
from typing import Any

from copied_rows import CopiedRows

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}  # used if the model does not matter
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Engines run concurrently, with one thread each on any free core. On a busy machine, threads that wait for each
    # other only spin.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_THREADING_LAYER": "workqueue",  # other methods do not survive a fork
}
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "num_gpu_blocks_override": 96,
    "block_size": 32,
    "seed": 0,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
    "speculative_config": NGRAM,
}


def model_folder(**changes: Any) -> str:
    """Return a folder with a small random Llama. There is one per config, for all processes; vLLM needs only the
    config."""
    config = json.dumps(LLAMA | changes, sort_keys=True)
    name = f"llama-{hashlib.sha256(config.encode()).hexdigest()[:12]}"
    folder = pathlib.Path(tempfile.gettempdir(), f"nwor-tests-{os.getuid()}", name)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{os.getpid()}.json"
    unfinished.write_text(config)
    unfinished.replace(folder / "config.json")
    return str(folder)


def prompts(count: int, longest: int = 90, seed: int = 0) -> list[list[int]]:
    """Return prompts of repeated random 8-grams, in which n-gram lookup always finds a proposal."""
    rng = random.Random(seed)
    repeated = []
    for _ in range(count):
        gram = [rng.randrange(3, LLAMA["vocab_size"]) for _ in range(8)]
        repeated.append((gram * (longest // 8 + 1))[: rng.randrange(10, longest)])
    return repeated


# ---------------------------------------------------------------- code of the engine's process


def sampling(index: int, temperature: float, max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=temperature, seed=index, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _write_in_forward() -> list[int]:
    """Make attention write the cache inside its forward, at the slots of its group, as a fused kernel or a model does.

    Returns an object that counts the writes.
    """
    from vllm.v1.attention.backends import cpu_attn

    impl, count = cpu_attn.CPUAttentionBackendImpl, [0]
    attend, write = impl.forward, impl.do_kv_cache_update

    def forward(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if attn_metadata is not None:
            slots = attn_metadata.slot_mapping
            write(self, layer, key[: len(slots)], value[: len(slots)], kv_cache, slots)
            count[0] += 1
        return attend(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **named)

    impl.forward = forward
    cpu_attn.CPUAttentionBackend.forward_includes_kv_cache_update = True
    return count


def run_requests(
    llm: Any,
    requests: list[list[int]],
    max_tokens: int | list[int],
    temperature: float = 0.0,
    abort: Mapping[int, list[str]] = MappingProxyType({}),
) -> Any:
    """Run requests through add_request and step, as a server does. Return tokens per request, None if aborted."""
    engine = llm.llm_engine
    limits = [max_tokens] * len(requests) if isinstance(max_tokens, int) else max_tokens
    for index, (tokens, limit) in enumerate(zip(requests, limits, strict=True)):
        engine.add_request(str(index), {"prompt_token_ids": tokens}, sampling(index, temperature, limit))
    done: dict[int, list[int]] = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
        if step in abort:
            engine.abort_request(abort[step])
            for request in abort[step]:
                done.pop(int(request), None)
    aborted = {int(request) for requests in abort.values() for request in requests}
    return [None if index in aborted else done[index] for index in range(len(requests))]


def receive_last_counts(llm: Any) -> None:
    """Run one more short request: its output brings our counters."""
    from nwor_ops.vllm.metrics.publisher import PERIOD

    time.sleep(2 * PERIOD)
    run_requests(llm, [[3, 4, 5]], 1)


def metrics_of(llm: Any) -> dict[str, float]:
    """Return vLLM's counters, and ours."""
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def _layers(llm: Any) -> dict[str, dict[str, Any]]:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return {
        name: {"isa": getattr(layer, "isa", None), "wrapped": "do_kv_cache_update" in vars(layer.impl)}
        for name, layer in runner.compilation_config.static_forward_context.items()
        if hasattr(layer, "impl")  # recurrent layers have no impl
    }


def _job(
    arguments: dict[str, Any],
    requests: list[list[int]],
    max_tokens: int,
    temperature: float,
    abort: dict[int, list[str]],
    own_writer: bool,
) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    own_writes = _write_in_forward() if own_writer else [0]
    import engine_child
    from vllm import LLM

    import nwor_ops.vllm
    from nwor_ops.vllm.audit.engine import cache_audit
    from nwor_ops.vllm.audit.vllm_states import VllmStateAudit

    llm = LLM(**arguments)
    staged = [session for session in nwor_ops.vllm.sessions() if session.mode == "stage" and cache_audit(session)]
    copied_rows = [CopiedRows(session.manager) for session in staged]
    result: dict[str, Any] = {
        "tokens": run_requests(llm, requests, max_tokens, temperature, abort),
        "metrics": {name.removeprefix("vllm:"): value for name, value in metrics_of(llm).items()},
        "layers": _layers(llm),
        "own_writes": own_writes[0],
        "session": None,
    }
    for session in nwor_ops.vllm.sessions():
        result["session"] = engine_child.describe_session(session) | {
            "vllm_states": [audit.summary() for audit in session.listeners if isinstance(audit, VllmStateAudit)],
            "groups": sorted({layer.group for layer in session.layers.values()}),
            "layers": {name: layer.fused for name, layer in session.layers.items()},
            "copied_rows": [counted.as_dict() for counted in copied_rows],
        }
    return result


# ---------------------------------------------------------------- code of the test's process


class Engines:
    """Start engines and collect their results."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["engine_preload"])
        self._context = context
        self._vanilla: dict[str, Future[dict[str, Any]]] = {}

    def start(
        self,
        requests: list[list[int]],
        nwor: dict[str, Any] | None = None,
        max_tokens: int = 40,
        temperature: float = 0.0,
        abort: dict[int, list[str]] | None = None,
        own_writer: bool = False,
        **arguments: Any,
    ) -> Future[dict[str, Any]]:
        """Run the requests on a fresh engine; `arguments` are vLLM's. Without the plugin, an earlier result may be
        returned."""
        settings = ENGINE | {"model": arguments.get("model") or model_folder()} | arguments
        job = (settings, requests, max_tokens, temperature, abort or {}, own_writer)
        if nwor is not None:
            settings["additional_config"] = {"nwor": nwor}
            return self.submit(_job, *job)
        key = json.dumps(job, sort_keys=True)
        if key not in self._vanilla:
            self._vanilla[key] = self.submit(_job, *job)
        return self._vanilla[key]

    def submit(self, job: Callable[..., dict[str, Any]], *arguments: Any) -> Future[dict[str, Any]]:
        """Run a function in a separate process, forked from one that has imported vLLM, and return its future."""
        pool = ProcessPoolExecutor(1, mp_context=self._context)
        future = pool.submit(job, *arguments)
        pool.shutdown(wait=False)
        return future

    def run(self, requests: list[list[int]], **arguments: Any) -> dict[str, Any]:
        return self.start(requests, **arguments).result()

    def pair(self, requests: list[list[int]], nwor: dict[str, Any], **arguments: Any) -> Any:
        """Run the same requests concurrently on a vanilla engine and on one with the plugin."""
        arguments.setdefault("model", model_folder())
        vanilla = self.start(requests, **arguments)
        ours = self.start(requests, nwor=nwor, **arguments)
        return vanilla.result(), ours.result()
