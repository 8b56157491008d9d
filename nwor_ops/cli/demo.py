"""``nwor-ops demo``: the same requests through a real vLLM engine, without and with NWOR.

Two engines are audited: one runs vanilla vLLM and only watches, one runs NWOR, and every byte of the
cache is compared after every step. Two more engines are timed, without an audit, in turns.
"""

from __future__ import annotations

import json
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nwor_ops.cli.engine_process import EngineFailed, EngineProcess, engine_environment
from nwor_ops.cli.picture import cache_panels, draw_caches
from nwor_ops.cli.tiny_llama import write_tiny_llama
from nwor_ops.cli.workload import MAX_RUNNING, Request, text_requests, tiny_llama_requests
from nwor_ops.shadow import num_shadow_blocks

SIDES = ("vanilla", "nwor")
MODEL_TOKENS = 512
BLOCK_SIZE = 32
BLOCKS = 64
# Fewer than a prompt may have: prompts come in chunks, beside other requests' drafts.
BATCH_TOKENS = 64
# On a busy machine the timing stops after so long, but not before so many rounds.
TIMING_SECONDS = 40.0
FEWEST_ROUNDS = 3
# Both sides must be seen: drafts that were accepted, and drafts that were not.
ACCEPTANCE = (0.2, 0.8)


@dataclass(frozen=True)
class DemoOptions:
    """What was asked for; see ``nwor-ops demo --help``."""

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
    def modes(self) -> dict[str, str]:
        """What each side runs in."""
        return {"vanilla": "off", "nwor": self.mode}

    @property
    def titles(self) -> dict[str, str]:
        return {"vanilla": "vanilla vLLM", "nwor": f"NWOR ({self.mode})"}


def run_demo(options: DemoOptions, as_json: bool) -> int:
    """Run, print and write everything; the exit code."""
    console = Console(stderr=as_json, highlight=False)
    started = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        measured = _measure(options, console)
    except EngineFailed as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}", soft_wrap=True)
        if as_json:
            print(json.dumps({"ok": False, "problems": [str(error).splitlines()[0]]}, indent=2))
        return 1
    result = _judged(options, measured)
    result["seconds"] = round(time.monotonic() - started, 1)
    _write_files(options, measured, result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _print_result(console, options, result)
    return 0 if result["ok"] else 1


# ---------------------------------------------------------------- running the engines


def make_job(options: DemoOptions, model: str) -> dict[str, Any]:
    """What each engine is asked to do: the same for all four."""
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
    """To the scheduler the caches of both sides have one size: what mode stage withholds comes on top."""
    if options.modes[side] != "stage":
        return job
    spare = num_shadow_blocks(MAX_RUNNING, options.num_speculative_tokens, BLOCK_SIZE)
    engine = job["engine"]
    return job | {"engine": engine | {"num_gpu_blocks_override": engine["num_gpu_blocks_override"] + spare}}


def _requests(options: DemoOptions) -> list[Request]:
    return text_requests(options.max_tokens) if options.own_model else tiny_llama_requests(options.max_tokens)


def _measure(options: DemoOptions, console: Console) -> dict[str, Any]:
    model = options.model
    if model is None:
        with _shown(console, "making a small Llama"):
            model = str(write_tiny_llama(options.output / "model"))
    job = make_job(options, model)
    with _shown(console, f"{len(job['requests'])} requests, audited: vanilla vLLM and NWOR at the same time"):
        audited = _run_audited(options, job)
    with _shown(console, "starting two more engines, without an audit"):
        engines = start_engines(options, job, audit=False)
    try:
        with _shown(console, f"timing them in turns, up to {options.rounds} rounds each"):
            timed = run_timed(options, engines)
    finally:
        close_engines(engines)
    return {"audited": audited, "timed": timed}


@contextmanager
def _shown(console: Console, what: str) -> Iterator[None]:
    started = time.monotonic()
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        console.print(f"{what} ...", soft_wrap=True)
        yield
    console.print(f"[green]done[/] in {time.monotonic() - started:4.0f} s: {what}", soft_wrap=True)


def start_engines(options: DemoOptions, job: dict[str, Any], audit: bool) -> dict[str, EngineProcess]:
    """One engine per side, started together, all ready."""
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


def _run_audited(options: DemoOptions, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    engines = start_engines(options, job, audit=True)
    try:
        with ThreadPoolExecutor(len(engines)) as pool:
            answers = pool.map(lambda engine: engine.ask("run") | engine.ask("report"), engines.values())
            return dict(zip(engines, answers, strict=True))
    finally:
        close_engines(engines)


def run_timed(options: DemoOptions, engines: dict[str, EngineProcess]) -> dict[str, dict[str, Any]]:
    """Only one engine runs at a time, and the sides take turns, so that both see the same machine."""
    tokens = {side: engine.ask("run")["tokens"] for side, engine in engines.items()}  # warms up as well
    rates: dict[str, list[float]] = {side: [] for side in engines}
    started = time.monotonic()
    for number in range(options.rounds):
        if number >= FEWEST_ROUNDS and time.monotonic() - started > TIMING_SECONDS:
            break
        order = list(engines) if number % 2 == 0 else list(reversed(engines))
        for side in order:
            answer = engines[side].ask("run")
            rates[side].append(sum(map(len, answer["tokens"])) / answer["seconds"])
    return {side: {"tokens": tokens[side], "rates": rates[side]} | engines[side].ask("report") for side in engines}


# ---------------------------------------------------------------- judging


def _judged(options: DemoOptions, measured: dict[str, Any]) -> dict[str, Any]:
    sides = {side: _side_result(options, measured, side) for side in SIDES}
    runs = [measured[kind][side]["tokens"] for kind in ("audited", "timed") for side in SIDES]
    drafted, accepted = (sides["vanilla"]["vllm"][name] for name in ("drafted", "accepted"))
    result: dict[str, Any] = {
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "versions": measured["audited"]["nwor"]["versions"],
        "model": options.model or "a small Llama with made-up weights, nwor_ops/cli/tiny_llama.py",
        "method": options.method,
        "draft_model": options.draft_model,
        "num_speculative_tokens": options.num_speculative_tokens,
        "enforce_eager": not options.compile,
        "requests": len(runs[0]),
        "output_tokens": sum(map(len, runs[0])),
        "acceptance": accepted / drafted if drafted else 0.0,
        "outputs_identical": all(run == runs[0] for run in runs),
        **sides,
        "speed_ratio": sides["nwor"]["tokens_per_second"]["median"] / sides["vanilla"]["tokens_per_second"]["median"],
    }
    result["problems"] = list(_problems(options, result))
    result["warnings"] = list(_workload_remarks(result)) if options.own_model else []
    result["ok"] = not result["problems"]
    return result


def _side_result(options: DemoOptions, measured: dict[str, Any], side: str) -> dict[str, Any]:
    audited, timed = measured["audited"][side], measured["timed"][side]
    session = audited["sessions"][0] if audited["sessions"] else {}
    rates = timed["rates"]
    return {
        "mode": options.modes[side],
        "session": session.get("description"),
        "audit": session.get("audit"),
        "stats": session.get("stats"),
        "vllm": audited["vllm"],
        "timed_rounds": len(rates),
        "timed_mode": timed["sessions"][0]["mode"] if timed["sessions"] else "none",
        "tokens_per_second": {
            "median": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "rounds": rates,
        },
    }


def _problems(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    """Everything that is not as promised, a sentence each."""
    for side in SIDES:
        if result[side]["audit"] is None:
            yield f"{options.titles[side]} was not audited: nwor_ops was not active in that engine"
    if result["nwor"]["timed_mode"] != options.mode or result["vanilla"]["timed_mode"] != "none":
        yield "the timed engines did not run in the modes that were asked for"
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
            yield f"the audit looked {looked} times, not twice in the middle of each of {steps} steps"
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
    if not low <= result["acceptance"] <= high:
        yield (
            f"the demo's workload does not show both sides: {result['acceptance']:.0%} of the drafts were "
            f"accepted, outside {low:.0%} to {high:.0%}"
        )
    if result["vanilla"]["audit"] and not result["vanilla"]["audit"]["stale_rows"]:
        yield "the demo's workload does not show both sides: vanilla vLLM left no stale row"


# ---------------------------------------------------------------- showing


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
    for row in _table_rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"vLLM {versions['vllm']}, torch {versions['torch']}, nwor_ops {versions['nwor_ops']}, "
        f"{versions['device']}; {result['seconds']:.0f} s in all"
    )
    console.print(f"picture: {options.output / 'cache.png'}, all figures: {options.output / 'result.json'}")
    for warning in result["warnings"]:
        console.print(f"[yellow]note:[/] {escape(warning)}", soft_wrap=True)
    for problem in result["problems"]:
        console.print(f"[bold red]not as promised:[/] {escape(problem)}", soft_wrap=True)
    if result["ok"]:
        kept = {
            "cow": "no rejected draft left a byte in the cache",
            "stage": "at no moment was a rejected draft's row in a page of a request",
        }
        console.print(f"[bold green]as promised:[/] the same tokens, and {kept[options.mode]}")


def _table_rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    vanilla, nwor = result["vanilla"], result["nwor"]
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
        yield label, *(f"{side['audit'][name]:,}" if side["audit"] else "-" for side in (vanilla, nwor))
        if name == "rejected":
            shares = (side["vllm"]["accepted"] / max(1, side["vllm"]["drafted"]) for side in (vanilla, nwor))
            yield "acceptance", *(f"{share:.1%}" for share in shares)
    identical = "yes" if result["outputs_identical"] else "[bold red]no[/]"
    yield "outputs identical, token by token", "", identical
    rates = [side["tokens_per_second"] for side in (vanilla, nwor)]
    yield "output tok/s, median", *(f"{rate['median']:,.0f}" for rate in rates)
    yield "  lowest to highest", *(f"{rate['lowest']:,.0f} to {rate['highest']:,.0f}" for rate in rates)
    yield "  NWOR / vanilla", "", f"{result['speed_ratio']:.3f}"
