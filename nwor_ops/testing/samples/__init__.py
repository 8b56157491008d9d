"""Sample calls of every op: valid arguments in random layouts, dtypes and sizes, drawn from a seed.

Each family has a module with one function, ``window``. It is a generator of a chain of calls, as an engine makes them.
Tests, ``nwor-ops verify`` and ``nwor-ops doctor`` all draw from these windows. To give an op its samples, add a call to
the window of its family::

    after = yield Call("NAME", (dice.ids(rows.states), dice.poisoned(rows.count), MAX_MODEL_LEN))

- ``dice`` draws sizes and options (``size``, ``choice``, ``maybe``), numbers in tensors (``number``, ``chance``), and
  places tensors in foreign memory (``placed``, ``strided``). See :class:`Dice`.
- ``yield`` returns the arguments after the call, for the calls that follow.
- Vary everything that the docstring of the op allows: sizes of 0, dtypes, strides, padding, arguments that are None.
- Every argument is passed, so that a test can change any of them.

Example:
    >>> from nwor_ops.testing import samples
    >>> seq_lens, local_seq_lens, *_ = samples.calls("dcp_local_seq_lens")[0]
    >>> local_seq_lens.dtype
    torch.int32
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from nwor_ops.ops import registry
from nwor_ops.testing import oracle
from nwor_ops.testing.layouts import twin
from nwor_ops.testing.samples.dice import Call, Calls, Dice

FAMILIES: dict[str, Callable[[Dice], Calls[None]]] = {
    family: importlib.import_module(f"{__name__}.{family}").window
    for family in sorted({op.family for op in registry.OPS.values()})
}


def run(window: Calls[None], run_call: Callable[[Call], tuple[Any, ...]]) -> Iterator[Call]:
    """Yield each call of a window after it was run. ``run_call`` returns its arguments after it."""
    after = None
    while True:
        try:
            call = window.send(after)  # type: ignore[arg-type]  # None starts it
        except StopIteration:
            return
        after = run_call(call)
        yield call


def _after_oracle(call: Call) -> tuple[Any, ...]:
    after: tuple[Any, ...] = twin(call.arguments)
    getattr(oracle, call.op)(*after)
    return after


@functools.cache
def _recorded(family: str, seed: int, data_seed: int = 0) -> tuple[Call, ...]:
    window = FAMILIES[family](Dice(family, seed, data_seed))
    return tuple(call._replace(arguments=twin(call.arguments)) for call in run(window, _after_oracle))


def calls(op: str, count: int = 3, device: str = "cpu", data_seed: int = 0) -> list[tuple[Any, ...]]:
    """Return the arguments of some calls of an op, each with separate memory.

    Args:
        op: name of the op.
        count: number of calls, from different windows.
        device: device of the arguments.
        data_seed: another one gives the same calls with other contents.
    """
    return [twin(call.arguments, device) for call in recorded(op, count, data_seed)]


def recorded(op: str, count: int, data_seed: int = 0) -> list[Call]:
    """Return the first call of an op in each of some windows. Their memory is shared and must not change."""
    family, found = registry.OPS[op].family, []
    for seed in range(100 * count):
        found += [call for call in _recorded(family, seed, data_seed) if call.op == op][:1]
        if len(found) == count:
            return found
    raise LookupError(f"{op}: no window calls it; add it to nwor_ops/testing/samples/{family}.py")


def ops_of(family: str) -> tuple[str, ...]:
    return tuple(op.name for op in registry.OPS.values() if op.family == family)


def argument_names(op: str) -> list[str]:
    return list(registry.OPS[op].names)


def named(op: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(argument_names(op), arguments, strict=False))


def with_arguments(op: str, arguments: tuple[Any, ...], **replaced: Any) -> tuple[Any, ...]:
    """Return the same call with some arguments replaced by name. Those before them get their defaults."""
    defaults = {argument.name: argument.default_value for argument in registry.OPS[op].overload._schema.arguments}
    values = defaults | named(op, arguments) | replaced
    if set(values) != set(defaults):
        raise KeyError(f"{op} has no argument {set(values) - set(defaults)}")
    names = list(defaults)
    last = max([len(arguments), *(names.index(name) + 1 for name in replaced)])
    return tuple(values[name] for name in names[:last])
