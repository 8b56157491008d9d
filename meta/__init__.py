"""Fake implementations: the shapes that each op returns, for ``torch.compile``, FakeTensor and ``device="meta"``.

A fake checks everything that needs no data, so that an invalid model fails while it is traced. First it checks each
argument by the table of its family (``ARGUMENTS``, one module per family). Then it checks the relations between
arguments (``relations``). The body of the op's declaration in ``nwor_ops/ops/`` returns the result.
"""

from typing import Any

from nwor_ops.meta import accept, drafter, recurrent, shadow, staging, undo
from nwor_ops.meta.check import Spec, check, check_apart, specs_of
from nwor_ops.meta.relations import check_relations
from nwor_ops.ops import registry

_FAMILIES = {
    "accept": accept,
    "drafter": drafter,
    "recurrent": recurrent,
    "shadow": shadow,
    "staging": staging,
    "undo": undo,
}

# Requirements of each argument, by op and by name.
SPECS: dict[str, dict[str, Spec]] = {
    name: specs_of(op, _FAMILIES[op.family].ARGUMENTS) for name, op in registry.OPS.items()
}


def _register(op: registry.Op) -> None:
    mutated = [argument.name for argument in op.overload._schema.arguments if argument.alias_info is not None]

    def fake(*positional: Any, **named: Any) -> Any:
        given = op.arguments(positional, named)
        check(op.name, SPECS[op.name], given)
        check_relations(op.name, given)
        check_apart(op.name, mutated, given)
        return op.function(*positional, **named)

    registry.implement_fake(op.name, fake)


for _op in registry.OPS.values():
    _register(_op)
