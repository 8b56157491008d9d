"""Deprecated alias of :mod:`nwor_ops.drafter`, until 0.2."""

import warnings
from typing import Any

from nwor_ops import drafter


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # asked by the import system; it must not load submodules a second time
        raise AttributeError(name)
    warnings.warn("nwor_ops.draft is now nwor_ops.drafter; the old name goes in 0.2", DeprecationWarning, stacklevel=2)
    return getattr(drafter, name)
