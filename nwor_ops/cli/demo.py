"""``nwor-ops demo``: show the three features.

- The KV transaction: a real vLLM engine runs the same requests without and with NWOR. Two engines are audited, and
  every byte of the cache is compared after every step. Two more engines take turns and are timed, without an audit and
  with a larger model. A step of the audited model is too short to tell anything about the speed of a served model.
- Recurrent states and the draft loop: engines of ``examples/`` run with the library in plain PyTorch
  (``demo_library.py``).

``demo_report.py`` checks and prints the results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from nwor_ops.cli.demo_options import PARTS, SIZES, DemoOptions, own_dtype
from nwor_ops.cli.demo_report import checked, print_result, write_files
from nwor_ops.cli.progress import Tasks
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all, engine_environment
from nwor_ops.testing.tiny_llama import write_tiny_llama
from nwor_ops.testing.workload import MAX_RUNNING, Request, text_requests, tiny_llama_requests
from nwor_ops.transaction.shadow_pages import num_shadow_blocks

MODEL_TOKENS = 512
BLOCK_SIZE = 32
BLOCKS = 64
# Smaller than a prompt may be, so that prompts come in chunks together with other requests' drafts.
BATCH_TOKENS = 64
# On a busy machine the timing stops after this time, but never before this number of rounds.
TIMING_SECONDS = 10.0
FEWEST_ROUNDS = 3
LIBRARY_PARTS = {
    "recurrent": "decoding with K + 1 recurrent states per request, and with one",
    "draft_loop": "drafting eagerly, and as captured",
}


def run_demo(options: DemoOptions, as_json: bool) -> int:
    """Run the demo, print and write the results, and return the exit code."""
    console = Console(stderr=as_json, highlight=False)
    started = time.monotonic()
    try:
        measured = _measure(options, console)
    except EngineFailed as error:
        console.print(f"[bold red]failed:[/] {escape(error.sentence or str(error))}", soft_wrap=True)
        if as_json:
            print(json.dumps({"ok": False, "problems": [error.sentence or str(error).splitlines()[0]]}, indent=2))
        return 1
    result = checked(options, measured)
    result["seconds"] = round(time.monotonic() - started, 1)
    write_files(options, measured, result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_result(console, options, result)
    return 0 if result["ok"] else 1


# ---------------------------------------------------------------- engines


def make_job(options: DemoOptions, model: str) -> dict[str, Any]:
    """Return the job that all four engines run."""
    speculation: dict[str, Any] = {
        "method": options.method,
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    if options.method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if options.draft_model is not None:
        speculation["model"] = options.draft_model
    engine: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": not options.own_model,
        "seed": 0,
        "max_model_len": MODEL_TOKENS,
        "max_num_seqs": MAX_RUNNING,
        "max_num_batched_tokens": max(BATCH_TOKENS, MAX_RUNNING * (options.num_speculative_tokens + 1)),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": BLOCKS,
        "enforce_eager": not options.compile,
        "disable_log_stats": False,
        "speculative_config": speculation,
    }
    if torch.cuda.is_available():
        engine["gpu_memory_utilization"] = 0.4  # two engines at a time
    return {"engine": engine, "requests": [asdict(request) for request in _requests(options)]}


def job_of_side(options: DemoOptions, job: dict[str, Any], side: str) -> dict[str, Any]:
    """Give mode stage extra blocks for its shadow pages, so that the schedulers of both sides see caches of
    one size."""
    if options.modes[side] != "stage":
        return job
    shadow = num_shadow_blocks(MAX_RUNNING, options.num_speculative_tokens, BLOCK_SIZE)
    engine = job["engine"]
    return job | {"engine": engine | {"num_gpu_blocks_override": engine["num_gpu_blocks_override"] + shadow}}


def _requests(options: DemoOptions) -> list[Request]:
    return text_requests(options.max_tokens) if options.own_model else tiny_llama_requests(options.max_tokens)


def _measure(options: DemoOptions, console: Console) -> dict[str, Any]:
    tasks = Tasks(console, 6 if options.own_model else 7)
    models = dict.fromkeys(PARTS, options.model)
    if not options.own_model:
        with tasks.task("creating two models: " + ", ".join(options.models.values())):
            models = {part: str(write_tiny_llama(options.output / part, size=SIZES[part])) for part in PARTS}
    # Half the tokens for the larger model, which makes them again in every round.
    shorter = {"audited": options, "timed": replace(options, max_tokens=max(options.max_tokens // 2, 8))}
    jobs = {part: make_job(shorter[part], str(model)) for part, model in models.items()}
    if not options.own_model:
        for part, job in jobs.items():
            job["engine"]["dtype"] = own_dtype(part)
    with tasks.task("starting two engines, vanilla vLLM and NWOR, both audited"):
        engines = start_engines(options, jobs["audited"], audit=True)
    try:
        with tasks.task(f"running {len(jobs['audited']['requests'])} requests in both, every byte compared"):
            audited = _run_audited(engines)
    finally:
        close_all(engines.values())
    with tasks.task("starting two more engines, without an audit"):
        engines = start_engines(options, jobs["timed"], audit=False)
    try:
        with tasks.task("timing them in turns", options.rounds) as advance:
            timed = run_timed(options, engines, advance)
    finally:
        close_all(engines.values())
    return {"audited": audited, "timed": timed} | run_library(options, tasks.task)


def run_library(
    options: DemoOptions, task: Callable[[str], AbstractContextManager[object]]
) -> dict[str, dict[str, Any]]:
    """Run the parts without vLLM, in a separate process. Each part runs inside ``with task(title):``."""
    job = {"num_speculative_tokens": options.num_speculative_tokens}
    environment = engine_environment("off", audit=False, offline=True)
    program = ("-m", "nwor_ops.cli.demo_library")
    process = EngineProcess("library", job, options.output, environment, program)
    try:
        answers: dict[str, dict[str, Any]] = {}
        for part, what in LIBRARY_PARTS.items():
            with task(what):
                if not answers:
                    process.wait_until_ready()
                answers[part] = process.ask(part)
        return answers
    finally:
        process.close()


def start_engines(options: DemoOptions, job: dict[str, Any], audit: bool) -> dict[str, EngineProcess]:
    """Start one engine per side in parallel, and wait until all are ready."""
    suffix = "audited" if audit else "timed"
    engines = {
        side: EngineProcess(
            f"{side}-{suffix}",
            job_of_side(options, job, side),
            options.output,
            engine_environment(mode, audit, offline=not options.own_model),
        )
        for side, mode in options.modes.items()
    }
    try:
        for engine in engines.values():
            engine.wait_until_ready()
    except BaseException:
        close_all(engines.values())
        raise
    return engines


def _run_audited(engines: dict[str, EngineProcess]) -> dict[str, dict[str, Any]]:
    def run(engine: EngineProcess) -> dict[str, Any]:
        answer = engine.ask("run")
        return answer | {"tokens": [answer["tokens"]]} | engine.ask("report")

    with ThreadPoolExecutor(len(engines)) as pool:
        return dict(zip(engines, pool.map(run, engines.values()), strict=True))


def run_timed(
    options: DemoOptions, engines: dict[str, EngineProcess], advance: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Time the engines. Only one runs at a time, and the sides take turns, so that both see the same machine."""
    runs = {side: [engine.ask("run")] for side, engine in engines.items()}  # the warm-up
    started = time.monotonic()
    for number in range(options.rounds):
        if number >= FEWEST_ROUNDS and time.monotonic() - started > TIMING_SECONDS:
            break
        order = list(engines) if number % 2 == 0 else list(reversed(engines))
        for side in order:
            runs[side].append(engines[side].ask("run"))
        advance()
    return {side: timed_figures(answers) | engines[side].ask("report") for side, answers in runs.items()}


def timed_figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of one side. The first answer is the warm-up and does not count."""
    counted = answers[1:]
    return {
        "tokens": [answer["tokens"] for answer in answers],
        "rates": [sum(map(len, answer["tokens"])) / answer["seconds"] for answer in counted],
        "step_ms": [1e3 * answer["seconds"] / answer["steps"] for answer in counted],
    }
