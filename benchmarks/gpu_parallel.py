"""Measure vLLM on several GPUs, end to end: NWOR on against off, with tensor and with data parallelism.

    python benchmarks/gpu_parallel.py [--gpus N ...] [--modes MODE ...] [--requests N ...] [--target 1b]

    tp1, tp2, tp4   the Llama-3-8B shape and an EAGLE head on 1, 2 or 4 GPUs, as in gpu_engine.py
    dp2, dp4        2 or 4 engines of one GPU each, which run at the same time. vLLM runs the ranks of a dense model in
                    this way. The server in front of them is not measured, because NWOR has no part in it.

The method is that of gpu_engine.py: one engine per mode, whose two sides take turns of 20 steps while its requests
decode. Synthetic acceptance is 2.5 tokens per step. In mode `cow` the graphs are captured twice for each side. All
engines are on the GPUs at the same time (about 28 GiB each, 18 for a rank of tp2). They are measured in turn, except
for the ranks of data parallelism, which run together.

Ranks of tensor parallelism use NCCL, because vLLM's other ways need peer access or NVLink multicast, which virtual
machines may lack. The workers of several ranks are not in the scheduler's process. The scheduler's count of
drafts stays there on both sides and takes microseconds per step. The log says once that counters disagree, because the
scheduler also counts the steps in which NWOR is off.

In addition to the rows of gpu_engine.py there is `added_us_MODE_tpN/REQUESTS`: the time that NWOR adds to a step, turn
by turn. It shows how the cost grows from one GPU to several. The script takes about 4 minutes on two GPUs, half of them
to start the engines. Each row is written when it is measured. An engine that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from gpu_engine import (
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
    turn_figures,
    visitor,
    write_shape,
)
from gpu_methods import CAPTURES, WARM_UP_TOKENS
from results import Row, row, show, this_machine, write

from nwor_ops.testing.engine_process import NCCL_ALONE, EngineFailed, EngineProcess, close_all

NAME = "gpu_parallel"
TARGETS = {"cow": 0.995, "stage": 0.99}
SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B}


class Place(NamedTuple):
    """The mode and the GPUs of an engine.

    Attributes:
        mode: mode of NWOR, ``"cow"`` or ``"stage"``.
        ranks: number of ranks of tensor parallelism.
        first: its first GPU.
    """

    mode: str
    ranks: int
    first: int = 0

    @property
    def name(self) -> str:
        return f"{self.mode}_tp{self.ranks}-{self.first}"


def places(mode: str, gpus: list[int]) -> Iterator[Place]:
    """The engines that a mode is measured with on 1, 2, ... GPUs."""
    for count in gpus:
        if count > 1:
            yield Place(mode, count)
    for first in range(max(gpus)):
        yield Place(mode, 1, first)


def engine_job_at(place: Place, folder: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    small = options.small
    shape = SHAPES[options.target] | (SMALL if small else {})
    model = write_shape(folder / "target", shape)
    speculation: dict[str, Any] = {"model": write_shape(folder / "eagle", shape | {"num_hidden_layers": 1})}
    speculation |= {"method": "draft_model"} if small else {"method": "eagle"} | SYNTHETIC
    more: dict[str, Any] = {}
    if not small:
        sizes = [(K + 1) * count for count in sorted(options.requests)]
        kernels = ("enable_jit_warmup", "enable_cutedsl_warmup", "enable_flashinfer_autotune")
        more = {
            # FlashInfer's fused all-reduce uses NVLink multicast.
            "compilation_config": {"cudagraph_capture_sizes": sizes, "pass_config": {"fuse_allreduce_rms": False}},
            "kernel_config": dict.fromkeys(kernels, False),  # compile kernels when they are first needed
            "gpu_memory_utilization": 0.1,  # four engines start on a GPU together
        }
    if place.ranks > 1:
        more |= {"tensor_parallel_size": place.ranks, "distributed_executor_backend": "mp"}
        more["disable_custom_all_reduce"] = True
    job = engine_job(model, speculation, small, **more)
    captures = 1 if small else CAPTURES[place.mode]
    return job | {"vocabulary": shape["vocab_size"], "max_tokens": WARM_UP_TOKENS, "captures": captures}


class Run:
    """The engines of a run, and what went wrong so far."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path) -> None:
        self.options, self.folder = options, folder
        self.engines: dict[Place, EngineProcess] = {}
        self.problems: list[str] = []
        self.suffix = "" if options.target == "8b" else f"_{options.target}"  # row names end with it

    def report(self, problem: object) -> None:
        self.problems.append(str(problem))
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)

    def start(self) -> None:
        """Start all engines together. An engine that does not start is left out."""
        began, options = time.monotonic(), self.options
        wanted = [place for mode in options.modes for place in places(mode, options.gpus)]
        for place in wanted:
            job = engine_job_at(place, self.folder, options)
            devices = ",".join(str(place.first + rank) for rank in range(place.ranks))
            environment = {"VLLM_NWOR_MODE": place.mode}
            environment |= {} if options.small else NCCL_ALONE | {"CUDA_VISIBLE_DEVICES": devices}
            cache = self.folder / f"cache-{place.name}"
            self.engines[place] = launch_engine(place.name, job, self.folder, cache, "v2", environment)
        with ThreadPoolExecutor(len(wanted)) as pool:
            ready = dict(zip(wanted, pool.map(self._is_ready, wanted), strict=True))
        for place in wanted:
            if not ready[place]:
                self.engines.pop(place).close()
        for place in list(self.engines):  # in turn, so that no capture disturbs another one
            self._guarded(place, "switch 0")
        with visitor():
            for on, count in product((0, 1), options.requests):
                there = list(self.engines)
                with ThreadPoolExecutor(max(len(there), 1)) as pool:
                    list(pool.map(partial(self._warm, on, count), there))
        print(f"ready after {time.monotonic() - began:.0f} s: {[place.name for place in self.engines]}", flush=True)

    def _warm(self, on: int, count: int, place: Place) -> None:
        self._guarded(place, f"switch {on}")
        self._guarded(place, f"run {count}")

    def _guarded(self, place: Place, command: str) -> None:
        try:
            if place in self.engines:
                self.engines[place].ask(command)
        except EngineFailed as error:
            self.report(error)
            self.engines.pop(place).close()

    def _is_ready(self, place: Place) -> bool:
        try:
            found = self.engines[place].wait_until_ready()
        except EngineFailed as error:
            self.report(error)
            return False
        print(f"{place.name}: {found}", flush=True)
        if not found["sessions"]:
            self.report(f"{place.name}: nwor_ops is not on there")
        return bool(found["sessions"])

    def measure(self) -> None:
        """One kind and number of requests after the other; both modes of a kind in turn."""
        kinds: list[tuple[str, list[int]]] = [(f"tp{count}", [0]) for count in self.options.gpus]
        kinds += [(f"dp{count}", list(range(count))) for count in self.options.gpus if count > 1]
        for count, (kind, firsts) in product(self.options.requests, kinds):
            ranks = int(kind[2:]) if kind.startswith("tp") else 1
            sides = {mode: [Place(mode, ranks, first) for first in firsts] for mode in self.options.modes}
            sides = {mode: own for mode, own in sides.items() if all(place in self.engines for place in own)}
            try:
                found = self._turns(sides, count) if sides else {}
            except EngineFailed as error:
                self.report(error)
                continue
            for mode, answers in found.items():
                self._write(f"{mode}_{kind}{self.suffix}", mode, count, answers)

    def _turns(self, sides: dict[str, list[Place]], count: int) -> dict[str, list[dict[str, Any]]]:
        """Answers of every mode, in rounds in which each has all its captures, with either side first."""
        answers: dict[str, list[dict[str, Any]]] = {mode: [] for mode in sides}
        budget, began, rounds = self.options.seconds * len(sides), time.monotonic(), 0
        with ThreadPoolExecutor(max(map(len, sides.values()))) as pool:
            while True:
                for number, first in product(range(max(CAPTURES.values())), (0, 1)):
                    for mode, own in sides.items():
                        capture = 0 if self.options.small else number % CAPTURES[mode]
                        command = f"turns {count} {capture} {first} 0"
                        engines = [self.engines[place] for place in own]
                        answers[mode] += pool.map(EngineProcess.ask, engines, [command] * len(engines))
                rounds += 1
                taken = time.monotonic() - began
                if taken + taken / rounds / 2 > budget:
                    print(f"{count} requests: {rounds} rounds in {taken:.0f} s", flush=True)
                    return answers

    def _write(self, name: str, mode: str, count: int, answers: list[dict[str, Any]]) -> None:
        (self.folder / f"{name}-{count}.json").write_text(json.dumps(answers) + "\n")
        try:
            rows = [*turn_figures(name, f"vanilla_{name}", count, answers, TARGETS[mode]), added(name, count, answers)]
        except RuntimeError as error:
            self.report(error)
            return
        write(this_machine(), NAME, rows, self.options.folder, keep=True)
        show(rows)

    def close(self) -> None:
        close_all(self.engines.values())


def added(name: str, count: int, answers: list[dict[str, Any]]) -> Row:
    """Microseconds that a step takes longer with NWOR, pair of turns by pair of turns, by their median steps."""
    found = []
    for answer in answers:
        for pair in zip(answer["turns"][::2], answer["turns"][1::2], strict=True):
            off, on = sorted(pair, key=itemgetter("on"))
            found.append(1e6 * (on["median_step"] - off["median_step"]))
    return row(f"added_us_{name}/{count}", found, "us", "lower", digits=1)


def gpus_here() -> int:
    """By the driver's own tool: torch would take a context in this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    return len(listed.stdout.splitlines())


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--gpus", nargs="+", type=int, help="how many, of 1, 2 and 4 (default: as far as there are)")
    parser.add_argument("--modes", nargs="+", choices=list(CAPTURES), default=list(CAPTURES), help="mode of NWOR")
    parser.add_argument("--requests", nargs="+", type=int, choices=REQUESTS, default=[16, 64], help="of each engine")
    parser.add_argument("--target", choices=list(SHAPES), default="8b", help="shape of the target: Llama 3's")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long to measure each row")
    options = parser.parse_args(arguments)
    there = 1 if options.small else gpus_here()
    options.gpus = options.gpus or [count for count in (1, 2, 4) if count <= there]
    if not options.gpus or (max(options.gpus) > there and not options.small):
        parser.error(f"--gpus asks for {options.gpus}, {there} are here")
    return options


def main() -> int:
    options = parse_arguments()
    if options.small:
        options.requests, options.folder = [1, 4], pathlib.Path(tempfile.mkdtemp())
    with log_folder(options) as folder:
        run = Run(options, folder)
        try:
            run.start()
            run.measure()
        finally:
            run.close()
    return exit_status(run.problems)


if __name__ == "__main__":
    sys.exit(main())
