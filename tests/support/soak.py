"""Load a server for minutes, as many clients do, and look for lost requests, leaks and wrong counts."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
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
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agreement import check_agreement
from readme_serve import Server, running

from nwor_ops.testing.engine_process import PROGRAM

VOCABULARY = 64
TEMPERATURES = (0.0, 0.7, 1.2)
MAX_TOKENS = 48  # of an answer
ABORTED = 0.35  # share of the requests that clients abort
# Memory is compared between the third and the last quarter of the load, because vLLM's own memory grows for about a
# thousand requests. This much is no leak: caches of the host, and what the GPU's allocator keeps for a larger batch.
HOST_GROWTH = 1.03
GPU_GROWTH_MIB = 64.0
MEMORY_SAMPLES = 80
START_SECONDS = 600.0
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
        longest: tokens of the longest prompt.
        drafts: K.
    """

    words: list[str]
    environment: dict[str, str]
    log: str
    seconds: float = 60.0
    clients: int = 64
    longest: int = 120
    drafts: int = 4


# ---------------------------------------------------------------- load


class Prompts:
    """Prompts that share prefixes of any length, in the tiny models' language, in which drafts are sometimes right."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._rng = random.Random(f"prompts {number}")
        self._longest = plan.longest
        self._texts = [self._text(number, 3 + 2 * number) for number in range(6)]

    def _text(self, first: int, step: int) -> list[int]:
        return [1 + (first + step * place + place * place // 7) % (VOCABULARY - 2) for place in range(self._longest)]

    def next(self) -> list[int]:
        shared = self._rng.choice(self._texts)[: self._rng.randrange(8, self._longest)]
        tail = [self._rng.randrange(1, VOCABULARY) for _ in range(self._rng.randrange(9))]
        return (shared + tail)[-self._longest :]


def stream(server: Server, model: str, prompt: list[int], temperature: float) -> Generator[list[int], None, None]:
    """Yield the tokens of an answer as they come. A caller that closes the iterator hangs up."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": temperature}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["token_ids"] or []


def run_client(server: Server, plan: Plan, number: int, until: float) -> Counter[str]:
    rng, counts, prompts = random.Random(str(number)), Counter[str](), Prompts(plan, number)
    while time.monotonic() < until:
        abort = rng.random() < ABORTED
        wanted = rng.randrange(1, MAX_TOKENS) if abort else MAX_TOKENS
        received = 0
        answer = stream(server, plan.words[0], prompts.next(), rng.choice(TEMPERATURES))
        with contextlib.closing(answer):
            for tokens in answer:
                received += len(tokens)
                if abort and received >= wanted:
                    break
        counts["tokens"] += received
        counts["aborted" if abort else "finished" if received == MAX_TOKENS else "short"] += 1
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


def watch_memory(process: int, until: float) -> list[dict[str, float | None]]:
    samples, pause = list[dict[str, float | None]](), (until - time.monotonic()) / MEMORY_SAMPLES
    while time.monotonic() < until:
        samples.append({"host_mib": host_mib(process), "gpu_mib": gpu_mib()})
        time.sleep(pause)
    return samples


def answers(server: Server, plan: Plan) -> list[list[int]]:
    """Ask some prompts one at a time. Each is asked twice, so that the second answer begins with a cached prefix."""
    prompts = Prompts(plan, -1)
    asked = [prompts.next() for _ in range(6)]
    return [server.complete(prompt, MAX_TOKENS) for prompt in asked * 2][6:]


def run(plan: Plan) -> dict[str, Any]:
    """Start the server, and run the clients between two rounds of the same answers."""
    server = Server(PROGRAM, plan.words, plan.environment, pathlib.Path(plan.log))
    with running(server, seconds=START_SECONDS):
        before, until = answers(server, plan), time.monotonic() + plan.seconds
        with ThreadPoolExecutor(plan.clients) as pool:
            clients = [pool.submit(run_client, server, plan, number, until) for number in range(plan.clients)]
            memory = watch_memory(server._process.pid, until)
            counts = sum((client.result() for client in clients), Counter[str]())
        after = answers(server, plan)
        return {
            "drafts": plan.drafts,
            "requests": dict(counts),
            "memory": memory,
            "answers_differ": sum(some != others for some, others in zip(before, after, strict=True)),
            "totals": server.metrics_at_rest(),
            "log": [line for line in server.log.splitlines() if BAD_LINE.search(line)],
        }


# ---------------------------------------------------------------- judgement


def growth(samples: list[dict[str, float | None]], name: str) -> tuple[float, float]:
    """Return the medians of the third and of the last quarter of the samples; zeros if there are too few."""
    values = [value for sample in samples if (value := sample[name]) is not None]
    if (quarter := len(values) // 4) < 2:
        return 0.0, 0.0
    return statistics.median(values[-2 * quarter : -quarter]), statistics.median(values[-quarter:])


def check(found: Mapping[str, Any]) -> None:
    """Check that a result of :func:`run` has no lost request, no leak and no wrong count."""
    totals, requests = found["totals"], Counter(found["requests"])
    assert found["log"] == []
    assert requests["finished"] > 0
    assert requests["aborted"] > 0
    assert requests["short"] == 0
    for name in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens"):
        assert totals[f"vllm:{name}_total"] > 0, f"the load does not reach {name}"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert totals[f"vllm:{name}"] == 0, name
    assert totals.get("nwor_recurrent_skipped_requests_total", 0) == 0
    # With async scheduling, two steps of a request at most still run when it is aborted.
    check_agreement(totals, requests["aborted"] + requests["finished"], 2 * found["drafts"])
    early, late = growth(found["memory"], "host_mib")
    assert late <= early * HOST_GROWTH, "host memory grew"
    early, late = growth(found["memory"], "gpu_mib")
    assert late <= early + GPU_GROWTH_MIB, "GPU memory grew"
