"""Draw the results of the H200 as pictures: docs/h200.png, docs/draft_graphs.png, docs/hybrid.png.

python benchmarks/picture.py [h200] [draft_graphs] [hybrid]
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from results import FOLDER, read

SHAPES = ("1x4", "16x4", "64x4", "256x4", "64x16", "256x8")
CACHES = {
    "cow_transaction": "bf16, head size 128",
    "cow_transaction_fp8": "fp8",
    "cow_transaction_d64": "bf16, head size 64",
    "cow_transaction_d256": "bf16, head size 256",
}
REQUESTS = (1, 16, 64)
DOCS = FOLDER.parent.parent / "docs"
ENGINES = {
    "e2e_cow": "cow, bf16",
    "e2e_cow_fp8": "cow, fp8",
    "e2e_stage": "stage, bf16",
}
DRAFTERS = {
    "tok_s_draft_model": ("draft model, draft graphs in V2", "-o"),
    "tok_s_draft_model_v1": ("draft model, draft graphs in V1", "-s"),
    "tok_s_draft_model_vanilla_v1": ("draft model, vanilla V1", "--s"),
    "tok_s_draft_model_vanilla": ("draft model, vanilla V2", "--o"),
    "tok_s_eagle_vanilla": ("EAGLE, vanilla V2", "-^"),
    "tok_s_no_speculation": ("no speculation, V2", ":x"),
}
HYBRIDS = {
    "tok_s_recurrent_beside_bfloat16": ("one state, K = 3", "-o"),
    "tok_s_bfloat16": ("vanilla's best: bfloat16 states, K = 3", "--s"),
    "tok_s_default": ("vanilla's default, K = 3", "--o"),
    "tok_s_recurrent_beside_drafts_0": ("one state with a ring, no drafts", "-x"),
    "tok_s_drafts_0": ("vanilla's default, no drafts", ":x"),
    "chunk_tok_s_recurrent_beside_bfloat16": ("one state, chunk form, K = 3 (another run)", "-^"),
}
TARGET_STYLE = {"color": "black", "linewidth": 0.8, "linestyle": "--"}


def draw(axes: Axes, found: Mapping[str, dict[str, Any]], series: dict[str, str], places: tuple[Any, ...]) -> None:
    """Draw a group of bars for each place, with one bar per series and its quartiles."""
    width = 0.8 / len(series)
    for number, (prefix, label) in enumerate(series.items()):
        chosen = [found[f"{prefix}/{place}"] for place in places]
        values = [row["value"] for row in chosen]
        errors = [[abs(row["value"] - row["spread"][end]) for row in chosen] for end in (0, 1)]
        x = [place + (number - (len(series) - 1) / 2) * width for place in range(len(places))]
        axes.bar(x, values, width, yerr=errors, label=label, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(places)), [str(place) for place in places])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def draw_engines() -> None:
    figure = Figure(figsize=(7, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    kernels, engine = figure.subplots(2, 1)  # below each other, for phones
    draw(kernels, read("h200", "cow_transaction"), CACHES, SHAPES)
    kernels.axhline(1.0, **TARGET_STYLE)
    kernels.set_title("the whole transaction over vLLM's plain writes, 32 layers (lower is better)", fontsize=10)
    kernels.set_xlabel("requests x drafts")
    names = ("gpu_engine", "gpu_engine_fp8", "gpu_engine_stage")
    draw(engine, ChainMap(*(read("h200", name) for name in names)), ENGINES, REQUESTS)
    for target in (0.998, 0.995):
        engine.axhline(target, **TARGET_STYLE)
    engine.set_ylim(0.9, 1.08)
    engine.set_title("vLLM's output tok/s, on over off (higher is better)", fontsize=10)
    engine.set_xlabel("requests")
    figure.savefig(DOCS / "h200.png", dpi=110)


def draw_lines(
    name: str, found: Mapping[str, dict[str, Any]], series: dict[str, tuple[str, str]], title: str, scale: str = "log"
) -> None:
    """Draw output tok/s over requests with their quartiles, one line per series."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes, ticks = figure.subplots(), set()
    for prefix, (label, style) in series.items():
        rows = {int(row.rsplit("/", 1)[1]): found[row] for row in found if row.rsplit("/", 1)[0] == prefix}
        counts = sorted(rows)
        values = [rows[count]["value"] for count in counts]
        errors = [[abs(rows[count]["value"] - rows[count]["spread"][end]) for count in counts] for end in (0, 1)]
        axes.errorbar(counts, values, errors, label=label, fmt=style, linewidth=1.2, markersize=5)
        ticks |= rows.keys()
    axes.set_xscale("log")
    axes.set_yscale(scale)
    axes.set_xticks(sorted(ticks), [str(count) for count in sorted(ticks)], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("output tok/s")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(DOCS / f"{name}.png", dpi=110)


def draw_drafters() -> None:
    """Draw a draft model in both runners, with and without draft graphs, and its alternatives."""
    title = "Llama 3 8B's shape, drafts by Llama 3.2 1B's: 2.5 tokens accepted a step"
    draw_lines("draft_graphs", read("h200", "gpu_draft_runners"), DRAFTERS, title)


def draw_hybrid() -> None:
    """Draw a hybrid model with one state per request and with vLLM's states, with and without drafts."""
    chunk = {f"chunk_{name}": row for name, row in read("h200", "gpu_hybrid_chunk").items()}
    found = ChainMap(read("h200", "gpu_hybrid"), read("h200", "gpu_hybrid_without_drafts_ring"), chunk)
    draw_lines(
        "hybrid", found, HYBRIDS, "Qwen3.5-9B's shape, 36 GiB of cache; with drafts: 2.5 tokens a step", "linear"
    )


PICTURES = {"h200": draw_engines, "draft_graphs": draw_drafters, "hybrid": draw_hybrid}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
