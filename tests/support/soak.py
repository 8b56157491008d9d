"""Load a server for minutes, as many clients do, and look for lost requests, leaks and wrong counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from metrics_at_rest import metrics_at_rest

from nwor_ops.testing.server import Server

VOCABULARY = 64
TEMPERATURES = (0.0, 0.7, 1.2)
# Memory is compared between the third and the last quarter of the load, because vLLM's own memory grows for about a
# thousand requests. This much is no leak: caches of the host, and what the GPU's allocator keeps for a larger batch.
HOST_GROWTH = 1.03
GPU_GROWTH_MIB = 64.0
MEMORY_SAMPLES = 80
START_SECONDS = 600.0
WATCHED = re.compile("nwor_|vllm:(spec_decode|num_|kv_cache_usage_perc$|prefix_cache|request_success_total$)")
# These lines of a log are problems, wherever they come from. vLLM also warns, with a traceback, of an optional package
# that it cannot import.
BAD_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|^(?!.*\bWARNING\b).*Traceback|AuditError")


@dataclasses.dataclass
class Plan:
    """What runs.

    Attributes:
        words: arguments of ``vllm serve``, the model first.
        environment: variables of the server.
        log: the server's log.
        seconds: how long clients send requests.
        clients: requests at the same time.
        aborted: share of the requests that clients abort.
        longest: tokens of the longest prompt.
        max_tokens: tokens of an answer.
        drafts: K.
        seed: of prompts, temperatures and aborts.
    """

    words: list[str]
    environment: dict[str, str]
    log: str
    seconds: float = 60.0
    clients: int = 64
    aborted: float = 0.35
    longest: int = 120
    max_tokens: int = 48
    drafts: int = 4
    seed: int = 0


# ---------------------------------------------------------------- the server


class Target:
    """A server under load.

    Args:
        server: a ready server.
        model: the model's name.
    """

    def __init__(self, server: Server, model: str) -> None:
        import aiohttp

        self._server, self._model = server, model
        self._address = f"http://127.0.0.1:{server.port}"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)
        )

    async def stream(self, prompt: list[int], temperature: float, max_tokens: int) -> AsyncIterator[list[int]]:
        """Yield the tokens of an answer as they come. A caller that closes the iterator aborts the request."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        response = await self._session.post(f"{self._address}/v1/completions", json=body)
        try:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice["token_ids"] or []
        finally:
            response.close()  # before the end of the answer, this is a client that hangs up

    async def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Return a whole answer, at temperature 0."""
        return [token async for tokens in self.stream(prompt, 0.0, max_tokens) for token in tokens]

    async def metrics(self) -> dict[str, float]:
        """Return the samples of ``/metrics`` by name."""
        return await asyncio.to_thread(self._server.metrics)

    def process(self) -> int:
        """Return the process whose memory, with that of its children, is watched."""
        return self._server._process.pid

    async def close(self) -> None:
        await self._session.close()


# ---------------------------------------------------------------- load


class Prompts:
    """Prompts that share prefixes of any length, in the tiny models' language, in which drafts are sometimes right."""

    def __init__(self, plan: Plan) -> None:
        self._rng = random.Random(plan.seed)
        self._longest = plan.longest
        self._texts = [self._text(number, 3 + 2 * number) for number in range(6)]

    def _text(self, first: int, step: int) -> list[int]:
        return [1 + (first + step * place + place * place // 7) % (VOCABULARY - 2) for place in range(self._longest)]

    def next(self) -> list[int]:
        shared = self._rng.choice(self._texts)[: self._rng.randrange(8, self._longest)]
        tail = [self._rng.randrange(1, VOCABULARY) for _ in range(self._rng.randrange(9))]
        return (shared + tail)[-self._longest :]


async def run_client(target: Target, plan: Plan, number: int, until: float, prompts: Prompts) -> Counter[str]:
    rng, counts = random.Random(f"{plan.seed} {number}"), Counter[str]()
    while time.monotonic() < until:
        abort = rng.random() < plan.aborted
        wanted = rng.randrange(1, plan.max_tokens) if abort else plan.max_tokens
        received = 0
        async with contextlib.aclosing(
            target.stream(prompts.next(), rng.choice(TEMPERATURES), plan.max_tokens)
        ) as parts:
            async for tokens in parts:
                received += len(tokens)
                if abort and received >= wanted:
                    break
        counts["tokens"] += received
        counts["aborted" if abort else "finished" if received == plan.max_tokens else "short"] += 1
    return counts


# ---------------------------------------------------------------- what is watched


def host_mib(process: int) -> float:
    """Return the memory of a process and its children without mapped files, in MiB. Shared pages count once.

    The files of torch and CUDA are left out: their share grows if other programs that map them end.
    """
    import psutil

    total = 0
    parent = psutil.Process(process)
    for each in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.Error):
            rollup = pathlib.Path(f"/proc/{each.pid}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", rollup, re.MULTILINE)))
    return total / 2**10


def gpu_mib() -> float | None:
    """Return the memory in use in MiB on the first GPU that this process may use, or None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


async def watch_memory(process: int, seconds: float) -> list[dict[str, float | None]]:
    samples: list[dict[str, float | None]] = []
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        host, gpu = await asyncio.gather(asyncio.to_thread(host_mib, process), asyncio.to_thread(gpu_mib))
        samples.append({"seconds": round(passed, 1), "host_mib": round(host, 1), "gpu_mib": gpu})
        await asyncio.sleep(seconds / MEMORY_SAMPLES)
    return samples


async def totals(target: Target) -> dict[str, float]:
    """Return the totals of an engine that has no requests any more."""
    await asyncio.sleep(1)
    await target.answer([3, 4, 5], 1)  # its output brings the last counts
    found = await metrics_at_rest(target.metrics)
    return {name: found[name] for name in found if WATCHED.match(name) and not name.endswith("_created")}


async def answers(target: Target, plan: Plan) -> list[list[int]]:
    """Ask some prompts one at a time. Each is asked twice, so that the second answer begins with a cached prefix."""
    prompts = Prompts(dataclasses.replace(plan, seed=plan.seed + 1))
    asked = [prompts.next() for _ in range(6)]
    for prompt in asked:
        await target.answer(prompt, plan.max_tokens)
    return [await target.answer(prompt, plan.max_tokens) for prompt in asked]


async def soak(target: Target, plan: Plan) -> dict[str, Any]:
    """Run the plan's clients between two rounds of the same answers."""
    before = await answers(target, plan)
    until, prompts = time.monotonic() + plan.seconds, Prompts(plan)
    memory = asyncio.create_task(watch_memory(target.process(), plan.seconds))
    clients = [run_client(target, plan, number, until, prompts) for number in range(plan.clients)]
    counts = sum(await asyncio.gather(*clients), Counter[str]())
    after = await answers(target, plan)
    return {
        "plan": dataclasses.asdict(plan),
        "requests": dict(counts),
        "memory": await memory,
        "answers_differ": sum(some != others for some, others in zip(before, after, strict=True)),
        "totals": await totals(target),
    }


async def run(plan: Plan) -> dict[str, Any]:
    """Start the server and run the plan. Return what :func:`problems` looks at."""
    server = Server(plan.words, os.environ | plan.environment, pathlib.Path(plan.log))
    try:
        await asyncio.to_thread(server.wait_until_ready, START_SECONDS)
        target = Target(server, plan.words[0])
        found = await soak(target, plan)
        await target.close()
        assert server.alive(), server.log[-4000:]
        found["log"] = bad_lines(server.log)  # a server that is stopped logs errors
    finally:
        server.stop()
    return found


# ---------------------------------------------------------------- judgement


def growth(samples: list[dict[str, float | None]], name: str) -> tuple[float, float] | None:
    """Return the medians of the third and of the last quarter of the samples, or None if there are too few."""
    values = [value for sample in samples if (value := sample[name]) is not None]
    quarter = len(values) // 4
    if quarter < 2:
        return None
    return statistics.median(values[-2 * quarter : -quarter]), statistics.median(values[-quarter:])


def bad_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if BAD_LINE.search(line)]


def problems(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for everything that is wrong with a result of :func:`run`."""
    plan, counted, requests = found["plan"], found["totals"], Counter(found["requests"])
    wrong = [f"in the log: {line}" for line in found["log"][:5]]

    def total(name: str) -> float:
        return float(counted.get(f"{name}_total", 0.0))

    if not requests["finished"] or not requests["aborted"]:
        wrong.append(f"the load was too small: {dict(requests)}")
    if requests["short"]:
        wrong.append(f"{requests['short']} answers were shorter than asked")
    reached = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:spec_decode_num_accepted_tokens")
    wrong += [f"{name} is 0: the load does not reach it" for name in reached if not total(name)]
    left = counted.get("vllm:num_requests_running", 0.0) + counted.get("vllm:num_requests_waiting", 0.0)
    if left:
        wrong.append(f"{left:.0f} requests are still there")
    usage = counted.get("vllm:kv_cache_usage_perc", 0.0)
    if usage:
        wrong.append(f"{usage:.1%} of the cache is in use without requests")
    skipped = sum(value for name, value in counted.items() if re.match(r"nwor_recurrent_\w+_requests_total$", name))
    for what, value in {
        "errors": total("nwor_errors"),
        "abandoned windows": total("nwor_abandoned_windows"),
        "requests with invalid counts": skipped,
    }.items():
        if value:
            wrong.append(f"{value:.0f} {what}")
    drafted, committed, rejected = (total(f"nwor_{name}_tokens") for name in ("draft", "committed", "rejected"))
    if drafted != committed + rejected:
        wrong.append(f"{drafted:.0f} drafts, but {committed:.0f} committed and {rejected:.0f} rejected")
    # The scheduler does not count the drafts of a request's steps that still run when it is aborted: with async
    # scheduling two at most.
    uncounted = drafted - total("vllm:spec_decode_num_draft_tokens")
    if not 0 <= uncounted <= 2 * plan["drafts"] * (requests["aborted"] + requests["finished"]):
        wrong.append(f"{drafted:.0f} drafts, {uncounted:.0f} more than the scheduler counted")
    if medians := growth(found["memory"], "host_mib"):
        early, late = medians
        if late > early * HOST_GROWTH:
            wrong.append(f"host memory grew from {early:.0f} to {late:.0f} MiB")
    if medians := growth(found["memory"], "gpu_mib"):
        early, late = medians
        if late > early + GPU_GROWTH_MIB:
            wrong.append(f"GPU memory grew from {early:.0f} to {late:.0f} MiB")
    return wrong
