"""Draw one block of the paged cache before a step, when its drafts are verified, and after its commit."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

# The colors of Okabe and Ito, which remain distinct with every common color blindness, and in gray.
FREE, COMMITTED, STALE, DRAFT = "0", "1", "2", "3"
STATES = {
    FREE: ("free", "#f0f0f0"),
    COMMITTED: ("committed row", "#56b4e9"),
    DRAFT: ("row of a draft", "#f0e442"),
    STALE: ("stale row of a rejected draft", "#a63603"),
}
TITLES = {"before": "1. before the step", "verified": "2. drafts are verified", "after": "3. after the commit"}
WHY = (
    "The next step overwrites a stale row. Code that reads the block before that, to save, hash or send it,\n"
    "gets the keys and values of a token that is not in the text."
)
SIZE_INCHES, DPI, COLUMNS = (11.0, 5.6), 120, 8
_INK = "#333333"


def draw_block(sides: Mapping[str, Mapping[str, str]], path: pathlib.Path) -> None:
    """Draw a block to a PNG file: a row of panels for each side, and a column for each of :data:`TITLES`.

    Args:
        sides: by title and moment, a digit per slot, of :data:`STATES`.
        path: the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(sides), len(TITLES), squeeze=False)
    for row, (side, panels) in zip(axes, sides.items(), strict=True):
        row[0].set_ylabel(side, fontsize=13, color=_INK)
        for axis, (moment, title) in zip(row, TITLES.items(), strict=True):
            axis.set_title(f"{title}\n{_counts(panels[moment])}", fontsize=11, color=_INK)
            _draw_panel(axis, panels[moment])
    figure.suptitle("One block of the paged KV cache in one step of speculative decoding", fontsize=13, color=_INK)
    patches = [Patch(facecolor=colour, edgecolor="#999999", label=label) for label, colour in STATES.values()]
    figure.legend(
        handles=patches, title=WHY, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=11
    )
    figure.savefig(path)


def _draw_panel(axis: Any, states: str) -> None:
    from matplotlib.colors import to_rgb

    rows = [[to_rgb(STATES[slot][1]) for slot in row] for row in re.findall(f".{{1,{COLUMNS}}}", states)]
    axis.pcolormesh(rows, edgecolors="white", linewidth=1.5)
    axis.set_aspect("equal")
    axis.invert_yaxis()
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def _counts(states: str) -> str:
    named = {COMMITTED: "committed", DRAFT: "of drafts", STALE: "stale"}
    return ", ".join(f"{states.count(state)} {name}" for state, name in named.items() if state in states)
