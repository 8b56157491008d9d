"""Every op of nwor_ops in plain Python: slow and obvious, one token at a time. Each family has a module.

Names, argument order and in-place behaviour are those of `nwor_ops.ops`, on CPU tensors.
"""

import importlib

from nwor_ops.ops import registry

for _op in registry.OPS.values():
    globals()[_op.name] = getattr(importlib.import_module(f"{__name__}.{_op.family}"), _op.name)
