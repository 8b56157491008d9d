"""The H200's figures as one picture, drawn from the results: docs/h200.png.

python benchmarks/picture.py
"""

from __future__ import annotations

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
ENGINES = {
    "e2e_cow": "cow, bf16",
    "e2e_cow_fp8": "cow, fp8",
    "e2e_stage": "stage, bf16",
}
TARGET_STYLE = {"color": "black", "linewidth": 0.8, "linestyle": "--"}


def draw(axes: Axes, found: Mapping[str, dict[str, Any]], series: dict[str, str], places: tuple[Any, ...]) -> None:
    """A group of bars for each place, a bar for each series, with its quartiles."""
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


def main() -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    kernels, engine = figure.subplots(1, 2, width_ratios=(2, 1))
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
    figure.savefig(FOLDER.parent.parent / "docs" / "h200.png", dpi=110)


if __name__ == "__main__":
    main()
