"""Measure vLLM on a GPU, end to end: output tokens per second with NWOR on against off.

    python benchmarks/gpu_engine.py [--cache fp8] [--mode stage] [--unvisited | --control | --apart] [--runner v1] ...

The target has the Llama-3-8B shape with random weights, and an EAGLE head of the same width drafts K = 4 tokens.
Synthetic acceptance is 2.5 tokens per step. Prompts have 64 tokens. vLLM has its default CUDA graphs
(FULL_AND_PIECEWISE), captured at fewer sizes to start sooner. No other engine is on the GPU.

One engine serves both sides. While its requests decode, the sides take turns of 20 steps: off, on, on, off, ... A turn
removes everything of NWOR from the worker, or installs it again, and exchanges the model's FULL graphs. So both sides
have the same weights at the same addresses, the same compiled code, the same process, and the same requests at the same
length. A difference in any of these is larger than the effect to be measured. `switch_transactions` in
gpu_engine_child.py says what remains while NWOR is off.

A row is the time of a step off over on, turn by turn. With equal acceptance this is the ratio of output tokens per
second. `.../median_step` is the ratio of the turns' median steps, which a delay on the host does not change. In mode
`cow` the FULL graphs are captured four times for each side, each time with other buffers. Each pair has its share of
turns, and a row. The run fails if the two sides did not accept equally many drafts.

Some decode steps of each side are profiled afterwards: which kernels ran and for how long, and how long the GPU worked
and waited. The script takes about 7 minutes.

Graphs may leave 0.4 us between two kernels if only one process has ever used the GPU, and the two sides may differ in
this. After another process has had a context on the GPU, all graphs leave 0.1 us. So an idle process opens a context
while the engine warms up, and ends before the measurements.

Each of these options has its rows in a separate file, as have `--cache fp8`, `--mode stage` and `--runner v1`:

`--unvisited`: without that idle process.
`--control`: compare off with off, the graphs of each capture with those of the first. It shows the noise.
`--apart`: one engine per side, both on the GPU, serve whole requests of 256 tokens in turn. So does `--runner v1`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from operator import itemgetter
from typing import Any

from results import FOLDER, Row, ratios, row, save, show, this_machine, write

from nwor_ops.testing.engine_process import EngineProcess, close_all, engine_environment

HERE = pathlib.Path(__file__).resolve().parent
K, ACCEPTANCE_LENGTH, ACCEPTANCE_DIFFERENCE = 4, 2.5, 0.05
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": ACCEPTANCE_LENGTH}
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256
REQUESTS = (1, 16, 64)
RUNS_PER_ROUND = {1: 2, 16: 4, 64: 3}  # of either side, in turn: single runs vary by 0.4, 1.0 and 0.4 %
TURNS_PER_ROUND = {1: 1, 16: 1, 64: 4}  # eights of turns: pairs of them vary by 1, 1 and 5 %
CAPTURES = 4
CACHES = {"bf16": "auto", "fp8": "fp8"}
# Target of each mode: its speed over vanilla's.
TARGETS = {"cow": 0.998, "stage": 0.995}
FEWEST_ROUNDS = 4
PROFILED_STEPS = 50
OURS = "nwor::"  # in the name of a kernel
CAPTURED_REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
# The shape of Qwen3.5-9B. Each class of vLLM needs a few more settings.
QWEN_9B_SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
# To try the script itself where there is no GPU; see --small.
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512}


class Side:
    """An engine with NWOR while NWOR is on, or while it is off. Both sides of an engine answer in turn."""

    def __init__(self, engine: EngineProcess, on: bool) -> None:
        self._engine, self._on = engine, on

    def ask(self, command: str) -> dict[str, Any]:
        self._engine.ask(f"switch {int(self._on)}")
        return self._engine.ask(command)


def start_sides(
    jobs: dict[str, dict[str, Any]], folder: pathlib.Path, runner: str, mode: str, apart: bool
) -> tuple[dict[tuple[str, str], EngineProcess], Mapping[tuple[str, str], EngineProcess | Side]]:
    """The engines, and what to ask for each job and side."""
    on = {"VLLM_NWOR_MODE": mode}
    if apart:
        engines = start_engines(jobs, folder, runner, {"off": {}, "on": on})
        return engines, engines
    engines = start_engines(jobs, folder, runner, {"on": on})
    return engines, {(name, side): Side(engines[name, "on"], side == "on") for name in jobs for side in ("off", "on")}


def write_shape(folder: pathlib.Path, shape: dict[str, Any]) -> str:
    """Write a model folder without weights, and return its path. vLLM fills in random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n")
    return str(folder)


def make_job(folder: pathlib.Path, layers: int, cache_dtype: str, small: bool = False) -> dict[str, Any]:
    """Return the job of an engine. The environment says whether NWOR is on."""
    shape = LLAMA_8B | ({"num_hidden_layers": layers} | (SMALL if small else {}))
    drafter = write_shape(folder / "eagle", shape | {"num_hidden_layers": 1})
    speculation: dict[str, Any] = {"model": drafter, "method": "draft_model"}
    if not small:
        speculation |= {"method": "eagle"} | SYNTHETIC
    job = engine_job(write_shape(folder / "target", shape), speculation, small, kv_cache_dtype=cache_dtype)
    return job | {"vocabulary": shape["vocab_size"]}


def engine_job(model: str, speculation: dict[str, Any], small: bool, **more: Any) -> dict[str, Any]:
    """Return a job without ``vocabulary``; see gpu_engine_child.py. All else is vLLM's default, prefix caching too: no
    two prompts of these benchmarks begin alike."""
    engine: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "seed": 0,
        "max_model_len": 2048,
        "max_num_seqs": max(REQUESTS),
        "max_num_batched_tokens": 8192,
        "disable_log_stats": False,
        "speculative_config": {"num_speculative_tokens": K, **speculation},
    }
    if small:
        engine |= {"enforce_eager": True, "max_num_batched_tokens": 2048, "max_num_seqs": 16}
    else:
        sizes = [(K + 1) * requests for requests in CAPTURED_REQUESTS]
        engine |= {
            "attention_config": {"backend": "FLASH_ATTN"},
            "compilation_config": {"cudagraph_capture_sizes": sizes},
            # No memory profiling: several engines start on one GPU at the same time.
            "kv_cache_memory_bytes": 8 << 30,
            "gpu_memory_utilization": 0.2,
        }
    return {"engine": engine | more, "prompt_tokens": PROMPT_TOKENS, "max_tokens": OUTPUT_TOKENS}


def launch_engine(
    name: str,
    job: dict[str, Any],
    folder: pathlib.Path,
    cache: pathlib.Path,
    runner: str,
    environment: dict[str, str],
) -> EngineProcess:
    """Start an engine. ``cache`` is the folder of what vLLM compiles; ``environment`` wins over all settings here but
    those of the runner."""
    sampler = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment = engine_environment("off", audit=False, offline=True) | sampler | environment
    # As a server runs it: the engine core in a process that does nothing else.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if job.get("one_process") else "1"
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc takes a function
    if runner == "v1":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    environment["VLLM_CACHE_ROOT"] = str(cache)
    return EngineProcess(name, job, folder, environment, program=(str(HERE / "gpu_engine_child.py"),))


def start_engines(
    jobs: dict[str, dict[str, Any]],
    folder: pathlib.Path,
    runner: str,
    sides: dict[str, dict[str, str]],
) -> dict[tuple[str, str], EngineProcess]:
    """An engine per job and side, all ready; by (job, side). The first side's compile for the others: which kernels the
    compiler takes depends on how long each of them takes while others run, and would differ from engine to engine."""
    engines: dict[tuple[str, str], EngineProcess] = {}
    first, *others = sides
    for together in ([first], others):
        started = {}
        for name, job in jobs.items():
            for side in together:
                started[name, side] = launch_engine(
                    f"{name}-{side}", job, folder, folder / f"cache-{name}", runner, sides[side]
                )
        engines |= started
        with ThreadPoolExecutor(max(len(started), 1)) as pool:
            versions = list(pool.map(EngineProcess.wait_until_ready, started.values()))
        for (name, side), found in zip(started, versions, strict=True):
            print(f"{name} {side}: {found}", flush=True)
            is_on = bool(found["sessions"] or found["draft_graphs"])
            if is_on != bool(sides[side]):
                raise RuntimeError(f"{name} {side}: nwor_ops is {'on' if is_on else 'not on'} in that engine")
    return engines


def measure(
    engines: Mapping[tuple[str, str], EngineProcess], requests: Sequence[int], seconds: float
) -> dict[Any, Any]:
    """Answers by (job, side, requests). Rounds until the time is up; their order turns with the round."""
    answers: dict[Any, list[dict[str, Any]]] = {}
    for (name, side), engine in engines.items():
        for count in requests:
            engine.ask(f"run {count}")  # warms up
            answers[name, side, count] = []
    started = time.monotonic()
    rounds = 0
    while rounds < FEWEST_ROUNDS or time.monotonic() - started < seconds:
        order = list(engines) if rounds % 2 == 0 else list(engines)[::-1]
        for count in requests:
            for _ in range(RUNS_PER_ROUND.get(count, 1)):
                for name, side in order:
                    answers[name, side, count].append(engines[name, side].ask(f"run {count}"))
        rounds += 1
    print(f"{rounds} rounds in {time.monotonic() - started:.0f} s", flush=True)
    return answers


def measure_apart(
    mode: str, name: str, engines: Mapping[tuple[str, str], EngineProcess], requests: Sequence[int], seconds: float
) -> tuple[list[Row], dict[str, Any]]:
    """Whole requests, an engine for each side: the rows, and the answers they are made of."""
    answers = measure(engines, requests, seconds)
    rows = []
    for count in requests:
        rows += figures(mode, name, count, answers[name, "off", count], answers[name, "on", count])
    return rows, {f"{name} {side} {count}": runs for (name, side, count), runs in answers.items()}


def measure_turns(
    kind: str, name: str, engine: EngineProcess, requests: Sequence[int], captures: int, visited: bool, seconds: float
) -> tuple[list[Row], dict[str, Any]]:
    """Both sides of an engine in turn: the rows, and the answers they are made of. A round has every capture, with
    either side first; rounds until the time is up."""
    answers: dict[int, list[dict[str, Any]]] = {count: [] for count in requests}
    engine.ask("switch 0")  # captures; no request may be running
    with visitor() if visited else contextlib.nullcontext():
        for count in requests:
            engine.ask(f"turns {count} 0 0 0")  # warms up
    started = time.monotonic()
    rounds = 0
    while not rounds or time.monotonic() - started < seconds:
        for first, capture in product((0, 1), range(captures)):
            for count, found in answers.items():
                for _ in range(TURNS_PER_ROUND.get(count, 1)):
                    found.append(engine.ask(f"turns {count} {capture} {first} {kind == 'control':d}"))
        rounds += 1
    print(f"{rounds} rounds in {time.monotonic() - started:.0f} s", flush=True)
    rows = []
    for count, found in answers.items():
        vanilla = f"vanilla{name.removeprefix(kind)}"
        rows += turn_figures(name, vanilla, count, found, TARGETS.get(kind), control=kind == "control")
    return rows, {f"{name} {count}": found for count, found in answers.items()}


@contextlib.contextmanager
def visitor() -> Iterator[None]:
    """A process that has a context on the GPU, if there is one, and does nothing."""
    code = "import sys, torch; torch.cuda.is_available() and torch.zeros(1, device='cuda'); print('here', flush=True)"
    command = [sys.executable, "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # it goes when this ends
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the process that was to visit the GPU has failed")
        yield


def turn_figures(
    name: str, vanilla: str, count: int, answers: list[dict[str, Any]], target: float | None, control: bool = False
) -> list[Row]:
    """The rows of one engine, whose sides have these names, and one number of requests; raises where the two are not
    comparable."""
    what = f"{name}, {count} requests"
    check_vanilla_steps(what, answers)
    ratios_of: dict[int, list[float]] = defaultdict(list)  # by capture
    median_ratios: list[float] = []
    sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for answer in answers:
        turns = answer["turns"]
        for turn in turns:
            sides[turn["on"]].append(turn)
        for pair in zip(turns[::2], turns[1::2], strict=True):
            off, on = sorted(pair, key=itemgetter("on"))
            ratios_of[answer["capture"]].append(off["seconds"] / on["seconds"])
            median_ratios.append(off["median_step"] / on["median_step"])
    if control:
        check_windows(what, sides[False] + sides[True], [])
    else:
        check_windows(what, sides[False], sides[True])
    rows = [row(f"e2e_{name}/{count}", list(chain(*ratios_of.values())), "ratio", "higher", target)]
    rows.append(row(f"e2e_{name}/{count}/median_step", median_ratios, "ratio", "higher"))
    if len(ratios_of) > 1:
        rows += [
            row(f"e2e_{name}/{count}/capture_{number}", found, "ratio", "higher") for number, found in ratios_of.items()
        ]
    lengths = []
    for on, side in ((True, name), (False, vanilla)):
        tokens, steps, seconds = (sum(turn[key] for turn in sides[on]) for key in ("tokens", "steps", "seconds"))
        step_us = [1e6 * turn["seconds"] / turn["steps"] for turn in sides[on]]
        lengths.append(tokens / steps / count)
        rows += [
            row(f"step_us_{side}/{count}", step_us, "us", "lower", digits=1),
            row(f"tok_s_{side}/{count}", [tokens / seconds], "tok/s", "higher", digits=1),
            row(f"acceptance_length_{side}/{count}", lengths[-1:], "tokens", "higher"),
        ]
    check_acceptance(what, *lengths)
    return rows


def check_windows(what: str, off: list[dict[str, Any]], on: list[dict[str, Any]]) -> None:
    """That each run was with NWOR, in every step where steps were counted, or without."""
    if any(run["windows"] for run in off) or any(run["windows"] < run.get("steps", 1) for run in on):
        raise RuntimeError(f"{what}: NWOR was on where it should be off, or off where it should be on")


def check_vanilla_steps(what: str, answers: list[dict[str, Any]]) -> None:
    if any(steps for answer in answers for steps in answer["vanilla_steps"]):
        raise RuntimeError(f"{what}: steps ran without the transaction, {answers[-1]['vanilla_steps']}")


def check_acceptance(what: str, on: float, off: float) -> None:
    if abs(on - off) > ACCEPTANCE_DIFFERENCE:
        raise RuntimeError(f"{what}: the sides accepted differently, {on} and {off} tokens a step: not comparable")


def figures(mode: str, name: str, count: int, off: list[dict[str, Any]], on: list[dict[str, Any]]) -> list[Row]:
    """The rows of one job and one number of requests; raises where the two sides are not comparable."""
    what = f"{name}, {count} requests"
    check_vanilla_steps(what, on)
    check_windows(what, off, on)
    return comparison(name, f"vanilla{name.removeprefix(mode)}", count, off, on, TARGETS[mode])


def per_step(answer: dict[str, Any], what: str) -> Counter[str]:
    return Counter({name: count / answer["steps"] for name, count in answer[what].items()})


def print_differences(title: str, on: Counter[str], off: Counter[str]) -> None:
    print(f"{title}, per step:")
    for name in sorted(set(on) | set(off)):
        if round(on[name] - off[name], 2):
            print(f"  {on[name] - off[name]:+8.2f}  ({off[name]:.2f} -> {on[name]:.2f})  {name[:150]}")


def kernel_times(device_us: Counter[str], *marks: str) -> Counter[str]:
    """Of kernels with one of the marks in their names; by their short names."""
    found: Counter[str] = Counter()
    for name, us in device_us.items():
        if any(mark in name for mark in marks) and (kernel := re.search(r"\w+_kernel", name)):
            found[kernel[0]] += us
    return found


def check_kernels(mode: str, side: str, kernels: dict[str, int]) -> None:
    """That NWOR was on, graphs included, or off."""
    ours = {name for name in kernels if OURS in name}
    wanted = {"cow": ("plan", "write", "restore"), "stage": ("plan", "open", "close")}[mode] if side == "on" else ()
    if kernels and (bool(ours) != bool(wanted) or not all(any(f"{w}_kernel" in name for name in ours) for w in wanted)):
        raise RuntimeError(f"{mode} {side}: kernels {', '.join(wanted) or 'of none of ours'} should run, found {ours}")


def profile_steps(
    mode: str, engines: Mapping[tuple[str, str], EngineProcess | Side], requests: Sequence[int]
) -> list[Row]:
    """What a step of each engine takes on the device, and how long nothing runs there."""
    rows: list[Row] = []
    raw: dict[str, dict[str, Any]] = {}
    for count in requests:
        for (name, side), engine in engines.items():
            engine.ask(f"profile {count} 5")  # the profiler's own start
            found = engine.ask(f"profile {count} {PROFILED_STEPS}")
            raw[f"profile {name} {side} {count}"] = found
            check_kernels(mode, side, found["kernels"])
            busy = [step - idle for step, idle in zip(found["step_us"], found["idle_us"], strict=True)]
            if busy:
                rows.append(row(f"step_busy_us_{name}_{side}/{count}", busy, "us", "lower", digits=1))
                rows.append(row(f"step_idle_us_{name}_{side}/{count}", found["idle_us"], "us", "lower", digits=1))
            # vLLM's writer, which the drafter's layers keep, and all of ours.
            for kernel, us in kernel_times(per_step(found, "device_us"), "reshape_and_cache", OURS).items():
                rows.append(row(f"kernel_us_{name}_{side}/{count}/{kernel}", [us], "us", "lower", digits=1))
    for key, found in raw.items():
        _, name, side, count = key.split()
        if side != "off":
            vanilla = raw[f"profile {name} off {count}"]
            for what in ("device_us", "idle_before_us"):
                print_differences(f"{key}: {what}", per_step(found, what), per_step(vanilla, what))
    return rows


def speeds(runs: list[dict[str, Any]]) -> list[float]:
    """Output tokens per second, run by run."""
    return [run["tokens"] / run["seconds"] for run in runs]


def comparison(
    name: str, vanilla: str, count: int, off: list[dict[str, Any]], on: list[dict[str, Any]], target: float | None
) -> list[Row]:
    """On over off, both sides' speeds, and what they accepted."""
    rates = {"off": speeds(off), "on": speeds(on)}
    lengths = {side: sum(a["acceptance_length"] for a in runs) / len(runs) for side, runs in (("off", off), ("on", on))}
    check_acceptance(f"{name}, {count} requests", lengths["on"], lengths["off"])
    if {a["tokens_hash"] for a in on} != {a["tokens_hash"] for a in off}:
        print(f"{name}, {count} requests: the two engines' tokens differ", flush=True)
    return [
        row(f"e2e_{name}/{count}", ratios(rates, "on", "off"), "ratio", "higher", target),
        row(f"tok_s_{name}/{count}", rates["on"], "tok/s", "higher", digits=1),
        row(f"tok_s_{vanilla}/{count}", rates["off"], "tok/s", "higher", digits=1),
        row(f"acceptance_length_{name}/{count}", [lengths["on"]], "tokens", "higher"),
        row(f"acceptance_length_{vanilla}/{count}", [lengths["off"]], "tokens", "higher"),
    ]


def result_name(benchmark: str, options: argparse.Namespace) -> str:
    """Return the name of the file with the results. Mode cow, the V2 runner and a bf16 cache add nothing to it."""
    parts = [] if options.mode == "cow" else [options.mode]
    parts += [] if options.runner == "v2" else [options.runner]
    parts += ["fp8"] if getattr(options, "cache", "bf16") == "fp8" else []
    parts += [name for name in ("unvisited", "control", "apart") if getattr(options, name, False)]
    return "_".join([benchmark, *parts])


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts with engines on a GPU have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="where the results go")
    parser.add_argument("--logs", type=pathlib.Path, help="where logs, answers and what vLLM compiles go")
    parser.add_argument("--small", action="store_true", help="try this script with tiny models; nothing is saved")
    return parser


@contextlib.contextmanager
def log_folder(options: argparse.Namespace) -> Iterator[pathlib.Path]:
    """Yield the folder of ``--logs``, or a temporary one."""
    with tempfile.TemporaryDirectory() as scratch:
        folder: pathlib.Path = (options.logs or pathlib.Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def exit_status(problems: Sequence[str]) -> int:
    """Print the problems of a run, and return the exit status of the script."""
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--mode", choices=list(TARGETS), default="cow", help="mode of NWOR")
    parser.add_argument("--runner", choices=("v2", "v1"), default="v2", help="vLLM's model runner")
    parser.add_argument("--cache", choices=list(CACHES), default="bf16", help="format of the cache")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--unvisited", action="store_true", help="leave the engine alone on the GPU from the start")
    compared.add_argument("--apart", action="store_true", help="an engine for each side")
    compared.add_argument("--control", action="store_true", help="compare off with off")
    parser.add_argument("--requests", nargs="+", type=int, choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to measure, once the engine is ready")
    options = parser.parse_args()
    if options.control and (options.mode, options.runner) != ("cow", "v2"):
        parser.error("--control needs graphs of two captures: mode cow and runner v2")
    if options.runner == "v1" and (options.unvisited or options.apart):
        parser.error("--runner v1 has engines of their own for the two sides in any case")
    return options


def main() -> None:
    options = parse_arguments()
    requests = [1, 4] if options.small else options.requests
    kind = "control" if options.control else options.mode
    apart = options.apart or options.runner == "v1"
    captures = CAPTURES if options.mode == "cow" and not options.small else 1
    target = pathlib.Path(tempfile.mkdtemp()) if options.small else options.folder
    with log_folder(options) as folder:
        name = kind + ("" if options.cache == "bf16" else f"_{options.cache}")
        job = make_job(folder, LLAMA_8B["num_hidden_layers"], CACHES[options.cache], options.small)
        jobs = {name: job | {"captures": captures}}
        engines, sides = start_sides(jobs, folder, options.runner, options.mode, apart)
        try:
            if apart:
                rows, raw = measure_apart(options.mode, name, engines, requests, options.seconds)
            else:
                rows, raw = measure_turns(
                    kind, name, engines[name, "on"], requests, captures, not options.unvisited, options.seconds
                )
            (folder / "answers.json").write_text(json.dumps(raw) + "\n")
            results = result_name("gpu_engine", options)
            save(this_machine(), results, rows, target)  # the profile may take minutes
            if not options.control:
                profiled = profile_steps(options.mode, sides, requests)
                write(this_machine(), results, rows + profiled, target)
                show(profiled)
        finally:
            close_all(engines.values())


if __name__ == "__main__":
    main()
