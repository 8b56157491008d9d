"""``nwor-ops bench``: measure a feature on this machine, with the user's model, arguments and traffic.

Two servers run the same requests in turn: vanilla vLLM, and vLLM with the feature. Each round measures every load on
both sides, so that both see the same machine. ``bench_report`` decides what the ratios prove.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import pathlib
import platform
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from nwor_ops.cli.bench_report import OURS, SIDES, VANILLA, Finding, Load, Run, as_dict, print_loads
from nwor_ops.cli.check import look_at, reasons_of
from nwor_ops.cli.report import Exit, Report, Stopped, counted, handling, make_folder, plugin_problem, versions
from nwor_ops.config import ENVIRONMENT_PREFIX, SUGGESTED_ROWS, SWITCH, NworConfig, is_ours
from nwor_ops.testing.engine_process import LONGEST_ERROR, STOP_SECONDS, EngineFailed, Server, error_of

START_SECONDS = 3600.0  # a large model may be downloaded and compiled
WARM_UP_SEEDS = (2**31 - 1, 2**31 - 2)  # no round has them
# The same tokens on both sides, apart from rounding. The user's arguments come after these and override them.
TRAFFIC = ("--dataset-name", "random", "--random-input-len", "512", "--random-output-len", "256", "--temperature", "0")
_RESET_SECONDS = 30.0
# Every setting with its default. The environment wins over --additional-config.
_DEFAULTS = {SWITCH: "on"} | {
    ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in asdict(NworConfig()).items()
}


class Feature(NamedTuple):
    """A feature to measure."""

    name: str  # in ``nwor-ops check``
    variable: str
    value: str


FEATURES = {
    "cow": Feature("cow", "VLLM_NWOR_MODE", "cow"),
    "stage": Feature("stage", "VLLM_NWOR_MODE", "stage"),
    "draft_graphs": Feature("draft graphs", "VLLM_NWOR_DRAFT_GRAPHS", "1"),
    "recurrent": Feature("recurrent", "VLLM_NWOR_RECURRENT", "exact"),
    "chunk": Feature("recurrent", "VLLM_NWOR_RECURRENT", "chunk"),
    "draft_vocabulary": Feature("draft vocabulary", "VLLM_NWOR_DRAFT_VOCABULARY", f"{SUGGESTED_ROWS}"),
}
OWN_DRAFTS = "draft_vocabulary"  # with any other feature both sides propose the same drafts


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command; see ``nwor-ops bench --help``."""

    feature: str  # a key of FEATURES, or several with + between them
    arguments: tuple[str, ...]  # of vllm serve, for both sides
    output: pathlib.Path
    requests: tuple[int, ...] = (1, 16, 64)
    rounds: int = 6
    seconds: float = 20.0
    client_arguments: tuple[str, ...] = ()  # of vllm bench serve, after TRAFFIC
    vanilla_arguments: tuple[str, ...] = ()
    vanilla_environment: Mapping[str, str] = field(default_factory=dict)
    restart: bool = False

    @property
    def features(self) -> list[Feature]:
        return [FEATURES[name] for name in self.feature.split("+")]

    def settings(self, side: str) -> dict[str, str]:
        """Return the variables that this command sets for a side."""
        if side == OURS:
            return _DEFAULTS | {feature.variable: feature.value for feature in self.features}
        return {**self.vanilla_environment, SWITCH: "off"}

    def environment(self, side: str) -> dict[str, str]:
        """Return the complete environment of a side's server. It lets a client empty the prefix cache."""
        kept = {name: value for name, value in os.environ.items() if not is_ours(name)}
        return kept | {"VLLM_SERVER_DEV_MODE": "1"} | self.settings(side)

    def arguments_of(self, side: str) -> list[str]:
        return [*self.arguments, *(self.vanilla_arguments if side == VANILLA else ())]


def parse_feature(text: str) -> str:
    """Check names like ``"recurrent+draft_vocabulary"``. Raises Stopped."""
    names = text.split("+")
    if not set(names) <= set(FEATURES) or len({FEATURES[name].variable for name in names}) < len(names):
        rule = "or several of different variables with + between them (cow or stage, recurrent or chunk)"
        raise Stopped(f"FEATURE must be {', '.join(FEATURES)}, {rule}, got {text!r}")
    return text


def parse_requests(text: str) -> tuple[int, ...]:
    """Parse ``"1,16,64"``. Raises Stopped."""
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise Stopped(f"--requests must be different positive numbers like 1,16,64, got {text!r}")
    return tuple(numbers)


def parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=VALUE``. Raises Stopped."""
    variables = {}
    for text in texts:
        name, is_assignment, value = text.partition("=")
        if not name or not is_assignment:
            raise Stopped(f"--vanilla-env must be NAME=VALUE, got {text!r}")
        variables[name] = value
    return variables


def parse_words(option: str, text: str) -> tuple[str, ...]:
    """Split a string as a shell does. Raises Stopped."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise Stopped(f"{option}: {error} in {text!r}") from None


def run_bench(options: BenchOptions, report: Report) -> int:
    """Measure, print and write the results, and return the exit code. No server runs afterwards. Raises Stopped."""
    make_folder(options.output)
    with handling(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C, which also stops the servers
        result, loads = _measure(options, report)
    print_loads(report, options.feature, loads)
    if not options.restart:
        report.line("two starts of one engine may differ by 1 % too; --restart measures several starts", "note")
    device = f"{result['device']['count']} x {result['device']['name']}, vLLM {result['versions']['vllm']}"
    report.line(f"{device}, {counted(options.rounds, 'round')}, {result['seconds']:.0f} s in total")
    report.result("all figures", options.output / "result.json", result)
    return int(result["exit_code"])


# ---------------------------------------------------------------- before the start


def prepare(options: BenchOptions) -> Any:
    """Return vLLM's configuration, after the checks of ``nwor-ops check``. They need no server. Raises Stopped."""
    if problem := plugin_problem():  # else both servers would be vanilla
        raise Stopped(f"{options.feature} will be refused: {problem}", Exit.REFUSED)
    config, preview = look_at(options.arguments, options.settings(OURS))
    for prediction in preview["features"]:
        name = prediction["feature"]
        if name in {feature.name for feature in options.features} and not prediction["runs"]:
            raise Stopped(f"{name} will be refused: {'; '.join(reasons_of(prediction))}", Exit.REFUSED)
    return config


def memory_arguments(options: BenchOptions, config: Any) -> list[str]:
    """Return the arguments that give each of two servers its share of the memory."""
    if options.restart:
        return []
    share = config.cache_config.gpu_memory_utilization / len(SIDES)
    return ["--gpu-memory-utilization", f"{math.floor(1000 * share) / 1000}"]


# ---------------------------------------------------------------- servers


@contextlib.contextmanager
def running(options: BenchOptions, memory: Sequence[str], report: Report, *sides: str) -> Iterator[dict[str, Server]]:
    """Start the servers of these sides one after the other, and stop them at the end, whatever happens.

    One after the other, because vLLM measures the memory that its start takes from the device.
    """
    servers: dict[str, Server] = {}

    def stop() -> None:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.stop()

    with report.ending("the servers", len(sides) * STOP_SECONDS, stop):
        for side in sides:
            log = options.output / f"{side}.log"
            servers[side] = Server([*options.arguments_of(side), *memory], options.environment(side), log)
            try:
                servers[side].wait_until_ready(START_SECONDS)
            except EngineFailed as error:
                title = VANILLA if side == VANILLA else options.feature
                short = memory and "memory" in str(error).lower()
                more = "; with --restart each side has the whole memory" if short else ""
                raise EngineFailed(f"{title}: {error}{more}") from None
        yield servers


class Client:
    """Sends requests to servers.

    Args:
        arguments: arguments of ``vllm bench serve``, after ``TRAFFIC``.
        model: vLLM's configuration of the model, which names the tokenizer.
        log: a file for the client's output.

    Raises:
        SystemExit: the client does not know an argument. Its parser has printed which one.
        Stopped: the tokenizer cannot be loaded, which the client would only find out after the servers have started.
    """

    def __init__(self, arguments: Sequence[str], model: Any, log: pathlib.Path) -> None:
        self._log = log
        self._log.write_text("")
        self._words = ["--tokenizer", str(model.tokenizer), "--tokenizer-mode", str(model.tokenizer_mode)]
        self._words += ["--trust-remote-code"] * bool(model.trust_remote_code)
        self._words += [*TRAFFIC, *arguments, "--save-detailed", "--disable-tqdm"]
        parsed = self._parse(port=0, requests=1, prompts=1, seed=0)
        if not parsed.skip_tokenizer_init:
            _load_tokenizer(parsed)

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


def _load_tokenizer(parsed: argparse.Namespace) -> None:
    from vllm.tokenizers import get_tokenizer

    mode, trusted = parsed.tokenizer_mode, parsed.trust_remote_code
    try:
        get_tokenizer(parsed.tokenizer, tokenizer_mode=mode, trust_remote_code=trusted)
    except Exception as error:
        reason = textwrap.shorten(str(error), LONGEST_ERROR, placeholder=" ...")
        raise Stopped(f"the client needs a tokenizer: {parsed.tokenizer}: {reason}", Exit.ENGINE) from None


def _empty_prefix_cache(server: Server) -> None:
    """Empty the prefix cache, so that no run profits from an earlier one."""
    deadline = time.monotonic() + _RESET_SECONDS
    while '"success":true' not in server.get("/reset_prefix_cache", method="POST").replace(" ", ""):
        if time.monotonic() > deadline:  # blocks of the last run are still held
            raise RuntimeError(f"the prefix cache could not be emptied for {_RESET_SECONDS:.0f} s")
        time.sleep(0.2)


# ---------------------------------------------------------------- measurements


def _measure(options: BenchOptions, report: Report) -> tuple[dict[str, Any], list[Load]]:
    started = time.monotonic()
    with report.task(f"checking whether {options.feature} runs with these arguments"):
        config = prepare(options)
        client = Client(options.client_arguments, config.model_config, options.output / "client.log")
    memory = memory_arguments(options, config)
    same_drafts = OWN_DRAFTS not in options.feature.split("+")
    measured = measure_rounds(options, report, functools.partial(running, options, memory, report), client)
    loads = [Load(requests, runs, same_drafts) for requests, runs in measured.items()]
    return _describe(options, config, memory, loads) | {"seconds": round(time.monotonic() - started, 1)}, loads


def measure_rounds(
    options: BenchOptions, report: Report, start: Callable[..., Any], client: Client
) -> dict[int, dict[str, list[Run]]]:
    """Return the runs of all rounds by load and side. The order of the sides turns from round to round.

    Both servers run all the time, or one server starts for each round and side. ``start`` is :func:`running`.
    """
    runs: dict[int, dict[str, list[Run]]] = {requests: {side: [] for side in SIDES} for requests in options.requests}
    prompts: dict[int, int] = {}  # of a run, by load; the same for all runs

    def warm_up(server: Server) -> None:
        """Run every load once. The first server's speed decides how many prompts a run of some seconds has."""
        for requests in options.requests:
            client.run(server, requests, requests, WARM_UP_SEEDS[0])
            if requests not in prompts:
                tried = client.run(server, requests, 2 * requests, WARM_UP_SEEDS[1])
                prompts[requests] = max(1, round(options.seconds / (tried.seconds / 2))) * requests

    with contextlib.ExitStack() as stack:
        both: dict[str, Server] = {}
        if not options.restart:
            with report.task(f"starting two servers, vanilla and {options.feature}"):
                both = stack.enter_context(start(*SIDES))
        minutes = math.ceil(options.rounds * len(options.requests) * len(SIDES) * options.seconds / 60)
        report.notice(f"measuring {counted(options.rounds, 'round')}, about {minutes} min")
        for server in both.values():
            warm_up(server)
        for number in range(options.rounds):
            with report.task(f"round {number + 1}"):
                for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                    with contextlib.nullcontext(both) if both else start(side) as servers:
                        if not both:
                            warm_up(servers[side])
                        for requests in options.requests:
                            runs[requests][side].append(client.run(servers[side], requests, prompts[requests], number))
    return runs


# ---------------------------------------------------------------- result


def _describe(options: BenchOptions, config: Any, memory: Sequence[str], loads: Sequence[Load]) -> dict[str, Any]:
    comparable = all(load.finding is not Finding.NOT_COMPARABLE for load in loads)
    return {
        "exit_code": Exit.FINE if comparable else Exit.NOT_COMPARABLE,
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "feature": options.feature,
        "model": config.model_config.model,
        "versions": versions(),
        "device": _device(config),
        "memory": "whole, started in turn" if options.restart else "shared, both started once",
        "sides": {
            side: {"arguments": [*options.arguments_of(side), *memory], "environment": options.settings(side)}
            for side in SIDES
        },
        "loads": [as_dict(load) for load in loads],
    }


def _device(config: Any) -> dict[str, Any]:
    """Return the device's name, from vLLM: torch would create a context on a GPU."""
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    name = current_platform.get_device_name()
    if name == "cpu":
        name = f"CPU with {os.cpu_count()} cores ({platform.machine()})"
    return {"name": name, "count": parallel.world_size * parallel.data_parallel_size}
