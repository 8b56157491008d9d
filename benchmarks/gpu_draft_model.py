"""Measure vLLM 0.33 with a draft model or an EAGLE head on a GPU: output tok/s with draft graphs and without.

    python benchmarks/gpu_draft_model.py [--seconds S] [--requests N ...] [--sides SIDE ...] [--no-profile] ...

The target has the Llama-3-8B shape with random weights. The drafter is a model of the Llama-3.2-1B shape, or an EAGLE
head of one layer, with K = 4. Synthetic acceptance is 2.5 tokens per step. Prompts have 64 tokens and outputs 256.
vLLM has its default CUDA graphs. Each engine is a separate process. All are on one GPU (30 GiB each, so four fit on an
H200). They take turns, in every order, with the same prompts:

    off          vanilla vLLM with its default model runner, V2, which runs a draft model without CUDA graphs
    v1           vanilla vLLM with VLLM_USE_V2_MODEL_RUNNER=0: piecewise graphs, the best that vanilla does
    on           the V2 runner with draft graphs
    on_v1        the V1 runner with draft graphs
    eagle_v1     EAGLE, vanilla V1
    eagle_on_v1  EAGLE, V1 with draft graphs
    eagle        EAGLE, vanilla V2, which has graphs for it
    none         no speculation, V2

The speed of a run is scaled to 2.5 tokens per step: its tokens per second, times 2.5, divided by its acceptance. The V2
runner draws acceptance from the requests' seeds, so `off` and `on` accept equally. V1 draws anew in every run. A row is
the ratio of two sides, run by run, or the speed of one side. Further rows have the drafter's share of a step, from
torch's profiler: launches, time on the device, and its idle share. Others have the memory and the time of the captures.

A side that fails is reported and left out. Rows are written after every round, so an interrupted run has some. Rows of
other requests and sides stay in the file, and with `--no-profile` those of the profiler. The script takes about 7
minutes with the defaults (`off`, `v1` and `on`): 2 until all three are ready, `--seconds` (200) of measuring, and 1 of
profiling. With any other side the rows go to the file gpu_draft_runners.jsonl. These two calls give the figures of
`benchmarks/picture.py`:

    python benchmarks/gpu_draft_model.py --sides v1 on_v1 eagle_v1 eagle_on_v1 --seconds 150 --no-profile
    python benchmarks/gpu_draft_model.py --sides off on eagle none --seconds 100 --no-profile
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gpu_engine import (
    ACCEPTANCE_DIFFERENCE,
    ACCEPTANCE_LENGTH,
    CAPTURED_REQUESTS,
    LLAMA_1B,
    LLAMA_8B,
    REQUESTS,
    SMALL,
    SYNTHETIC,
    K,
    engine_job,
    exit_status,
    launch_engine,
    log_folder,
    new_parser,
    write_shape,
)
from results import Row, row, show, this_machine, write

from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all

NAME = "draft_model"


@dataclass(frozen=True)
class Side:
    """An engine.

    Attributes:
        runner: vLLM's model runner.
        rows: the name of its rows.
        drafter: "draft_model" or "eagle"; None: no speculation.
        graphs: whether it has draft graphs.
    """

    runner: str
    rows: str
    drafter: str | None = NAME
    graphs: bool = False


SIDES = {
    "off": Side("v2", f"{NAME}_vanilla"),
    "v1": Side("v1", f"{NAME}_vanilla_v1"),
    "on": Side("v2", NAME, graphs=True),
    "on_v1": Side("v1", f"{NAME}_v1", graphs=True),
    "eagle_v1": Side("v1", "eagle_vanilla_v1", "eagle"),
    "eagle_on_v1": Side("v1", "eagle_v1", "eagle", graphs=True),
    "eagle": Side("v2", "eagle_vanilla", "eagle"),
    "none": Side("v2", "no_speculation", None),
}
DEFAULT_SIDES = ("off", "v1", "on")
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
# Draft graphs, what they are compared with, the name of the ratio, and the least that it shall be, by requests.
RATIOS: tuple[tuple[str, str, str, dict[int, float]], ...] = (
    ("on", "off", NAME, {1: 2.1, 16: 2.1, 64: 1.65}),
    ("on", "v1", f"{NAME}_over_v1", {}),
    ("on_v1", "v1", f"{NAME}_v1", {1: 1.35, 16: 1.4, 64: 1.2}),
    ("eagle_on_v1", "eagle_v1", "eagle_v1", dict.fromkeys(REQUESTS, 1.03)),
)
FEWEST_ROUNDS = 4
PROFILED_STEPS = 40
GRAPH_LAUNCHES = ("cudaGraphLaunch",)
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", *GRAPH_LAUNCHES)


Answers = dict[tuple[str, int], list[dict[str, Any]]]  # answers of the runs, by side and number of requests


def draft_job(folder: pathlib.Path, backend: str, side: Side, small: bool) -> dict[str, Any]:
    tiny = SMALL if small else {}
    target = LLAMA_8B | tiny
    # vLLM takes a folder with the name of a method for that method.
    head = write_shape(folder / "head", target | {"num_hidden_layers": 1})
    draft = write_shape(folder / "draft", LLAMA_1B | tiny)
    speculation = {
        "method": "draft_model" if small else side.drafter,  # as far as vLLM's CPU engine has it
        "model": head if side.drafter == "eagle" else draft,
        **({} if small else SYNTHETIC),
    }
    more: dict[str, Any] = {}
    if not small:
        more = {"attention_config": {"backend": backend}}
        more["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(side)}
    job = engine_job(write_shape(folder / "target", target), speculation, small, **more)
    if side.drafter is None:
        del job["engine"]["speculative_config"]
    return job | {"vocabulary": target["vocab_size"], "one_process": True}  # the drafter can be profiled only there


def capture_sizes(side: Side) -> list[int]:
    """Return the sizes of the graphs, in tokens.

    The target needs K + 1 tokens per request, or one without speculation. V1 runs its drafter from graphs of these
    sizes too. Its first pass has up to K + 2 tokens per request, the others have one, and all are rounded up to
    multiples of K + 1. Every pass gets a graph with the least padding.
    """
    query = 1 if side.drafter is None else K + 1
    sizes = {query * requests for requests in CAPTURED_REQUESTS}
    if side.runner == "v1":
        sizes |= {-(-tokens // query) * query for n in REQUESTS for tokens in (n, (K + 2) * n)}
    return sorted(sizes)


class Run:
    """The engines that still answer, and what went wrong with the others."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineProcess] = {}
        self.problems: list[str] = []

    def start(self, sides: Sequence[str], folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
        """All together, each compiling for itself: their starts can be compared. What they say of themselves."""
        for side in sides:
            job = draft_job(folder, options.backend, SIDES[side], options.small)
            environment = side_environment(SIDES[side], options)
            self.engines[side] = launch_engine(
                f"{NAME}-{side}", job, folder, folder / f"cache-{NAME}-{side}", SIDES[side].runner, environment
            )
        with ThreadPoolExecutor(len(sides)) as pool:
            found = dict(zip(sides, pool.map(self._ready, sides), strict=True))
        for side, versions in found.items():
            if versions is not None:
                print(f"{side}: {versions}", flush=True)
                if wrong := what_is_wrong(SIDES[side], versions, options.small):
                    self.drop(side, wrong)
        return {side: found[side] for side in self.engines}

    def _ready(self, side: str) -> dict[str, Any] | None:
        try:
            return self.engines[side].wait_until_ready()
        except EngineFailed as error:
            self.drop(side, str(error))
            return None

    def ask(self, side: str, command: str) -> dict[str, Any] | None:
        """None, and the side is out, if it fails."""
        if side not in self.engines:
            return None
        try:
            return self.engines[side].ask(command)
        except EngineFailed as error:
            self.drop(side, str(error))
            return None

    def drop(self, side: str, why: str) -> None:
        self.engines.pop(side).close()
        self.report(f"{side}: {why}")

    def report(self, problem: str) -> None:
        self.problems.append(problem)
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)

    def close(self) -> None:
        close_all(self.engines.values())


def side_environment(side: Side, options: argparse.Namespace) -> dict[str, str]:
    if not side.graphs:
        return {}
    # Without a GPU there is nothing to switch on; see --small.
    graphs = {} if options.small else {"VLLM_NWOR_DRAFT_GRAPHS": "1"}
    return graphs | ({"VLLM_NWOR_MODE": "cow"} if options.cow or options.small else {})


def what_is_wrong(side: Side, versions: dict[str, Any], small: bool) -> str | None:
    is_on = bool(versions["sessions"] or versions["draft_graphs"])
    if is_on != side.graphs:
        return f"nwor_ops is {'on' if is_on else 'not on'} in that engine"
    if not small and versions["runner"] != RUNNERS[side.runner]:
        return f"its model runner is {versions['runner']}, not {side.runner}"
    return None


def measure(run: Run, requests: Sequence[int], options: argparse.Namespace) -> Answers:
    """Rounds until the time is up, a run of each side and number of requests in each; in every order of the sides. Rows
    are written after each round."""
    sides = list(run.engines)
    answers: Answers = {}
    for side, count in itertools.product(sides, requests):
        run.ask(side, f"run {count}")  # warms up
        answers[side, count] = []
    every_order = list(itertools.permutations(sides))
    random.Random(0).shuffle(every_order)  # of four sides a run has time for some
    orders = itertools.cycle(every_order)
    started, rounds = time.monotonic(), 0
    while run.engines and (rounds < FEWEST_ROUNDS or time.monotonic() - started < options.seconds):
        order = next(orders)
        for count in requests:
            # No two requests of any round have a seed in common.
            found = {side: run.ask(side, f"run {count} {(rounds + 1) * max(REQUESTS)}") for side in order}
            for side, answer in found.items():
                if answer is not None:
                    answers[side, count].append(answer)
        rounds += 1
        save(speed_rows(answers, requests), options)
    print(f"{rounds} rounds in {time.monotonic() - started:.0f} s", flush=True)
    return answers


def speeds(runs: list[dict[str, Any]]) -> list[float]:
    """Output tokens per second, at the acceptance that was asked for if there is any, run by run."""
    accepted = (run["acceptance_length"] or ACCEPTANCE_LENGTH for run in runs)
    return [
        run["tokens"] / run["seconds"] * ACCEPTANCE_LENGTH / length for run, length in zip(runs, accepted, strict=True)
    ]


def speed_rows(answers: Answers, requests: Sequence[int]) -> list[Row]:
    """Draft graphs over either vanilla, then each side's speed and what it accepted."""
    rows: list[Row] = []
    for count in requests:
        found = {side: answers[side, count] for side in SIDES if answers.get((side, count))}
        rates = {side: speeds(runs) for side, runs in found.items()}
        for graphs, vanilla, name, targets in RATIOS:
            if graphs in found and vanilla in found:
                # A side that failed has fewer runs.
                ratios = [on / off for on, off in zip(rates[graphs], rates[vanilla], strict=False)]
                rows.append(row(f"e2e_{name}/{count}", ratios, "ratio", "higher", targets.get(count)))
        for side, runs in found.items():
            name = SIDES[side].rows
            rows.append(row(f"tok_s_{name}/{count}", rates[side], "tok/s", "higher", digits=1))
            if SIDES[side].drafter is not None:
                lengths = [answer["acceptance_length"] for answer in runs]
                rows.append(row(f"acceptance_length_{name}/{count}", [statistics.mean(lengths)], "tokens", "higher"))
    return rows


def check(run: Run, answers: Answers) -> None:
    """Report, and leave out, runs that do not show what they should: draft graphs replayed in each, and as many drafts
    accepted as were asked for."""
    for (side, count), runs in list(answers.items()):
        if SIDES[side].drafter is None:
            continue
        what = f"{side}, {count} requests"
        lengths = [answer["acceptance_length"] for answer in runs]
        # A run of one request has a hundred steps, and their mean a standard deviation of 0.05 tokens.
        if runs and abs(statistics.mean(lengths) - ACCEPTANCE_LENGTH) > 2 * ACCEPTANCE_DIFFERENCE:
            run.report(f"{what}: {statistics.mean(lengths):.2f} tokens a step in place of {ACCEPTANCE_LENGTH}")
            del answers[side, count]
        elif SIDES[side].graphs and not all(answer["draft_graph_replays"] for answer in runs):
            run.report(f"{what}: no draft graph was replayed in a run; {runs[-1]['draft_graphs']}")
            del answers[side, count]


def profile(run: Run, requests: Sequence[int]) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and what they are made of."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    drafting = [side for side in run.engines if SIDES[side].drafter is not None]
    for count, side in itertools.product(requests, drafting):
        run.ask(side, f"drafter {count} 3")  # starts the profiler
        found = run.ask(side, f"drafter {count} {PROFILED_STEPS}")
        if found is not None:
            raw[f"drafter {side} {count}"] = found
            rows += drafter_rows(side, count, found)
    return rows, raw


def drafter_rows(side: str, count: int, found: dict[str, Any]) -> list[Row]:
    """Return rows per step. ``idle`` is the share of time without a kernel between the drafter's first and last one."""
    launches, calls = found["launches"], found["calls"]
    label = f"{side}/{count}"
    idle = [1 - busy / span for busy, span in zip(found["busy_us"], found["span_us"], strict=True)]
    graphs = sum(launches.get(name, 0) for name in GRAPH_LAUNCHES) / calls
    return [
        row(f"drafter_graph_launches_{label}", [graphs], "launches", "lower", digits=2),
        row(
            f"drafter_launches_{label}",
            [sum(launches.get(name, 0) for name in LAUNCHES) / calls],
            "launches",
            "lower",
            digits=1,
        ),
        row(f"drafter_kernels_{label}", [found["kernels"] / calls], "kernels", "lower", digits=1),
        row(f"drafter_host_us_{label}", found["host_us"], "us", "lower", digits=1),
        row(f"drafter_device_us_{label}", found["span_us"], "us", "lower", digits=1),
        row(f"drafter_us_per_draft_{label}", [span / K for span in found["span_us"]], "us", "lower", digits=1),
        row(f"drafter_idle_share_{label}", idle, "share", "lower"),
    ]


def cost_rows(versions: dict[str, dict[str, Any]]) -> list[Row]:
    rows = [
        row(f"start_seconds/{side}", [found["start_seconds"]], "s", "lower", digits=1)
        for side, found in versions.items()
    ]
    for side, found in versions.items():
        suffix = "" if side == "on" else f"/{side}"
        for report in found["draft_graphs"]:
            memory, seconds = report["capture_bytes"] / 2**20, report["capture_seconds"]
            rows.append(row(f"draft_graphs_memory{suffix}", [memory], "MiB", "lower", digits=1))
            rows.append(row(f"draft_graphs_capture_seconds{suffix}", [seconds], "s", "lower", digits=2))
    return rows


def save(rows: list[Row], options: argparse.Namespace) -> None:
    drafters = "model" if set(options.sides) <= set(DEFAULT_SIDES) else "runners"
    name = (
        f"gpu_draft_{drafters}"
        + ("" if options.backend == "FLASH_ATTN" else "_triton")
        + ("_cow" if options.cow else "")
    )
    all_loads, all_sides = set(options.requests) == set(REQUESTS), set(options.sides) == set(DEFAULT_SIDES)
    in_part = not (all_loads and all_sides and options.profile)
    if rows and not options.small:
        write(this_machine(), name, rows, options.folder, keep=in_part)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--backend", choices=("FLASH_ATTN", "TRITON_ATTN"), default="FLASH_ATTN")
    parser.add_argument("--cow", action="store_true", help="run the transaction too, on the side with graphs")
    parser.add_argument("--requests", nargs="+", type=int, choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=list(SIDES),
        default=list(DEFAULT_SIDES),
        help="the engines; two fit in 80 GiB, four in 141",
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="how long to measure, once the engines are ready")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave the profiler out")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    requests = (1, 4) if options.small else options.requests
    sides = [side for side in SIDES if side in options.sides]
    run = Run()
    with log_folder(options) as folder:
        try:
            versions = run.start(sides, folder, options)
            answers = measure(run, requests, options)
            if not options.small:
                check(run, answers)
            rows = speed_rows(answers, requests) + cost_rows(versions)
            save(rows, options)
            raw: dict[str, Any] = {f"{side} {count}": runs for (side, count), runs in answers.items()}
            if options.profile and not options.small:
                profiled, found = profile(run, requests)
                rows, raw = rows + profiled, raw | found
                save(rows, options)
            (folder / "answers.json").write_text(json.dumps(raw) + "\n")
        finally:
            run.close()
    if rows:
        show(rows)
    return exit_status(run.problems)


if __name__ == "__main__":
    sys.exit(main())
