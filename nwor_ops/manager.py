"""The old name of :mod:`nwor_ops.transaction.manager`, until 0.2."""

import warnings
from typing import Any

from nwor_ops.transaction import manager as _manager


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what the import system asks: there is no second copy of a submodule
        raise AttributeError(name)
    warnings.warn(
        "nwor_ops.manager is now nwor_ops.transaction.manager; the old name goes in 0.2",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(_manager, name)
