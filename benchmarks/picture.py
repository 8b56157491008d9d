"""Draw the results of the H200 as bars: docs/draft_graphs.png, docs/hybrid.png and docs/step_time.png.

python benchmarks/picture.py [draft_graphs] [hybrid] [step_time]
"""

from __future__ import annotations

import sys

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from results import FOLDER, read

DOCS = FOLDER.parent.parent / "docs"
# By picture: the file of results, and the labels of its rows NAME/REQUESTS.
PICTURES = {
    "draft_graphs": ("gpu_draft_runners", {
        "tok_s_draft_model_vanilla": "draft model, vanilla V2",
        "tok_s_draft_model_vanilla_v1": "draft model, vanilla V1",
        "tok_s_draft_model_v1": "draft model, draft graphs in V1",
        "tok_s_draft_model": "draft model, draft graphs in V2",
        "tok_s_eagle_vanilla": "EAGLE, vanilla V2",
        "tok_s_no_speculation": "no speculation, V2",
    }),
    "hybrid": ("gpu_engine_hybrid_sides", {
        "tok_s/vanilla": "vLLM's default",
        "tok_s/bfloat16+drafts_0": "vanilla without drafts, bfloat16 states",
        "tok_s/bfloat16+fp8_head": "the best vanilla: bfloat16 states, fp8 head of the drafter",
        "tok_s/recurrent": "recurrent",
        "tok_s/vocabulary": "draft vocabulary",
        "tok_s/recurrent+vocabulary": "recurrent and draft vocabulary",
        "tok_s/bfloat16+chunk+vocabulary": "both, chunk form and bfloat16 states",
    }),
}  # fmt: skip


def draw(picture: str) -> None:
    """Draw output tok/s with quartiles: a panel for each number of requests, and a bar for each label."""
    file, labels = PICTURES[picture]
    found = read("h200", file)
    counts = sorted({int(count) for name, _, count in (row.rpartition("/") for row in found) if name in labels})
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(counts))
    for axes, count in zip(panels, counts, strict=True):
        speeds = {label: found[name] for row, label in labels.items() if (name := f"{row}/{count}") in found}
        for place, (label, speed) in enumerate(speeds.items()):
            errors = [[abs(speed["value"] - end)] for end in speed["spread"]]
            axes.bar(place, speed["value"], yerr=errors, label=label, color=f"C{place}", capsize=3)
        axes.set_title(f"{count} request{'' if count == 1 else 's'}", fontsize=10)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("output tok/s", fontsize=10)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(DOCS / f"{picture}.png", dpi=110)


def draw_step_time() -> None:
    """Draw the device time of a decode step as stacked bars."""
    found = read("h200", "gpu_engine_steps")
    parts = {"rest": "rest", "target_head": "target's head", "states": "states", "drafts_heads": "drafter's heads"}
    sides = {"recurrent+vocabulary": "both", "vanilla": "vLLM's default"}
    bars = {f"{count}, {label}": f"step_us/{side}/{count}" for count in (16, 1) for side, label in sides.items()}
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes, left = figure.subplots(), [0.0] * len(bars)
    for part, label in parts.items():
        widths = [found[f"{row}/{part}"]["value"] / 1e3 for row in bars.values()]
        axes.barh(list(bars), widths, left=left, label=label)
        left = [sum(pair) for pair in zip(left, widths, strict=True)]
    axes.set(xlabel="ms", ylabel="requests, engine")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(DOCS / "step_time.png", dpi=110)


if __name__ == "__main__":
    for name in sys.argv[1:] or [*PICTURES, "step_time"]:
        draw_step_time() if name == "step_time" else draw(name)
