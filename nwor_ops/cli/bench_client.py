"""Measure a running server with the client of ``vllm bench serve``."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time
from dataclasses import asdict, dataclass
from typing import Any

from nwor_ops.cli.report import Stopped
from nwor_ops.testing.server import Server, ServerFailed, error_of

RANDOM = "random"
OUTPUT_TOKENS = 256  # of random prompts
_RESET_SECONDS = 30.0


@dataclass(frozen=True)
class Traffic:
    """The requests of a run.

    Attributes:
        prompts: ``"random"``, or a file of JSON lines with ``prompt`` and ``output_tokens``.
        input_len: tokens of a random prompt.
        output_len: output tokens per request. None: 256, or the numbers in the file.
        temperature: 0 makes both sides choose the same tokens.
        client_args: more arguments of ``vllm bench serve``.
    """

    prompts: str = RANDOM
    input_len: int = 512
    output_len: int | None = None
    temperature: float = 0.0
    client_args: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what a result says about its traffic. The input of prompts from a file is theirs."""
        if self.prompts != RANDOM:
            return asdict(self) | {"input_len": None}
        return asdict(self) | {"output_len": self.output_len or OUTPUT_TOKENS}

    def arguments(self) -> list[str]:
        """Return the arguments of ``vllm bench serve``."""
        if self.prompts == RANDOM:
            output_len = self.output_len or OUTPUT_TOKENS
            words = ["--dataset-name", "random", "--random-input-len", str(self.input_len)]
            words += ["--random-output-len", str(output_len)]
        else:
            words = ["--dataset-name", "custom", "--dataset-path", self.prompts]
            words += ["--custom-output-len", str(self.output_len or -1)]
        return [*words, "--temperature", str(self.temperature), *self.client_args]


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
        traffic: the requests.
        model: vLLM's configuration of the model, which names the tokenizer.
        log: a file for the client's output.

    Raises:
        SystemExit: ``client_args`` has an argument that ``vllm bench serve`` does not know.
        Stopped: the client cannot make the prompts.
    """

    def __init__(self, traffic: Traffic, model: Any, log: pathlib.Path) -> None:
        self._traffic, self._log = traffic, log
        self._log.write_text("")
        self._tokenizer = ["--tokenizer", str(model.tokenizer), "--tokenizer-mode", str(model.tokenizer_mode)]
        if model.trust_remote_code:
            self._tokenizer.append("--trust-remote-code")
        self._try()

    def _try(self) -> None:
        """Make prompts, one of each line of a file, so that a mistake is found before a server starts."""
        from vllm.benchmarks.datasets import get_samples
        from vllm.tokenizers import get_tokenizer

        arguments = self._parse(port=0, requests=1, prompts=self._count_prompts(), seed=0)
        tokenizer = None
        with self._log.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                if not arguments.skip_tokenizer_init:
                    trusted = arguments.trust_remote_code
                    tokenizer = get_tokenizer(
                        arguments.tokenizer, tokenizer_mode=arguments.tokenizer_mode, trust_remote_code=trusted
                    )
                get_samples(arguments, tokenizer)
            except (Exception, SystemExit) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise Stopped(f"the client of vllm bench serve cannot make the prompts: {reason}") from None

    def _count_prompts(self) -> int:
        if self._traffic.prompts == RANDOM:
            return 1
        path = pathlib.Path(self._traffic.prompts)
        if path.suffix != ".jsonl" or not path.is_file():
            raise Stopped(f"--prompts must be {RANDOM!r} or a file that ends with .jsonl, got {str(path)!r}")
        with path.open("rb") as file:
            return max(1, sum(1 for _ in file))

    def run(self, server: Server, requests: int, prompts: int, seed: int) -> Run:
        """Send ``prompts`` requests, ``requests`` at a time, to a server with an empty prefix cache.

        Raises:
            ServerFailed: the server ended, or a request failed.
        """
        from vllm.benchmarks import serve

        with self._log.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                _empty_prefix_cache(server)
                measured = serve.main(self._parse(server.port, requests, prompts, seed))
            except Exception as error:
                raise ServerFailed(self._reason(server, f"{type(error).__name__}: {error}")) from error
        if measured["failed"] or measured["completed"] != prompts:
            lines = next(filter(None, measured["errors"]), "no reason given").strip().splitlines()
            raise ServerFailed(self._reason(server, f"{measured['failed']} of {prompts} requests failed: {lines[-1]}"))
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

        words = [*self._tokenizer, *self._traffic.arguments(), "--save-detailed", "--disable-tqdm"]
        fixed = {"port": port, "num-prompts": prompts, "max-concurrency": requests, "seed": seed}
        for name, value in (fixed | {"ready-check-timeout-sec": 0}).items():
            words += [f"--{name}", str(value)]
        parser = FlexibleArgumentParser(prog="nwor-ops bench: --client-args: vllm bench serve")
        serve.add_cli_args(parser)
        return parser.parse_args(words)


def _empty_prefix_cache(server: Server) -> None:
    """Empty the prefix cache, so that no run profits from an earlier one."""
    deadline = time.monotonic() + _RESET_SECONDS
    while '"success":true' not in server.get("/reset_prefix_cache", method="POST").replace(" ", ""):
        if time.monotonic() > deadline:  # blocks of the last run are still held
            raise RuntimeError(f"the prefix cache could not be emptied for {_RESET_SECONDS:.0f} s")
        time.sleep(0.2)
