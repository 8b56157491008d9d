"""Compare vLLM engines on a GPU, end to end: output tokens per second of several sides that take turns.

    python benchmarks/gpu_engine.py --sides SIDE ... [--model MODEL] [--requests N ...] [--seconds S] ...

A side is an engine. Its name is one word, or several joined by ``+``. All other settings are the defaults of ``vllm
serve``: prefix caching, CUDA graphs, asynchronous scheduling.

    vanilla           vLLM without nwor_ops
    recurrent, chunk  one recurrent state per request, in the exact or the chunk form
    vocabulary        a draft vocabulary of 32,768 rows; vocabulary_N has N rows
    graphs            draft graphs
    cow, stage        the KV transaction
    audited           all features of the side, audited at every step; at most 16 requests
    drafts_N          N drafts per step; 0: no speculation
    bfloat16          bfloat16 recurrent states
    no_prefix         no prefix caching
    triton            the Triton prefill of recurrent layers
    fp8_head          an fp8 copy of the output head for the drafter (vLLM's draft_lm_head_quantization)
    eagle             an EAGLE head in place of the model's own drafter
    v1                vLLM's V1 model runner

A model (``--model``) has a public model's shape and random weights:

    hybrid    Qwen3.5-9B with its multi-token prediction layer, K = 3
    moe       Qwen3.5-35B-A3B with its multi-token prediction layer, K = 3
    llama     Llama 3 8B with a draft model of Llama 3.2 1B's shape, K = 4

The figures of README and docs/benchmarks.md:

    python benchmarks/gpu_engine.py --sides recurrent vanilla bfloat16
    python benchmarks/gpu_engine.py --sides bfloat16+recurrent bfloat16 --requests 1 16 64 128
    python benchmarks/gpu_engine.py --sides drafts_0+chunk drafts_0
    python benchmarks/gpu_engine.py --model llama --at-once 3 --sides graphs vanilla v1
    python benchmarks/gpu_engine.py --model llama --at-once 3 --sides graphs eagle drafts_0
    python benchmarks/gpu_engine.py --at-once 4 --cache-gib 12 --requests 1 16 64 128 \
        --sides vanilla bfloat16 recurrent vocabulary recurrent+vocabulary --over vanilla bfloat16 recurrent

Drafts are accepted with the probability ``--acceptance``: 2.5 tokens per step with the model's own K. The first side
stays on the GPU. The others join it, as many as ``--at-once`` allows, one group after the other. All engines of a group
take turns and serve the same requests. The speed of a run is scaled to the acceptance that was asked for, because the
V1 runner draws new acceptance in every run, while V2 draws it from the requests' seeds.

Rows, each written when it is measured, to ``gpu_engine_MODEL.jsonl`` (or the name of ``--results``). Rows with other
names stay there:

    e2e/SIDE/over/RIVAL/N          ratio of output tok/s, run by run, with N requests at the same time
    tok_s/SIDE/N, running/SIDE/N   output tok/s; the most requests that ran together
    acceptance_length/SIDE/N       tokens per step
    ttft/SIDE/over/RIVAL/KIND, ttft_ms/SIDE/KIND    first tokens of prompts that share a prefix: cold, hit, hit_at_once
    fits/SIDE, fits/SIDE/over/RIVAL    requests of 2,048 tokens that fit by vLLM's upper bound
    start_seconds/SIDE, draft_graphs_mib/SIDE
    step_us/SIDE/N/PART            device time of a decode step: states, drafts_heads, target_head, rest (--profile)

Rivals are ``--over``, by default every side without nwor_ops. A rival has ratios over those named before it. Two
hybrid engines with 36 GiB of cache fit on an H200, or with ``--cache-gib 12`` on an H100. An engine starts in one or
two minutes. With ``--gpus`` each side runs on the next one of these GPUs. A side that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from results import Row, new_parser, ratios, row, save, this_machine

from nwor_ops.config import SUGGESTED_ROWS
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all, engine_environment

CHILD = pathlib.Path(__file__).resolve().with_name("benchmark_engine.py")
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 256
REQUESTS = (1, 16, 64, 128, 384)
RUNS_PER_ROUND = {1: 2, 16: 2}
LEAST_ROUNDS = 2
ACCEPTANCE_DIFFERENCE = 0.1  # tokens per step, of the mean of the runs from what was asked for
PREFIX_TOKENS, SUFFIX_TOKENS = 4608, 300  # eight blocks of 576 tokens, and less than one
TTFT_SINGLE, TTFT_AT_ONCE = 16, 8  # prompts of a round, one by one and together
FIT_TOKENS = 2048
GIB = 1 << 30
# vLLM wants a block of states for each of max_num_seqs, and 12 GiB do not hold the default of an H100 (1,024).
CACHE_GIB, SEQS_OF_SMALL_CACHE = 36, 512
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}

# ---------------------------------------------------------------- models

# Fields that are not here have the defaults of the classes in transformers.
LLAMA_8B: dict[str, Any] = {
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
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
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
QWEN_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
QWEN_35B = QWEN_9B | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
# For --small.
TINY = LLAMA_8B | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512}


@dataclass(frozen=True)
class Model:
    """A target, vLLM's method and a draft model. ``acceptance`` is the probability that a draft is accepted if the one
    before it was, ``engine`` has arguments of ``vllm.LLM``."""

    shape: dict[str, Any]
    method: str
    draft: dict[str, Any] | None
    num_drafts: int
    acceptance: float
    engine: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "hybrid": Model(QWEN_9B, "mtp", None, 3, 0.6914),
    "moe": Model(QWEN_35B, "mtp", None, 3, 0.6914),
    "llama": Model(LLAMA_8B, "draft_model", LLAMA_1B, 4, 0.6445, {"attention_config": {"backend": "FLASH_ATTN"}}),
}
SMALL = Model(TINY, "draft_model", TINY, 2, 0.7)


def expected_length(num_drafts: int, acceptance: float) -> float:
    """Return the mean of tokens per step."""
    return sum(acceptance**position for position in range(num_drafts + 1))


# ---------------------------------------------------------------- sides


@dataclass(frozen=True)
class Side:
    """How an engine differs from the default one. ``settings`` are variables of nwor_ops, ``engine`` arguments of
    ``vllm.LLM``, and ``speculation`` fields of its speculative configuration. K and the method replace the model's."""

    settings: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    num_drafts: int | None = None
    method: str | None = None
    runner: str = "v2"
    speculation: Mapping[str, Any] = field(default_factory=dict)

    def __or__(self, other: Side) -> Side:
        return Side(
            {**self.settings, **other.settings},
            {**self.engine, **other.engine},
            self.num_drafts if other.num_drafts is None else other.num_drafts,
            other.method or self.method,
            "v1" if "v1" in (self.runner, other.runner) else "v2",
            {**self.speculation, **other.speculation},
        )


WORDS = {
    "vanilla": Side(),
    "recurrent": Side({"VLLM_NWOR_RECURRENT": "1"}),
    "chunk": Side({"VLLM_NWOR_RECURRENT": "chunk"}),
    "vocabulary": Side({"VLLM_NWOR_DRAFT_VOCABULARY": f"{SUGGESTED_ROWS}"}),
    "graphs": Side({"VLLM_NWOR_DRAFT_GRAPHS": "1"}),
    "cow": Side({"VLLM_NWOR_MODE": "cow"}),
    "stage": Side({"VLLM_NWOR_MODE": "stage"}),
    "audited": Side({"VLLM_NWOR_AUDIT": "1"}, engine={"max_num_seqs": 16}),
    "bfloat16": Side(engine={"mamba_ssm_cache_dtype": "bfloat16"}),
    "no_prefix": Side(engine={"enable_prefix_caching": False}),
    "triton": Side(engine={"gdn_prefill_backend": "triton"}),
    "eagle": Side(method="eagle"),
    "fp8_head": Side(speculation={"draft_lm_head_quantization": "fp8"}),
    "v1": Side(runner="v1"),
}


def side_of(name: str) -> Side:
    """Return the side with a name such as ``bfloat16+recurrent+drafts_4``.

    Raises:
        ValueError: a part of the name is unknown.
    """

    def word(part: str) -> Side:
        kind, _, number = part.rpartition("_")
        if number.isdecimal() and kind == "drafts":
            return Side(num_drafts=int(number))
        if number.isdecimal() and kind == "vocabulary":
            return Side({"VLLM_NWOR_DRAFT_VOCABULARY": number})
        if part not in WORDS:
            raise ValueError(f"{part!r} is no side; there are drafts_N, vocabulary_N, {', '.join(WORDS)}")
        return WORDS[part]

    return reduce(Side.__or__, map(word, name.split("+")))


def write_shape(folder: pathlib.Path, shape: Mapping[str, Any]) -> str:
    """Write a model folder without weights, and return its path. vLLM fills in random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=1) + "\n")
    return str(folder)


def job_of(model: Model, side: Side, folder: pathlib.Path, cache_gib: float, acceptance: float) -> dict[str, Any]:
    """Return the job of an engine; see benchmark_engine.py. The environment switches nwor_ops on."""
    num_drafts = model.num_drafts if side.num_drafts is None else side.num_drafts
    engine: dict[str, Any] = {
        "model": write_shape(folder / "target", model.shape),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_log_stats": False,
        "max_num_batched_tokens": 8192,  # the default of vllm serve on an H200
        # No memory profiling: several engines share the GPU, with caches of one size.
        "kv_cache_memory_bytes": int(cache_gib * GIB),
        "gpu_memory_utilization": 0.2,
        **model.engine,
        **side.engine,
    }
    if cache_gib < CACHE_GIB:
        engine.setdefault("max_num_seqs", SEQS_OF_SMALL_CACHE)
    if model is SMALL:  # vLLM's CPU engine, to try the script
        engine |= {"enforce_eager": True, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "max_model_len": 2048}
    if num_drafts:
        method = side.method or model.method
        speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
        if method == "eagle":  # vLLM takes a folder with the name of a method for that method
            speculation["model"] = write_shape(folder / "head", model.shape | {"num_hidden_layers": 1})
        elif model.draft is not None:
            speculation["model"] = write_shape(folder / "draft", model.draft)
        if model is not SMALL:
            rates = [round(acceptance**position, 4) for position in range(1, num_drafts + 1)]
            speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        engine["speculative_config"] = {**speculation, **side.speculation}
    tokens = (16, 32) if model is SMALL else (PROMPT_TOKENS, OUTPUT_TOKENS)
    return {
        "engine": engine,
        "prompt_tokens": tokens[0],
        "max_tokens": tokens[1],
        "vocabulary": model.shape["vocab_size"],
        "length": expected_length(num_drafts, acceptance) if num_drafts and model is not SMALL else None,
    }


def launch(
    name: str, job: dict[str, Any], side: Side, folder: pathlib.Path, more: Mapping[str, str] | None = None
) -> EngineProcess:
    """Start an engine as a server runs it: the engine core is in a process that does nothing else."""
    environment = engine_environment("off", audit=False) | dict(side.settings) | dict(more or {})
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc takes a function
    if side.runner == "v1":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return EngineProcess(name.replace("+", "_"), job, folder, environment, program=(str(CHILD),))


@contextlib.contextmanager
def visitor() -> Iterator[None]:
    """A process that has a context on the GPU and does nothing.

    Graphs may leave 0.4 us between two kernels if only one process has ever used the GPU, and 0.1 us later. So every
    engine is warmed up while another process is there.
    """
    code = "import sys, torch; torch.cuda.is_available() and torch.zeros(1, device='cuda'); print('here', flush=True)"
    command = [sys.executable, "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # it goes when this ends
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the process that was to visit the GPU has failed")
        yield


# ---------------------------------------------------------------- the run


@dataclass
class Engine:
    """A running engine and what it said of itself."""

    process: EngineProcess
    job: dict[str, Any]
    versions: dict[str, Any] = field(default_factory=dict)


class Run:
    """The engines that run, the rows so far, and the problems."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path) -> None:
        self.options, self.folder = options, folder
        self.model = SMALL if options.small else MODELS[options.model]
        self.engines: dict[str, Engine] = {}
        self.problems: list[str] = []
        self.began = time.monotonic()

    def report(self, problem: object) -> None:
        self.problems.append(str(problem))
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)

    def save(self, rows: list[Row], answers: object, name: str) -> None:
        """Write and print rows, and write the answers that they are made of to the folder of the logs."""
        (self.folder / f"{name}.json").write_text(json.dumps(answers) + "\n")
        save(this_machine(), self.options.results, rows, self.options.folder, keep=True)
        print(f"-- {time.monotonic() - self.began:.0f} s", flush=True)

    def start(self, names: Sequence[str]) -> None:
        """Start these sides together and warm them up. A side that fails is reported and left out."""
        for name in names:
            side = side_of(name)
            job = job_of(self.model, side, self.folder, self.options.cache_gib, self.options.acceptance)
            # One folder for all: vLLM needs 40 s to inspect two model classes. Compiled graphs are keyed by settings.
            environment = {"VLLM_CACHE_ROOT": str(self.folder / "cache")}
            if gpus := self.options.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[self.options.sides.index(name) % len(gpus)]
            self.engines[name] = Engine(launch(name, job, side, self.folder, environment), job)
        self._each(names, lambda engine: engine.versions.update(engine.process.wait_until_ready()))
        for name in [name for name in names if name in self.engines]:
            print(f"{name}: {self.engines[name].versions}", flush=True)
            if problem := self._problem(name):
                self._drop(name, problem)
        with visitor():
            for count in self.options.requests:
                self._each(names, lambda engine, count=count: engine.process.ask(f"run {count}"))

    def _problem(self, name: str) -> str | None:
        """Return why an engine is not what its side says."""
        versions, side = self.engines[name].versions, side_of(name)
        parts = {key: versions[key] for key in ("sessions", "draft_graphs", "recurrent_engines", "draft_vocabularies")}
        if any(parts.values()) != bool(side.settings):
            return f"nwor_ops has {parts} in that engine, with the settings {dict(side.settings)}"
        if self.model is not SMALL and versions["runner"] != RUNNERS[side.runner]:
            return f"its model runner is {versions['runner']}, not {side.runner}"
        return None

    def _each(self, names: Iterable[str], call: Callable[[Engine], object]) -> None:
        """Call something of each engine at the same time."""

        def attempt(name: str) -> str:
            try:
                call(self.engines[name])
            except EngineFailed as error:
                return str(error)
            return ""

        present = [name for name in names if name in self.engines]
        with ThreadPoolExecutor(max(len(present), 1)) as pool:
            for name, problem in zip(present, pool.map(attempt, present), strict=True):
                if problem:
                    self._drop(name, problem)

    def _drop(self, name: str, problem: str) -> None:
        self.engines.pop(name).process.close()
        self.report(f"{name}: {problem}")

    def ask(self, name: str, command: str) -> dict[str, Any]:
        return self.engines[name].process.ask(command)

    def close(self, names: Iterable[str]) -> None:
        close_all([self.engines.pop(name).process for name in list(names) if name in self.engines])

    def pairs(self) -> list[tuple[str, str]]:
        """Return each side with each of its rivals. A rival is compared with the rivals before it."""
        rank = {name: number for number, name in enumerate(self.options.over)}
        pairs = itertools.permutations(self.engines, 2)
        return [(name, rival) for name, rival in pairs if rank.get(rival, len(rank)) < rank.get(name, len(rank))]

    # ------------------------------------------------------------ measurements

    def measure(self, count: int) -> None:
        """Serve requests with every engine in turn, in every order, until the time is up."""
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in self.engines}
        orders = itertools.cycle(itertools.permutations(self.engines))
        began, rounds = time.monotonic(), 0
        while rounds < LEAST_ROUNDS or time.monotonic() - began < self.options.seconds:
            order = next(orders) if len(answers) < 4 else list(answers)[:: 1 if rounds % 2 else -1]
            for name, _ in itertools.product(order, range(RUNS_PER_ROUND.get(count, 1))):
                # No two requests of any round have a seed in common.
                answers[name].append(self.ask(name, f"run {count} {rounds * max(REQUESTS)}"))
            rounds += 1
        self.save(self.speed_rows(count, answers), answers, f"run-{'-'.join(answers)}-{count}")

    def speed_rows(self, count: int, answers: dict[str, list[dict[str, Any]]]) -> list[Row]:
        """Return the rows of one load. A side that accepted another share of its drafts is reported and left out."""
        rows: list[Row] = []
        rates: dict[str, list[float]] = {}
        for name, runs in answers.items():
            expected, lengths = self.engines[name].job["length"], [run["acceptance_length"] for run in runs]
            mean = statistics.mean(lengths) if all(lengths) else None
            has_graphs = "VLLM_NWOR_DRAFT_GRAPHS" in side_of(name).settings
            if expected and (mean is None or abs(mean - expected) > ACCEPTANCE_DIFFERENCE):
                self.report(f"{name}, {count} requests: {mean} tokens per step, expected {expected:.2f}")
            elif has_graphs and not all(run["draft_graph_replays"] for run in runs):
                self.report(f"{name}, {count} requests: no draft graph was replayed in a run")
            else:
                scales = [expected / length if expected else 1.0 for length in lengths]
                rates[name] = [run["tokens"] / run["seconds"] * scale for run, scale in zip(runs, scales, strict=True)]
                running = [run["most_running"] for run in runs]
                rows.append(row(f"tok_s/{name}/{count}", rates[name], "tok/s", "higher", digits=1))
                rows.append(row(f"running/{name}/{count}", running, "requests", "higher", digits=0))
            if mean is not None:
                rows.append(row(f"acceptance_length/{name}/{count}", [mean], "tokens", "higher"))
        return rows + [
            row(f"e2e/{name}/over/{rival}/{count}", ratios(rates, name, rival), "ratio", "higher")
            for name, rival in self.pairs()
            if name in rates and rival in rates
        ]

    def first_tokens(self, prefixes: Iterable[int]) -> None:
        """Ask for prompts that share a prefix, one by one and then together. The sides take turns at each prompt."""
        prefix, suffix = (512, 40) if self.options.small else (PREFIX_TOKENS, SUFFIX_TOKENS)
        answers: dict[str, dict[str, list[dict[str, Any]]]]
        answers = {name: {"single": [], "at_once": []} for name in self.engines}
        for number in prefixes:
            for turn in range(TTFT_SINGLE + 1):
                kind, requests = ("single", 1) if turn < TTFT_SINGLE else ("at_once", TTFT_AT_ONCE)
                for name in list(answers)[:: 1 if (number + turn) % 2 else -1]:
                    command = f"ttft {requests} {prefix} {suffix} {int(requests > 1)} {number}"
                    answers[name][kind].append(self.ask(name, command))
        self.save(self.first_token_rows(answers), answers, f"ttft-{'-'.join(answers)}")

    def first_token_rows(self, answers: dict[str, dict[str, list[dict[str, Any]]]]) -> list[Row]:
        """Return rows of first tokens. A prompt is a hit if the engine found a part of it in the prefix cache. The
        ratios of single prompts compare pairs: both hits, or both cold."""
        times: dict[str, dict[str, list[float | None]]] = {}
        for name, found in answers.items():
            single = [(1e3 * run["seconds"][0], bool(run["cached"][0])) for run in found["single"]]
            times[name] = {
                "cold": [None if hit else ms for ms, hit in single],
                "hit": [ms if hit else None for ms, hit in single],
                "hit_at_once": [1e3 * seconds for run in found["at_once"] for seconds in run["seconds"]],
            }
        rows = [
            row(f"ttft_ms/{name}/{kind}", some, "ms", "lower", digits=2)
            for name, kinds in times.items() for kind, all_ms in kinds.items()
            if (some := [ms for ms in all_ms if ms is not None])
        ]  # fmt: skip
        for (name, rival), kind in itertools.product(self.pairs(), ("cold", "hit", "hit_at_once")):
            both = zip(times[name][kind], times[rival][kind], strict=True)
            if found_ratios := [ours / theirs for ours, theirs in both if ours is not None and theirs is not None]:
                rows.append(row(f"ttft/{name}/over/{rival}/{kind}", found_ratios, "ratio", "lower"))
        return rows

    def profile(self, count: int) -> None:
        """Write the device time of the parts of a step. Only one engine runs at a time."""
        parts = {name: self.ask(name, f"profile {count}") for name in self.engines}
        rows = [
            row(f"step_us/{name}/{count}/{part}", [us], "us", "lower", digits=0)
            for name, found in parts.items()
            for part, us in found.items()
            if part != "steps"
        ]
        self.save(rows, parts, f"profile-{'-'.join(self.engines)}-{count}")

    def facts(self) -> None:
        """Write what needs no turns: requests that fit, seconds until an engine is ready, memory of draft graphs."""
        fits = {name: self.ask(name, f"fits {FIT_TOKENS}") for name in self.engines}
        rows = [row(f"fits/{name}", [found["requests"]], "requests", "higher") for name, found in fits.items()]
        rows += [
            row(f"fits/{name}/over/{rival}", [fits[name]["requests"] / fits[rival]["requests"]], "ratio", "higher")
            for name, rival in self.pairs()
        ]
        for name, engine in self.engines.items():
            rows.append(row(f"start_seconds/{name}", [engine.versions["start_seconds"]], "s", "lower", digits=1))
            for graphs in engine.versions["draft_graphs"]:
                memory = graphs["capture_bytes"] / 2**20
                rows.append(row(f"draft_graphs_mib/{name}", [memory], "MiB", "lower", digits=1))
        self.save(rows, fits, f"fits-{'-'.join(self.engines)}")


# ---------------------------------------------------------------- the command


def engine_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts with engines on a GPU."""
    parser = new_parser(description)
    parser.add_argument("--logs", type=pathlib.Path, help="where logs, answers and what vLLM compiles go")
    parser.add_argument("--small", action="store_true", help="try this script with tiny models on a CPU; saves nothing")
    parser.add_argument("--requests", nargs="+", type=int, help="numbers of requests at the same time")
    parser.add_argument("--seconds", type=float, default=16.0, help="how long to measure each load")
    return parser


@contextlib.contextmanager
def log_folder(options: argparse.Namespace) -> Iterator[pathlib.Path]:
    """Yield the folder of ``--logs``, or a temporary one. With ``--small`` the results go there too."""
    with tempfile.TemporaryDirectory() as scratch:
        folder: pathlib.Path = (options.logs or pathlib.Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if options.small:
            options.folder = folder / "results"
        yield folder


def exit_status(problems: Sequence[str]) -> int:
    """Print the problems of a run, and return the exit status of the script."""
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if problems else 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="hybrid")
    parser.add_argument("--sides", nargs="+", default=[], help="the engines; the first one stays on the GPU")
    parser.add_argument("--over", nargs="+", help="sides that others are compared with, in this order")
    parser.add_argument("--at-once", type=int, default=2, help="engines that fit on the GPU together")
    parser.add_argument("--cache-gib", type=float, default=CACHE_GIB, help="cache of each engine")
    parser.add_argument("--acceptance", type=float, help="probability that a draft is accepted")
    parser.add_argument("--ttft-rounds", type=int, default=0, help="rounds that measure first tokens of long prompts")
    parser.add_argument("--profile", nargs="+", type=int, default=[], help="requests of the profiled steps")
    parser.add_argument("--gpus", nargs="+", help="GPUs by their numbers, one side on each in turn")
    parser.add_argument("--results", help="name of the file with the results")
    options = parser.parse_args(arguments)
    options.sides = options.sides or (["cow", "vanilla"] if options.small else ["recurrent", "vanilla"])
    try:
        plain = [name for name in options.sides if not side_of(name).settings]
    except ValueError as error:
        parser.error(str(error))
    options.over = plain if options.over is None else options.over
    if unknown := [name for name in options.over if name not in options.sides]:
        parser.error(f"--over names {', '.join(unknown)}, which --sides does not have")
    if options.at_once < 2 <= len(options.sides):
        parser.error("--at-once must be at least 2: sides are compared in turn")
    options.requests = options.requests or ([1, 4] if options.small else list(REQUESTS))
    options.results = options.results or f"gpu_engine_{options.model}"
    options.acceptance = MODELS[options.model].acceptance if options.acceptance is None else options.acceptance
    if options.small:
        options.seconds, options.cache_gib = 0.0, 1 / 16
    return options


def groups_of(sides: Sequence[str], at_once: int) -> Iterator[list[str]]:
    """Yield the sides that run next to the first one."""
    others = sides[1:]
    step = max(at_once - 1, 1)
    yield from ([*others[start : start + step]] for start in range(0, max(len(others), 1), step))


def main() -> int:
    options = parse_arguments()
    with log_folder(options) as folder:
        run = Run(options, folder)
        try:
            for number, group in enumerate(groups_of(options.sides, options.at_once)):
                new = [name for name in (options.sides[0], *group) if name not in run.engines]
                run.start(new)
                try:
                    for count in options.requests:
                        run.measure(count)
                    if options.ttft_rounds:  # the first side has the prefixes of the earlier groups in its cache
                        first = number * options.ttft_rounds
                        run.first_tokens(range(first, first + options.ttft_rounds))
                    for count in options.profile:
                        run.profile(count)
                    run.facts()
                except EngineFailed as error:
                    run.report(error)
                    run.close(run.engines)
                run.close(group)
        finally:
            run.close(run.engines)
    return exit_status(run.problems)


if __name__ == "__main__":
    sys.exit(main())
