"""Compare vLLM on a GPU with the KV transaction on and off: output tokens per second, and time added to a step.

    python benchmarks/gpu_transaction.py [--modes MODE ...] [--model llama|hybrid] [--ranks N] [--requests N ...]

The Llama-3-8B shape drafts with an EAGLE head of the same width, Qwen3.5-9B's with its multi-token prediction layer.
Weights, acceptance and defaults are those of gpu_engine.py. ``--ranks`` are ranks of tensor parallelism, one per GPU.

One engine serves both sides. While its requests decode, the sides take turns of 20 steps: off, on, on, off, ... A turn
removes everything of NWOR from the worker, or installs it again, and exchanges the model's FULL graphs. So both sides
have the same weights at the same addresses, the same compiled code, and the same requests at the same length. A
difference in any of these is larger than the effect to be measured. In mode `cow` the FULL graphs are captured twice
for each side, each time with other buffers.

Rows, turn by turn, in ``gpu_transaction.jsonl``, or with other options ``gpu_transaction_MODEL_tpRANKS.jsonl``:

    e2e/MODE/N               time of a step off over on: the ratio of output tok/s, since both accept the same drafts
    e2e/MODE/N/median_step   the same of the turns' median steps, which a delay on the host does not change
    added_us/MODE/N, step_us/vanilla_MODE/N

The engines of both modes are on the GPU together (28 GiB each; the hybrid model 60). It takes 4 minutes.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import chain, product
from operator import itemgetter
from typing import Any

from gpu_engine import MODELS, SMALL, engine_parser, exit_status, job_of, launch, log_folder, side_of, visitor
from results import Row, row, save, this_machine

from nwor_ops.testing.engine_process import NCCL_ALONE, EngineFailed, EngineProcess, close_all

TARGETS = {"cow": 0.998, "stage": 0.995}
CAPTURES = {"cow": 2, "stage": 1}  # mode stage puts nothing into graphs
ACCEPTANCE_DIFFERENCE = 0.05


def main() -> int:
    parser = engine_parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--model", choices=("llama", "hybrid"), default="llama")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of tensor parallelism")
    options = parser.parse_args()
    requests = options.requests or ([1, 4] if options.small else [16, 64, 1])
    name = "gpu_transaction" + (f"_{options.model}" if options.model != "llama" else "")
    name += f"_tp{options.ranks}" if options.ranks > 1 else ""
    problems: list[str] = []
    with log_folder(options) as folder:
        engines: dict[str, EngineProcess] = {}
        try:
            for mode in options.modes:
                side = side_of(mode if options.small or options.model == "hybrid" else f"{mode}+eagle")
                model = SMALL if options.small else MODELS[options.model]
                job = job_of(model, side, folder, 1 / 16 if options.small else 8.0, model.acceptance)
                job["captures"] = CAPTURES[mode]
                more = {"VLLM_CACHE_ROOT": str(folder / f"cache-{mode}")}
                if options.ranks > 1:
                    job["engine"] |= {"tensor_parallel_size": options.ranks, "disable_custom_all_reduce": True}
                    more |= NCCL_ALONE
                engines[mode] = launch(mode, job, side, folder, more)
            for mode, engine in engines.items():
                print(f"{mode}: {engine.wait_until_ready()}", flush=True)
                engine.ask("switch 0")  # captures; no request may be running
            with visitor():
                for on, count, engine in product((0, 1), requests, engines.values()):
                    engine.ask(f"switch {on}")
                    engine.ask(f"run {count}")
            for count in requests:
                answers = measure(engines, count, 0.0 if options.small else options.seconds)
                (folder / f"turns-{count}.json").write_text(json.dumps(answers) + "\n")
                for mode, found in answers.items():
                    try:
                        rows = turn_rows(mode, count, found)
                    except RuntimeError as error:
                        problems.append(str(error))
                        continue
                    save(this_machine(), name, rows, options.folder, keep=True)
        except EngineFailed as error:
            problems.append(str(error))
        finally:
            close_all(engines.values())
    return exit_status(problems)


def measure(engines: dict[str, EngineProcess], count: int, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Measure every engine in rounds, in which each uses all its captures, with each side first."""
    answers: dict[str, list[dict[str, Any]]] = {mode: [] for mode in engines}
    began = time.monotonic()
    while not all(answers.values()) or time.monotonic() - began < seconds * len(engines):
        for number, first in product(range(max(CAPTURES.values())), (0, 1)):
            for mode, engine in engines.items():
                answers[mode].append(engine.ask(f"turns {count} {number % CAPTURES[mode]} {first}"))
    return answers


def turn_rows(mode: str, count: int, answers: list[dict[str, Any]]) -> list[Row]:
    """Return the rows of one mode and load.

    Raises:
        RuntimeError: the two sides cannot be compared.
    """
    what = f"{mode}, {count} requests"
    turns = list(chain.from_iterable(answer["turns"] for answer in answers))
    if any(turn["windows"] < turn["steps"] if turn["on"] else turn["windows"] for turn in turns):
        raise RuntimeError(f"{what}: NWOR was on where it should be off, or off where it should be on")
    if any(steps for answer in answers for steps in answer["vanilla_steps"]):
        raise RuntimeError(f"{what}: steps ran without the transaction, {answers[-1]['vanilla_steps']}")
    sides = {on: [turn for turn in turns if turn["on"] == on] for on in (False, True)}
    off, on = (sum(turn["tokens"] for turn in side) / sum(turn["steps"] for turn in side) / count
               for side in sides.values())  # fmt: skip
    if abs(on - off) > ACCEPTANCE_DIFFERENCE:
        raise RuntimeError(f"{what}: the sides accepted {on:.2f} and {off:.2f} tokens per step: not comparable")
    pairs = [sorted(pair, key=itemgetter("on")) for pair in zip(turns[::2], turns[1::2], strict=True)]
    ratios = [off["seconds"] / on["seconds"] for off, on in pairs]
    medians = [off["median_step"] / on["median_step"] for off, on in pairs]
    added = [1e6 * (on["median_step"] - off["median_step"]) for off, on in pairs]
    steps = [1e6 * turn["seconds"] / turn["steps"] for turn in sides[False]]
    return [
        row(f"e2e/{mode}/{count}", ratios, "ratio", "higher", TARGETS[mode]),
        row(f"e2e/{mode}/{count}/median_step", medians, "ratio", "higher"),
        row(f"added_us/{mode}/{count}", added, "us", "lower", digits=1),
        row(f"step_us/vanilla_{mode}/{count}", steps, "us", "lower", digits=1),
    ]


if __name__ == "__main__":
    sys.exit(main())
