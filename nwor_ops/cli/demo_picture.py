"""Draw the paged cache: one row per block, one square per slot, vanilla and NWOR next to each other."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# The colors of Okabe and Ito, which remain distinct with every common color blindness, and in gray.
FREE, COMMITTED, STALE, SHADOW = "0", "1", "2", "3"
STATES = {
    FREE: ("free", "#f0f0f0"),
    COMMITTED: ("committed", "#56b4e9"),
    STALE: ("stale, of a rejected draft", "#a63603"),
    SHADOW: ("shadow page", "#bdbdbd"),
}
WIDTH_INCHES, LEAST_INCHES, MOST_INCHES, HEADER_INCHES = 11.0, 3.0, 16.0, 1.3
DPI = 120
_INK = "#333333"


def draw_caches(caches: Mapping[str, Mapping[str, Sequence[str]]], path: pathlib.Path, headline: str) -> None:
    """Draw caches to a PNG file: a column of panels for each of them, and a row for each group.

    Args:
        caches: by title and group, a string per block with a digit per slot, of :data:`STATES`.
        path: the file.
        headline: the first line of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups = list(dict.fromkeys(group for cache in caches.values() for group in cache))
    heights = [_inches([cache.get(group, []) for cache in caches.values()]) for group in groups]
    figure = Figure(figsize=(WIDTH_INCHES, HEADER_INCHES + sum(heights)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), len(caches), squeeze=False, height_ratios=heights)
    for row, group in enumerate(groups):
        for axis, (title, cache) in zip(axes[row], caches.items(), strict=True):
            _draw_panel(axis, title if len(groups) == 1 else f"{title}, group {group}", cache.get(group, []))
    figure.suptitle(headline, fontsize=13, color=_INK)
    patches = [Patch(facecolor=colour, edgecolor="#999999", label=label) for label, colour in STATES.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=11)
    figure.savefig(path)


def _inches(panels: Sequence[Sequence[str]]) -> float:
    """Return the height of a row of panels: square slots, within limits."""
    width = 0.86 * WIDTH_INCHES / len(panels)
    square = max((width * len(blocks) / len(blocks[0]) for blocks in panels if blocks), default=0.0)
    return min(MOST_INCHES, max(LEAST_INCHES, square))


def _draw_panel(axis: Any, title: str, blocks: Sequence[str]) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    slots = [[int(slot) for slot in block] for block in blocks] or [[0]]
    colours = ListedColormap([colour for _, colour in STATES.values()])
    columns, rows = range(len(slots[0])), range(len(slots))  # the centers of the squares
    axis.pcolormesh(columns, rows, slots, cmap=colours, vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=0.8)
    axis.invert_yaxis()
    counts = (f"{sum(block.count(state) for block in blocks):,} {name}" for state, name in _COUNTED.items())
    axis.set_title(f"{title}\n{', '.join(counts)}", fontsize=12, color=_INK)
    axis.set_xlabel("slot within the block", color=_INK)
    axis.set_ylabel("block", color=_INK)
    axis.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(16, integer=True))
    axis.tick_params(length=0, colors=_INK)
    axis.spines[:].set_visible(False)


_COUNTED = {COMMITTED: "committed", STALE: "stale", FREE: "free"}
