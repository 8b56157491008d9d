"""vLLM 0.33 on a GPU with a draft model of its own: output tokens per second with draft graphs over vanilla.

    python benchmarks/gpu_draft_model.py [--seconds S] [--backend TRITON_ATTN] [--cow] [--folder FOLDER]

The Llama-3-8B shape with random weights, a draft model of the Llama-3.2-1B shape, K = 4, synthetic acceptance of 2.5
tokens per step, 64-token prompts, 256 output tokens, vLLM's default CUDA graphs. Two engines, with draft graphs and
without, live in processes of their own on one GPU and take turns, as in gpu_engine.py. Then the drafter's share of a
step in either engine, from torch's profiler: launches, its time on the device, and how much of that the device idles.
Also what capturing takes, in memory and at start-up. About 5 minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import tempfile
from typing import Any

from gpu_engine import (
    LLAMA_8B,
    REQUESTS,
    SMALL,
    SYNTHETIC,
    K,
    comparison,
    engine_job,
    measure,
    start_engines,
    write_shape,
)
from results import FOLDER, Row, row, save

NAME = "draft_model"
TARGETS = {1: 2.1, 16: 2.1, 64: 1.65}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
PROFILED_STEPS = 40
GRAPH_LAUNCHES = ("cudaGraphLaunch",)
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", *GRAPH_LAUNCHES)


def draft_job(folder: pathlib.Path, backend: str, small: bool) -> dict[str, Any]:
    tiny = SMALL if small else {}
    target, draft = LLAMA_8B | tiny, LLAMA_1B | tiny
    speculation = {
        "method": "draft_model",
        "model": write_shape(folder / "draft", draft),
        **({} if small else SYNTHETIC),
    }
    more = {} if small else {"attention_config": {"backend": backend}}
    job = engine_job(write_shape(folder / "target", target), speculation, small, **more)
    return job | {"vocabulary": target["vocab_size"], "one_process": True}  # where its drafter can be profiled


def check_graphs_ran(answers: dict[Any, list[dict[str, Any]]]) -> None:
    """Every step of a run but its first ones, which have prompts in them, from graphs."""
    for (_, side, count), runs in answers.items():
        if side == "off":
            continue
        for before, after in itertools.pairwise(runs):
            [first], [last] = before["draft_graphs"], after["draft_graphs"]
            if last["replays"]["decode"] <= first["replays"]["decode"]:
                raise RuntimeError(f"{count} requests: no draft graph was replayed in a run; {last}")


def drafter_rows(side: str, count: int, found: dict[str, Any]) -> list[Row]:
    """Per step. Of the device, ``idle`` is time between the drafter's first and last kernel in which it ran none."""
    launches, calls = found["launches"], found["calls"]
    label = f"{side}/{count}"
    idle = [1 - busy / span for busy, span in zip(found["busy_us"], found["span_us"], strict=True)]
    graphs = sum(launches.get(name, 0) for name in GRAPH_LAUNCHES) / calls
    return [
        row(f"drafter_graph_launches_{label}", [graphs], "launches", "lower", digits=2),
        row(
            f"drafter_launches_{label}",
            [sum(launches.get(name, 0) for name in LAUNCHES) / calls],
            "launches",
            "lower",
            digits=1,
        ),
        row(f"drafter_kernels_{label}", [found["kernels"] / calls], "kernels", "lower", digits=1),
        row(f"drafter_host_us_{label}", found["host_us"], "us", "lower", digits=1),
        row(f"drafter_device_us_{label}", found["span_us"], "us", "lower", digits=1),
        row(f"drafter_us_per_draft_{label}", [span / K for span in found["span_us"]], "us", "lower", digits=1),
        row(f"drafter_idle_share_{label}", idle, "share", "lower"),
    ]


def cost_rows(versions: dict[str, dict[str, Any]]) -> list[Row]:
    [report] = versions["on"]["draft_graphs"]
    return [
        row("draft_graphs_memory", [report["capture_bytes"] / 2**20], "MiB", "lower", digits=1),
        row("draft_graphs_capture_seconds", [report["capture_seconds"]], "s", "lower", digits=2),
        row("start_seconds/on", [versions["on"]["start_seconds"]], "s", "lower", digits=1),
        row("start_seconds/off", [versions["off"]["start_seconds"]], "s", "lower", digits=1),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("FLASH_ATTN", "TRITON_ATTN"), default="FLASH_ATTN")
    parser.add_argument("--cow", action="store_true", help="with NWOR's transaction, too, on the side with graphs")
    parser.add_argument("--seconds", type=float, default=130.0, help="how long to measure, once both engines are ready")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="where the results go")
    parser.add_argument("--logs", type=pathlib.Path, help="where the engines' logs go")
    parser.add_argument("--small", action="store_true", help="try this script with tiny models; nothing is saved")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    requests = (1, 4) if options.small else REQUESTS
    # Without a GPU there is nothing to switch on; see --small.
    on = {} if options.small else {"VLLM_NWOR_DRAFT_GRAPHS": "1"}
    if options.cow or options.small:
        on["VLLM_NWOR_MODE"] = "cow"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.logs or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        job = draft_job(folder, options.backend, options.small)
        engines = start_engines({NAME: job}, folder, "v2", {"off": {}, "on": on}, compile_once=False)
        profiles: dict[tuple[str, int], dict[str, Any]] = {}
        try:
            versions = {side: engine.ask("versions") for (_, side), engine in engines.items()}
            answers = measure(engines, requests, options.seconds)
            for count in () if options.small else requests:
                for side in ("off", "on"):
                    engines[NAME, side].ask(f"drafter {count} 3")  # the profiler's own start
                    profiles[side, count] = engines[NAME, side].ask(f"drafter {count} {PROFILED_STEPS}")
        finally:
            for engine in engines.values():
                engine.close()
        raw = {f"{side} {count}": runs for (_, side, count), runs in answers.items()}
        raw |= {f"drafter {side} {count}": found for (side, count), found in profiles.items()}
        (folder / "answers.json").write_text(json.dumps(raw) + "\n")
    rows = []
    for count in requests:
        off, with_graphs = (answers[NAME, side, count] for side in ("off", "on"))
        rows += comparison(NAME, f"{NAME}_vanilla", count, off, with_graphs, TARGETS.get(count))
    if not options.small:
        check_graphs_ran(answers)
        for (side, count), found in profiles.items():
            rows += drafter_rows(side, count, found)
        rows += cost_rows(versions)
    name = "gpu_draft_model" + ("" if options.backend == "FLASH_ATTN" else "_triton") + ("_cow" if options.cow else "")
    save("h200", name, rows, pathlib.Path(tempfile.mkdtemp()) if options.small else options.folder)


if __name__ == "__main__":
    main()
