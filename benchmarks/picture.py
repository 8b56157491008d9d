"""Draw the results of the H200 as pictures: docs/draft_graphs.png, docs/hybrid.png and docs/step.png.

python benchmarks/picture.py [draft_graphs] [hybrid] [step]
"""

from __future__ import annotations

import itertools
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
# A bar of vanilla is that of the best of these sides at its load.
VANILLAS = ("vanilla", "bfloat16+fp8_head", "fp8_head", "drafts_0")
BARS = {"recurrent": "recurrent", "vocabulary": "draft vocabulary", "recurrent+vocabulary": "both"}
STEPS = {"vanilla": "vanilla", "recurrent+vocabulary": "recurrent,\ndraft vocabulary"}
PARTS = {
    "rest": "other layers", "target_head": "the target's head", "drafts_heads": "the drafts' heads", "states": "states"
}  # fmt: skip


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
    """Draw a hybrid model's output tok/s in one run: the best vanilla, each of our features, and both."""
    found = read("h200", "gpu_engine_hybrid")
    counts = sorted(int(name.rsplit("/", 1)[1]) for name in found if name.startswith("tok_s/vanilla/"))
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, count in zip(figure.subplots(1, len(counts)), counts, strict=True):
        best = max(VANILLAS, key=lambda side: found[f"tok_s/{side}/{count}"]["value"])
        for place, (side, label) in enumerate({best: "the best vanilla", **BARS}.items()):
            measured = found[f"tok_s/{side}/{count}"]
            errors = [[abs(measured["value"] - end)] for end in measured["spread"]]
            axes.bar(place, measured["value"], yerr=errors, label=label, color=f"C{place}", capsize=3)
        plural = "" if count == 1 else "s"
        axes.set_title(f"{count} request{plural}\nvanilla: {best}", fontsize=9)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("output tok/s", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(DOCS / "hybrid.png", dpi=110)


def draw_step() -> None:
    """Draw the device time of a decode step by its parts, before and after."""
    found = read("h200", "gpu_engine_steps")
    counts = sorted({int(name.split("/")[2]) for name in found if name.startswith("step_us/")})
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (count, side) in enumerate(itertools.product(counts, STEPS)):
        left = 0.0
        for color, (part, label) in enumerate(PARTS.items()):
            milliseconds = found[f"step_us/{side}/{count}/{part}"]["value"] / 1e3
            axes.barh(-place, milliseconds, left=left, color=f"C{color}", label=label if place == 0 else None)
            left += milliseconds
    labels = [f"{STEPS[side]}, {count}" for count, side in itertools.product(counts, STEPS)]
    axes.set_yticks([-place for place in range(len(labels))], labels, fontsize=8)
    axes.set_xlabel("device time of a decode step (ms), by requests at once")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(DOCS / "step.png", dpi=110)


PICTURES = {"draft_graphs": draw_drafters, "hybrid": draw_hybrid, "step": draw_step}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
