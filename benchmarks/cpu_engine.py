"""A real vLLM CPU engine with NWOR on against off: output tokens per second, unaudited.

    python benchmarks/cpu_engine.py

Two engines, each a process with one thread, alive together and timed in turns on the demo's workload (24
requests, at most 12 running, n-gram drafts, K = 4, eager). ``tiny`` is the demo's model, whose steps take under
2 ms: the worst case for anything that costs a fixed time per step. ``small`` has 60 million parameters.

On a processor with AMX the pages have an order that our writer does not write, so that a log precedes vLLM's own: the
rows go to a file of their own, ``cpu_engine_amx``.
"""

from __future__ import annotations

import pathlib
import tempfile

import torch
from results import Row, row, save

from nwor_ops.cli.demo import DemoOptions, close_engines, make_job, run_timed, start_engines
from nwor_ops.cli.tiny_llama import Size, write_tiny_llama

SIZES = {
    "tiny": (Size(), 30),
    "small": (Size(layers=10, hidden=768, heads=12, kv_heads=4, intermediate=2048), 15),
}
LEAST = 0.97


def measure(name: str, size: Size, rounds: int, folder: pathlib.Path) -> list[Row]:
    options = DemoOptions(output=folder, rounds=rounds)
    job = make_job(options, str(write_tiny_llama(folder / name, size=size)))
    engines = start_engines(options, job, audit=False)
    try:
        timed = run_timed(options, engines, fewest_rounds=rounds)
    finally:
        close_engines(engines)
    vanilla, nwor = timed["vanilla"], timed["nwor"]
    if vanilla["tokens"] != nwor["tokens"]:
        raise RuntimeError(f"{name}: the two engines generated different tokens")
    ratios = [ours / theirs for ours, theirs in zip(nwor["rates"], vanilla["rates"], strict=True)]
    return [
        row(f"e2e_cow_over_vanilla/{name}", ratios, "ratio", "higher", LEAST),
        row(f"e2e_vanilla/{name}", vanilla["rates"], "tok/s", "higher", digits=1),
        row(f"e2e_cow/{name}", nwor["rates"], "tok/s", "higher", digits=1),
    ]


def main() -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, rounds) in SIZES.items():
            rows += measure(name, size, rounds, pathlib.Path(folder))
    save("cpu", "cpu_engine_amx" if torch.cpu._is_amx_tile_supported() else "cpu_engine", rows)


if __name__ == "__main__":
    main()
