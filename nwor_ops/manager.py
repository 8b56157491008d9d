"""Deprecated alias of :mod:`nwor_ops.transaction.manager`, until 0.2."""

import warnings
from typing import Any

from nwor_ops.transaction import manager as _manager


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # asked by the import system; it must not load submodules a second time
        raise AttributeError(name)
    warnings.warn(
        "nwor_ops.manager is now nwor_ops.transaction.manager; the old name goes in 0.2",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(_manager, name)
