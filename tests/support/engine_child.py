"""The process of one engine.

A job is a dict with ``engine`` (arguments of ``vllm.LLM``), ``environment``, and these optional keys:

- ``max_tokens``, ``temperature``: for sampling.
- ``requests``: number of requests. ``shared_prefix``: number of prefix tokens that they share.
- ``rounds``: how often the requests run. ``abort``: request numbers to abort, by step.
- ``sleep`` (True, or level 2), ``drop_prefix_cache``: what happens between rounds. Blocks that are cached
  after a drop were loaded by a KV connector.
- ``continued``: each round's answers become part of the next round's prompts.
- ``record_drafts``: record the proposals of the drafter, step by step.
- ``faults``: errors to plant, see ``engine_faults``.
- ``adapter``: the folder of a LoRA adapter, which every other request uses.
- ``exports``: record what a KV connector saw, see ``export_connector``.
- ``cost_curves``: milliseconds of drafting by requests and of verifying by tokens, for adaptive verification. They
  replace vLLM's measurements, so that every engine verifies the same drafts.
- ``prompt_tokens``: lengths of the prompts, in turn.
- ``chats``: real prompts of the real model. ``schema``: a JSON schema that its answers follow.
- ``prefill``: settings of a prefill engine in another process. It computes all prompts first; see ``prefill_engine``.
- ``nodes``: 2 if half of the workers run on another node.

``{fresh}`` in an engine's settings stands for a new folder. The answer is a file, so that it exists whatever happens to
the process afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import engine_faults
from copied_rows import CopiedRows
from engine_ranks import counters, second_node, serve_ranks
from prefill_engine import PrefillEngine, transfer_of

from nwor_ops.testing.engine_process import free_port
from nwor_ops.vllm.metrics.publisher import PERIOD

# Arrival of each request, in engine steps. More requests arrive than may run, so some must wait.
ARRIVAL_STEPS = (0, 0, 0, 2, 5, 5, 8, 9, 12, 12, 13, 20, 20, 21, 24, 26, 28, 28, 30, 31, 32, 32, 33, 34)
MOST_STEPS = 4000
MOST_RESETS = 200
RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")


def run(job: dict[str, Any], answer: str, log: str) -> None:
    """Run the whole life of the process."""
    os.setpgid(0, 0)  # a signal that ends it also ends its children
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(job["environment"])
    result: dict[str, Any] = {"error": None}
    try:
        run_engine(job, result)
    except BaseException as error:
        traceback.print_exc()
        result["error"] = "".join(traceback.format_exception_only(error)).strip()
    unfinished = pathlib.Path(f"{answer}.unfinished")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(answer)
    # vLLM's teardown has nothing left to do, but may take seconds.
    os._exit(0)


def run_engine(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Run an engine in this process, and add what it did to the result."""
    if job["engine"].get("data_parallel_size", 1) > 1:
        requests = _requests(job)
        result |= serve_ranks(job, requests, lambda index: _sampling(job, requests, index), describe_worker)
        return
    if job["nodes"] > 1:
        with second_node(job | {"port": free_port()}) as engine:
            run_engine(job | {"engine": engine, "nodes": 1}, result)
        return
    replays = GraphReplays()
    from vllm import LLM

    engine = json.dumps(job["engine"])
    if "{fresh}" in engine:
        engine = engine.replace("{fresh}", tempfile.mkdtemp(prefix="nwor-engine-"))
    job |= {"engine": json.loads(engine)}
    if job["faults"] in engine_faults.BEFORE_START:
        engine_faults.plant(None, job["faults"])
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(PrefillEngine(job)) if job["prefill"] is not None else None
        _run_alone(job, result, LLM(**job["engine"]), replays, prefill)


def _run_alone(
    job: dict[str, Any], result: dict[str, Any], llm: Any, replays: GraphReplays, prefill: PrefillEngine | None
) -> None:
    replays.total = replays.with_drafts = 0
    if job["cost_curves"]:
        _runner(llm).adaptive_verification.set_cost_curves(*job["cost_curves"])
    steps_by_drafts = _count_steps_by_drafts()
    proposed = _record_drafts(llm) if job["record_drafts"] else None
    if job["faults"] and job["faults"] not in engine_faults.BEFORE_START:
        llm.collective_rpc(engine_faults.plant, args=(job["faults"],))
    exports = _watch_exports(llm) if job["exports"] and _sessions() else None
    copied_rows = [
        CopiedRows(session.manager) for session in _sessions() if session.mode == "stage" and _cache_audit(session)
    ]
    requests = _requests(job)
    result["rounds"], result["accepted"] = [], []  # accepted: tokens of drafts, by round
    for number in range(job["rounds"]):
        if number and job["sleep"]:
            llm.sleep(level=int(job["sleep"]))
            if job["sleep"] == 2:
                llm.wake_up(tags=["weights"])
                llm.collective_rpc("reload_weights")
            llm.wake_up()
        if number and job["drop_prefix_cache"]:
            drop_prefix_cache(llm)
        if number and job["continued"]:
            for request, answer in zip(requests, result["rounds"][-1], strict=True):
                request.prompt.extend(answer)
        prompts = {f"{number}-{index}": list(request.prompt) for index, request in enumerate(requests)}
        transfer = transfer_of(prefill.prefill(prompts) if prefill else None)
        result["rounds"].append(_serve(llm, job, requests, number, transfer))
        result["accepted"].append(_accepted(llm) - sum(result["accepted"]))
    result["replays"] = {"graph_replays": replays.total, "replays_with_drafts": replays.with_drafts}
    result["steps_by_drafts"] = steps_by_drafts
    result["proposed"] = proposed
    result["copied_rows"] = [counted.as_dict() for counted in copied_rows]
    if prefill is not None:
        result["prefill"] = prefill.describe()
    if "state_connector" in sys.modules:
        result |= {"states": sys.modules["state_connector"].states, "handed_over": handed_over()}
    if exports is not None:
        serve_short_one(llm, "last")  # one more step, which tells the worker that all requests ended
        result["exports"] = exports.summary()
    result["metrics"] = {
        metric.name.removeprefix("vllm:"): metric.value if hasattr(metric, "value") else metric.values
        for metric in llm.get_metrics()
        if hasattr(metric, "value") or hasattr(metric, "values")  # no histograms
    }
    if job["engine"].get("tensor_parallel_size", 1) > 1:
        for number in range(2):  # in these steps the last counts arrive
            time.sleep(2 * PERIOD)
            serve_short_one(llm, f"last-{number}")
    result["counters"] = counters()
    result["workers"] = llm.collective_rpc(describe_worker)
    if len(result["workers"]) > 1:  # separate processes, between two steps
        llm.llm_engine.engine_core.shutdown()


def _accepted(llm: Any) -> int:
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


class GraphReplays:
    """Count the CUDA graphs that this process replays.

    Attributes:
        total: number of all replays.
        with_drafts: number of replays in a forward of the target inside a window, so with drafts in the batch.
    """

    def __init__(self) -> None:
        import torch

        self.total = self.with_drafts = 0
        self._in_forward = False
        _wrap(torch.cuda.CUDAGraph, "replay", self._counting)
        for module in RUNNERS:
            _wrap(importlib.import_module(module).GPUModelRunner, "execute_model", self._marking)

    def _counting(self, replay: Callable[..., Any], *arguments: Any) -> Any:
        self.total += 1
        self.with_drafts += self._in_forward and any(session.in_window for session in _sessions())
        return replay(*arguments)

    def _marking(self, execute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._in_forward = True
        try:
            return execute(*arguments, **named)
        finally:
            self._in_forward = False


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return around(method, *arguments, **named)

    setattr(owner, name, wrapped)


def _of_plugin(function: str) -> list[Any]:
    plugin = sys.modules.get("nwor_ops.vllm")  # missing in a vanilla engine
    return getattr(plugin, function)() if plugin else []


_sessions = functools.partial(_of_plugin, "sessions")


def drop_prefix_cache(llm: Any) -> None:
    """Drop the prefix cache after no request holds a block.

    While stores of a KV connector are unfinished, the worker must continue to step. It steps only if there is a
    request, so this function adds requests that are too short to be cached.
    """
    for attempt in range(MOST_RESETS):
        if llm.reset_prefix_cache():
            return
        serve_short_one(llm, f"reset-{attempt}")
        time.sleep(0.01)
    raise RuntimeError(f"the prefix cache was not dropped after {MOST_RESETS} attempts")


def serve_short_one(llm: Any, name: str) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    llm.llm_engine.add_request(name, {"prompt_token_ids": [3, 4, 5]}, parameters)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    llm.llm_engine.step()


def handed_over() -> dict[str, int]:
    """The pages that ``state_connector`` took and gave in this process."""
    module = sys.modules.get("state_connector")
    return dict(module.handed_over) if module else {}


def _watch_exports(llm: Any) -> Any:
    import export_connector

    return export_connector.watch(llm)


def _runner(llm: Any) -> Any:
    """Return the model runner of an engine that runs in one process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def _count_steps_by_drafts() -> dict[int, int]:
    """Count the steps from now on by the largest number of drafts of a request."""
    from nwor_ops.vllm.step_listener import StepListener

    steps: Counter[int] = Counter()

    class Counting(StepListener):
        def begin(self, query_start_loc: Any, num_draft_tokens: Any, *_: Any) -> None:
            steps[max(map(int, num_draft_tokens), default=0)] += 1

    for session in _sessions():
        session.subscribe(Counting())
    return steps


def _record_drafts(llm: Any) -> dict[str, Any]:
    """Record the proposals of a drafter with a model from now on.

    ``drafts[request][length]`` holds as many drafts as were requested, where the length is that of the sequence they
    continue. ``steps`` counts the proposals, and ``by_drafts`` counts them by their number. Rows of prompt chunks are
    left out.
    """
    runner = _runner(llm)
    is_v2 = hasattr(runner, "speculator")
    drafter = runner.speculator if is_v2 else runner.drafter
    propose = drafter.propose
    by_drafts: Counter[int] = Counter()
    record: dict[str, Any] = {"steps": 0, "by_drafts": by_drafts, "drafts": {}}

    def recording_v2(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(input_batch, *args, **kwargs)
        num_sampled, num_rejected = args[4], args[5]
        lengths = input_batch.seq_lens[: input_batch.num_reqs] - num_rejected
        count = kwargs["num_speculative_tokens"]
        keep(count, input_batch.req_ids, lengths.tolist(), (num_sampled > 0).tolist(), drafts)
        return drafts

    def recording_v1(
        *, num_speculative_tokens: int, common_attn_metadata: Any, num_rejected_tokens_gpu: Any, **more: Any
    ) -> Any:
        lengths = common_attn_metadata.seq_lens  # vLLM's drafter overwrites it
        lengths = (lengths if num_rejected_tokens_gpu is None else lengths - num_rejected_tokens_gpu).tolist()
        drafts = propose(
            num_speculative_tokens=num_speculative_tokens,
            common_attn_metadata=common_attn_metadata,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
            **more,
        )
        sampled = (~runner.discard_request_mask.np[: len(lengths)].astype(bool)).tolist()
        keep(num_speculative_tokens, runner.input_batch.req_ids, lengths, sampled, drafts)
        return drafts

    def keep(count: int, requests: list[str], lengths: list[int], sampled: list[bool], drafts: Any) -> None:
        record["steps"] += 1
        by_drafts[count] += 1
        for request, length, has_sampled, tokens in zip(requests, lengths, sampled, drafts.tolist(), strict=True):
            if has_sampled and count > 0:
                name = "-".join(request.split("-")[:2])  # vLLM adds a suffix
                record["drafts"].setdefault(name, {})[str(length)] = tokens[:count]

    drafter.propose = recording_v2 if is_v2 else recording_v1
    return record


def _requests(job: dict[str, Any]) -> list[Any]:
    """Return the demo's requests, which have many lengths and arrive while others run, with or without a
    shared prefix."""
    from nwor_ops.testing.real_model import PROMPTS, chats
    from nwor_ops.testing.tiny_llama import tiny_llama_requests

    demo = tiny_llama_requests(job["max_tokens"])
    requests = demo[: job["requests"]]
    for index in range(len(demo), job["requests"]):  # further requests start later in the text
        request, start = demo[index % len(demo)], index // len(demo)
        requests.append(dataclasses.replace(request, prompt=request.prompt[start:] + request.prompt[:start]))
    prefix = [(7 * position + position // 5) % 64 for position in range(job["shared_prefix"])]
    for request in requests:
        request.prompt[:0] = prefix
    real = [prompt for kind in PROMPTS.values() for prompt in kind[: -(-len(requests) // len(PROMPTS))]]
    for request, tokens in zip(requests, chats(real) if job["chats"] else (), strict=False):
        request.prompt[:] = tokens
    for request, length in zip(requests, itertools.cycle(job["prompt_tokens"]), strict=False):
        request.prompt[:] = (request.prompt * (1 + length // len(request.prompt)))[:length]
    return requests


def _serve(
    llm: Any, job: dict[str, Any], requests: list[Any], number: int, extra: Callable[[str], Any]
) -> list[list[int] | None]:
    """Return the tokens of each request, or None if it was aborted. Each request is added at its arrival step, as in a
    server."""
    from vllm.lora.request import LoRARequest

    engine = llm.llm_engine
    adapter = LoRARequest("adapter", 1, job["adapter"]) if job["adapter"] else None
    abort = {int(step): numbers for step, numbers in job["abort"].items()}
    aborted = {index for numbers in abort.values() for index in numbers}
    waiting = list(range(len(requests)))
    done: dict[int, list[int]] = {}
    for step in range(MOST_STEPS):
        while waiting and ARRIVAL_STEPS[waiting[0] % len(ARRIVAL_STEPS)] <= step:
            index = waiting.pop(0)
            engine.add_request(
                f"{number}-{index}",
                {"prompt_token_ids": requests[index].prompt},
                _sampling(job, requests, index, extra(f"{number}-{index}")),
                lora_request=adapter if index % 2 else None,
            )
        for output in engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[1])] = list(output.outputs[0].token_ids)
        if step in abort:
            engine.abort_request([f"{number}-{index}" for index in abort[step]])
        if not waiting and not engine.has_unfinished_requests():
            return [None if index in aborted else done[index] for index in range(len(requests))]
    raise RuntimeError(f"{len(requests)} requests did not finish within {MOST_STEPS} steps, only {sorted(done)}")


def _sampling(job: dict[str, Any], requests: list[Any], index: int, extra: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    return SamplingParams(
        temperature=job["temperature"],
        seed=index,
        max_tokens=requests[index].max_tokens,
        ignore_eos=job["schema"] is None,
        detokenize=False,
        extra_args=extra,
        structured_outputs=StructuredOutputsParams(json=job["schema"]) if job["schema"] else None,
    )


def _cache_audit(session: Any) -> Any:
    from nwor_ops.vllm.audit.engine import cache_audit

    return cache_audit(session)


def describe_worker(worker: Any) -> dict[str, Any]:
    """Return what each worker runs, and what nwor_ops recorded there."""
    runner = worker.model_runner
    config = runner.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    audits = [audit for session in _sessions() if (audit := _cache_audit(session))]
    return {
        "runner": type(runner).__module__,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "kv_cache_layout": config.cache_config.kv_cache_layout,
        "kv_cache_groups": len(runner.kv_cache_config.kv_cache_groups),
        "num_gpu_blocks": runner.kv_cache_config.num_blocks,
        "attention": sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}),
        "gdn_prefill_backends": sorted(
            {layer.gdn_prefill_backend for layer in layers if hasattr(layer, "gdn_prefill_backend")}
        ),
        "recorded_layers": [name for audit in audits for name in audit._recorders],
        "draft_graphs": _of_plugin("draft_graph_reports"),
        "draft_vocabulary": _describe_vocabulary(runner),
        "recurrent": [
            {"describe": state.describe(), "audit": state.listener.summary() if state.listener else None}
            for state in _of_plugin("recurrent_engines")
        ],
        "planted": engine_faults.describe(),
        "vllm_states": [audit.summary() for audit in engine_faults.state_audits(_sessions())],
        "wrapped": any("do_kv_cache_update" in vars(layer.impl) for layer in layers if hasattr(layer, "impl")),
        "sessions": [describe_session(session) for session in _sessions()],
    }


def describe_session(session: Any) -> dict[str, Any]:
    audit = _cache_audit(session)
    return {
        "mode": session.mode,
        "describe": session.describe(),
        "stats": session.stats().as_dict(),
        "audit": audit.summary() if audit else None,
        "others_write": audit.others_write if audit else None,
        "vanilla_steps": dict(session.vanilla_steps),
    }


def _describe_vocabulary(runner: Any) -> list[dict[str, Any]]:
    """Return the counters of the runner's draft vocabulary, and whether its maps and rows agree with the head."""
    from nwor_ops.vllm.draft_vocabulary.plugin import vocabulary_of

    owner = vocabulary_of(runner)
    reports = []
    for vocabulary in owner.vocabularies.values() if owner is not None else ():
        tokens = vocabulary.token_ids - vocabulary.first_token
        rows = vocabulary.row_of_token[tokens].tolist()
        is_copy = bool((vocabulary.weight == vocabulary.head[tokens]).all())
        reports.append(
            {
                "counters": vocabulary.counters.tolist(),
                "consistent": is_copy and rows == list(range(len(rows))),
                "errors": dict(owner.errors.counts),
            }
        )
    return reports
