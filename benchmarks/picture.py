"""Draw the results of the H200 as pictures: docs/draft_graphs.png and docs/hybrid.png.

python benchmarks/picture.py [draft_graphs] [hybrid]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from results import FOLDER, read

DOCS = FOLDER.parent.parent / "docs"
DRAFTERS = {
    "tok_s_draft_model": ("draft model, draft graphs in V2", "-o"),
    "tok_s_draft_model_v1": ("draft model, draft graphs in V1", "-s"),
    "tok_s_draft_model_vanilla_v1": ("draft model, vanilla V1", "--s"),
    "tok_s_draft_model_vanilla": ("draft model, vanilla V2", "--o"),
    "tok_s_eagle_vanilla": ("EAGLE, vanilla V2", "-^"),
    "tok_s_no_speculation": ("no speculation, V2", ":x"),
}
BARS = {
    "vanilla": "vLLM's default",
    "bfloat16+fp8_head": "the best vanilla: bfloat16 states, fp8 head of the drafter",
    "recurrent": "recurrent",
    "vocabulary": "draft vocabulary",
    "recurrent+vocabulary": "recurrent and draft vocabulary",
}


def draw_lines(name: str, found: Mapping[str, dict[str, Any]], series: dict[str, tuple[str, str]], title: str) -> None:
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
    axes.set_yscale("log")
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
    """Draw a hybrid model's output tok/s in one run: vanilla, the best vanilla, and our features."""
    found = read("h200", "gpu_engine_hybrid")
    counts = sorted(int(name.rsplit("/", 1)[1]) for name in found if name.startswith("tok_s/vanilla/"))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, count in zip(figure.subplots(1, len(counts)), counts, strict=True):
        speeds = {side: found[name] for side in BARS if (name := f"tok_s/{side}/{count}") in found}
        for place, (side, speed) in enumerate(speeds.items()):
            errors = [[abs(speed["value"] - end)] for end in speed["spread"]]
            axes.bar(place, speed["value"], yerr=errors, label=BARS[side], color=f"C{place}", capsize=3)
        axes.set_title(f"{count} request{'' if count == 1 else 's'}", fontsize=10)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("output tok/s", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(DOCS / "hybrid.png", dpi=110)


PICTURES = {"draft_graphs": draw_drafters, "hybrid": draw_hybrid}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
