"""Measure one recurrent state per request against vLLM's one per draft, end to end on a GPU.

    python benchmarks/gpu_recurrent.py [--drafts K ...] [--requests N ...] [--full N] [--seconds S] [--profile] ...
    python benchmarks/gpu_recurrent.py --texts N [--drafts K]

The model is dense, of the Qwen3.5-9B shape, with random weights: 24 layers of Gated DeltaNet with float32 states, 8 of
attention, and its layer for multi-token prediction. Synthetic acceptance is 2.5 tokens per step. The caches of the two
sides have different shapes. So each side has its own engine, with the same memory for its cache. Both are on the GPU,
and serve whole requests of 256 tokens in turn. A row `e2e_recurrent/K/N` is the ratio of their output tokens per second
with N concurrent requests. `--full N` is a load that does not fit vanilla's cache. Its rows are `.../full`, and
`running_...` is the largest number of requests that ran concurrently.

`--profile` counts launches, copies and waits of a decode step on each side, after the measurements. Rows
`recurrent_step/K/N/...` are the differences to vanilla. Kernels inside graphs are counted one by one.

`--texts N` measures nothing. It runs N requests of 256 tokens with greedy verification, first one after the other and
then together, twice in each engine. It says at which token texts first differ, between runs of one engine and between
the two engines, and how far apart the two best tokens were there. With random weights the best of 248,320 tokens is
hardly better than the next one.

Both engines of a K take 60 to 130 seconds to start, and 36 GiB of cache each, so an H200 is needed. With `--texts` one
engine starts after the other. The second one then reuses the kernels that the compiler selected by time for the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_engine import (
    LLAMA_8B,
    PROFILED_STEPS,
    SMALL,
    SYNTHETIC,
    comparison,
    engine_job,
    launch_engine,
    per_step,
    print_differences,
    visitor,
    write_shape,
)
from gpu_engine import K as SMALL_K
from gpu_methods import GIB, METHODS, QWEN_9B
from gpu_step_profile import LAUNCHES, total
from results import FOLDER, Row, row, show, this_machine, write

from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all

NAME = "gpu_recurrent"
SIDES = {"vanilla": {}, "recurrent": {"VLLM_NWOR_RECURRENT": "1"}}
# Measured numbers of concurrent requests, by K.
REQUESTS = {3: [1, 16, 64, 128], 7: [64]}
FULL = 384
RUNS_PER_ROUND = {1: 2, 16: 2}
# If vanilla's cache is full, there should be a graph that is not much larger than its batch.
GRAPHS = (1, 16, 64, 96, 112, 128, 136, 144, 160, 192, 256, 320, 384)


def job_of(folder: pathlib.Path, drafts: int, most: int, small: bool, synthetic: bool = True) -> dict[str, Any]:
    """Return the job of both sides. Only the environment differs."""
    if small:  # vLLM's CPU engine, to try the script: neither side has recurrent layers
        model = write_shape(folder / "target", LLAMA_8B | SMALL)
        drafter = write_shape(folder / "drafter", LLAMA_8B | SMALL | {"num_hidden_layers": 1})
        job = engine_job(model, {"method": "draft_model", "model": drafter}, small)
        return job | {"vocabulary": SMALL["vocab_size"], "max_tokens": 32, "counts_running": True}
    model = write_shape(folder / "target", QWEN_9B)
    speculation = {"model": model, "method": "mtp", "num_speculative_tokens": drafts}
    speculation |= SYNTHETIC if synthetic else {}
    kernels = ("enable_jit_warmup", "enable_cutedsl_warmup", "enable_flashinfer_autotune")
    sizes = [(drafts + 1) * count for count in GRAPHS if count <= most]
    more = METHODS["mtp"].engine | {
        "max_num_seqs": most,
        "kv_cache_memory_bytes": 36 * GIB,
        "compilation_config": {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]},
        "kernel_config": dict.fromkeys(kernels, False),
    }
    job = engine_job(model, speculation, small, **more)
    return job | {"vocabulary": QWEN_9B["vocab_size"], "max_tokens": 256, "counts_running": True}


def start(
    job: dict[str, Any], folder: pathlib.Path, drafts: int, small: bool, together: bool = True
) -> dict[str, EngineProcess]:
    """Both sides, ready."""
    engines: dict[str, EngineProcess] = {}
    found: dict[str, dict[str, Any]] = {}
    try:
        for side, environment in ({"vanilla": {}, "draft": {}} if small else SIDES).items():
            engines[side] = launch_engine(
                f"{side}_{drafts}", job, folder, folder / f"cache_{drafts}", "v2", environment
            )
            if not together:
                found[side] = engines[side].wait_until_ready()
        if together:
            with ThreadPoolExecutor(len(engines)) as pool:
                found = dict(zip(engines, pool.map(EngineProcess.wait_until_ready, engines.values()), strict=True))
        for side, versions in found.items():
            print(f"{side}, K = {drafts}: {versions}", flush=True)
            if bool(versions["one_states"]) != (side == "recurrent"):
                raise RuntimeError(f"{side}: {versions['one_states'] or 'there is one state per draft'}")
    except BaseException:
        close_all(engines.values())
        raise
    return engines


def measure(engines: dict[str, EngineProcess], count: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Answers of both sides in turn, their order turning, until the time is up; two rounds at least."""
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in engines}
    began, rounds = time.monotonic(), 0
    while rounds < 2 or time.monotonic() - began < seconds:
        for side in list(engines)[:: 1 if rounds % 2 == 0 else -1]:
            answers[side] += [engines[side].ask(f"run {count} {rounds}") for _ in range(RUNS_PER_ROUND.get(count, 1))]
        rounds += 1
    return answers


def figures(case: str, count: int, answers: dict[str, list[dict[str, Any]]]) -> list[Row]:
    off, on = answers.values()
    rows = comparison(f"recurrent/{case}", f"vanilla/{case}", count, off, on, None)
    for side, runs in answers.items():
        rows.append(row(f"running_{side}/{case}/{count}", [run["most_running"] for run in runs], "requests", "higher"))
    return rows


def profile(engines: dict[str, EngineProcess], case: str, count: int) -> tuple[list[Row], dict[str, Any]]:
    """Return rows with the differences in a step, and the raw answers."""
    counted = {}
    for side, engine in engines.items():
        engine.ask(f"profile {count} 5")  # starts the profiler
        counted[side] = engine.ask(f"profile {count} {PROFILED_STEPS}")
    return profile_rows(case, count, *counted.values()), counted


def profile_rows(case: str, count: int, off: dict[str, Any], on: dict[str, Any]) -> list[Row]:
    for what in ("kernels", "copies", "calls"):
        print_differences(f"{what}, {count} requests", per_step(on, what), per_step(off, what))

    def added(what: str, names: tuple[str, ...] | None = None) -> float:
        # To a tenth: a step at either end of the profile may be cut.
        return round(total(per_step(on, what), names) - total(per_step(off, what), names), 1)

    name = f"recurrent_step/{case}/{count}"
    return [
        row(f"{name}/kernels_added", [added("kernels")], "kernels", "lower"),
        row(f"{name}/host_launches_added", [added("calls", LAUNCHES)], "calls", "lower", 1),
        row(f"{name}/copies_added", [added("copies")], "copies", "lower"),
        row(f"{name}/syncs_added", [added("syncs")], "calls", "lower", 0),
    ]


def parting(texts: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Of requests whose texts differ: which, the first token that does, and the margin of the best token there."""
    found = []
    for request, (one, other) in enumerate(zip(texts, others, strict=True)):
        pairs = zip(one["tokens"], other["tokens"], strict=True)
        at = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if at is not None:
            found.append((request, at, min(one["margins"][at], other["margins"][at])))
    return found


def compare_texts(engines: dict[str, EngineProcess], count: int) -> dict[str, Any]:
    """Says what parts; the answers."""
    answers: dict[str, Any] = {}
    for at_once in (0, 1):
        runs = {
            f"{side}, run {number}": engine.ask(f"texts {count} {at_once}")["texts"]
            for number in (1, 2)
            for side, engine in engines.items()
        }
        answers["at once" if at_once else "one by one"] = runs
        margins = [margin for text in next(iter(runs.values())) for margin in text["margins"]]
        tied = sum(margin == 0 for margin in margins)
        print(
            f"{count} requests {'at once' if at_once else 'one by one'}: {tied} of {len(margins)} best tokens are tied"
        )
        for (one, texts), (other, others) in itertools.combinations(runs.items(), 2):
            found = parting(texts, others)
            places = "".join(f"; request {r} at token {at}, margin {margin:.4g}" for r, at, margin in found[:4])
            print(f"  {one} and {other}: {len(found)} of {count} texts part{places}", flush=True)
    return answers


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", nargs="+", type=int, choices=list(REQUESTS), default=list(REQUESTS), help="K")
    parser.add_argument("--requests", nargs="+", type=int, help="at once; else 1, 16, 64, 128, and 64 with K = 7")
    parser.add_argument("--full", type=int, default=FULL, help="requests of the load that fills vanilla's cache, or 0")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring, for each row")
    parser.add_argument("--profile", action="store_true", help="count launches, copies and waits of a step, too")
    parser.add_argument("--texts", type=int, default=0, help="only compare the texts of so many requests")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="where the results go")
    parser.add_argument("--logs", type=pathlib.Path, help="where logs, answers and what vLLM compiles go")
    parser.add_argument("--small", action="store_true", help="try this script with tiny models; nothing is saved")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.logs or pathlib.Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for drafts in [SMALL_K] if options.small else options.drafts:
            requests = [1, 4] if options.small else options.requests or REQUESTS[drafts]
            # Only the first K has the full load.
            full = options.full if drafts == options.drafts[0] and not options.small else 0
            if options.texts:
                requests, full = [], 0
            job = job_of(folder, drafts, max(*requests, full, options.texts, 1), options.small, not options.texts)
            try:
                engines = start(job, folder, drafts, options.small, together=not options.texts)
            except (EngineFailed, RuntimeError) as error:
                problems.append(str(error))
                continue
            try:
                with visitor():
                    for engine in engines.values():
                        for count in requests:
                            engine.ask(f"run {count}")  # warms up
                if options.texts:
                    answers = compare_texts(engines, options.texts)
                    (folder / f"texts-{drafts}.json").write_text(json.dumps(answers) + "\n")
                for count in [*requests, *([full] if full else [])]:
                    case = str(drafts) if count != full else f"{drafts}/full"
                    answers = measure(engines, count, options.seconds)
                    (folder / f"answers-{drafts}-{count}.json").write_text(json.dumps(answers) + "\n")
                    rows = figures(case, count, answers)
                    if not options.small:
                        write(this_machine(), NAME, rows, options.folder, keep=True)
                    show(rows)
                for count in requests if options.profile else []:
                    rows, answers = profile(engines, str(drafts), count)
                    (folder / f"profile-{drafts}-{count}.json").write_text(json.dumps(answers) + "\n")
                    if not options.small:
                        write(this_machine(), NAME, rows, options.folder, keep=True)
                    show(rows)
            except (EngineFailed, RuntimeError) as error:
                problems.append(str(error))
            finally:
                close_all(engines.values())
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
