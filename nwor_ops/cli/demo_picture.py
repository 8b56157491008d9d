"""Draw the paged cache: one row per block, one square per slot, vanilla and NWOR next to each other."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The colors of Okabe and Ito, which remain distinct with every common color blindness, and in gray.
FREE, COMMITTED, STALE, SHADOW = "0", "1", "2", "3"
COLOURS = {FREE: "#f0f0f0", COMMITTED: "#56b4e9", STALE: "#a63603", SHADOW: "#bdbdbd"}
LABELS = {
    FREE: "free (never written, or zeroed)",
    COMMITTED: "committed row",
    STALE: "stale row of a rejected draft",
    SHADOW: "shadow page (mode stage)",
}
WIDTH_INCHES = 11.0
DPI = 120
COLUMNS = 2  # panels per row
_INK = "#333333"


@dataclass(frozen=True)
class CachePanel:
    """One cache: one string per block, with one digit per slot (0 free, 1 committed, 2 stale, 3 shadow)."""

    title: str
    blocks: Sequence[str]

    def count(self, state: str) -> int:
        return sum(block.count(state) for block in self.blocks)


def cache_panels(caches: Mapping[str, Mapping[str, Sequence[str]]]) -> list[CachePanel]:
    """Return panels for ``{run: {group: blocks}}``: one row of panels per group, one column per run."""
    groups = list(dict.fromkeys(group for cache in caches.values() for group in cache))
    return [
        CachePanel(run if len(groups) == 1 else f"{run}, group {group}", cache.get(group, []))
        for group in groups
        for run, cache in caches.items()
    ]


def draw_caches(panels: Sequence[CachePanel], path: pathlib.Path, headline: str) -> None:
    """Draw the panels to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(panels) // COLUMNS)
    heights = [_height(panels, row) for row in range(rows)]
    figure = Figure(figsize=(WIDTH_INCHES, 1.0 + sum(heights)), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, COLUMNS, squeeze=False, height_ratios=heights)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    shown = [COMMITTED, STALE, FREE, *([SHADOW] if any(panel.count(SHADOW) for panel in panels) else [])]
    _add_headline_and_legend(figure, headline, shown)
    figure.savefig(path)


def _height(panels: Sequence[CachePanel], row: int) -> float:
    """Return the height of one row of panels in inches: square slots, within limits."""
    shapes = [(len(p.blocks), len(p.blocks[0])) for p in panels[row * COLUMNS :][:COLUMNS] if p.blocks]
    width = 0.86 * WIDTH_INCHES / COLUMNS
    return min(16.0, max([2.5, *(width * blocks / slots for blocks, slots in shapes)])) + 0.8


def _draw_panel(axis: Any, panel: CachePanel) -> None:
    from matplotlib.colors import ListedColormap

    states = [[int(slot) for slot in block] for block in panel.blocks] or [[0]]
    blocks, slots = len(states), len(states[0])
    axis.pcolormesh(
        states,
        cmap=ListedColormap([COLOURS[state] for state in (FREE, COMMITTED, STALE, SHADOW)]),
        vmin=-0.5,
        vmax=3.5,
        edgecolors="white",
        linewidth=0.8 if blocks * slots <= 8192 else 0.0,
    )
    axis.invert_yaxis()
    counts = f"{panel.count(COMMITTED):,} committed, {panel.count(STALE):,} stale, {panel.count(FREE):,} free"
    axis.set_title(panel.title, fontsize=14, fontweight="bold", color=_INK, pad=24)
    axis.text(0.5, 1.008, counts, transform=axis.transAxes, ha="center", va="bottom", fontsize=10.5, color=_INK)
    axis.set_xlabel("slot within the block", fontsize=11, color=_INK)
    axis.set_ylabel("block", fontsize=11, color=_INK)
    _ticks_in_cell_centres(axis.xaxis, slots)
    _ticks_in_cell_centres(axis.yaxis, blocks)
    axis.tick_params(length=0, labelsize=10, colors=_INK)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _ticks_in_cell_centres(axis: Any, cells: int) -> None:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 20) if cells / step <= 16)
    axis.set_ticks([cell + 0.5 for cell in range(0, cells, step)], [str(cell) for cell in range(0, cells, step)])


def _add_headline_and_legend(figure: Any, headline: str, shown: list[str]) -> None:
    from matplotlib.patches import Patch

    inches = figure.get_figheight()
    figure.suptitle(headline, fontsize=13, color=_INK, y=1 - 0.18 / inches, va="top")
    handles = [
        Patch(facecolor=COLOURS[state], edgecolor="#999999", linewidth=0.6, label=LABELS[state]) for state in shown
    ]
    figure.legend(
        handles=handles,
        loc="upper center",
        ncols=len(shown),
        frameon=False,
        fontsize=11,
        bbox_to_anchor=(0.5, 1 - 0.42 / inches),
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.72 / inches), w_pad=2.5)
