"""Fake implementations: the shapes that each op returns, for ``torch.compile``, FakeTensor and ``device="meta"``.

A fake checks the dtype, the device and the number of dimensions of each tensor by the table of its family
(``ARGUMENTS``, one module per family). The kernels check the rest when they are called. The body of the op's
declaration in ``nwor_ops/ops/`` returns the result.
"""

import importlib
from typing import Any

from nwor_ops.meta.check import Array as Array
from nwor_ops.meta.check import check, specs_of
from nwor_ops.meta.check import one_of as one_of
from nwor_ops.ops import registry

# Requirements of each tensor, by op and by name.
SPECS: dict[str, dict[str, Array]] = {
    name: specs_of(op, importlib.import_module(f"{__name__}.{op.family}").ARGUMENTS)
    for name, op in registry.OPS.items()
}


def _register(op: registry.Op) -> None:
    def fake(*positional: Any, **named: Any) -> Any:
        arguments = op.arguments(positional, named)
        if arguments.get("plane_table") is not None:
            raise registry.Refusal(
                f"{op.name}: plane_table hides from a compiler which planes are mutated; pass all of them in caches "
                "and no table"
            )
        check(op.name, SPECS[op.name], arguments)
        return op.function(*positional, **named)

    registry.implement_fake(op.name, fake)


for _op in registry.OPS.values():
    _register(_op)
