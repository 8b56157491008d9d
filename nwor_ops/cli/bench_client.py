"""Measure a running server with the client of ``vllm bench serve``."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwor_ops.testing.engine_process import EngineFailed, Server, error_of

# The same tokens on both sides, apart from rounding. The user's arguments come after these and override them.
TRAFFIC = ("--dataset-name", "random", "--random-input-len", "512", "--random-output-len", "256", "--temperature", "0")
_RESET_SECONDS = 30.0


@dataclass(frozen=True)
class Run:
    """One run of the client: ``prompts`` requests, a constant number of them at a time.

    Attributes:
        tok_s: output tokens per second.
        ttft_ms: median time to the first token.
        tpot_ms: median time per further token.
        drafts: how often a request's drafts were verified.
        accepted: accepted draft tokens.
    """

    prompts: int
    seconds: float
    tok_s: float
    ttft_ms: float
    tpot_ms: float
    output_tokens: int
    drafts: int
    accepted: int


class Client:
    """Sends requests to servers.

    Args:
        arguments: arguments of ``vllm bench serve``, after ``TRAFFIC``.
        model: vLLM's configuration of the model, which names the tokenizer.
        log: a file for the client's output.

    Raises:
        SystemExit: the client does not know an argument. Its parser has printed which one.
    """

    def __init__(self, arguments: Sequence[str], model: Any, log: pathlib.Path) -> None:
        self._log = log
        self._log.write_text("")
        self._words = ["--tokenizer", str(model.tokenizer), "--tokenizer-mode", str(model.tokenizer_mode)]
        self._words += ["--trust-remote-code"] * bool(model.trust_remote_code)
        self._words += [*TRAFFIC, *arguments, "--save-detailed", "--disable-tqdm"]
        self._parse(port=0, requests=1, prompts=1, seed=0)

    def run(self, server: Server, requests: int, prompts: int, seed: int) -> Run:
        """Send ``prompts`` requests, ``requests`` at a time, to a server with an empty prefix cache.

        Raises:
            EngineFailed: the server ended, or a request failed.
        """
        from vllm.benchmarks import serve

        with self._log.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                _empty_prefix_cache(server)
                measured = serve.main(self._parse(server.port, requests, prompts, seed))
            except (Exception, SystemExit) as error:
                raise EngineFailed(self._reason(server, f"{type(error).__name__}: {error}")) from error
        if measured["failed"] or measured["completed"] != prompts:
            lines = next(filter(None, measured["errors"]), "no reason given").strip().splitlines()
            raise EngineFailed(self._reason(server, f"{measured['failed']} of {prompts} requests failed: {lines[-1]}"))
        return Run(
            prompts=prompts,
            seconds=measured["duration"],
            tok_s=measured["output_throughput"],
            ttft_ms=float(measured["median_ttft_ms"]),
            tpot_ms=float(measured["median_tpot_ms"]),
            output_tokens=measured["total_output_tokens"],
            drafts=measured.get("spec_decode_num_drafts", 0),
            accepted=measured.get("spec_decode_accepted_tokens", 0),
        )

    def _reason(self, server: Server, error: str) -> str:
        if server.alive():
            return f"{error} (logs: {self._log}, {server.log_file})"
        return f"the server ended: {error_of(server.log)} (log: {server.log_file})"

    def _parse(self, port: int, requests: int, prompts: int, seed: int) -> argparse.Namespace:
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        fixed = {"port": port, "num-prompts": prompts, "max-concurrency": requests, "seed": seed}
        words = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
        parser = FlexibleArgumentParser(prog="nwor-ops bench: --client-args: vllm bench serve")
        serve.add_cli_args(parser)
        return parser.parse_args([*self._words, *words, "--ready-check-timeout-sec", "0"])


def _empty_prefix_cache(server: Server) -> None:
    """Empty the prefix cache, so that no run profits from an earlier one."""
    deadline = time.monotonic() + _RESET_SECONDS
    while '"success":true' not in server.get("/reset_prefix_cache", method="POST").replace(" ", ""):
        if time.monotonic() > deadline:  # blocks of the last run are still held
            raise RuntimeError(f"the prefix cache could not be emptied for {_RESET_SECONDS:.0f} s")
        time.sleep(0.2)
