"""Draw the result of ``nwor-ops bench``: a row for each load, with the ratio of every round."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence

from nwor_ops.cli.bench_report import Finding, Load, rates

# The colors of Okabe and Ito, as in demo_picture.py.
COLOURS = {
    Finding.FASTER: "#009e73",
    Finding.SLOWER: "#d55e00",
    Finding.NOISE: "#777777",
    Finding.TOO_FEW_ROUNDS: "#777777",
}
WIDTH_INCHES, ROW_INCHES = 10.0, 0.75
DPI = 120
LEAST_SPAN = 0.04  # the shortest axis, so that noise does not fill the picture
_INK = "#333333"


def draw_loads(loads: Sequence[Load], path: pathlib.Path, headline: str, subtitle: str) -> None:
    """Draw the loads to a PNG file. A load that is not comparable has its reason in place of a ratio."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, 1.9 + ROW_INCHES * len(loads)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(headline, fontsize=13, color=_INK)
    axes = figure.subplots()
    axes.set_title(subtitle, fontsize=9.5, color=_INK)
    axes.axvline(1.0, color=_INK, linewidth=0.9, linestyle="--")
    for row, load in enumerate(loads):
        if load.obstacle is not None:
            reason = f"not comparable: {load.obstacle}"
            place = axes.get_yaxis_transform()
            text = axes.text(0.02, row, reason, transform=place, va="center", fontsize=9, backgroundcolor="white")
            text.set_color(COLOURS[Finding.SLOWER])
            continue
        colour, median = COLOURS[load.finding], statistics.median(load.ratios)
        if load.interval is not None:
            axes.plot(load.interval, [row, row], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(load.ratios, [row] * len(load.ratios), "o", color=colour, markersize=4, alpha=0.7)
        axes.plot([median], [row], "|", color=colour, markersize=22, markeredgewidth=2.5)
        label = f"{median:.3f}, {load.finding.value}\n{rates(load)}"
        axes.annotate(label, (1.01, row), xycoords=axes.get_yaxis_transform(), va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(loads)), [f"{load.requests:,}" for load in loads])
    axes.set_ylim(len(loads) - 0.5, -0.5)
    axes.set_xlim(*_limits(loads))
    axes.set_ylabel("requests at a time", color=_INK)
    axes.set_xlabel(
        "output tok/s over vanilla's: a dot for each round, a line for the median, a bar for 95 %", color=_INK
    )
    axes.tick_params(colors=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _limits(loads: Sequence[Load]) -> tuple[float, float]:
    ratios = [1.0, *(ratio for load in loads if load.obstacle is None for ratio in load.ratios)]
    low, high = min(ratios), max(ratios)
    margin = max(0.06 * (high - low), (LEAST_SPAN - (high - low)) / 2)
    return low - margin, high + margin
