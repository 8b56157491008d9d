"""``vllm serve`` on the GPU with NWOR: completions, and the counters on /metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from agreement import check_agreement
from engine_pool import ENVIRONMENT
from gpu_cases import ENGINE, NGRAM

from nwor_ops.testing.ports import free_port

PATIENCE_SECONDS = 300.0  # seconds, while other engines compile
REQUESTS = 6
# The server has a tokenizer, its own sizes, and separate processes.
NOT_FOR_SERVERS = ("model", "skip_tokenizer_init", "disable_log_stats", "enable_prefix_caching", "seed")


def _arguments(engines: Any, port: int) -> list[str]:
    settings = {name: value for name, value in ENGINE.items() if name not in NOT_FOR_SERVERS}
    settings |= {
        "port": port,
        "host": "127.0.0.1",
        "served_model_name": "tiny",
        "attention_config": {"backend": "FLASH_ATTN"},
        "speculative_config": NGRAM,
        "additional_config": {"nwor": {"mode": "cow", "audit": True}},
    }

    def as_text(value: Any) -> str:
        return json.dumps(value) if isinstance(value, dict) else str(value)

    options = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", as_text(value))]
    return [engines.models["llama"], *options]


def _get(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


@contextmanager
def _server(engines: Any) -> Iterator[str]:
    """Start a server, and return its address after it answers."""
    port = free_port()
    log = engines.logs / "serve.log"
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *_arguments(engines, port)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                _get(f"{address}/health")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start; the end of {log}:\n{log.read_text()[-3000:]}", pytrace=False)
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _counters(text: str, prefix: str) -> dict[str, float]:
    """Return sums over labels, by name."""
    found: dict[str, float] = {}
    for name, value in re.findall(rf"^({prefix}\w+?_total)(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_counters_at_metrics(engines: Any, record: dict[str, Any]) -> None:
    with _server(engines) as address:
        for number in range(REQUESTS):
            prompt = [(position * 37 + number) % 64 for position in range(30)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = json.loads(_get(f"{address}/v1/completions", body))
            assert answer["usage"]["completion_tokens"] == 40
        time.sleep(1)
        body |= {"prompt": [3, 4, 5], "max_tokens": 1}
        _get(f"{address}/v1/completions", body)  # its output brings the last counts
        text = _get(f"{address}/metrics")
    ours, vllm = _counters(text, "nwor_"), _counters(text, "vllm:spec_decode")
    record["counters"] = ours
    assert ours["nwor_rejected_tokens_total"] > 0, text[-2000:]
    # With async scheduling, a step may still run when its request ends.
    check_agreement(ours | vllm, REQUESTS, NGRAM["num_speculative_tokens"])
