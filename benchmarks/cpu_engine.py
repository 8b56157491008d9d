"""Compare a real vLLM CPU engine with NWOR on and off: output tokens per second.

    python benchmarks/cpu_engine.py
    python benchmarks/cpu_engine.py --audit      # time with an audit over time without, with the real model

The engine has one thread and runs the demo's workload (24 requests, at most 12 running, n-gram drafts, K = 4, eager).
Between two runs, everything of NWOR is removed from its worker or attached again. Both sides therefore have the same
memory and process; two engines of the same kind differ by more than the effect to be measured. ``tiny`` is the demo's
model with steps under 2 ms, the worst case for a fixed cost per step. ``small`` has 60 million parameters. It takes two
minutes. On a processor with AMX our writer does not support the order of the pages, so it only logs before vLLM's
writer. These rows go to a separate file, ``cpu_engine_amx``.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from typing import Any

import torch
from benchmark_engine import describe_plugin, switch_transactions
from results import Row, ratios, row, save

from nwor_ops.cli.demo_engine import DemoEngine
from nwor_ops.testing import real_model
from nwor_ops.testing.engine_process import EngineProcess, close_all, engine_environment, serve
from nwor_ops.testing.tiny_llama import Request, Size, tiny_llama_requests, write_tiny_llama

SIZES = {
    "tiny": (Size(), 60),
    "small": (Size(layers=10, hidden=768, heads=12, kv_heads=4, intermediate=2048), 20),
}
LEAST, MOST_AUDITED = 0.97, 3.0


class SwitchedEngine(DemoEngine):
    """The engine of the demo. ``switched`` serves all requests with NWOR (1) or without (0)."""

    def switched(self, on: int) -> dict[str, Any]:
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        begun = switch_transactions(worker, bool(on))
        return self.run() | {"windows": describe_plugin(worker)["windows"] - begun}


def measure(name: str, size: Size, rounds: int, folder: pathlib.Path) -> list[Row]:
    from nwor_ops.cli.demo import OUTPUT_TOKENS, make_job

    job = make_job(str(write_tiny_llama(folder / name, size=size)), tiny_llama_requests(OUTPUT_TOKENS))
    engine = EngineProcess(name, job, folder, engine_environment("cow", audit=False), program=(__file__,))
    answers: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    try:
        engine.wait_until_ready()
        for number in range(-1, rounds):  # the first run is the warm-up
            for side in ("off", "on") if number % 2 else ("on", "off"):
                answers[side].append(engine.ask(f"switched {int(side == 'on')}"))
    finally:
        engine.close()
    if any(a["windows"] for a in answers["off"]) or not all(a["windows"] for a in answers["on"]):
        raise RuntimeError(f"{name}: NWOR was on where it should be off, or off where it should be on")
    if any(a["tokens"] != answers["off"][0]["tokens"] for a in answers["off"] + answers["on"]):
        raise RuntimeError(f"{name}: two runs generated different tokens")
    speeds = {side: [sum(map(len, a["tokens"])) / a["seconds"] for a in found[1:]] for side, found in answers.items()}
    return [
        row(f"e2e_cow_over_vanilla/{name}", ratios(speeds, "on", "off"), "ratio", "higher", LEAST),
        row(f"e2e_vanilla/{name}", speeds["off"], "tok/s", "higher", digits=1),
        row(f"e2e_cow/{name}", speeds["on"], "tok/s", "higher", digits=1),
    ]


def measure_audit(folder: pathlib.Path, rounds: int = 6) -> list[Row]:
    """Compare two engines with mode ``cow``, 1 GiB of cache and 8 requests: one is audited."""
    from nwor_ops.cli.demo import OUTPUT_TOKENS, REAL_PROMPTS, make_job

    requests = [Request(prompt, OUTPUT_TOKENS) for prompt in real_model.chats(REAL_PROMPTS[:8])]
    job = make_job(str(real_model.model_folder()), requests, stop_token_ids=[real_model.END])
    del job["engine"]["num_gpu_blocks_override"]
    engines = {
        side: EngineProcess(side, job, folder, engine_environment("cow", audit=side == "audit"))
        for side in ("audit", "none")
    }
    try:
        for engine in engines.values():
            engine.wait_until_ready()
        warm_up, *runs = [{side: engine.ask("run") for side, engine in engines.items()} for _ in range(1 + rounds)]
    finally:
        close_all(engines.values())
    if any(run["audit"]["tokens"] != run["none"]["tokens"] for run in (warm_up, *runs)):
        raise RuntimeError("the audited engine generated different tokens")
    seconds = {side: [run[side]["seconds"] for run in runs] for side in engines}
    most = [row("audit_over_none/real", ratios(seconds, "audit", "none"), "ratio", "lower", MOST_AUDITED)]
    return most + [row(f"{side}/real", times, "s", "lower", digits=2) for side, times in seconds.items()]


def main() -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, rounds) in SIZES.items():
            rows += measure(name, size, rounds, pathlib.Path(folder))
    save("cpu", "cpu_engine_amx" if torch.cpu._is_amx_tile_supported() else "cpu_engine", rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--audit"]:
        with tempfile.TemporaryDirectory() as folder:
            save("cpu", "cpu_audit", measure_audit(pathlib.Path(folder)))
    elif sys.argv[1:]:
        serve(SwitchedEngine)
    else:
        main()
