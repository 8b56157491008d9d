"""Measure a running server with the client of ``vllm bench serve``."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time
from dataclasses import dataclass
from typing import Any

from nwor_ops.cli.bench_options import RANDOM, BenchOptions
from nwor_ops.testing.server import Server, ServerFailed, error_of

OUTPUT_TOKENS = 256  # of random prompts
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
    """Sends the traffic of the options.

    Args:
        options: the options of the command.
        model: vLLM's configuration of the model, which names the tokenizer.

    Raises:
        SystemExit: ``--client-args`` has an argument that ``vllm bench serve`` does not know.
        ValueError: the client cannot make the prompts.
    """

    def __init__(self, options: BenchOptions, model: Any) -> None:
        self._options, self._log = options, options.output / "client.log"
        self._log.write_text("")
        self._tokenizer = ["--tokenizer", str(model.tokenizer), "--tokenizer-mode", str(model.tokenizer_mode)]
        if model.trust_remote_code:
            self._tokenizer.append("--trust-remote-code")
        self._try()

    def _try(self) -> None:
        """Make one prompt, so that a mistake is found before a server starts."""
        from vllm.benchmarks.datasets import get_samples
        from vllm.tokenizers import get_tokenizer

        arguments = self._parse(port=0, requests=1, prompts=1, seed=0)
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
                raise ValueError(f"the client of vllm bench serve cannot make the prompts: {reason}") from None

    def run(self, server: Server, requests: int, prompts: int, seed: int) -> Run:
        """Send ``prompts`` requests, ``requests`` at a time, to a server with an empty prefix cache.

        Raises:
            ServerFailed: the server ended, or a request failed.
        """
        from vllm.benchmarks import serve

        with self._log.open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                _empty_prefix_cache(server)
                found = serve.main(self._parse(server.port, requests, prompts, seed))
            except Exception as error:
                raise ServerFailed(self._reason(server, f"{type(error).__name__}: {error}")) from error
        if found["failed"] or found["completed"] != prompts:
            lines = next(filter(None, found["errors"]), "no reason given").strip().splitlines()
            raise ServerFailed(self._reason(server, f"{found['failed']} of {prompts} requests failed: {lines[-1]}"))
        return Run(
            prompts=prompts,
            seconds=found["duration"],
            tok_s=found["output_throughput"],
            ttft_ms=float(found["median_ttft_ms"]),
            tpot_ms=float(found["median_tpot_ms"]),
            output_tokens=found["total_output_tokens"],
            drafts=found.get("spec_decode_num_drafts", 0),
            accepted=found.get("spec_decode_accepted_tokens", 0),
        )

    def _reason(self, server: Server, of_client: str) -> str:
        if server.alive():
            return f"{of_client} (logs: {self._log}, {server.log_file})"
        return f"the server ended: {error_of(server.log)} (log: {server.log_file})"

    def _parse(self, port: int, requests: int, prompts: int, seed: int) -> argparse.Namespace:
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        options = self._options
        if options.prompts == RANDOM:
            length = options.output_tokens or OUTPUT_TOKENS
            traffic = ["--dataset-name", "random", "--random-input-len", str(options.input_tokens)]
            traffic += ["--random-output-len", str(length)]
        else:
            traffic = ["--dataset-name", "custom", "--dataset-path", str(pathlib.Path(options.prompts))]
            traffic += ["--custom-output-len", str(options.output_tokens or -1)]
        traffic += ["--temperature", str(options.temperature), *self._tokenizer, *options.client_arguments]
        fixed = {"port": port, "num-prompts": prompts, "max-concurrency": requests, "seed": seed}
        for name, value in (fixed | {"ready-check-timeout-sec": 0}).items():
            traffic += [f"--{name}", str(value)]
        parser = FlexibleArgumentParser(prog="nwor-ops bench: --client-args: vllm bench serve")
        serve.add_cli_args(parser)
        return parser.parse_args([*traffic, "--save-detailed", "--disable-tqdm"])


def _empty_prefix_cache(server: Server) -> None:
    """Empty the prefix cache, so that no run profits from an earlier one."""
    deadline = time.monotonic() + _RESET_SECONDS
    while '"success":true' not in server.get("/reset_prefix_cache", method="POST").replace(" ", ""):
        if time.monotonic() > deadline:  # blocks of the last run are still held
            raise RuntimeError(f"the prefix cache could not be emptied for {_RESET_SECONDS:.0f} s")
        time.sleep(0.2)
