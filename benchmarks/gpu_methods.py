"""Compare vLLM on a GPU, end to end, with NWOR on and off: more methods of drafting, a hybrid model and a KV connector.

    python benchmarks/gpu_methods.py [--methods M ...] [--modes MODE ...] [--requests N ...] [--other TREE] ...

    eagle3      EAGLE-3 on the Llama-3-8B shape, K = 4
    mtp         the multi-token prediction layer of a dense model of the Qwen3.5-9B shape, K = 3: 24 layers of Gated
                DeltaNet with float32 states, 8 of attention
    offloading  eagle3 with vLLM's OffloadingConnector, which copies every full block to the host
    eagle       as in gpu_engine.py

Measured as in gpu_engine.py: one engine per mode, whose two sides take turns of 20 steps while its requests decode,
with synthetic acceptance of 2.5 tokens per step. Graphs are captured only for the requested numbers of requests, and
twice for each side in mode `cow`. The engines of the two modes are on the GPU at the same time and are measured in
turn, if both fit (28 GiB each). Those of mtp run one after the other (45 GiB).

With `--other`, a checkout with its libraries built, each mode also has an engine with the nwor_ops of that checkout:
rows `.../..._other`. Each ratio uses the vanilla side of the same engine.

A row is written when it is measured; rows of an earlier run with other names stay. Failures are reported and left out.
A row takes about `--seconds` per mode, and an engine takes 30 to 90 seconds to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from gpu_engine import (
    LLAMA_8B,
    QWEN_9B_SHAPE,
    REQUESTS,
    SMALL,
    SYNTHETIC,
    TARGETS,
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
from results import Row, show, this_machine, write

from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all

NAME = "gpu_methods"
ROOT = pathlib.Path(__file__).resolve().parent.parent
CAPTURES = {"cow": 2, "stage": 1}  # mode stage puts nothing into graphs
WARM_UP_TOKENS = 64
GIB = 1 << 30
HOST_BYTES = 4 * GIB  # bytes for blocks
# The shape of the head of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B.
EAGLE3 = LLAMA_8B | {"num_hidden_layers": 1, "draft_vocab_size": 32000}
QWEN_9B = QWEN_9B_SHAPE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_experts": 0,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 8192,
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    # Also stores decoded blocks; only these are measured.
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES, "offload_prompt_only": False},
}
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Method:
    """One measured method.

    Attributes:
        speculation: vLLM's name of the method, or more of its configuration.
        drafter: the shape of a separate draft model. None if the target's model contains the drafter.
        engine: arguments of the engine.
        at_once: number of engines that fit on a GPU of 80 GB.
        stores: whether a connector must store something in every measurement.
        targets: targets by mode.
    """

    speculation: dict[str, Any]
    target: dict[str, Any] = field(default_factory=lambda: LLAMA_8B)
    drafter: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    at_once: int = 2
    stores: bool = False
    targets: dict[str, float] = field(default_factory=lambda: {"cow": 0.995, "stage": 0.99})


METHODS = {
    "eagle3": Method({"method": "eagle3"}, drafter=EAGLE3),
    "offloading": Method(
        {"method": "eagle3"},
        drafter=EAGLE3,
        engine={"kv_transfer_config": OFFLOADING, "enable_prefix_caching": True},
        stores=True,
    ),
    "mtp": Method(
        {"method": "mtp", "num_speculative_tokens": 3},
        target=QWEN_9B,
        engine={
            "mamba_ssm_cache_dtype": "float32",
            "gdn_prefill_backend": "triton",
            "worker_extension_cls": "gpu_worker_hybrid.Worker",
            "enable_prefix_caching": False,
            # 64 requests x 14 blocks of 20 MB, and 128 shadow pages.
            "kv_cache_memory_bytes": 22 * GIB,
        },
        at_once=1,
    ),
    "eagle": Method({"method": "eagle"}, drafter=LLAMA_8B | {"num_hidden_layers": 1}, targets=TARGETS),
}


@dataclass(frozen=True)
class Side:
    """An engine: its mode, and the checkout of its nwor_ops."""

    mode: str
    tree: pathlib.Path

    def name(self, method: str) -> str:
        return f"{self.mode}_{method}" + ("" if self.tree == ROOT else "_other")


def method_job(method: Method, folder: pathlib.Path, requests: Iterable[int], small: bool) -> dict[str, Any]:
    target, drafter = method.target, method.drafter
    if small:  # also available in vLLM's CPU engine
        method = Method({"method": "draft_model"})
        target, drafter = LLAMA_8B | SMALL, LLAMA_8B | SMALL | {"num_hidden_layers": 1}
    model = write_shape(folder / "target", target)
    speculation = {"model": model if drafter is None else write_shape(folder / "drafter", drafter)}
    speculation |= method.speculation | ({} if small else SYNTHETIC)
    more: dict[str, Any] = {}
    if not small:
        tokens = speculation.get("num_speculative_tokens", K) + 1
        kernels = ("enable_jit_warmup", "enable_cutedsl_warmup", "enable_flashinfer_autotune")
        more = {
            "compilation_config": {"cudagraph_capture_sizes": [tokens * count for count in sorted(requests)]},
            "kernel_config": dict.fromkeys(kernels, False),  # compiled when first needed, while the engine warms up
        }
    if method.stores and shutil.disk_usage(SHARED_MEMORY).free < method.at_once * HOST_BYTES:
        more["worker_extension_cls"] = "gpu_worker_pinned.Worker"
    job = engine_job(model, speculation, small, **more | method.engine)
    return job | {"vocabulary": target["vocab_size"], "max_tokens": WARM_UP_TOKENS}


class Run:
    """The options of this run, and the failures so far."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path) -> None:
        self.options, self.folder = options, folder
        self.problems: list[str] = []

    def report(self, problem: object) -> None:
        self.problems.append(str(problem))
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)

    def measure(self, name: str, sides: list[Side]) -> None:
        """Measure the rows of a method, and write each one."""
        try:
            with self._started(name, sides) as engines:
                for count in self.options.requests if engines else ():
                    found = measure(engines, count, self.options.seconds, self.options.small)
                    for side, answers in found.items():
                        self._write(name, side, count, answers)
        except EngineFailed as error:
            self.report(error)

    def _write(self, name: str, side: Side, count: int, answers: list[dict[str, Any]]) -> None:
        (self.folder / f"{side.name(name)}-{count}.json").write_text(json.dumps(answers) + "\n")
        try:
            rows = figures(name, side, count, answers, self.options.small)
        except RuntimeError as error:
            self.report(error)
            return
        write(this_machine(), NAME, rows, self.options.folder, keep=True)
        show(rows)

    @contextlib.contextmanager
    def _started(self, name: str, sides: list[Side]) -> Iterator[dict[Side, EngineProcess]]:
        """Start engines of these sides in parallel, and return the ones that got ready and warm.

        Engines of a later method reuse what was compiled.
        """
        engines: dict[Side, EngineProcess] = {}
        began = time.monotonic()
        try:
            for place, side in enumerate(sides):
                engines[side] = self._launch(name, side, self.folder / f"cache-{place}")
            with ThreadPoolExecutor(len(sides)) as pool:
                try:
                    ready = dict(zip(sides, pool.map(partial(self._is_ready, name), engines.items()), strict=True))
                except BaseException:  # after control-C, the threads wait for answers that never come
                    close_all(engines.values())
                    raise
            for side in [side for side in sides if not ready[side]]:
                engines.pop(side).close()
            for engine in engines.values():
                engine.ask("switch 0")  # captures
            with visitor():
                for on, count, engine in product((0, 1), self.options.requests, engines.values()):
                    engine.ask(f"switch {on}")
                    engine.ask(f"run {count}")
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            yield engines
        finally:
            close_all(engines.values())

    def _launch(self, name: str, side: Side, cache: pathlib.Path) -> EngineProcess:
        # vLLM would derive the method from the name of a drafter's folder.
        folder = self.folder / ("small" if self.options.small else name)
        job = method_job(METHODS[name], folder, self.options.requests, self.options.small)
        job["captures"] = 1 if self.options.small else CAPTURES[side.mode]
        # Search its packages first.
        path = os.pathsep.join(filter(None, [str(side.tree), os.environ.get("PYTHONPATH")]))
        environment = {"VLLM_NWOR_MODE": side.mode, "PYTHONPATH": path}
        return launch_engine(side.name(name), job, self.folder, cache, "v2", environment)

    def _is_ready(self, name: str, started: tuple[Side, EngineProcess]) -> bool:
        side, engine = started
        try:
            found = engine.wait_until_ready()
        except EngineFailed as error:
            self.report(error)
            return False
        print(f"{side.name(name)}: {found}", flush=True)
        if found["sessions"] and pathlib.Path(found["tree"]) == side.tree:
            return True
        self.report(f"{side.name(name)}: nwor_ops of {side.tree} is not on there")
        return False


def measure(
    engines: dict[Side, EngineProcess], count: int, seconds: float, small: bool
) -> dict[Side, list[dict[str, Any]]]:
    """Measure every engine in rounds, in which each uses all its captures, with each side first.

    The number of rounds is the one closest to the given time, and at least one.
    """
    answers: dict[Side, list[dict[str, Any]]] = {side: [] for side in engines}
    budget, began, rounds = seconds * len(engines), time.monotonic(), 0
    while True:
        for number, first in product(range(max(CAPTURES.values())), (0, 1)):
            for side, engine in engines.items():
                capture = 0 if small else number % CAPTURES[side.mode]
                answers[side].append(engine.ask(f"turns {count} {capture} {first} 0"))
        rounds += 1
        taken = time.monotonic() - began
        if taken + taken / rounds / 2 > budget:
            print(f"{count} requests: {rounds} rounds in {taken:.0f} s", flush=True)
            return answers


def figures(name: str, side: Side, count: int, answers: list[dict[str, Any]], small: bool) -> list[Row]:
    """Return the results of one measurement. Raises RuntimeError if the two sides are not comparable."""
    method, label = METHODS[name], side.name(name)
    if method.stores and not small and not all(answer["stored_bytes"] for answer in answers):
        raise RuntimeError(f"{label}, {count} requests: the connector has stored nothing in a measurement")
    return turn_figures(label, f"vanilla_{label}", count, answers, method.targets[side.mode])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--modes", nargs="+", choices=list(CAPTURES), default=list(CAPTURES), help="mode of NWOR")
    parser.add_argument("--requests", nargs="+", type=int, choices=REQUESTS, default=[16, 64, 1])
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of measuring per row")
    parser.add_argument("--other", type=pathlib.Path, help="another checkout to compare with")
    options = parser.parse_args(arguments)
    if options.other is not None:
        options.other = options.other.resolve()
        if options.other == ROOT or not (options.other / "nwor_ops" / "__init__.py").exists():
            parser.error(f"--other must be another checkout of nwor_ops, got {options.other}")
    return options


def main() -> int:
    options = parse_arguments()
    if options.small:
        options.requests, options.folder = [1, 4], pathlib.Path(tempfile.mkdtemp())
    trees = [ROOT] + ([options.other] if options.other else [])
    sides = [Side(mode, tree) for mode, tree in product(options.modes, trees)]
    with log_folder(options) as folder:
        run = Run(options, folder)
        for name in options.methods:
            at_once = METHODS[name].at_once
            for start in range(0, len(sides), at_once):
                run.measure(name, sides[start : start + at_once])
    return exit_status(run.problems)


if __name__ == "__main__":
    sys.exit(main())
