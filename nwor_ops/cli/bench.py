"""``nwor-ops bench``: measure a feature on this machine, with the user's model, arguments and traffic.

Two servers run the same requests in turn: vanilla vLLM, and vLLM with the feature. Each round measures every load on
both sides, so that both see the same machine. ``bench_report`` decides what the ratios prove.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from nwor_ops.cli.bench_client import OUTPUT_TOKENS, Client, Run
from nwor_ops.cli.bench_options import OURS, RANDOM, RECURRENT, SIDES, VANILLA, BenchOptions, check_form
from nwor_ops.cli.bench_picture import draw_loads
from nwor_ops.cli.bench_report import Finding, Load, as_dict, print_loads
from nwor_ops.cli.files import not_written
from nwor_ops.cli.progress import Tasks
from nwor_ops.cli.versions import imported_versions
from nwor_ops.config import is_ours
from nwor_ops.testing.server import Server, ServerFailed

START_SECONDS = 3600.0  # a large model may be downloaded and compiled
WARM_UP_SEEDS = (2**31 - 1, 2**31 - 2)  # no round has them
SIMULTANEOUS = 2  # servers that share a device


class Outcome(enum.IntEnum):
    """The exit code of ``nwor-ops bench``."""

    MEASURED = 0  # every load was measured, whatever the ratio
    FAILED = 1  # a server or a request failed
    INVALID = 2  # the command line or a setting is invalid
    REFUSED = 3  # the plugin refuses the feature for this engine
    ENGINE = 4  # vLLM itself refuses the arguments
    NOT_COMPARABLE = 5  # the acceptance of the two sides differs
    INTERRUPTED = 130


class Stopped(Exception):
    """The benchmark ends without a result. The message is a sentence."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def run_bench(options: BenchOptions, as_json: bool) -> int:
    """Measure, print and write the results, and return the exit code. No server runs afterwards."""
    console, errors = _console(as_json), _console(True)
    try:
        with _ended_by(signal.SIGTERM):
            result, loads = _measure(options, console)
    except (Stopped, ServerFailed) as error:
        outcome = error.outcome if isinstance(error, Stopped) else Outcome.FAILED
        errors.print(f"[bold red]nwor-ops bench:[/] {escape(str(error))}", soft_wrap=True)
        if as_json:
            print(json.dumps({"exit_code": outcome.value, "error": str(error)}, indent=2))
        return outcome.value
    except KeyboardInterrupt:
        errors.print("nwor-ops bench: interrupted; the servers are stopped", soft_wrap=True)
        return Outcome.INTERRUPTED.value
    device, versions = result["device"], result["versions"]
    headline = f"{options.titles[OURS]} over vanilla vLLM: {result['model']}"
    about = f"{device['count']} x {device['name']}, vLLM {versions['vllm']}, nwor_ops {versions['nwor_ops']}, "
    is_written = True
    try:
        (options.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        draw_loads(loads, options.output / "bench.png", headline, about + f"rounds: {options.rounds}")
    except OSError as error:  # a full disk, for example; the result is printed all the same
        is_written = False
        errors.print(f"[bold red]nwor-ops bench:[/] {escape(not_written(options.output, error))}", soft_wrap=True)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_loads(console, options, loads)
        console.print(f"{about}{result['seconds']:.0f} s in total", soft_wrap=True)
        if is_written:
            pictured, figures = options.output / "bench.png", options.output / "result.json"
            console.print(f"picture: {pictured}, all figures: {figures}", soft_wrap=True)
    return int(result["exit_code"])


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=120)


@contextlib.contextmanager
def _ended_by(number: signal.Signals) -> Iterator[None]:
    """Treat a signal as Ctrl-C, so that it also stops the servers."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# ---------------------------------------------------------------- before the start


def _prepare(options: BenchOptions) -> Any:
    """Return vLLM's configuration, after the checks of ``nwor-ops check``. They need no server."""
    found = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of this process; vLLM reads it when it is imported
    from nwor_ops.vllm import check

    for name in filter(is_ours, found):
        del os.environ[name]
    os.environ.update(options.settings(OURS))
    try:
        config = check.configure(options.arguments)
        check_form(options, config.additional_config, found)
        predictions = () if options.control else check.look(options.arguments).predictions
    except check.InvalidEngine as error:
        raise Stopped(Outcome.ENGINE, f"vLLM refuses these arguments: {error}") from None
    except ValueError as error:
        raise Stopped(Outcome.INVALID, str(error)) from None
    finally:
        os.environ.clear()
        os.environ.update(found)
    for prediction in predictions:
        if prediction.feature == options.feature_name and not prediction.runs:
            why = "; ".join(f"{reason.why} ({reason.change})" if reason.change else reason.why
                            for reason in prediction.reasons)  # fmt: skip
            raise Stopped(Outcome.REFUSED, f"{options.feature_name} will be refused: {why}")
    longest, asked = config.model_config.max_model_len, options.input_tokens + (options.output_tokens or OUTPUT_TOKENS)
    if options.prompts == RANDOM and asked > longest:
        raise Stopped(
            Outcome.INVALID, f"--input-len and --output-len: {asked} tokens exceed the engine's limit of {longest}"
        )
    return config


def memory_arguments(options: BenchOptions, config: Any) -> list[str]:
    """Return the arguments that give each of two servers its share of the memory."""
    if options.restart:
        return []
    share = config.cache_config.gpu_memory_utilization / SIMULTANEOUS
    return ["--gpu-memory-utilization", f"{math.floor(1000 * share) / 1000}"]


# ---------------------------------------------------------------- servers


class Servers:
    """Starts the servers of both sides and checks that each is what it should be."""

    def __init__(self, options: BenchOptions, memory: Sequence[str]) -> None:
        self._options, self._memory = options, memory

    @contextlib.contextmanager
    def running(self, *sides: str) -> Iterator[dict[str, Server]]:
        """Start the servers of these sides one after the other, and stop them at the end, whatever happens.

        One after the other, because vLLM measures the memory that its start takes from the device.
        """
        started: dict[str, Server] = {}
        try:
            for side in sides:
                log = self._options.output / f"{side}.log"
                started[side] = Server(self.arguments_of(side), self._options.environment(side), log)
                self._wait(side, started[side])
            yield started
        finally:
            with _uninterrupted():
                for server in started.values():
                    server.terminate()
                for server in started.values():
                    server.stop()

    def arguments_of(self, side: str) -> list[str]:
        return [*self._options.arguments_of(side), *self._memory]

    def _wait(self, side: str, server: Server) -> None:
        title = self._options.titles[side]
        try:
            server.wait_until_ready(START_SECONDS)
        except ServerFailed as error:
            short = self._memory and "memory" in str(error).lower()
            more = "; with --restart each side has the whole memory" if short else ""
            raise ServerFailed(f"{title}: {error}{more}") from None
        expected = None if side == VANILLA or self._options.control else self._options.label
        try:
            found = _active(server.get("/metrics"))
        except OSError as error:
            raise ServerFailed(f"{title}: /metrics does not answer: {error} (log: {server.log_file})") from None
        if expected is None and found:
            raise ServerFailed(f"{title}: nwor_ops is active there: {found} (log: {server.log_file})")
        if expected is not None and found.get(expected[0]) != expected[1]:
            raise ServerFailed(f"{title}: not active in the started engine; its log has the reason: {server.log_file}")


def _active(metrics: str) -> dict[str, str]:
    """Return the labels of ``nwor_info``, which an engine without the plugin does not have."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [s for family in text_string_to_metric_families(metrics) for s in family.samples if s.name == "nwor_info"]
    return dict(samples[0].labels) if samples else {}


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C, so that a second one leaves no server running."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- measurements


def _measure(options: BenchOptions, console: Console) -> tuple[dict[str, Any], list[Load]]:
    started = time.monotonic()
    tasks = Tasks(console, 2 if options.restart else 3)
    with tasks.task(f"checking whether {options.titles[OURS]} runs with these arguments"):
        with contextlib.redirect_stdout(sys.stderr):
            config = _prepare(options)
        try:
            client = Client(options, config.model_config)
        except ValueError as error:
            raise Stopped(Outcome.INVALID, str(error)) from None
    servers, plan = Servers(options, memory_arguments(options, config)), Plan(options, client)
    (_measure_restarted if options.restart else _measure_side_by_side)(options, console, tasks, servers, plan)
    loads = [Load(requests, runs) for requests, runs in plan.runs.items()]
    result = _describe(options, config, servers, loads)
    return result | {"seconds": round(time.monotonic() - started, 1)}, loads


def _measure_side_by_side(options: BenchOptions, console: Console, tasks: Tasks, servers: Servers, plan: Plan) -> None:
    with contextlib.ExitStack() as stack:
        with tasks.task(f"starting two servers, vanilla and {options.titles[OURS]}"):
            both = stack.enter_context(servers.running(*SIDES))
        minutes = math.ceil(plan.total * options.seconds / 60)
        title = f"measuring {options.rounds} rounds after a warm-up, about {minutes} min"
        with tasks.task(title, plan.total) as advance:
            for server in both.values():
                plan.warm_up(server)
            for number in range(options.rounds):
                for requests in options.requests:
                    for side in _order(number):
                        plan.run(side, both[side], requests, number)
                        advance()
                _say_round(console, options, number)


def _measure_restarted(options: BenchOptions, console: Console, tasks: Tasks, servers: Servers, plan: Plan) -> None:
    title = f"measuring {options.rounds} rounds, each after a start of each side"
    with tasks.task(title, plan.total) as advance:
        for number in range(options.rounds):
            for side in _order(number):
                with servers.running(side) as started:
                    plan.warm_up(started[side])
                    for requests in options.requests:
                        plan.run(side, started[side], requests, number)
                        advance()
            _say_round(console, options, number)


def _order(number: int) -> Sequence[str]:
    """Return the sides in the order of this round, which turns from round to round."""
    return SIDES if number % 2 == 0 else SIDES[::-1]


def _say_round(console: Console, options: BenchOptions, number: int) -> None:
    if not console.is_terminal:
        console.print(f"round {number + 1} of {options.rounds}")


class Plan:
    """Runs the client, and decides how many prompts a run has. Runs of one load have equally many.

    Attributes:
        runs: by load and side, in the order of the rounds.
        total: how many runs are measured.
    """

    def __init__(self, options: BenchOptions, client: Client) -> None:
        self._options, self._client = options, client
        self._prompts: dict[int, int] = {}
        self.runs: dict[int, dict[str, list[Run]]] = {load: {side: [] for side in SIDES} for load in options.requests}
        self.total = options.rounds * len(options.requests) * len(SIDES)

    def warm_up(self, server: Server) -> None:
        """Run every load once. The first server's speed decides how many prompts a run of some seconds has."""
        for requests in self._options.requests:
            self._client.run(server, requests, requests, WARM_UP_SEEDS[0])
            if requests not in self._prompts:
                tried = self._client.run(server, requests, 2 * requests, WARM_UP_SEEDS[1])
                waves = self._options.seconds / (tried.seconds / 2)
                self._prompts[requests] = max(1, round(waves)) * requests

    def run(self, side: str, server: Server, requests: int, number: int) -> None:
        """Measure one run of a round."""
        self.runs[requests][side].append(self._client.run(server, requests, self._prompts[requests], number))


# ---------------------------------------------------------------- result


def _describe(options: BenchOptions, config: Any, servers: Servers, loads: Sequence[Load]) -> dict[str, Any]:
    comparable = all(load.finding is not Finding.NOT_COMPARABLE for load in loads)
    return {
        "exit_code": (Outcome.MEASURED if comparable else Outcome.NOT_COMPARABLE).value,
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "feature": options.feature_name,
        "form": options.form if options.feature == RECURRENT else None,
        "control": options.control,
        "model": config.model_config.model,
        "versions": imported_versions(),
        "device": _device(config),
        "memory": "whole, started in turn" if options.restart else "shared, both started once",
        "traffic": {
            "prompts": options.prompts,
            "input_len": options.input_tokens if options.prompts == RANDOM else None,
            "output_len": options.output_tokens or (OUTPUT_TOKENS if options.prompts == RANDOM else None),
            "temperature": options.temperature,
            "client_args": list(options.client_arguments),
            "seconds": options.seconds,
        },
        "sides": {
            side: {"arguments": servers.arguments_of(side), "environment": options.settings(side)} for side in SIDES
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
