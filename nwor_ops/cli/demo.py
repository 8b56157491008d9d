"""``nwor-ops demo``: run the same requests through a real vLLM engine with and without NWOR.

Two engines are audited, and every byte of the cache is compared after every step. One of them runs vanilla vLLM, the
other runs NWOR. Two more engines take turns and are timed, without an audit and with a larger model. A step of the
audited model is too short to tell anything about the speed of a served model.
"""

from __future__ import annotations

import json
import pathlib
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from nwor_ops.cli.picture import cache_panels, draw_caches
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, engine_environment
from nwor_ops.testing.tiny_llama import TIMED_SIZE, Size, write_tiny_llama
from nwor_ops.testing.workload import MAX_RUNNING, Request, text_requests, tiny_llama_requests
from nwor_ops.transaction.shadow_pages import num_shadow_blocks

SIDES = ("vanilla", "nwor")
PARTS = ("audited", "timed")
SIZES = {"audited": Size(), "timed": TIMED_SIZE}
SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
MODEL_TOKENS = 512
BLOCK_SIZE = 32
BLOCKS = 64
# Smaller than a prompt may be, so that prompts come in chunks together with other requests' drafts.
BATCH_TOKENS = 64
# On a busy machine the timing stops after this time, but never before this number of rounds.
TIMING_SECONDS = 30.0
FEWEST_ROUNDS = 3
# A larger ratio between the rounds of one engine means that the machine is busy.
STEADY = 1.5
# The workload must have both accepted and rejected drafts.
ACCEPTANCE = (0.2, 0.8)


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command; see ``nwor-ops demo --help``."""

    output: pathlib.Path
    mode: str = "cow"
    model: str | None = None
    method: str = "ngram"
    draft_model: str | None = None
    num_speculative_tokens: int = 4
    max_tokens: int = 64
    rounds: int = 20
    compile: bool = False

    @property
    def own_model(self) -> bool:
        return self.model is not None

    @property
    def models(self) -> dict[str, str]:
        """A description of each part's model, for output."""
        return {part: self.model or f"{SIZES[part]}, {SHORT_DTYPES[own_dtype(part)]}" for part in PARTS}

    @property
    def modes(self) -> dict[str, str]:
        """The mode of each side."""
        return {"vanilla": "off", "nwor": self.mode}

    @property
    def titles(self) -> dict[str, str]:
        return {"vanilla": "vanilla vLLM", "nwor": f"NWOR ({self.mode})"}


def check_options(options: DemoOptions) -> None:
    """Check the options that can be checked without an engine.

    A name that is not a folder may be a model that vLLM downloads, unless it is spelled like a path.

    Raises:
        ValueError: an option is invalid; the message is a sentence.
    """
    for option, model in (("--model", options.model), ("--draft-model", options.draft_model)):
        if model is None:
            continue
        folder = pathlib.Path(model).expanduser()
        if not folder.exists():
            if model.startswith(("/", ".", "~")):
                raise ValueError(f"{option}: there is no folder {model}")
        elif not folder.is_dir():
            raise ValueError(f"{option}: {model} is a file, not the folder of a model")
        elif not (folder / "config.json").is_file():
            raise ValueError(f"{option}: {model} has no config.json, so it is not the folder of a model")
    if options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output: {options.output} is a file, not a folder")


def own_dtype(part: str) -> str:
    """Return the dtype of the demo's own models.

    On a processor without bf16 instructions, a matrix product in bf16 takes four times as long as in float32, and the
    timed part would take minutes.
    """
    return "float32" if part == "timed" and not torch.cuda.is_available() else "bfloat16"


def run_demo(options: DemoOptions, as_json: bool) -> int:
    """Run the demo, print and write the results, and return the exit code."""
    console = Console(stderr=as_json, highlight=False)
    started = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        measured = _measure(options, console)
    except EngineFailed as error:
        console.print(f"[bold red]failed:[/] {escape(error.sentence or str(error))}", soft_wrap=True)
        if as_json:
            print(json.dumps({"ok": False, "problems": [error.sentence or str(error).splitlines()[0]]}, indent=2))
        return 1
    result = _checked(options, measured)
    result["seconds"] = round(time.monotonic() - started, 1)
    _write_files(options, measured, result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print_result(console, options, result)
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
    spare = num_shadow_blocks(MAX_RUNNING, options.num_speculative_tokens, BLOCK_SIZE)
    engine = job["engine"]
    return job | {"engine": engine | {"num_gpu_blocks_override": engine["num_gpu_blocks_override"] + spare}}


def _requests(options: DemoOptions) -> list[Request]:
    return text_requests(options.max_tokens) if options.own_model else tiny_llama_requests(options.max_tokens)


def _measure(options: DemoOptions, console: Console) -> dict[str, Any]:
    stages = Stages(console, 4 if options.own_model else 5)
    models = dict.fromkeys(PARTS, options.model)
    if not options.own_model:
        with stages.stage("creating two models: " + ", ".join(options.models.values())):
            models = {part: str(write_tiny_llama(options.output / part, size=SIZES[part])) for part in PARTS}
    jobs = {part: make_job(options, str(model)) for part, model in models.items()}
    if not options.own_model:
        for part, job in jobs.items():
            job["engine"]["dtype"] = own_dtype(part)
    with stages.stage("starting two engines, vanilla vLLM and NWOR, both audited"):
        engines = start_engines(options, jobs["audited"], audit=True)
    try:
        with stages.stage(f"running {len(jobs['audited']['requests'])} requests in both, every byte compared"):
            audited = _run_audited(engines)
    finally:
        close_engines(engines)
    with stages.stage("starting two more engines, without an audit"):
        engines = start_engines(options, jobs["timed"], audit=False)
    try:
        with stages.stage("timing them in turns", options.rounds) as advance:
            timed = run_timed(options, engines, advance)
    finally:
        close_engines(engines)
    return {"audited": audited, "timed": timed}


class Stages:
    """Show the progress: a live line on a terminal, otherwise one line before and one line after each stage."""

    def __init__(self, console: Console, count: int) -> None:
        self._console = console
        self._count = count
        self._begun = 0

    @contextmanager
    def stage(self, what: str, most: int | None = None) -> Iterator[Callable[[], None]]:
        """Show one stage. Yields a function to call after each of its ``most`` parts."""
        self._begun += 1
        title = f"{self._begun}/{self._count} {what}"
        started = time.monotonic()
        if self._console.is_terminal:
            bar = () if most is None else (BarColumn(), MofNCompleteColumn())
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *bar, TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                task = progress.add_task(title, total=most)
                yield lambda: progress.advance(task)
        else:
            self._console.print(f"{title} ...", soft_wrap=True, markup=False)
            yield lambda: None
        self._console.print(f"[green]done[/] in {time.monotonic() - started:3.0f} s: {escape(title)}", soft_wrap=True)


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
        close_engines(engines)
        raise
    return engines


def close_engines(engines: dict[str, EngineProcess]) -> None:
    for engine in engines.values():
        engine.close()


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


# ---------------------------------------------------------------- checks


def _checked(options: DemoOptions, measured: dict[str, Any]) -> dict[str, Any]:
    sides = {side: _side_result(options, measured, side) for side in SIDES}
    tokens = {part: [run for side in SIDES for run in measured[part][side]["tokens"]] for part in PARTS}
    rounds = zip(*(measured["timed"][side]["rates"] for side in SIDES), strict=True)
    result: dict[str, Any] = {
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "versions": measured["audited"]["nwor"]["versions"],
        "models": options.models,
        "method": options.method,
        "draft_model": options.draft_model,
        "num_speculative_tokens": options.num_speculative_tokens,
        "enforce_eager": not options.compile,
        "requests": len(tokens["audited"][0]),
        "output_tokens": sum(map(len, tokens["audited"][0])),
        "acceptance": {part: _acceptance(measured[part]["vanilla"]["vllm"]) for part in PARTS},
        "outputs_identical": all(run == runs[0] for runs in tokens.values() for run in runs),
        **sides,
        "speed_ratio": _spread([nwor / vanilla for vanilla, nwor in rounds]),
    }
    result["problems"] = list(_problems(options, result))
    result["warnings"] = [*(_workload_remarks(result) if options.own_model else ()), *_machine_remarks(result)]
    result["ok"] = not result["problems"]
    return result


def _acceptance(counted: dict[str, int]) -> float:
    return counted["accepted"] / counted["drafted"] if counted["drafted"] else 0.0


def _spread(rounds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(rounds), "lowest": min(rounds), "highest": max(rounds), "rounds": rounds}


def _side_result(options: DemoOptions, measured: dict[str, Any], side: str) -> dict[str, Any]:
    audited, timed = measured["audited"][side], measured["timed"][side]
    session = audited["sessions"][0] if audited["sessions"] else {}
    return {
        "mode": options.modes[side],
        "session": session.get("description"),
        "audit": session.get("audit"),
        "stats": session.get("stats"),
        "vllm": audited["vllm"],
        "timed_vllm": timed["vllm"],
        "timed_mode": timed["sessions"][0]["mode"] if timed["sessions"] else "none",
        "step_ms": _spread(timed["step_ms"]),
        "tokens_per_second": _spread(timed["rates"]),
    }


def _problems(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for every check that failed."""
    for side in SIDES:
        if result[side]["audit"] is None:
            yield f"{options.titles[side]} was not audited: nwor_ops was not active in that engine"
    if result["nwor"]["timed_mode"] != options.mode or result["vanilla"]["timed_mode"] != "none":
        yield "the timed engines did not run in the requested modes"
    if not result["outputs_identical"]:
        yield "the engines did not generate the same tokens"
    if any(result[side]["audit"] is None for side in SIDES):
        return
    audit = result["nwor"]["audit"]
    if audit["stale_rows"] or audit["stale_rows_at_end"]:
        yield f"NWOR left {max(audit['stale_rows'], audit['stale_rows_at_end'])} stale rows in the cache"
    if options.mode == "stage":
        if audit["exposed_rows"]:
            yield f"NWOR wrote {audit['exposed_rows']} rows of rejected drafts to pages of a request"
        if audit["moments"] != 2 * audit["steps"]:
            looked, steps = audit["moments"], audit["steps"]
            yield f"the audit compared {looked} times during steps, not twice in each of {steps} steps"
    yield from _disagreements(options, result)
    if not options.own_model:
        yield from _workload_remarks(result)


def _disagreements(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    for side in SIDES:
        audit, vllm = result[side]["audit"], result[side]["vllm"]
        for name in ("drafted", "accepted"):
            if audit[name] != vllm[name]:
                title = options.titles[side]
                yield f"{title}: the audit counted {audit[name]} {name} tokens, vLLM's metrics {vllm[name]}"
    for name in ("drafted", "accepted", "rejected"):
        counted, seen = result["nwor"]["stats"][name], result["nwor"]["audit"][name]
        if counted != seen:
            yield f"NWOR counted {counted} {name} tokens on the device, the audit {seen}"


def _workload_remarks(result: dict[str, Any]) -> Iterator[str]:
    low, high = ACCEPTANCE
    for part, acceptance in result["acceptance"].items():
        if not low <= acceptance <= high:
            yield (
                f"the workload needs accepted and rejected drafts: {acceptance:.0%} of the drafts of the {part} part "
                f"were accepted, outside {low:.0%} to {high:.0%}"
            )
    if result["vanilla"]["audit"] and not result["vanilla"]["audit"]["stale_rows"]:
        yield "the workload needs rejected drafts: vanilla vLLM left no stale row"


def _machine_remarks(result: dict[str, Any]) -> Iterator[str]:
    rates = result["vanilla"]["tokens_per_second"]
    if rates["highest"] > STEADY * rates["lowest"]:
        yield (
            f"the rounds of vanilla vLLM vary from {rates['lowest']:,.0f} to {rates['highest']:,.0f} tok/s: "
            "the machine is busy, and the speeds are not reliable"
        )


# ---------------------------------------------------------------- output


def _write_files(options: DemoOptions, measured: dict[str, Any], result: dict[str, Any]) -> None:
    caches = {
        title: (measured["audited"][side]["sessions"] or [{"cache": {}}])[0]["cache"]
        for side, title in options.titles.items()
    }
    legend = {"0": "free", "1": "committed row", "2": "stale row of a rejected draft", "3": "shadow page"}
    (options.output / "cache.json").write_text(json.dumps({"states": legend, "caches": caches}, indent=1) + "\n")
    (options.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    if panels := cache_panels(caches):
        audit = result["nwor"]["audit"] or {}
        headline = (
            f"The paged KV cache after the last request: {audit.get('drafted', 0):,} drafts verified, "
            f"{audit.get('rejected', 0):,} rejected"
        )
        draw_caches(panels, options.output / "cache.png", headline)


def _print_result(console: Console, options: DemoOptions, result: dict[str, Any]) -> None:
    versions = result["versions"]
    eager = "no CUDA graphs, no torch.compile" if result["enforce_eager"] else "compiled"
    table = Table(title=f"{result['requests']} requests, {result['output_tokens']:,} output tokens, {eager}")
    table.add_column("", no_wrap=True)
    for title in options.titles.values():
        table.add_column(title, justify="right")
    for part, rows in (("audited", _audited_rows(result)), ("timed", _timed_rows(result))):
        table.add_section()
        table.add_row(f"[bold]{part}[/]: {escape(textwrap.shorten(result['models'][part], 30))}")
        for row in rows:
            table.add_row(*row)
    console.print(table)
    console.print(
        f"vLLM {versions['vllm']}, torch {versions['torch']}, nwor_ops {versions['nwor_ops']}, "
        f"{versions['device']}; {result['seconds']:.0f} s in total"
    )
    console.print(f"picture: {options.output / 'cache.png'}, all figures: {options.output / 'result.json'}")
    for warning in result["warnings"]:
        console.print(f"[yellow]note:[/] {escape(warning)}", soft_wrap=True)
    for problem in result["problems"]:
        console.print(f"[bold red]not as promised:[/] {escape(problem)}", soft_wrap=True)
    if result["ok"]:
        kept = {
            "cow": "no rejected draft left a byte in the cache",
            "stage": "no rejected draft was ever written to a page of a request",
        }
        console.print(f"[bold green]as promised:[/] the same tokens, and {kept[options.mode]}")


def _audited_rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    sides = [result[side] for side in SIDES]
    for label, name in (
        ("steps", "steps"),
        ("verify steps", "verify_steps"),
        ("drafted", "drafted"),
        ("accepted", "accepted"),
        ("rejected", "rejected"),
        ("rejected rows before sampling (sum)", "exposed_rows"),
        ("stale rows left after a step (sum)", "stale_rows"),
        ("stale rows in the cache at the end", "stale_rows_at_end"),
    ):
        yield label, *(f"{side['audit'][name]:,}" if side["audit"] else "-" for side in sides)
        if name == "rejected":
            yield "acceptance", *(f"{_acceptance(side['vllm']):.1%}" for side in sides)
    yield "outputs identical, both parts", "", "yes" if result["outputs_identical"] else "[bold red]no[/]"


def _timed_rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    sides = [result[side] for side in SIDES]
    yield "acceptance", *(f"{_acceptance(side['timed_vllm']):.1%}" for side in sides)
    yield "a step, median", *(f"{side['step_ms']['median']:.1f} ms" for side in sides)
    rates = [side["tokens_per_second"] for side in sides]
    yield "output tok/s, median", *(f"{rate['median']:,.0f}" for rate in rates)
    yield "  lowest to highest", *(f"{rate['lowest']:,.0f} to {rate['highest']:,.0f}" for rate in rates)
    ratio = result["speed_ratio"]
    yield f"NWOR / vanilla, median of {len(ratio['rounds'])} rounds", "", f"{ratio['median']:.3f}"
    yield "  lowest to highest", "", f"{ratio['lowest']:.3f} to {ratio['highest']:.3f}"
