"""Additions to :mod:`engine_child` for several ranks: a data-parallel server, and an engine with half of its workers on
another node.

A data-parallel job is served twice, through vLLM's ``AsyncLLM``. First, each rank in turn gets one request at a time,
so that nothing depends on arrival times; the other ranks are idle or run dummy batches. Then all requests run
concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

NODES = 2
_ALONE = 8  # number of requests that run one at a time


@contextlib.contextmanager
def second_node(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the engine's arguments for the first node, while the second node runs. Each has half of the GPUs."""
    engine = job["engine"]
    half = engine.get("tensor_parallel_size", 1) // NODES
    nodes = [
        engine | {"nnodes": NODES, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": job["port"]}
        for rank in range(NODES)
    ]
    devices = [",".join(str(rank * half + place) for place in range(half)) for rank in range(NODES)]
    os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": devices[0]}
    script = pathlib.Path(__file__).with_name("headless_node.py")
    with subprocess.Popen(
        [sys.executable, str(script), json.dumps(nodes[1])],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": devices[1]},
    ) as node:
        try:
            yield nodes[0]
        finally:
            node.kill()


def serve_ranks(
    job: dict[str, Any], requests: list[Any], sampling: Callable[[int], Any], describe: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return the answers of a data-parallel engine, the descriptions of its workers, and its counters."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    async def all_of_it() -> dict[str, Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
        result: dict[str, Any] = {}
        ranks = job["engine"]["data_parallel_size"]

        async def answer(name: str, index: int) -> list[int]:
            prompt: Any = {"prompt_token_ids": requests[index].prompt}
            tokens: list[int] = []
            async for output in engine.generate(
                prompt, sampling(index), f"{name}-{index}", data_parallel_rank=index % ranks
            ):
                tokens = list(output.outputs[0].token_ids)
            return tokens

        alone = [await answer("alone", index) for index in range(_ALONE)]
        together = await asyncio.gather(*(answer("together", index) for index in range(len(requests))))
        result["rounds"] = [alone, together]
        await asyncio.sleep(1)
        for rank in range(ranks):  # the outputs of these requests bring the last counts
            short = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            prompt: Any = {"prompt_token_ids": [3, 4, 5]}
            async for _ in engine.generate(prompt, short, f"last-{rank}", data_parallel_rank=rank):
                pass
        of_engines = await engine.engine_core.call_utility_all_async("collective_rpc", describe, None, (), None)
        result["workers"] = [worker for workers in of_engines for worker in workers]
        result["counters"] = counters()
        return result

    return asyncio.run(all_of_it())


def counters() -> dict[str, dict[str, int]]:
    """Return our counters on this process's /metrics, by engine."""
    import prometheus_client

    engines: dict[str, dict[str, int]] = {}
    for metric in prometheus_client.REGISTRY.collect():
        if metric.name.startswith("nwor_"):
            for sample in metric.samples:
                if "engine" in sample.labels and sample.name.endswith("_total"):
                    engines.setdefault(sample.labels["engine"], {})[metric.name] = int(sample.value)
    return engines
