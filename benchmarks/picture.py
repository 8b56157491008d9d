"""Draw the results of the H200 as pictures: docs/draft_graphs.png and docs/hybrid.png.

python benchmarks/picture.py [draft_graphs] [hybrid]
"""

from __future__ import annotations

import sys
from collections import ChainMap
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
HYBRIDS = {
    "tok_s_recurrent_beside_bfloat16": ("recurrent, K = 3", "-o"),
    "tok_s_bfloat16": ("vanilla's best: bfloat16 states, K = 3", "--s"),
    "tok_s_default": ("vanilla's default, K = 3", "--o"),
    "tok_s_recurrent_beside_drafts_0": ("recurrent, chunk form, no drafts", "-x"),
    "tok_s_drafts_0": ("vanilla's default, no drafts", ":x"),
    "chunk_tok_s_recurrent_beside_bfloat16": ("recurrent, chunk form, K = 3 (another run)", "-^"),
}


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
    """Draw a hybrid model with recurrent on and off, with and without drafts."""
    chunk = {f"chunk_{name}": row for name, row in read("h200", "gpu_hybrid_chunk").items()}
    found = ChainMap(read("h200", "gpu_hybrid"), read("h200", "gpu_hybrid_without_drafts_chunk"), chunk)
    draw_lines(
        "hybrid", found, HYBRIDS, "Qwen3.5-9B's shape, 36 GiB of cache; with drafts: 2.5 tokens a step", "linear"
    )


PICTURES = {"draft_graphs": draw_drafters, "hybrid": draw_hybrid}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
