"""`sample_inputs(op, device)`: a few calls of every op, for the schema, meta and error tests."""

from __future__ import annotations

from typing import Any

import torch
from samples_accept import accept_samples
from samples_drafter import drafter_samples
from samples_recurrent import recurrent_samples
from samples_shadow import shadow_samples
from samples_staging import staging_samples
from samples_undo import undo_samples

from nwor_ops.ops import registry
from nwor_ops.testing.layouts import twin

OPS = tuple(registry.OPS)
_FAMILIES = {
    "accept": accept_samples,
    "drafter": drafter_samples,
    "recurrent": recurrent_samples,
    "shadow": shadow_samples,
    "staging": staging_samples,
    "undo": undo_samples,
}


def sample_inputs(op: str, device: str = "cpu") -> list[tuple[Any, ...]]:
    """Arguments of `op`, each with separate memory."""
    return [twin(arguments, device) for arguments in _FAMILIES[registry.OPS[op].family](op)]


def ops_of(family: str) -> tuple[str, ...]:
    return tuple(op.name for op in registry.OPS.values() if op.family == family)


def argument_names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.nwor, op).default._schema.arguments]


def with_arguments(op: str, arguments: tuple[Any, ...], **replaced: Any) -> tuple[Any, ...]:
    """The same call with some arguments replaced by name."""
    names = argument_names(op)
    defaults = [argument.default_value for argument in getattr(torch.ops.nwor, op).default._schema.arguments]
    length = max(len(arguments), *(names.index(name) + 1 for name in replaced))
    values = [*arguments, *defaults[len(arguments) : length]]
    for name, value in replaced.items():
        values[names.index(name)] = value
    return tuple(values)
