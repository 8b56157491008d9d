"""Processes that tests start: where they are, and where they find modules."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def environment(*folders: Path) -> dict[str, str]:
    """What this process hands on, with a path to these folders, to tests/support, the examples and the checkout."""
    path = map(str, (*folders, SUPPORT, ROOT / "examples", ROOT))
    return os.environ | {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}
