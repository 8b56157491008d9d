"""Run one vLLM engine of the benchmarks in a separate process: ``benchmark_engine.py JOB.json``.

A job is ``{"engine": arguments of vllm.LLM, "prompt_tokens": ..., "max_tokens": ..., "vocabulary": ...}``, and with
``captures`` the number of times to capture the FULL graphs for each side of a transaction.

Each line of stdin is a command, and each answer is a line of JSON on stdout:

- ``run N [SEED]``: serve N requests.
- ``ttft N PREFIX SUFFIX AT_ONCE SEED``: time first tokens.
- ``fits TOKENS``: return how many requests of this length fit into the cache by vLLM's upper bound.
- ``profile N``: measure the parts of a decode step of N requests.
- ``switch 0``: remove the transaction from an engine, until ``switch 1``.
- ``turns N CAPTURE FIRST``: time decode steps of N requests with the transaction off and on in turn.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nwor_ops.testing.engine_process import serve

TTFT_TOKENS = 8
STEPS_BEFORE = 12  # until all prompts are computed
TURNS, TURN_STEPS = 8, 20
STEPS_BETWEEN_LOOKS = 25  # steps between two reads of the number of running requests; a read takes milliseconds
PROFILED_STEPS = 40
# The heads are the longest matrix products of a step. With a draft vocabulary the drafts' come before our argmax.
MATRIX_PRODUCT = re.compile("gemm|nvjet|cutlass|cublas")
STEP_MARK = "spin_kernel"  # torch.cuda._sleep
OUR_ARGMAX, OUR_UPDATE = re.compile("nwor::.*argmax_kernel"), re.compile("nwor::.*(plan|copy)_vocabulary_kernel")
STATES = re.compile("delta_rule|gdn|causal_conv1d|nwor::.*(verify|fold|fold_plan|window_plan)_kernel")
STEPS_BETWEEN = 6  # steps until results from before the switch have arrived


def main() -> None:
    serve(TimedEngine)


class TimedEngine:
    """An engine and its requests."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        from vllm import LLM

        started = time.perf_counter()
        self._llm = LLM(**job["engine"])
        self._start_seconds = time.perf_counter() - started
        gc.collect()
        gc.freeze()  # exclude the objects of start-up from garbage collection
        self._runs = 0

    def describe(self) -> dict[str, Any]:
        runner = self._llm.collective_rpc(runner_module)[0]
        return {"start_seconds": self._start_seconds, "runner": runner, **self._plugin()}

    def run(self, requests: int, seed: int = 0) -> dict[str, Any]:
        """Run all requests concurrently to their ends. In the V2 runner, the first request's seed decides what is
        accepted."""
        counted, replays = self._counted(), self._replays()
        engine = self._llm.llm_engine
        gc.collect()  # not during a run, which takes a second
        # An engine core in a separate process starts when the first request is added.
        start = time.perf_counter()
        self._add(requests, self._job["max_tokens"], seed)
        steps = tokens = most_running = 0
        while engine.has_unfinished_requests():
            outputs, steps = engine.step(), steps + 1
            if steps % STEPS_BETWEEN_LOOKS == 0:
                most_running = max(most_running, int(self._metrics().get("vllm:num_requests_running", 0)))
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs if output.finished)
        seconds = time.perf_counter() - start
        drafts, accepted = (self._counted()[name] - counted[name] for name in counted)
        return {
            "seconds": seconds,
            "tokens": tokens,
            "acceptance_length": 1 + accepted / drafts if drafts else None,
            "most_running": most_running,
            "draft_graph_replays": self._replays() - replays,
        }

    def ttft(self, requests: int, prefix: int, suffix: int, at_once: int, seed: int) -> dict[str, Any]:
        """Measure the seconds until each request's first token. All prompts begin with the same ``prefix`` tokens,
        which depend on the seed. Each ends with ``suffix`` tokens that no other has."""
        from vllm import SamplingParams

        engine, vocabulary = self._llm.llm_engine, self._job["vocabulary"]
        self._runs += 1
        shared, own = random.Random(-1 - seed), random.Random(self._runs)
        beginning = [shared.randrange(vocabulary) for _ in range(prefix)]
        prompts = [beginning + [own.randrange(vocabulary) for _ in range(suffix)] for _ in range(requests)]
        params = SamplingParams(temperature=0.0, max_tokens=TTFT_TOKENS, ignore_eos=True, detokenize=False)
        gc.collect()
        added: dict[int, float] = {}
        first: dict[int, float] = {}
        cached: dict[int, int] = {}
        for index, prompt in enumerate(prompts):
            added[index] = time.perf_counter()
            engine.add_request(f"{self._runs}-{index}", {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests() and (not at_once or index == requests - 1):
                for output in engine.step():
                    number = int(output.request_id.split("-")[1])
                    if number not in first and output.outputs[0].token_ids:
                        first[number] = time.perf_counter() - added[number]
                    cached[number] = output.num_cached_tokens or cached.get(number, 0)
        return {
            "seconds": [first[index] for index in range(requests)],
            "cached": [cached[index] for index in range(requests)],
        }

    def fits(self, tokens: int) -> dict[str, Any]:
        """Return how many requests of this many tokens fit in the cache."""
        return {"requests": self._llm.collective_rpc(requests_that_fit, args=(tokens,))[0]}

    def profile(self, requests: int) -> dict[str, Any]:
        """Return the device's microseconds in a decode step, by part; see :func:`step_parts`."""
        with self._steady(requests) as step:
            self._llm.collective_rpc(start_profile)
            for _ in range(PROFILED_STEPS):
                step()
            [kernels] = self._llm.collective_rpc(stop_profile)
        speculation = self._job["engine"].get("speculative_config", {})
        return step_parts(kernels, speculation.get("num_speculative_tokens", 0))

    def switch(self, on: int) -> dict[str, Any]:
        self._switch(bool(on), 0)
        return {}

    def turns(self, requests: int, capture: int, first: int) -> dict[str, Any]:
        """Time the same requests in all turns: off on on off ... or, with `first`, on off off on ..."""
        gc.collect()
        order = [bool(first) != (turn % 4 in (1, 2)) for turn in range(TURNS)]
        windows, found = [], []
        self._switch(order[0], capture)
        with self._steady(requests) as step:
            for on in order:
                windows.append(self._switch(on, capture))
                for _ in range(STEPS_BETWEEN):
                    outputs = step()
                tokens = -_tokens_so_far(outputs, requests)
                ends = [time.perf_counter()]
                for _ in range(TURN_STEPS):
                    outputs = step()
                    ends.append(time.perf_counter())
                tokens += _tokens_so_far(outputs, requests)
                steps = [after - before for before, after in itertools.pairwise(ends)]
                found.append(
                    {"on": on, "steps": TURN_STEPS, "tokens": tokens, "seconds": sum(steps),
                     "median_step": statistics.median(steps)}
                )  # fmt: skip
            windows.append(self._switch(on, capture))
        for turn, (before, after) in zip(found, itertools.pairwise(windows), strict=True):
            turn["windows"] = after - before
        return {"turns": found, "capture": capture, **self._plugin()}

    def _switch(self, on: bool, capture: int) -> int:
        """Switch NWOR on or off, and return the number of windows begun so far."""
        captures = self._job.get("captures", 1)
        windows, *others = self._llm.collective_rpc(switch_transactions, args=(on, capture, captures))
        if any(other != windows for other in others):
            raise RuntimeError(f"the ranks of one engine have begun {[windows, *others]} windows")
        return int(windows)

    @contextlib.contextmanager
    def _steady(self, requests: int) -> Iterator[Callable[[], Any]]:
        """Return a function that runs one step, in which all requests decode."""
        engine = self._llm.llm_engine
        self._add(requests, self._job["engine"].get("max_model_len", 4096) - self._job["prompt_tokens"] - 1)
        for _ in range(STEPS_BEFORE):
            engine.step()
        yield engine.step
        if not engine.has_unfinished_requests():
            raise RuntimeError("the requests ended while steps were counted")
        engine.abort_request([f"{self._runs}-{index}" for index in range(requests)])
        while engine.has_unfinished_requests():
            engine.step()

    def _add(self, requests: int, max_tokens: int, seed: int = 0) -> None:
        from vllm import SamplingParams

        self._runs += 1
        # Use new prompts in every run; otherwise a connector would find them stored already.
        generator = random.Random(self._runs)
        for index in range(requests):
            prompt = [generator.randrange(self._job["vocabulary"]) for _ in range(self._job["prompt_tokens"])]
            # The V2 runner's synthetic sampler uses the request's seed, so two engines accept the same drafts.
            params = SamplingParams(
                temperature=0.0, seed=seed + index, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            )
            self._llm.llm_engine.add_request(f"{self._runs}-{index}", {"prompt_token_ids": prompt}, params)

    def _counted(self) -> dict[str, float]:
        values = self._metrics()
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return {name: values.get(name, 0) for name in names}

    def _metrics(self) -> dict[str, float]:
        return {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}

    def _replays(self) -> int:
        """Return the number of replays of a draft model's loop."""
        return sum(report["replays"]["decode"] for report in self._plugin()["draft_graphs"])

    def _plugin(self) -> dict[str, Any]:
        worker, *_ = self._llm.collective_rpc(describe_plugin)  # all ranks give the same answer
        return worker


def _tokens_so_far(outputs: list[Any], requests: int) -> int:
    """Return the number of tokens of all requests. Each request gets some in every step."""
    if len(outputs) != requests:
        raise RuntimeError(f"{len(outputs)} of {requests} requests had tokens in a step")
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def step_parts(kernels: Sequence[tuple[str, float]], num_drafts: int) -> dict[str, float]:
    """Return the microseconds of each part of a step, from the kernels of some steps in the order of their starts.

    A step begins with a mark. Its heads are its K + 1 longest products, or the longest one with a draft vocabulary. The
    first is the target's. ``drafts_heads`` includes the argmax and the update of a draft vocabulary.
    """
    parts = dict.fromkeys(("states", "drafts_heads", "target_head", "rest"), 0.0)
    num_heads = 1 if any(OUR_ARGMAX.search(name) for name, _ in kernels) else 1 + num_drafts
    steps: list[list[tuple[str, float]]] = []
    for kernel in kernels:
        if STEP_MARK in kernel[0]:
            steps.append([])
        elif steps:
            steps[-1].append(kernel)
    for step in steps:
        products = []
        for (name, us), (following, _) in itertools.pairwise([*step, ("", 0.0)]):
            if OUR_ARGMAX.search(name) or OUR_ARGMAX.search(following) or OUR_UPDATE.search(name):
                parts["drafts_heads"] += us
            elif MATRIX_PRODUCT.search(name):
                products.append(us)
            else:
                parts["states" if STATES.search(name) else "rest"] += us
        heads = sorted(sorted(range(len(products)), key=products.__getitem__)[-num_heads:])
        parts["target_head"] += sum(products[place] for place in heads[:1])
        parts["drafts_heads"] += sum(products[place] for place in heads[1:])
        parts["rest"] += sum(us for place, us in enumerate(products) if place not in heads)
    return {part: us / len(steps) for part, us in parts.items()} | {"steps": len(steps)}


# ---------------------------------------------------------------- in the worker, which may be a separate process


def runner_module(worker: Any) -> str:
    """Return the module of the worker's model runner; vLLM has two."""
    return type(worker.model_runner).__module__


def requests_that_fit(worker: Any, tokens: int) -> int:
    """See :meth:`TimedEngine.fits`."""
    runner = worker.model_runner
    cache, model = runner.kv_cache_config, runner.vllm_config.model_config
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    longest, model.max_model_len = model.max_model_len, tokens
    try:
        pages = [-(-spec.max_memory_usage_bytes(runner.vllm_config) // spec.page_size_bytes) for spec in specs]
    finally:
        model.max_model_len = longest
    return int(cache.num_blocks // sum(pages))


def start_profile(worker: Any) -> None:
    """Start a profile in which each step begins with a kernel that marks it."""
    import torch

    runner = worker.model_runner
    worker.nwor_execute = execute = runner.execute_model

    def execute_marked(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(1)
        return execute(*args, **kwargs)

    torch.cuda.synchronize()
    runner.execute_model = execute_marked
    worker.nwor_profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    worker.nwor_profile.start()


def stop_profile(worker: Any) -> list[tuple[str, float]]:
    """Return the kernels of the steps and their microseconds, in the order of their starts."""
    import torch

    torch.cuda.synchronize()
    worker.nwor_profile.stop()
    worker.model_runner.execute_model = worker.nwor_execute
    events = worker.nwor_profile.profiler.kineto_results.events()
    ran = [event for event in events if event.device_type().name == "CUDA"]
    ran.sort(key=lambda event: event.start_ns())
    return [(event.name(), event.duration_ns() / 1e3) for event in ran]


def switch_transactions(worker: Any, on: bool, capture: int = 0, captures: int = 1) -> int:
    """Remove NWOR from this worker, or attach it again, between two steps. Return the number of windows begun so far.

    Weights, caches, compiled code and drafter stay, so the two sides differ only by NWOR. Only FULL graphs contain a
    writer. If one was patched, the first call captures them again for both sides in turn, `captures` times;
    no request may run then. `capture` selects the capture to use from now on. Two things remain if NWOR is off: its
    counters are still collected, and in mode ``stage`` the cache lacks the shadow pages.
    """
    from nwor_ops.vllm import sessions

    runner = worker.model_runner
    if not hasattr(worker, "nwor_parts"):
        [session] = sessions()
        worker.nwor_parts = [(patch.owner, patch.name, patch.replacement) for patch in session.patches]
        if not worker.nwor_parts:
            raise RuntimeError("nwor_ops patched nothing in this engine")
        worker.nwor_graphs = []
        if full_graphs(runner) and any(name == "do_kv_cache_update" for _, name, _ in worker.nwor_parts):
            for number in range(captures):
                graphs = {}
                for side in (False, True):
                    put_parts(worker, side)
                    graphs[side] = capture_full_graphs(runner, number)
                worker.nwor_graphs.append(graphs)
    put_parts(worker, on)
    if worker.nwor_graphs:
        runner.cudagraph_manager.graphs = worker.nwor_graphs[capture][on]
    return describe_plugin(worker)["windows"]


def put_parts(worker: Any, on: bool) -> None:
    for owner, name, part in worker.nwor_parts:
        if on:
            setattr(owner, name, part)
        else:
            vars(owner).pop(name, None)


def full_graphs(runner: Any) -> dict[Any, Any]:
    """Return the model's FULL graphs, by batch; empty in an eager engine."""
    manager = getattr(runner, "cudagraph_manager", None)
    return manager.graphs if manager is not None else {}


def capture_full_graphs(runner: Any, shift: int) -> dict[Any, Any]:
    """Capture the model's FULL graphs again; those of the drafter and the piecewise graphs stay.

    With another `shift` their buffers have other addresses, which may affect the times. Otherwise each capture would
    reuse the memory of the previous one.

    The earlier graphs stay alive. From torch 2.12, a graph that is destroyed takes the cuBLAS workspaces of its capture
    stream with it (pytorch #193402). The piecewise graphs were captured on that stream and still use them.
    """
    import torch
    from vllm.config import CUDAGraphMode, set_current_vllm_config

    manager = runner.cudagraph_manager
    batches_of, earlier, manager.graphs = manager._capture_descs, manager.graphs, {}
    manager._capture_descs = {mode: batches for mode, batches in batches_of.items() if mode == CUDAGraphMode.FULL}
    runner.speculator.capture = lambda: None
    begin, held = torch.cuda.CUDAGraph.capture_begin, [earlier]

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        # torch has one pool for small blocks and one for large blocks. The next capture would use their memory again.
        sizes = [least + shift * 37 * 1024 for least in (0, 1 << 20)] if shift else []
        held.extend(torch.empty(size, dtype=torch.uint8, device=runner.device) for size in sizes)

    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign]
    try:
        with set_current_vllm_config(runner.vllm_config):
            runner.capture_model()
    finally:
        torch.cuda.CUDAGraph.capture_begin = begin  # type: ignore[method-assign]
        manager._capture_descs = batches_of
        del runner.speculator.capture  # the method again
    runner.nwor_held = [*getattr(runner, "nwor_held", ()), *held]
    gc.collect()
    gc.freeze()  # restore what vLLM set and a capture resets
    return manager.graphs


def describe_plugin(worker: Any) -> dict[str, Any]:
    """Return what nwor_ops holds in this worker."""
    plugin = sys.modules.get("nwor_ops.vllm")  # missing if vLLM did not load it
    sessions = plugin.sessions() if plugin else []
    return {
        "sessions": [session.describe() for session in sessions],
        "vanilla_steps": [dict(session.vanilla_steps) for session in sessions],
        "windows": sum(session.begun for session in sessions),
        "draft_graphs": plugin.draft_graph_reports() if plugin else [],
        "recurrent_engines": [state.describe() for state in plugin.recurrent_engines()] if plugin else [],
        "draft_vocabularies": [vocabulary.describe() for vocabulary in plugin.draft_vocabularies()] if plugin else [],
    }


if __name__ == "__main__":
    main()
