"""``nwor-ops demo``: show the three features.

- Recurrent states and the draft loop: engines of ``examples/`` run with the library in plain PyTorch
  (``demo_library``).
- The KV transaction: two real vLLM engines run the same requests, without and with NWOR. The audit compares every byte
  of their caches after every step.
"""

from __future__ import annotations

import pathlib
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nwor_ops.cli import demo_library
from nwor_ops.cli.demo_picture import draw_caches
from nwor_ops.cli.report import BAD, GOOD, Report, Stopped, make_folder
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all, engine_environment
from nwor_ops.testing.tiny_llama import MAX_TOKENS, write_tiny_llama
from nwor_ops.testing.workload import MAX_RUNNING, tiny_llama_requests
from nwor_ops.transaction.shadow_pages import num_shadow_blocks

SIDES = ("vanilla", "nwor")
NUM_DRAFTS, OUTPUT_TOKENS = 4, 64  # of a request, at most
BLOCK_SIZE, BLOCKS = 32, 64
# Smaller than a prompt may be, so that prompts come in chunks together with other requests' drafts.
BATCH_TOKENS = 64
# The workload must have both accepted and rejected drafts.
ACCEPTANCE = (0.2, 0.8)


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command; see ``nwor-ops demo --help``."""

    output: pathlib.Path
    mode: str = "cow"

    @property
    def modes(self) -> dict[str, str]:
        return {"vanilla": "off", "nwor": self.mode}

    @property
    def titles(self) -> dict[str, str]:
        return {"vanilla": "vanilla vLLM", "nwor": f"NWOR ({self.mode})"}


def run_demo(options: DemoOptions, report: Report) -> int:
    """Run the demo, print and write the results, and return the exit code. Raises Stopped."""
    make_folder(options.output)
    started = time.monotonic()
    library = run_library(report)
    try:
        engines = run_engines(options, report)
    except EngineFailed as error:
        raise Stopped(str(error), 1) from None
    result = summarize(options, engines, library) | {"seconds": round(time.monotonic() - started, 1)}
    report.write_json(options.output, "result.json", result)
    caches = {options.titles[side]: engines[side].get("cache", {}) for side in SIDES}
    if any(caches.values()):
        audit = result["nwor"]["audit"] or result["vanilla"]["audit"]
        counts = f"{audit['drafted']:,} drafts verified, {audit['rejected']:,} rejected"
        headline = f"The paged KV cache after the last request: {counts}"
        report.write(options.output, "cache.png", lambda path: draw_caches(caches, path, headline))
    report.json(result)
    print_result(report, options, result)
    return 0 if result["ok"] else 1


# ---------------------------------------------------------------- engines


def make_job(model: str, mode: str = "off") -> dict[str, Any]:
    """Return the job of :class:`nwor_ops.cli.demo_engine.DemoEngine`: the demo's requests, for a model.

    Mode stage gets extra blocks for its shadow pages, so that the schedulers of both sides see caches of one size.
    """
    shadow = num_shadow_blocks(MAX_RUNNING, NUM_DRAFTS, BLOCK_SIZE) if mode == "stage" else 0
    lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "seed": 0,
        "max_model_len": MAX_TOKENS,
        "max_num_seqs": MAX_RUNNING,
        "max_num_batched_tokens": BATCH_TOKENS,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": BLOCKS + shadow,
        "enforce_eager": True,
        "speculative_config": lookup | {"num_speculative_tokens": NUM_DRAFTS},
    }
    if torch.cuda.is_available():
        engine["gpu_memory_utilization"] = 0.4  # two engines at a time
    return {"engine": engine, "requests": [asdict(request) for request in tiny_llama_requests(OUTPUT_TOKENS)]}


def run_engines(options: DemoOptions, report: Report) -> dict[str, dict[str, Any]]:
    """Run the requests in one audited engine per side. Return versions, tokens and counts by side."""
    model = str(write_tiny_llama(options.output / "model"))
    engines: dict[str, EngineProcess] = {}
    try:
        with report.task("starting two engines, vanilla vLLM and NWOR, both audited"):
            for side, mode in options.modes.items():
                engines[side] = EngineProcess(
                    side, make_job(model, mode), options.output, engine_environment(mode, audit=True)
                )
            versions = {side: engine.wait_until_ready() for side, engine in engines.items()}
        with report.task("running the requests in both, every byte compared"), ThreadPoolExecutor(len(engines)) as pool:
            runs = pool.map(lambda engine: engine.ask("run") | engine.ask("report"), engines.values())
            return {side: run | {"versions": versions[side]} for side, run in zip(engines, runs, strict=True)}
    finally:
        close_all(engines.values())


def run_library(report: Report) -> dict[str, dict[str, Any]]:
    """Run the parts without vLLM."""
    with report.task("decoding with one recurrent state per request"):
        recurrent = demo_library.recurrent_states(NUM_DRAFTS)
    with report.task("drafting eagerly, and as captured"):
        return {"recurrent": recurrent, "draft_loop": demo_library.draft_loop(NUM_DRAFTS)}


# ---------------------------------------------------------------- checks


def summarize(
    options: DemoOptions, engines: dict[str, dict[str, Any]], library: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the result of the demo: figures, and a sentence for each check that failed.

    Args:
        options: the options of the command.
        engines: the answers of both engines, by side.
        library: the answers of the parts without vLLM.
    """
    tokens = engines["vanilla"]["tokens"]
    result: dict[str, Any] = {
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "versions": engines["nwor"]["versions"],
        "num_speculative_tokens": NUM_DRAFTS,
        "requests": len(tokens),
        "output_tokens": sum(map(len, tokens)),
        "outputs_identical": engines["nwor"]["tokens"] == tokens,
    } | library
    for side in SIDES:
        result[side] = {"mode": options.modes[side], "audit": engines[side].get("audit")}
    result["problems"] = list(problems(options, result))
    result["ok"] = not result["problems"]
    return result


def problems(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for every check that failed."""
    yield from _recurrent_problems(result["recurrent"])
    yield from _draft_loop_problems(result["draft_loop"])
    if not result["outputs_identical"]:
        yield "the engines did not generate the same tokens"
    missing = [side for side in SIDES if result[side]["audit"] is None]
    for side in missing:
        yield f"{options.titles[side]} was not audited: nwor_ops was not active in that engine"
    if not missing:
        yield from _transaction_problems(options, *(result[side]["audit"] for side in SIDES))


def _transaction_problems(options: DemoOptions, vanilla: dict[str, Any], nwor: dict[str, Any]) -> Iterator[str]:
    if stale := max(nwor["stale_rows"], nwor["stale_rows_at_end"]):
        yield f"NWOR left {stale} stale rows in the cache"
    if options.mode == "stage" and nwor["exposed_rows"]:
        yield f"NWOR wrote {nwor['exposed_rows']} rows of rejected drafts to pages of a request"
    if options.mode == "stage" and nwor["moments"] != 2 * nwor["steps"]:
        moments, steps = nwor["moments"], nwor["steps"]
        yield f"the audit compared {moments} times during steps, not twice in each of {steps} steps"
    low, high = ACCEPTANCE
    if not low <= (acceptance := vanilla["accepted"] / max(1, vanilla["drafted"])) <= high:
        share = f"{acceptance:.0%} of the drafts were accepted, outside {low:.0%} to {high:.0%}"
        yield f"the workload needs accepted and rejected drafts: {share}"
    if not vanilla["stale_rows"]:
        yield "the workload needs rejected drafts: vanilla vLLM left no stale row"


def _recurrent_problems(recurrent: dict[str, Any]) -> Iterator[str]:
    if not recurrent["same_as_plain"]:
        yield "recurrent states: decoding with drafts gave other tokens than plain decoding"
    if not recurrent["accepted"] or not recurrent["rejected"]:
        yield "recurrent states: the workload needs accepted and rejected drafts"
    every, one = recurrent["bytes"]["every_state"], recurrent["bytes"]["state"] + recurrent["bytes"]["record"]
    if one >= every:
        taken = f"{one:,} bytes, not less than the {every:,} of K + 1 states"
        yield f"recurrent states: one state and its record took {taken}"


def _draft_loop_problems(loop: dict[str, Any]) -> Iterator[str]:
    for mode in ("step", "loop"):
        if not loop[mode]["same_as_eager"]:
            yield f"draft loop: mode {mode} made other drafts than eager code"
    if loop["loop"]["graphs"] != 2:
        yield f"draft loop: a captured step replayed {loop['loop']['graphs']} graphs, not 2"
    counts = {mode: loop[mode]["kernels"] + loop[mode]["graphs"] for mode in ("eager", "step", "loop")}
    if not counts["eager"] > counts["step"] > counts["loop"]:
        yield f"draft loop: launches per step must fall from eager to step to loop, got {counts}"


# ---------------------------------------------------------------- output


def print_result(report: Report, options: DemoOptions, result: dict[str, Any]) -> None:
    """Print a table for each feature, the conclusion, and a sentence for each problem."""
    recurrent = result["recurrent"]
    size = recurrent["bytes"]
    report.table([
        ("Hybrid models: a small Llama in torch", f"{NUM_DRAFTS + 1} states", "NWOR (one state)"),
        ("bytes per request, with the record", f"{size['every_state']:,}", f"{size['state'] + size['record']:,}"),
        ("drafts accepted, rejected", "", f"{recurrent['accepted']:,}, {recurrent['rejected']:,}"),
        ("the tokens of plain decoding", "", _yes(recurrent["same_as_plain"])),
    ])  # fmt: skip
    loop = result["draft_loop"]
    eager, captured = loop["eager"], loop["loop"]
    same = captured["same_as_eager"] and loop["step"]["same_as_eager"]
    report.table([
        ("Draft models: a small drafter in torch", "eager", "NWOR (captured)"),
        ("launches per step", f"{eager['kernels']:,}", f"{captured['graphs']} graphs, {captured['kernels']} kernels"),
        (f"the same {loop['drafts']:,} drafts", "", _yes(same)),
    ])  # fmt: skip
    if loop["device"] == "cpu":
        report.line("A CPU has no CUDA graphs: stand-ins run their bodies, and each replay counts")
        report.line("as one launch.\n")
    audits = [result[side]["audit"] for side in SIDES]
    report.table([
        ("KV transaction: a vLLM engine, audited", *options.titles.values()),
        _counts("steps, verify steps", audits, "steps", "verify_steps"),
        _counts("drafts accepted, rejected", audits, "accepted", "rejected"),
        _counts("rejected rows before sampling (sum)", audits, "exposed_rows"),
        _counts("stale rows left after a step (sum)", audits, "stale_rows"),
        _counts("stale rows in the cache at the end", audits, "stale_rows_at_end"),
        ("the same tokens", "", _yes(result["outputs_identical"])),
    ])  # fmt: skip
    versions = result["versions"]
    report.line(f"vLLM {versions['vllm']}, torch {versions['torch']}, nwor_ops {versions['nwor_ops']}")
    report.line(f"{versions['device']}; K = {NUM_DRAFTS}; {result['seconds']:.0f} s in total")
    report.line(f"picture: {options.output / 'cache.png'}, all figures: {options.output / 'result.json'}")
    for problem in result["problems"]:
        report.line(problem, "not as promised", BAD)
    if result["ok"]:
        kept = {"cow": "left a byte in the cache", "stage": "was ever in a page of a request"}
        report.line(f"the same tokens, and no rejected draft {kept[options.mode]}", "as promised", GOOD)


def _counts(label: str, sides: Any, *names: str) -> tuple[str, ...]:
    return label, *(", ".join(f"{side[name]:,}" for name in names) if side else "-" for side in sides)


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"
