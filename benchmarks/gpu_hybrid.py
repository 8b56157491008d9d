"""Measure one recurrent state per request in the engine that a user starts: vLLM's defaults, Qwen3.5's own class.

    python benchmarks/gpu_hybrid.py [--vanilla V ...] [--ours V] [--requests N ...] [--seconds S] [--quick] ...

The model has the Qwen3.5-9B shape, its layer for multi-token prediction and random weights. Both sides run with the
defaults of ``vllm serve``: prefix caching (``align``), FlashInfer's prefill on Hopper, warm-ups, asynchronous
scheduling, CUDA graphs. The benchmark sets dummy weights, no tokenizer, 36 GiB of cache and synthetic acceptance of
drafts. It also sets 8,192 tokens a batch, which ``vllm serve`` takes on an H200 and ``LLM`` does not.

The engine with one state per request stays on the GPU. One vanilla engine after another runs next to it. Both have a
cache of the same size, and they take turns. A vanilla engine is a name of ``VARIANTS``, or several joined by ``+``:

    default     vLLM's defaults, K = 3
    no_prefix   without prefix caching
    triton      with the Triton prefill
    bfloat16    with bfloat16 states
    drafts_N    with K = N; 0 is no speculation
    ring_R      with VLLM_NWOR_RING_ROWS=R, only for our engine
    chunk       with VLLM_NWOR_RECURRENT=chunk, only for our engine

Each draft is accepted with the probability that gives 2.5 tokens a step at K = 3, so K = 1 and 2 have 1.69 and 2.17.

With ``--ours drafts_0`` our engine does not speculate either. Its rows go to a separate file
(``gpu_hybrid_without_drafts.jsonl``), and the vanilla engines are ``drafts_0`` and ``bfloat16+drafts_0`` by default.
So do those of an engine with a ring, as ``--ours drafts_0+ring_6`` (``gpu_hybrid_without_drafts_ring.jsonl``), with
chunks, as ``--ours chunk`` (``gpu_hybrid_chunk.jsonl``), and with bfloat16 states.

Rows, of which each is written when it is measured:

    e2e_recurrent/over_V/N       output tok/s over variant V, N requests of 64 + 256 tokens together
    e2e_recurrent/over_best/N    the lowest of these: over the best vanilla
    tok_s_V/N, tok_s_recurrent_beside_V/N, running_V/N (most requests that ran together), acceptance_length_V/N
    ttft_ms_V/cold, /hit, /hit_at_once    first tokens of prompts that share a long prefix; hit_rate_V
    ttft_recurrent/over_V/...    our time over the variant's
    held_V/2048, held_recurrent/over_V    requests of 1,536 to 2,048 tokens that ran together in a full cache
    fits_V/2048, fits_recurrent/over_V    requests of 2,048 tokens that fit by vLLM's upper bound of their blocks

``--resume`` leaves out what the results already have for this commit and these versions. Needs one H200 (two engines of
60 GiB). The first two engines take 60 to 130 s to start, each further one 30 to 60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gpu_engine import (
    LLAMA_8B,
    QWEN_9B_SHAPE,
    SMALL,
    check_acceptance,
    engine_job,
    exit_status,
    launch_engine,
    log_folder,
    new_parser,
    speeds,
    visitor,
    write_shape,
)
from results import Row, circumstances, ratios, read, row, show, this_machine, write

from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all

NAME = "gpu_hybrid"
GIB, CACHE_GIB = 1 << 30, 36
# vLLM wants a block of states for each of max_num_seqs, and 12 GiB do not hold the default of an H100 (1,024).
SEQS_OF_SMALL_CACHE = 512
OURS = "recurrent"
REQUESTS = (1, 16, 64, 128, 384)
# Targets of two ratios: output tok/s over the best vanilla, and running requests over vLLM's defaults.
TARGETS = {1: 1.0, 16: 1.05, 64: 1.12, 128: 1.15}
TARGET_HELD = 2.1
RUNS_PER_ROUND = {1: 2, 16: 2}
# The fewest rounds; a quick run does no more.
ROUNDS = {384: 1}
LEAST_ROUNDS = 2
# Eight blocks of 576 tokens, and less than one.
PREFIX_TOKENS, SUFFIX_TOKENS = 4608, 300
TTFT_SINGLE, TTFT_AT_ONCE = 16, 8  # prompts of a round, one by one and together
SMALL_TOKENS = (512, 40)
FIT_TOKENS = 2048
HELD_PROMPT, HELD_REQUESTS = 1536, 480  # more than either cache holds
# By K: 1 + p + p^2 + p^3 = 2.5.
ACCEPTED = 0.6914
QWEN3_5_9B: dict[str, Any] = QWEN_9B_SHAPE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 262144,
    "attn_output_gate": True,
}


@dataclass(frozen=True)
class Variant:
    """How an engine differs from the default one.

    Attributes:
        engine: arguments of ``vllm.LLM``.
        drafts: K.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    drafts: int = 3


VARIANTS = {
    "default": Variant(),
    "no_prefix": Variant({"enable_prefix_caching": False}),
    "triton": Variant({"gdn_prefill_backend": "triton"}),
    "bfloat16": Variant({"mamba_ssm_cache_dtype": "bfloat16"}),
    **{f"drafts_{drafts}": Variant(drafts=drafts) for drafts in (0, 1, 2)},
    **{f"ring_{rows}": Variant({"additional_config": {"nwor": {"ring_rows": rows}}}) for rows in (4, 6, 8, 12)},
    "chunk": Variant({"additional_config": {"nwor": {"recurrent": "chunk"}}}),
}
# A run without --vanilla takes these: the defaults first, then what a user may find faster.
VANILLA = ("default", "bfloat16", "no_prefix+drafts_1", "drafts_2", "drafts_0", "triton")
VANILLA_QUICK = ("default", "bfloat16")
VANILLA_WITHOUT_DRAFTS = ("drafts_0", "bfloat16+drafts_0")


def variant_of(name: str) -> Variant:
    """Join the variants of a name like ``bfloat16+drafts_1``.

    Raises:
        ValueError: one of them is not a variant.
    """
    engine: dict[str, Any] = {}
    drafts = VARIANTS["default"].drafts
    for part in name.split("+"):
        if part not in VARIANTS:
            raise ValueError(f"{part!r} is not a variant; there are {', '.join(VARIANTS)}")
        engine |= VARIANTS[part].engine
        drafts = VARIANTS[part].drafts if part.startswith("drafts_") else drafts
    return Variant(engine, drafts)


def job_of(
    folder: pathlib.Path, variant: Variant, small: bool, block_size: int | None = None, cache_gib: int = CACHE_GIB
) -> dict[str, Any]:
    """Return the job of either side; the environment says which side it is."""
    if small:  # vLLM's CPU engine, to try the script: neither side has recurrent layers
        model = write_shape(folder / "target", LLAMA_8B | SMALL)
        drafter = write_shape(folder / "drafter", LLAMA_8B | SMALL | {"num_hidden_layers": 1})
        speculation: dict[str, Any] = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 2}
        job = engine_job(model, speculation, small)
        job["engine"] |= {"enable_prefix_caching": True, "kv_cache_memory_bytes": 1 << 26}
        if not variant.drafts:
            del job["engine"]["speculative_config"]
        return job | {"vocabulary": SMALL["vocab_size"], "max_tokens": 32, "counts_running": True}
    model = write_shape(folder / "target", QWEN3_5_9B)
    engine: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_log_stats": False,
        "max_num_batched_tokens": 8192,
        # No memory profiling: two engines share the GPU, with caches of one size.
        "kv_cache_memory_bytes": cache_gib * GIB,
        "gpu_memory_utilization": 0.2,
        **variant.engine,
    }
    if cache_gib < CACHE_GIB:
        engine["max_num_seqs"] = SEQS_OF_SMALL_CACHE
    if block_size is not None:
        engine["block_size"] = block_size
    if variant.drafts:
        engine["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": variant.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [round(ACCEPTED**place, 4) for place in range(1, variant.drafts + 1)],
        }
    return {
        "engine": engine,
        "prompt_tokens": 64,
        "max_tokens": 256,
        "vocabulary": QWEN3_5_9B["vocab_size"],
        "counts_running": True,
    }


def launch(side: str, job: dict[str, Any], folder: pathlib.Path, cache: pathlib.Path, small: bool) -> EngineProcess:
    environment = {} if small else {"VLLM_USE_FLASHINFER_SAMPLER": "1"}  # as by default
    if side == OURS and not small and "recurrent" not in job["engine"].get("additional_config", {}).get("nwor", {}):
        environment["VLLM_NWOR_RECURRENT"] = "1"
    return launch_engine(side.replace("+", "_"), job, folder, cache, "v2", environment)


def ready(engines: dict[str, EngineProcess], small: bool) -> None:
    """Wait for all of them, and check that one state per request is where it should be."""
    with ThreadPoolExecutor(len(engines)) as pool:
        found = dict(zip(engines, pool.map(EngineProcess.wait_until_ready, engines.values()), strict=True))
    for side, versions in found.items():
        print(f"{side}: {versions}", flush=True)
        if not small and bool(versions["one_states"]) != (side == OURS):
            raise RuntimeError(f"{side}: {versions['one_states'] or 'there is one state per draft'}")


def warm_up(engine: EngineProcess, requests: Iterable[int], tokens: tuple[int, int]) -> None:
    for count in requests:
        engine.ask(f"run {count}")
    engine.ask(f"ttft 2 {tokens[0]} {tokens[1]} 0 999")


def measure(engines: dict[str, EngineProcess], count: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of both sides. The sides alternate, and so does their order, until the time is up."""
    answers: dict[str, list[dict[str, Any]]] = {side: [] for side in engines}
    began, rounds = time.monotonic(), 0
    while rounds < ROUNDS.get(count, LEAST_ROUNDS) or time.monotonic() - began < seconds:
        for side in list(engines)[:: 1 if rounds % 2 == 0 else -1]:
            answers[side] += [engines[side].ask(f"run {count} {rounds}") for _ in range(RUNS_PER_ROUND.get(count, 1))]
        rounds += 1
    return answers


def figures(vanilla: str, count: int, answers: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """The rows of one vanilla engine and one load; raises if two sides with equal K accepted differently."""
    ours, theirs = answers[OURS], answers[vanilla]
    beside = f"{OURS}_beside_{vanilla}"
    rates = {OURS: speeds(ours), vanilla: speeds(theirs)}
    rows = [
        row(f"e2e_{OURS}/over_{vanilla}/{count}", ratios(rates, OURS, vanilla), "ratio", "higher"),
        row(f"tok_s_{beside}/{count}", rates[OURS], "tok/s", "higher", digits=1),
        row(f"tok_s_{vanilla}/{count}", rates[vanilla], "tok/s", "higher", digits=1),
    ]
    lengths = {}
    for side, name in ((OURS, beside), (vanilla, vanilla)):
        rows.append(
            row(f"running_{name}/{count}", [run["most_running"] for run in answers[side]], "requests", "higher")
        )
        found = [run["acceptance_length"] for run in answers[side] if run["acceptance_length"] is not None]
        if found:
            lengths[side] = sum(found) / len(found)
            rows.append(row(f"acceptance_length_{name}/{count}", [lengths[side]], "tokens", "higher"))
    if len(lengths) == 2 and variant_of(vanilla).drafts == variant_of("default").drafts:
        check_acceptance(f"{vanilla}, {count} requests", *lengths.values())
    return rows


def first_tokens(
    engines: dict[str, EngineProcess], rounds: Sequence[int], tokens: tuple[int, int]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Ask for prompts that share a prefix: one by one, then all together.

    The sides take turns at each prompt, because the host can be slower for a second at a time.

    Args:
        engines: the two sides.
        rounds: the number of each round. Prompts of rounds with one number share a prefix.
        tokens: lengths of the prefix and of the rest.
    """
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {side: {"single": [], "at_once": []} for side in engines}

    def ask(kind: str, requests: int, turn: int, number: int) -> None:
        command = f"ttft {requests} {tokens[0]} {tokens[1]} {int(kind == 'at_once')} {number}"
        for side in list(engines)[:: 1 if turn % 2 == 0 else -1]:
            answers[side][kind].append(engines[side].ask(command))

    for number in rounds:
        for place in range(TTFT_SINGLE):
            ask("single", 1, number + place, number)
        ask("at_once", TTFT_AT_ONCE, number, number)
    return answers


def first_token_figures(vanilla: str, answers: dict[str, dict[str, list[dict[str, Any]]]]) -> list[Row]:
    """Make rows of first tokens. A single prompt is a hit if the engine found a part of it in the prefix cache.

    The ratios of single prompts compare pairs: both hits, or both cold.
    """
    rows, samples = [], {}
    for side, found in answers.items():
        single = [(1e3 * run["seconds"][0], run["cached"][0], run["prompt_tokens"]) for run in found["single"]]
        at_once = [1e3 * seconds for run in found["at_once"] for seconds in run["seconds"]]
        samples[side] = single, at_once
        name = side if side == vanilla else f"{OURS}_beside_{vanilla}"
        later = [(cached, tokens) for place, (_, cached, tokens) in enumerate(single) if place % TTFT_SINGLE]
        times = {
            "cold": [time for time, cached, _ in single if not cached],
            "hit": [time for time, cached, _ in single if cached],
            "hit_at_once": at_once,
        }
        rows += [row(f"ttft_ms_{name}/{kind}", some, "ms", "lower", digits=2) for kind, some in times.items() if some]
        hit_rate = sum(cached for cached, _ in later) / sum(tokens for _, tokens in later)
        rows.append(row(f"hit_rate_{name}", [hit_rate], "ratio", "higher"))
    (ours, ours_at_once), (theirs, theirs_at_once) = samples[OURS], samples[vanilla]
    pairs = [(mine[0] / other[0], mine[1], other[1]) for mine, other in zip(ours, theirs, strict=True)]
    ratios_of = {
        "cold": [ratio for ratio, mine, other in pairs if not mine and not other],
        "hit": [ratio for ratio, mine, other in pairs if mine and other],
        "hit_at_once": [mine / other for mine, other in zip(ours_at_once, theirs_at_once, strict=True)],
    }
    return rows + [
        row(f"ttft_{OURS}/over_{vanilla}/{kind}", some, "ratio", "lower") for kind, some in ratios_of.items() if some
    ]


def fit_figures(vanilla: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[Row]:
    """Requests that the two caches hold, and the tokens of a block of attention."""
    for side, found in ((OURS, ours), (vanilla, theirs)):
        print(f"{side}: {found}", flush=True)
    return [
        row(f"fits_{OURS}/{FIT_TOKENS}", [ours["requests"]], "requests", "higher"),
        row(f"fits_{vanilla}/{FIT_TOKENS}", [theirs["requests"]], "requests", "higher"),
        row(f"fits_{OURS}/over_{vanilla}", [ours["requests"] / theirs["requests"]], "ratio", "higher"),
        row(f"block_tokens_{OURS}", [max(ours["block_sizes"])], "tokens", "higher"),
        row(f"block_tokens_{vanilla}", [max(theirs["block_sizes"])], "tokens", "higher"),
    ]


def held_figures(vanilla: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[Row]:
    """Return rows with the most requests that ran together in a full cache.

    Raises:
        RuntimeError: a cache was never full.
    """
    for side, found in ((OURS, ours), (vanilla, theirs)):
        if not found["waited"]:
            raise RuntimeError(f"{side}: all requests ran at once, so the cache was not full: {found}")
    target = TARGET_HELD if vanilla == "default" else None
    counts = ours["most_running"], theirs["most_running"]
    return [
        row(f"held_{OURS}/{FIT_TOKENS}", [counts[0]], "requests", "higher"),
        row(f"held_{vanilla}/{FIT_TOKENS}", [counts[1]], "requests", "higher"),
        row(f"held_{OURS}/over_{vanilla}", [counts[0] / counts[1]], "ratio", "higher", target),
    ]


def best_figures(known: dict[str, dict[str, Any]], targets: dict[int, float]) -> list[Row]:
    """Return one row per load: ours over the vanilla engine that came closest."""
    rows = []
    for count in REQUESTS:
        prefix, suffix = f"e2e_{OURS}/over_", f"/{count}"
        found = [
            entry
            for name, entry in known.items()
            if name.startswith(prefix) and name.endswith(suffix) and name != f"{prefix}best{suffix}"
        ]
        if found:
            worst = min(found, key=lambda entry: float(entry["value"]))
            print(f"{count} requests: the best vanilla is {worst['name'].split('/')[1].removeprefix('over_')}")
            name, target = f"{prefix}best{suffix}", targets.get(count)
            rows.append(Row(name, worst["value"], "ratio", "higher", worst["spread"], target))
    return rows


def results_of(ours: str) -> str:
    """Name of the results of our engine with this variant."""
    drafts = "" if variant_of(ours).drafts else "_without_drafts"
    forms = (f"_{form}" for form in ("bfloat16", "ring", "chunk") if form in ours)
    return f"{NAME}{drafts}{''.join(forms)}"


def known_rows(folder: pathlib.Path, results: str) -> dict[str, dict[str, Any]]:
    """The results of this commit with these versions."""
    if not (folder / this_machine() / f"{results}.jsonl").exists():
        return {}
    now = circumstances()
    same = ("machine", "torch", "vllm", "commit")
    found = read(this_machine(), results, folder)
    return {name: entry for name, entry in found.items() if all(entry[key] == now[key] for key in same)}


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--vanilla", nargs="+", help=f"the engines to compare with (default: {' '.join(VANILLA)})")
    parser.add_argument("--ours", default="default", help="how the engine with one state differs from the defaults")
    parser.add_argument("--requests", nargs="+", type=int, default=list(REQUESTS), help="numbers of requests at once")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long to measure each row")
    parser.add_argument(
        "--quick", action="store_true", help=f"the fewest rounds, and {' and '.join(VANILLA_QUICK)} alone"
    )
    parser.add_argument(
        "--ttft-rounds", type=int, default=4, help="rounds that measure the first tokens of long prompts, or 0"
    )
    parser.add_argument(
        "--held", action=argparse.BooleanOptionalAction, default=True, help="count the requests in a full cache"
    )
    parser.add_argument("--block-size", type=int, help="block size of both sides (default: each engine chooses)")
    parser.add_argument("--cache-gib", type=int, default=CACHE_GIB, help="cache of each side; 12 fits on an H100")
    parser.add_argument("--resume", action="store_true", help="skip the rows that the results have already")
    options = parser.parse_args()
    try:
        with_drafts = variant_of(options.ours).drafts > 0
        chosen = (VANILLA_QUICK if options.quick else VANILLA) if with_drafts else VANILLA_WITHOUT_DRAFTS
        options.vanilla = options.vanilla or list(chosen)
        for name in options.vanilla:
            variant_of(name)
    except ValueError as error:
        parser.error(str(error))
    if options.quick:
        options.seconds, options.ttft_rounds = 0.0, min(options.ttft_rounds, 2)
    if options.small:
        options.requests, options.vanilla, options.seconds = [1, 4], ["default", "drafts_0"], 0.0
    return options


def main() -> int:
    options = parse_arguments()
    problems: list[str] = []
    tokens = SMALL_TOKENS if options.small else (PREFIX_TOKENS, SUFFIX_TOKENS)
    with log_folder(options) as folder:
        target = pathlib.Path(tempfile.mkdtemp()) if options.small else options.folder
        cache = pathlib.Path(os.environ.get("VLLM_CACHE_ROOT", pathlib.Path.home() / ".cache" / "vllm"))
        began, results = time.monotonic(), results_of(options.ours)

        def keep(rows: list[Row]) -> None:
            write(this_machine(), results, rows, target, keep=True)
            show(rows)
            print(f"-- {time.monotonic() - began:.0f} s", flush=True)

        def start(side: str, name: str) -> EngineProcess:
            job = job_of(folder, variant_of(name), options.small, options.block_size, options.cache_gib)
            return launch(side, job, folder, cache, options.small)

        engines: dict[str, EngineProcess] = {}
        try:
            for vanilla in options.vanilla:
                done = known_rows(target, results) if options.resume else {}
                loads = [n for n in options.requests if f"e2e_{OURS}/over_{vanilla}/{n}" not in done]
                if not loads:
                    continue
                new = [] if OURS in engines else [OURS]
                if new:
                    engines[OURS] = start(OURS, options.ours)
                engines[vanilla] = start(vanilla, vanilla)
                pair = {side: engines[side] for side in (vanilla, OURS)}
                try:
                    ready({side: engines[side] for side in (*new, vanilla)}, options.small)
                    print(f"-- ready after {time.monotonic() - began:.0f} s", flush=True)
                    with visitor():
                        for side in (*new, vanilla):
                            warm_up(engines[side], options.requests if side == OURS else loads, tokens)
                    answers: Any
                    for count in loads:
                        answers = measure(pair, count, options.seconds)
                        (folder / f"answers-{vanilla}-{count}.json").write_text(json.dumps(answers) + "\n")
                        keep(figures(vanilla, count, answers))
                    if options.ttft_rounds:
                        # Our engine has the prefixes of an earlier vanilla's rounds in its cache.
                        begin = options.vanilla.index(vanilla) * options.ttft_rounds
                        answers = first_tokens(pair, range(begin, begin + options.ttft_rounds), tokens)
                        (folder / f"answers-{vanilla}-ttft.json").write_text(json.dumps(answers) + "\n")
                        keep(first_token_figures(vanilla, answers))
                    keep(fit_figures(vanilla, *(engines[side].ask(f"fits {FIT_TOKENS}") for side in (OURS, vanilla))))
                    if options.held and not options.small:
                        command = f"held {HELD_REQUESTS} {HELD_PROMPT} {FIT_TOKENS - HELD_PROMPT}"
                        keep(held_figures(vanilla, *(engines[side].ask(command) for side in (OURS, vanilla))))
                except (EngineFailed, RuntimeError) as error:
                    problems.append(str(error))
                    if new:
                        engines.pop(OURS).close()
                finally:
                    engines.pop(vanilla).close()
        finally:
            close_all(engines.values())
        if rows := best_figures(known_rows(target, results), TARGETS if results == NAME else {}):
            keep(rows)
    return exit_status(problems)


if __name__ == "__main__":
    sys.exit(main())
